"""Measures where drafting at the edge pays: tokens per second against the round trip.

    python -m benchmarks.edge [--quick] [--json FILE] [--plot FILE] [--target T] [--dtype D]
                              [--drafter NAME|DIRECTORY] [--gamma N] [--policy P] [--tokens N]
                              [--prompts FILE] [--temperature T] [--jitter MS] [--bandwidth KB]

Three ways to the same texts, one text at a time: the target alone in the cloud, which streams its
tokens; the drafter beside the target in the cloud; the drafter at the edge, which waits for every
verdict. The edge talks to a verification server, a process of its own, through a relay that delays
each message by half a round trip. The first two ways are measured without a line, and pay one round
trip for a text. Beside the edge stands the formula E/(k·t_d + t_v + rtt + b/W): tokens and draft
tokens of a round, seconds of a draft token and of a pass at the server, and bytes of a round, as
measured in that run; rtt has the mean jitter of two messages. The last column is the most that
drafting ahead could reach, while a verdict travels: drafts then cost nothing after each round whose
tokens were all accepted.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import heads  # noqa: F401  (registers its drafters)
from benchmarks.common import (
    PROMPTS,
    TARGET,
    JsonOption,
    PromptsOption,
    TargetOption,
    describe_machine,
    rows_table,
    run_command,
    save_figure,
    start_benchmark,
    write_json,
)
from benchmarks.shared.relay import Relay
from decode.drafters import DRAFTERS, Drafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.loop.parts import Part
from decode.model.loading import Target, load_target
from decode.opening.directory import open_drafter
from draftsmith.cli.command import tokenized_prompts
from draftsmith.edge.client import EdgeClient, summary
from draftsmith.edge.link import Link
from train.data.read import read_examples
from train.engines.child_process import free_port

ROUND_TRIPS = (0, 5, 20, 50, 100, 200)  # milliseconds
QUICK = (0, 20, 100)
CLOUD, CLOUD_DRAFTER, EDGE, FORMULA = "cloud alone", "drafter in the cloud", "edge", "formula"
# The most that an edge could reach which drafts on while a verdict travels: it then has its next
# draft without waiting for it, but only if the verdict accepts all of the last one.
AHEAD = "drafting ahead, at most"


def main(
    quick: Annotated[bool, typer.Option("--quick", help="fewer prompts and round trips")] = False,
    json_file: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="draw the table here, as PNG")] = None,
    target: TargetOption = TARGET,
    dtype: Annotated[str, typer.Option(help="dtype of all models")] = "float32",
    drafter: Annotated[str, typer.Option(help="name or directory")] = "ngram",
    gamma: Annotated[int, typer.Option(min=1, help="longest draft")] = 4,
    policy: Annotated[str, typer.Option(help="draft-length policy")] = "fixed",
    temperature: Annotated[float, typer.Option(help="of the texts")] = 0.0,
    prompts: PromptsOption = PROMPTS / "test.jsonl",
    tokens: Annotated[int, typer.Option(min=2, help="tokens of each text")] = 64,
    jitter: Annotated[
        float, typer.Option(min=0, help="ms that a message takes longer, at most")
    ] = 0.0,
    bandwidth: Annotated[
        float | None, typer.Option(min=0.1, help="kB/s of the line, each way; default: any")
    ] = None,
) -> None:
    """Measure the three ways at several round trips."""
    reporter = start_benchmark()
    loaded = load_target(target, dtype=dtype, device="cpu")
    examples = read_examples(str(prompts))[0]
    texts = tokenized_prompts(examples, loaded, 1 if quick else 8)
    with _serving(target, dtype) as port:
        rows = measure(
            loaded,
            open_drafter(drafter, loaded),
            texts,
            port,
            round_trips=QUICK if quick else ROUND_TRIPS,
            tokens=min(tokens, 24) if quick else tokens,
            gamma=gamma,
            policy=policy,
            sampling=Sampling(temperature),
            jitter=jitter,
            bandwidth=bandwidth,
            say=reporter.say,
        )
    reporter.table(rows_table(f"tokens per second, {drafter}", [shown(row) for row in rows]))
    for row in rows:
        if not row["identical"]:
            reporter.say(f"at {row['rtt_ms']} ms, texts differ from those in the cloud")
    if json_file is not None:
        ratios = {f"edge_to_cloud_at_{row['rtt_ms']}_ms": row[EDGE] / row[CLOUD] for row in rows}
        process = describe_machine()
        line = {"jitter_ms": jitter, "bandwidth_kb": bandwidth}
        figures = {"process": process, "line": line, "rows": rows, "ratios": ratios}
        write_json(json_file, {"benchmark": "edge", **figures})
    if plot is not None:
        plot_rows(rows, plot)


def measure(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    port: int,
    *,
    round_trips: Sequence[float],
    tokens: int,
    gamma: int,
    policy: Part,
    sampling: Sampling,
    jitter: float = 0.0,
    bandwidth: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Return a row for each round trip, in milliseconds: tokens per second of each way, the figures
    of the edge's rounds, and whether the edge's texts are those in the cloud. port: of a
    verification server on this machine. jitter: milliseconds that a message takes longer, at most.
    bandwidth: kB/s each way; None: any. say: is told what is measured next."""
    say("measuring in the cloud")
    alone = _decoder(target, DRAFTERS["none"](), 1, "fixed", sampling)
    beside = _decoder(target, drafter, gamma, policy, sampling)
    alone.decode(prompts[:1], 2)
    cloud = [_timed(alone, prompt, tokens) for prompt in prompts]
    drafted = [_timed(beside, prompt, tokens) for prompt in prompts]
    rows = []
    for rtt in round_trips:
        say(f"measuring at the edge, round trip {rtt:g} ms")
        # Each of the two messages is late by half of the jitter, on average.
        trip = (rtt + jitter) / 1e3
        speed = None if bandwidth is None else 1e3 * bandwidth
        with Relay(port, rtt=rtt / 1e3, jitter=jitter / 1e3, bandwidth=speed) as relay:
            client = EdgeClient(
                Link(relay.url), drafter, gamma=gamma, policy=policy, sampling=sampling
            )
            edge = [_timed(client, prompt, tokens) for prompt in prompts]
            client.close()
        ways = {CLOUD: cloud, CLOUD_DRAFTER: drafted, EDGE: edge}
        trips = {CLOUD: trip, CLOUD_DRAFTER: trip, EDGE: 0.0}
        speeds = {
            name: sum(len(text) for text, _, _ in runs)
            / sum(seconds + trips[name] for _, seconds, _ in runs)
            for name, runs in ways.items()
        }
        figures = summary(client.rounds)
        emitted = sum(len(text) for text, _, _ in edge) / len(client.rounds)
        draft_s = sum(drafts for _, _, drafts in edge) / len(client.rounds)
        server_s = float(np.mean([one.wall_ms - one.rtt_ms for one in client.rounds])) / 1e3
        accepted = float(np.mean([one.accepted == one.k > 0 for one in client.rounds]))
        sent = sum(one.bytes_up + one.bytes_down for one in client.rounds) / len(client.rounds)
        rest_s = server_s + trip + (sent / speed if speed else 0.0)
        rows.append(
            {
                "rtt_ms": rtt,
                **speeds,
                FORMULA: emitted / (draft_s + rest_s),
                AHEAD: emitted / (draft_s * (1 - accepted) + rest_s),
                "all_accepted": accepted,
                "tokens_per_round": emitted,
                "rounds": figures,
                "identical": [text for text, _, _ in edge] == [text for text, _, _ in drafted],
            }
        )
    return rows


