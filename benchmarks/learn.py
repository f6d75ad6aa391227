"""Measures what a cycle of `draftsmith learn` gains beside an engine whose requests have changed.

    python -m benchmarks.learn [--engine vllm|llama-server|serve] [--quick] [--json FILE]
                               [--target T] [--drafter DIRECTORY] [--gamma N] [--clients N]
                               [--prompts FILE] [--requests FILE]

The engine serves with a small language model behind `draftsmith record`. First the held-out prompts
are asked as they are, then under a system message that the drafter never saw: that is the drift.
Then other prompts are asked under that message, and recorded. One cycle learns from the records,
starts a second engine with the new drafter and switches to it. The held-out prompts are asked again
there, in both ways. Accepted ÷ drafted tokens come from the engine's own counters. All requests are
greedy. The target and its answers are the same before and after.
"""

import hashlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from accelerate import Accelerator

from benchmarks.common import (
    PROMPTS,
    TARGET,
    JsonOption,
    PromptsOption,
    RunsOption,
    TargetOption,
    describe_machine,
    rows_table,
    run_command,
    start_benchmark,
    write_json,
)
from benchmarks.decode import train_drafter
from benchmarks.serve.process import MODEL, ServiceProcess, command, serve_command
from decode.base.device import dtype_name
from decode.base.errors import UserError
from decode.model.loading import Target, load_target, target_gguf
from draftsmith.export import ExportOptions
from draftsmith.export.export_directory import export_drafter
from draftsmith.export.formats import FORMATS
from draftsmith.export.verify_export import require_engine
from draftsmith.learn.cycle import TenantLearner
from draftsmith.learn.learn_config import EngineConfig, LearnConfig, read_learn_config
from draftsmith.learn.swap import EngineProcesses, RecorderSwitch
from train.data.read import read_examples
from train.engines.child_process import ask, environment_of
from train.engines.counters import read_counters
from train.engines.programs import llama_server_program

DRIFT = "You are the assistant of a shop. Answer in one short sentence."
KEY, RECORDED = "DRAFTSMITH_BENCHMARK_KEY", "records-allowed"
SETTLE_SECONDS = 3.0  # an engine counts a moment after its answer
FORMS = {"vllm": "vllm", "llama-server": "gguf", "serve": "hf"}


