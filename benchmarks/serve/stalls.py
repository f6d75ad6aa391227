"""Measures how long the service stands still while it reads the worst bodies.

    python -m benchmarks.serve.stalls [--quick] [--json FILE] [--target T]

For each kind of body a client sends some, one after the other, and another client asks for /health
all the time. The table has the longest of these answers. A body of a kind is as long as the service
takes, and it is read, refused or both.
"""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import typer

from benchmarks.common import (
    TARGET,
    JsonOption,
    TargetOption,
    rows_table,
    run_command,
    start_benchmark,
    write_json,
)
from benchmarks.serve.client import CHAT, ask
from benchmarks.serve.process import MODEL, ServiceProcess, serve_command

COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
LENGTH = 2_000_000  # bytes of a body, about


def bodies(length: int = LENGTH) -> dict[str, tuple[str, bytes]]:
    """The worst bodies, by what they are: path and content."""

    def filled(part: Any) -> list[Any]:
        return [part] * (length // (len(json.dumps(part)) + 2))

    said = {"role": "user", "content": "a"}
    numbered: dict[str, Any] = {f"x{n}": n for n in range(length // 20)}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "a text of words": (COMPLETIONS, {"prompt": "ab " * (length // 3)}),
        "a text without spaces": (COMPLETIONS, {"prompt": "a" * length}),
        "a text of spaces": (COMPLETIONS, {"prompt": " " * length}),
        "token ids": (COMPLETIONS, {"prompt": filled(5)}),
        "prompts": (COMPLETIONS, {"prompt": filled("a")}),
        "numbers for token ids": (COMPLETIONS, {"prompt": filled(1.5)}),
        "messages": (CHAT, {"messages": filled(said)}),
        "a message of parts": (
            CHAT,
            {"messages": [{**said, "content": filled({"type": "text", "text": "a"})}]},
        ),
        "numbers for messages": (CHAT, {"messages": filled(5)}),
        "stop strings": (CHAT, {"messages": [said], "stop": filled("a")}),
        "unknown fields": (CHAT, numbered),
        "a long name": (CHAT, {"x" * length: 1}),
        "items": (RESPONSES, {"input": filled(said)}),
        "labels": (RESPONSES, {"input": "a", "metadata": numbered}),
        "settings": ("/admin/settings", numbered),
    }
    made = {name: (path, {"model": MODEL, **body}) for name, (path, body) in kinds.items()}
    written = {name: (path, json.dumps(body).encode()) for name, (path, body) in made.items()}
    return written | {"brackets": (CHAT, b"[" * length), "digits": (CHAT, b"1" * length)}


def longest_health(url: str, path: str, body: bytes, times: int) -> tuple[float, int | None]:
    """The longest answer to /health, in seconds, while a body is sent so many times; and the last
    status that the body got."""
    done = threading.Event()

    def send() -> int | None:
        try:
            return [ask(url, body, path).status for _ in range(times)][-1]
        finally:
            done.set()

    longest = 0.0
    with ThreadPoolExecutor() as pool:
        status = pool.submit(send)
        while not done.is_set():
            began = time.monotonic()
            ask(url, b"", "/health", method="GET")
            longest = max(longest, time.monotonic() - began)
        return longest, status.result()


def main(
    quick: Annotated[bool, typer.Option("--quick", help="each body once, of a tenth")] = False,
    json_file: JsonOption = None,
    target: TargetOption = TARGET,
) -> None:
    """Send the worst bodies to a service, and print the longest answer to /health."""
    reporter = start_benchmark()
    figures: dict[str, dict[str, float | None]] = {}
    with ServiceProcess(serve_command(target, "ngram")) as process:
        process.warm_up()
        for name, (path, body) in bodies(LENGTH // 10 if quick else LENGTH).items():
            seconds, status = longest_health(process.url, path, body, 1 if quick else 3)
            figures[name] = {"bytes": len(body), "status": status, "health_s": seconds}
    rows = [
        {
            "body": name,
            "bytes": f"{figure['bytes']:,}",
            "status": f"{figure['status']}",
            "longest /health, s": f"{figure['health_s']:.3f}",
        }
        for name, figure in figures.items()
    ]
    reporter.table(rows_table("longest answer to /health", rows))
    if json_file is not None:
        write_json(json_file, figures)


if __name__ == "__main__":
    run_command(main)
