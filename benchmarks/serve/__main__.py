"""Measures the service: tokens a second and time to the first token, by clients; or soaks it.

    python -m benchmarks.serve [--quick] [--json FILE] [--plot FILE] [--target T] [--drafter D]
                               [--gamma N] [--policy P] [--dtype D] [--device D]
                               [--prompts FILE] [--clients N …] [--others NAMES]

Each service is a process of its own, and clients send requests over HTTP, each the next one when it
has its answer. All requests are greedy and go on to the same number of tokens. The contestants take
turns with the same prompts, in a rotating order, after a warm-up that does not count; the other
services are halted meanwhile. No prompt is sent to a contestant twice, so no cache holds more than
its system message. Contestants:

- our service with the drafter, and without one;
- the loop of this service in the benchmark's process, one prompt after the other;
- `transformers serve --continuous-batching`, if its packages are installed;
- llama-server on the same weights, plain and with its prompt lookup, with a slot for each client.

If a contestant fails or is not installed, the output gives the reason, and it has no ratio. Ratios
are of tokens a second, ours over theirs: above 1 we are faster. Nothing else may compute on the
machine: loops in the benchmark's own process lose much more time to it than services do.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

import heads.kinds  # noqa: F401  (registers its drafters)
from benchmarks.common import (
    PROMPTS,
    TARGET,
    DeviceOption,
    JsonOption,
    PromptsOption,
    TargetOption,
    Unable,
    describe_machine,
    end_benchmark,
    ratio_table,
    rows_table,
    run_command,
    save_figure,
    write_json,
)
from benchmarks.serve.contestants import (
    NAMES,
    Contestant,
    Prompt,
    Turn,
    one_after_the_other,
    over_http,
    transformers_command,
)
from benchmarks.serve.process import ServiceProcess, prepare, serve_command
from benchmarks.shared.llama_cpp import server_command, write_target
from decode.base.device import dtype_name
from decode.base.errors import UserError
from decode.model.loading import Target, load_target
from decode.settings import DecodeSettings
from decode.text import prompt_ids
from draftsmith.export.formats.gguf_layout import FILE
from train.base.console import Reporter
from train.data.read import Example, spread

CLIENTS = [1, 4, 16]
LLAMA_CONTEXT = 512  # tokens of a text that llama-server has memory for
OURS = ("served", "plain_served", "alone")
PACKAGES = ("starlette", "uvicorn", "fastapi")
# {number of clients: {contestant: its turns}}
Turns = dict[int, dict[str, list[Turn]]]


def main(
    quick: Annotated[bool, typer.Option("--quick", help="about 3 minutes on 2 cores")] = False,
    json_file: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="write the plot here")] = None,
    target: TargetOption = TARGET,
    drafter: Annotated[str, typer.Option(help="a directory, ngram, or none")] = "ngram",
    gamma: Annotated[int, typer.Option(min=1, help="depth of drafts")] = 4,
    policy: Annotated[str, typer.Option(help="as for `serve`")] = "worth",
    dtype: Annotated[str, typer.Option(help="of all models")] = "bfloat16",
    device: DeviceOption = "auto",
    prompts: PromptsOption = PROMPTS / "dev.jsonl",
    clients: Annotated[list[int] | None, typer.Option(help="clients at once; repeat it")] = None,
    others: Annotated[
        str,
        typer.Option(help="begin the names of other contestants: transformers, llama"),
    ] = "transformers,llama",
) -> None:
    """Measure the service beside others."""
    if clients is not None and min(clients) < 1:
        raise UserError(f"--clients is {min(clients)}; expected at least 1")
    reporter, loaded, examples, options = prepare(
        target, prompts, dtype=dtype, device=device, gamma=gamma, policy=policy
    )
    figures: dict[str, Any] = {
        "benchmark": "serve",
        "quick": quick,
        "settings": {
            "target": target,
            "drafter": drafter,
            "dtype": dtype,
            "gamma": gamma,
            "policy": policy,
        },
    }
    counts = sorted(set(clients or CLIENTS))
    settings = DecodeSettings(gamma=gamma, policy=policy)
    with ExitStack() as stack, tempfile.TemporaryDirectory() as directory:
        contestants, unable, broken = enter_contestants(
            *(loaded, drafter, options, settings, Path(directory), stack, max(counts)),
            [n for n in NAMES if n not in OURS and n.startswith(tuple(others.split(",")))],
        )
        turns = hold_turns(contestants, loaded, examples, counts, broken, reporter, quick=quick)
    unable |= broken
    for name, reason in unable.items():
        reporter.say(f"not available: {NAMES[name]}: {reason}")
    figures |= {
        "ratios": ratios(turns),
        "unable": unable,
        "contests": [
            {
                "clients": count,
                "contestants": {name: summary(taken) for name, taken in by.items()},
            }
            for count, by in turns.items()
        ],
    }
    title = "ratios of tokens a second, ours over theirs"
    reporter.table(ratio_table(title, figures["ratios"]))
    if plot is not None:
        plot_turns(turns, plot)
    machine = describe_machine(PACKAGES)
    reporter.say(f"machine: {machine['machine']}; {machine['versions']}")
    if json_file is not None:
        write_json(json_file, {**figures, "process": machine})
    end_benchmark({NAMES[name]: how for name, how in broken.items()})


def enter_contestants(
    target: Target,
    drafter: str,
    options: Sequence[str],
    settings: DecodeSettings,
    directory: Path,
    stack: ExitStack,
    clients: int,
    others: Sequence[str],
) -> tuple[dict[str, Contestant], dict[str, str], dict[str, str]]:
    """Start the services, which end with the stack. Returns all contestants, why others cannot take
    part, and how others broke. clients: the most that ask at once; those without a row wait.
    others: those that are not ours and take part."""
    waiting = ["--limits", f"max_waiting={max(clients, 64)},max_wait=600"]

    ours = {"served": drafter} | ({} if drafter == "none" else {"plain_served": "none"})
    services = {
        name: ServiceProcess(serve_command(target.name, its_drafter, *options, *waiting))
        for name, its_drafter in ours.items()
    }
    for service in services.values():
        stack.callback(service.kill)  # they start together; one of them may fail
    fields: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}
    contestants = {
        name: over_http(stack.enter_context(service), **fields)
        for name, service in services.items()
    }
    contestants["alone"] = one_after_the_other(target, drafter, settings)
    # Our loop packs the weights of its model, so transformers get another one.
    dtype = dtype_name(target.dtype)
    model = load_target(target.name, dtype=dtype, device=str(target.device)).model
    model.generation_config.eos_token_id = None
    unable: dict[str, str] = {}
    broken: dict[str, str] = {}

    def transformers() -> Contestant:
        device = str(target.device)
        command = transformers_command(model, target.tokenizer, directory, device)
        service = stack.enter_context(ServiceProcess(command))
        service.warm_up(str(directory))
        return over_http(service, str(directory))

    def llama(*more: str) -> Contestant:
        file = directory / FILE
        command = server_command(file, rows=clients, context=LLAMA_CONTEXT)
        if not file.exists():
            write_target(directory, model, target.name)
        service = stack.enter_context(ServiceProcess([*command, *more]))
        return over_http(service, cache_prompt=False, **fields)

    makers: dict[str, Callable[[], Contestant]] = {
        "transformers_serve_continuous": transformers,
        "llama_server": llama,
        "llama_server_lookup": partial(llama, "--spec-type", "ngram-simple"),
    }
    for name in others:
        try:
            contestants[name] = makers[name]()
        except Unable as error:
            unable[name] = str(error)
        except (UserError, RuntimeError) as error:
            broken[name] = str(error)
    return contestants, unable, broken


def hold_turns(
    contestants: dict[str, Contestant],
    target: Target,
    examples: Sequence[Example],
    clients: Sequence[int],
    broken: dict[str, str],
    reporter: Reporter,
    *,
    quick: bool,
) -> Turns:
    """Let all contestants answer. Who fails leaves `contestants` and gets a reason in `broken`."""
    tokens, rounds = (32, 2) if quick else (96, 4)
    turns: Turns = {}
    sent = 0

    def next_prompts(count: int) -> list[Prompt]:
        """Prompts that nobody has seen: each begins with a number of its own."""
        nonlocal sent
        chosen = [spread(examples, count)[at % len(examples)] for at in range(count)]
        sent += count
        return [
            numbered(f"{sent - count + at}. {example.prompt}", target)
            for at, example in enumerate(chosen)
        ]

    def take_turn(name: str, prompts: list[Prompt], count: int, tokens: int) -> Turn | None:
        try:
            return contestants[name](prompts, count, tokens)
        except Exception as error:  # of another package; ours fails the benchmark
            if name in OURS:
                raise
            broken[name] = f"{type(error).__name__}: {error}"
            del contestants[name]
            return None

    warm = next_prompts(2)
    for name in list(contestants):
        take_turn(name, warm, 2, 8)
    for count in clients:
        by_name = turns[count] = {name: [] for name in contestants}
        for number in range(rounds):
            prompts = next_prompts(max(count, 2 if quick else 4))
            order = [name for name in contestants if name != "alone" or count == 1]
            at = number % len(order)
            for name in order[at:] + order[:at]:
                turn = take_turn(name, prompts, count, tokens)
                if turn is not None:
                    by_name[name].append(turn)
        turns[count] = {name: taken for name, taken in by_name.items() if len(taken) == rounds}
        reporter.table(turns_table(count, turns[count], tokens))
    return turns


def numbered(text: str, target: Target) -> Prompt:
    messages = [{"role": "user", "content": text}]
    return Prompt(messages, prompt_ids(messages, target.tokenizer))


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """Tokens a second over all turns and of each, and the median time to the first token."""
    firsts = [first for turn in turns for first in turn.firsts]
    return {
        "tokens_per_second": sum(turn.tokens for turn in turns)
        / sum(turn.seconds for turn in turns),
        "tokens_per_second_of_turns": [turn.speed for turn in turns],
        "first_token_seconds": median(firsts),
        "tokens": sum(turn.tokens for turn in turns),
    }


def ratios(turns: Turns) -> dict[str, float]:
    """Ratios of tokens a second: of more clients over 1 (or the fewest), of the service with the
    drafter over the one without, and of ours over the others'."""
    speeds = {
        (name, count): summary(taken)["tokens_per_second"]
        for count, by_name in turns.items()
        for name, taken in by_name.items()
    }
    fewest = min(turns)
    values = {}
    for count in turns:
        served = speeds["served", count]
        if count != fewest:
            values[f"serve_{count}_vs_{fewest}"] = served / speeds["served", fewest]
        if ("plain_served", count) in speeds:
            values[f"speculative_vs_plain_served_{count}"] = served / speeds["plain_served", count]
        if ("alone", 1) in speeds:
            values[f"serve_{count}_vs_one_after_the_other"] = served / speeds["alone", 1]
        for name in NAMES:
            if name in OURS or (name, count) not in speeds:
                continue
            values[f"serve_vs_{name}_{count}"] = served / speeds[name, count]
            if ("plain_served", count) in speeds:
                values[f"plain_served_vs_{name}_{count}"] = (
                    speeds["plain_served", count] / speeds[name, count]
                )
    return values


