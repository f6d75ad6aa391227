"""Who answers the same requests: our service, the loop without it, transformers, llama-server."""

import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.common import Unable
from benchmarks.serve.client import ask_all
from benchmarks.serve.process import MODEL, ServiceProcess
from decode.base.device import dtype_name
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from decode.settings import DecodeSettings

NAMES = {
    "served": "draftsmith serve, with the drafter",
    "plain_served": "draftsmith serve, no drafter",
    "alone": "draftsmith's loop, one after the other",
    "transformers_serve_continuous": "transformers serve --continuous-batching",
    "llama_server": "llama-server",
    "llama_server_lookup": "llama-server, prompt lookup",
}


@dataclass(frozen=True)
class Prompt:
    """messages, and ids: the same through the chat template."""

    messages: list[dict[str, str]]
    ids: list[int]


@dataclass
class Turn:
    """Answers to some prompts. tokens: of all answers. seconds: until the last one. firsts: until
    the first text of each answer, from its request on."""

    tokens: int
    seconds: float
    firsts: list[float] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


# (prompts, clients, tokens of each answer)
Contestant = Callable[[Sequence[Prompt], int, int], Turn]


def over_http(service: ServiceProcess, model: str = MODEL, **fields: Any) -> Contestant:
    """Clients of a service that stream their answers. Between turns the service is halted."""

    def run(prompts: Sequence[Prompt], clients: int, tokens: int) -> Turn:
        common = {"model": model, "max_tokens": tokens, "temperature": 0, "stream": True, **fields}
        bodies = [{**common, "messages": prompt.messages} for prompt in prompts]
        with service.alone():
            answers, seconds = ask_all(service.url, bodies, clients)
        for answer in answers:
            if answer.status != 200 or answer.error is not None:
                raise RuntimeError(f"{service.command}: {answer.status} {answer.error}")
        tokens_of_all = sum(answer.usage["completion_tokens"] for answer in answers)
        return Turn(tokens_of_all, seconds, [answer.first for answer in answers])

    return run


def one_after_the_other(target: Target, drafter: str, settings: DecodeSettings) -> Contestant:
    """The loop that the service runs, without the service, one row at a time."""
    endless = replace(target, eos_token_ids=())
    decoder, _ = settings.decoder(endless, open_drafter(drafter, target))

    def run(prompts: Sequence[Prompt], clients: int, tokens: int) -> Turn:
        firsts: list[float] = []
        begun = time.perf_counter()
        for prompt in prompts:
            asked, count = time.perf_counter(), len(firsts)

            def note(row: int, new: list[int], asked: float = asked, count: int = count) -> None:
                if len(firsts) == count:
                    firsts.append(time.perf_counter() - asked)

            decoder.decode([prompt.ids], tokens, on_tokens=note)
        return Turn(len(prompts) * tokens, time.perf_counter() - begun, firsts)

    return run


def transformers_command(model: Any, tokenizer: Any, directory: Path, device: str) -> list[str]:
    """The command `transformers serve` for this model, which is stored in the directory, with
    continuous batching. Raises Unable if what it needs is not installed."""
    for package in ("fastapi", "uvicorn", "openai"):
        if importlib.util.find_spec(package) is None:
            raise Unable(f"{package} is not installed; pip install 'transformers[serving]'")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    main = "from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", main, "serve", str(directory), "--device", device]
    command += ["--dtype", dtype_name(model.dtype), "--continuous-batching"]
    return [*command, "--cb-num-blocks", "256", "--cb-max-batch-tokens", "1024"]