def main(
    engine: Annotated[str, typer.Option(help="vllm, llama-server or serve")] = "vllm",
    quick: Annotated[bool, typer.Option("--quick", help="fewer requests")] = False,
    json_file: JsonOption = None,
    target: TargetOption = TARGET,
    drafter: Annotated[
        Path | None,
        typer.Option(help="a small LM with the target's full vocabulary; default: train one"),
    ] = None,
    gamma: Annotated[int, typer.Option(min=1, help="tokens per draft")] = 3,
    clients: Annotated[int, typer.Option(min=1, help="requests at a time")] = 4,
    tokens: Annotated[int, typer.Option(min=2, help="the longest answer")] = 96,
    prompts: PromptsOption = PROMPTS / "test.jsonl",
    requests: Annotated[Path, typer.Option(help="prompts that are learnt from")] = PROMPTS
    / "train.jsonl",
    runs: RunsOption = Path("runs"),
) -> None:
    """Run the cycle and print the engine's acceptance before and after it."""
    require_known_engine(engine)
    reporter = start_benchmark()
    loaded = load_target(target, dtype="fastest")
    first = drafter or train_drafter(loaded, quick=True, runs=runs, reporter=reporter)
    asked = conversations(prompts, 24 if quick else None)
    learnt = conversations(requests, 160 if quick else None)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = write_config(work, engine, target, first, gamma, tokens, loaded)
        export_drafter(
            first, config.form, work / "export", ExportOptions(target=target, gamma=gamma)
        )
        engines = EngineProcesses(config.engine, gamma)
        stack.callback(stop_all, engines, work)
        os.environ[KEY] = secrets.token_hex(16)

        def traffic(url: str, rows: Sequence[list[dict[str, str]]], store: bool) -> dict[str, Any]:
            return send(url, rows, clients, tokens, store)

        reporter.say(f"starting {engine}")
        old = engines.start(work / "first", work / "export")
        recorder = stack.enter_context(ServiceProcess(record_command(old, work)))
        figures = {"before": {"usual": traffic(old, asked, False)}}
        figures["before"]["drift"] = traffic(old, drifted(asked), False)
        reporter.say(f"asking {len(learnt)} prompts, which are recorded")
        recorded = traffic(recorder.url, drifted(learnt), True)

        def meanwhile(seconds: float) -> None:
            # A cycle that waits for requests gets some.
            traffic(recorder.url, drifted(asked)[:8], True)

        learner = TenantLearner(
            config,
            engines,
            RecorderSwitch(recorder.url, os.environ[KEY]),
            reporter,
            lambda settings: Accelerator(cpu=loaded.device.type == "cpu"),
            sleep=meanwhile,
        )
        begin = time.perf_counter()
        outcome = learner.once()
        seconds = time.perf_counter() - begin
        if outcome is None or not outcome.kept:
            raise UserError(
                "the cycle changed nothing: "
                + (outcome.reason if outcome else f"no more than {config.held_out} records")
            )
        new = learner.recorder.serving
        figures["after"] = {
            "usual": traffic(new, asked, False),
            "drift": traffic(new, drifted(asked), False),
        }
    gains = {
        f"acceptance_gain_{way}": figures["after"][way]["rate"] / figures["before"][way]["rate"]
        for way in ("usual", "drift")
    }
    reporter.table(
        rows_table(
            f"{engine}, γ = {gamma}, {clients} clients, greedy",
            [
                {
                    "requests": way,
                    "drafter": when,
                    "accepted ÷ drafted": f"{row['accepted']:.0f} / {row['drafted']:.0f} = "
                    f"{row['rate']:.3f}",
                    "tokens/s": f"{row['tokens'] / row['seconds']:.1f}",
                }
                for way in ("usual", "drift")
                for when, rows in figures.items()
                for row in (rows[way],)
            ],
        )
    )
    reporter.say(
        f"{recorded['requests']} requests recorded from, {outcome.records} records learnt from, "
        f"{outcome.held_out} held out; the cycle took {seconds:.0f} s; in our loop "
        f"{outcome.serving:.3f} became {outcome.candidate:.3f} of the drafted tokens"
    )
    if json_file:
        write_json(
            json_file,
            {
                "machine": describe_machine(),
                "engine": engine,
                "figures": figures,
                "cycle": outcome.model_dump() | {"seconds": seconds},
                "ratios": gains,
            },
        )


def require_known_engine(name: str) -> None:
    """Raise UserError unless this engine can be started here."""
    if name not in FORMS:
        raise UserError(f"--engine {name}: expected {', '.join(FORMS)}")
    if name != "serve":
        require_engine(name)


def conversations(path: Path, limit: int | None) -> list[list[dict[str, str]]]:
    """The file's single-turn prompts as messages of a user."""
    asked = [x.prompt for x in read_examples(str(path))[0] if x.prompt]
    return [[{"role": "user", "content": prompt}] for prompt in asked[:limit]]


def drifted(rows: Sequence[list[dict[str, str]]]) -> list[list[dict[str, str]]]:
    """The same prompts under the system message."""
    return [[{"role": "system", "content": DRIFT}, *row] for row in rows]


def send(
    url: str, rows: Sequence[list[dict[str, str]]], clients: int, tokens: int, store: bool
) -> dict[str, Any]:
    """Ask all rows, `clients` at a time. Returns the tokens of the answers and the seconds.

    store: with the key whose requests are recorded. If not, the result also has the engine's counts
    of these requests."""

    def one(messages: list[dict[str, str]]) -> int:
        body = {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0}
        answer = ask(f"{url}/v1/chat/completions", body, RECORDED if store else "")
        return int(json.loads(answer)["usage"]["completion_tokens"])

    before = None if store else read_counters(url)
    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        emitted = sum(pool.map(one, rows))
    figures: dict[str, Any] = {
        "requests": len(rows),
        "tokens": emitted,
        "seconds": time.perf_counter() - begin,
    }
    if before is not None:
        time.sleep(SETTLE_SECONDS)
        counts = read_counters(url) - before
        figures |= {"drafted": counts.drafted, "accepted": counts.accepted, "rate": counts.rate}
    return figures