def turns_table(count: int, turns: dict[str, list[Turn]], tokens: int) -> Any:
    rows = []
    for name, taken in turns.items():
        figures = summary(taken)
        speeds = figures["tokens_per_second_of_turns"]
        rows.append(
            {
                "contestant": NAMES[name],
                "tokens/s": f"{figures['tokens_per_second']:.1f}",
                "of turns": f"{min(speeds):.1f}–{max(speeds):.1f}",
                "first token, ms": f"{1000 * figures['first_token_seconds']:.0f}",
            }
        )
    return rows_table(f"clients at once: {count}; answers of {tokens} tokens", rows)


def plot_turns(turns: Turns, file: Path) -> None:
    """Plot tokens a second and time to the first token over the clients."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    speed, first = figure.subplots(1, 2)
    for name, label in NAMES.items():
        figures = {
            count: summary(by_name[name]) for count, by_name in turns.items() if name in by_name
        }
        style = "o-" if name in OURS else "s--"
        for panel, key in ((speed, "tokens_per_second"), (first, "first_token_seconds")):
            points = [(n, one[key]) for n, one in figures.items()]
            if points:
                panel.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    for panel, label in ((speed, "tokens/s"), (first, "median seconds to the first token")):
        panel.set_xscale("log", base=2)
        panel.set_xticks(list(turns), [str(count) for count in turns])
        panel.set_xlabel("clients at once")
        panel.set_ylabel(label)
    speed.legend(fontsize=7)
    save_figure(figure, file)


if __name__ == "__main__":
    run_command(main)