def _decoder(
    target: Target, drafter: Drafter, gamma: int, policy: Part, sampling: Sampling
) -> Decoder:
    return Decoder(
        target.model,
        drafter,
        eos_token_ids=target.eos_token_ids,
        gamma=gamma,
        policy=policy,
        rule="coupled",
        sampling=sampling,
        first_target=False,
    )


def _timed(
    decoder: Decoder | EdgeClient, prompt: Sequence[int], tokens: int
) -> tuple[list[int], float, float]:
    """A text, its seconds, and the seconds of its drafts."""
    started = time.perf_counter()
    decoded = decoder.decode([prompt], tokens)
    return decoded.outputs[0], time.perf_counter() - started, decoded.timing.draft


@contextlib.contextmanager
def _serving(target: str, dtype: str) -> Iterator[int]:
    """The port of a verification server in a process of its own: in one process, edge and server
    would share their threads."""
    port = free_port()
    server = [sys.executable, "-m", "draftsmith.cli.main", "verify-server", "--target", target]
    command = [*server, "--dtype", dtype, "--device", "cpu", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if not any("verifies by" in line for line in process.stdout):
                raise RuntimeError(f"{command} did not start")
            yield port
        finally:
            process.terminate()


def shown(row: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a row of `measure`, with the fastest way."""
    ways = (CLOUD, CLOUD_DRAFTER, EDGE)
    return {
        "round trip, ms": f"{row['rtt_ms']:g}",
        **{way: f"{row[way]:.1f}" for way in (*ways, FORMULA, AHEAD)},
        "tokens per round": f"{row['tokens_per_round']:.2f}",
        "fastest": max(ways, key=lambda way: row[way]),
        "edge pays": "yes" if row[EDGE] > row[CLOUD] else "no",
    }


def plot_rows(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw tokens per second against the round trip, a line for each way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    styles = {CLOUD: "-", CLOUD_DRAFTER: "-", EDGE: "-", FORMULA: "--", AHEAD: ":"}
    for name, style in styles.items():
        axes.plot(
            [row["rtt_ms"] for row in rows],
            [row[name] for row in rows],
            marker="o",
            linestyle=style,
            label=name,
        )
    axes.set_xlabel("round trip (ms)")
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, file)


if __name__ == "__main__":
    run_command(main)