def record_command(upstream: str, work: Path) -> list[str]:
    """The recorder before an engine. It records all requests with the key `RECORDED`, so the engine
    need not know of records."""
    keys = {hashlib.sha256(RECORDED.encode()).hexdigest(): {"tenant": "default", "record": "all"}}
    (work / "keys.json").write_text(json.dumps(keys))
    paths = ("--out", str(work / "records"), "--record-keys", str(work / "keys.json"))
    return command("record", "--upstream", upstream, "--admin-key-env", KEY, *paths)


def write_config(
    work: Path, engine: str, target: str, drafter: Path, gamma: int, tokens: int, loaded: Target
) -> LearnConfig:
    """The configs of the cycle and of its training, as a user would write them."""
    run = {
        "name": "cycle",
        "target": {"model": target, "dtype": "fastest"},
        "precision": "fastest",
        "trackers": [],
        "data": {"train": "replaced.jsonl", "test": "replaced.jsonl"},
        "stages": [
            {
                "name": "distill",
                "kind": "distill",
                "text": "data",
                "drafter": {"model": "{serving}"},
                "losses": {"forward_kl": 1.0},
                "train_embeddings": False,
                "remember_teacher": True,
                "loop": {"epochs": 4, "tokens_per_batch": 1024},
                "optimizer": {"lr": 1e-3, "warmup_steps": 5},
            }
        ],
    }
    learn = {
        "records": "records/default",
        "directory": "learning",
        "run": "run.yaml",
        "drafter": str(drafter.absolute()),
        "form": FORMS[engine],
        "gamma": gamma,
        "trigger": {"records": 16},
        "held_out": 16,
        "max_new_tokens": tokens,
        "recorder": {"key_env": KEY},
        "engine": engine_config(engine, target, work, loaded).model_dump(),
        "watch": {"drafted": 200, "seconds": 120, "tolerance": 1e-3},
        "poll_seconds": 1,
    }
    (work / "run.yaml").write_text(yaml.safe_dump(run))
    (work / "learn.yaml").write_text(yaml.safe_dump(learn))
    return read_learn_config(work / "learn.yaml")


def engine_config(engine: str, target: str, work: Path, loaded: Target) -> EngineConfig:
    """How this engine is started with a drafter."""
    threads = str(os.cpu_count() or 1)
    if engine == "serve":
        words = serve_command(target, "{drafter}", "--gamma", "{gamma}", "--port", "{port}")
        return EngineConfig(command=words)
    if engine == "llama-server":
        layout: Any = FORMATS[FORMS[engine]]
        words = [
            str(llama_server_program()), *layout.models(target_gguf(target), Path("{drafter}")),
            "--spec-type", layout.spec_type, "--spec-draft-n-max", "{gamma}",
            "--spec-draft-p-min", "0", "--metrics", "--port", "{port}", "-t", threads,
            "-np", "4", "-c", "8192",
        ]  # fmt: skip
        return EngineConfig(command=words)
    directory = work / "target"
    loaded.model.save_pretrained(directory)
    loaded.tokenizer.save_pretrained(directory)
    dtype = dtype_name(loaded.dtype)
    speculative = {"method": "draft_model", "model": "{drafter}", "num_speculative_tokens": 0}
    # The number is no string in JSON.
    setting = json.dumps(speculative).replace(": 0}", ": {gamma}}")
    words = [
        str(environment_of("vllm") / "bin/python"), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(directory), "--served-model-name", MODEL, "--dtype", dtype,
        "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8",
        "--generation-config", "vllm", "--port", "{port}", "--speculative-config", setting,
    ]  # fmt: skip
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return EngineConfig(command=words, env=env)


def stop_all(engines: EngineProcesses, work: Path) -> None:
    """Stop every engine that a version's directory names."""
    for directory in (work / "first", *(work / "learning/versions").glob("*")):
        engines.stop(directory)


if __name__ == "__main__":
    run_command(main)
