"""Many clients at once for a while, with everything that clients do, and then: is anything left?

    python -m tools.soak [--seconds S] [--clients N] [--target T] [--drafter D] [--gamma N]
                         [--device D] [--prompts FILE] [--default-requests N] [--json FILE]

They send everything that clients send, hang up and come again, to a service in float32. The exit
status is 1 if an answer, a status, a counter, a thread, a file or a row is not as it should be.
"""

import http.client
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import psutil
import typer

import heads.kinds  # noqa: F401  (registers its drafters)
from benchmarks.common import (
    PROMPTS,
    TARGET,
    DeviceOption,
    JsonOption,
    PromptsOption,
    TargetOption,
    describe_machine,
    run_command,
    write_json,
)
from benchmarks.serve.client import (
    CHAT,
    COMPLETIONS,
    JSON,
    RESPONSES,
    ClientAnswer,
    ask,
    read_metrics,
)
from benchmarks.serve.process import MODEL, ServiceProcess, prepare, serve_command
from decode.drafters import DRAFTERS
from decode.loop.decoding import Decoder
from decode.model.loading import Target
from decode.text import prompt_ids
from decode.text_stream import decode
from train.base.console import Reporter
from train.data.read import Example, spread

# (prompt, limit in tokens) → the greedy text that the decode gives alone.
Texts = Mapping[tuple[str, int], str]

IDLE_SECONDS = 30.0  # until texts that were given up have left
MIB = 2**20
SAMPLINGS: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1},
    {"temperature": 1.2, "min_p": 0.1},
)
# What is sent, its content type, path and method, and the status that docs/serving.md names for it.
MALFORMED: tuple[tuple[bytes, str, str, str, int], ...] = (
    (b"", JSON, CHAT, "POST", 400),
    (b"{", JSON, CHAT, "POST", 400),
    (b"[" * 50_000, JSON, CHAT, "POST", 400),
    (b'{"model": "target", "messages": [], "max_tokens": 4}', JSON, CHAT, "POST", 400),
    (b'{"model": "target", "prompt": "a", "tools": [{}]}', JSON, COMPLETIONS, "POST", 400),
    (b'{"model": "target", "prompt": "a", "n": 100000}', JSON, COMPLETIONS, "POST", 400),
    (b'{"model": "target", "prompt": [-1]}', JSON, COMPLETIONS, "POST", 400),
    (b'{"model": "other", "prompt": "a"}', JSON, COMPLETIONS, "POST", 404),
    (b"{}", "text/plain", CHAT, "POST", 415),
    (b"{}", JSON, "/v1/nothing", "POST", 404),
    (b"", JSON, CHAT, "GET", 405),
    (b'"' + b"a" * (3 * MIB) + b'"', JSON, CHAT, "POST", 413),
    (b'{"model": "target", "prompt": "' + b"a b " * 50_000 + b'"}', JSON, COMPLETIONS, "POST", 400),
)


@dataclass(frozen=True)
class Job:
    """One request. prompt: of a greedy one, whose text is known; else "". malformed: sent in place
    of the body. hang_up: as for `ask`."""

    body: dict[str, Any] = field(default_factory=dict)
    path: str = CHAT
    prompt: str = ""
    malformed: tuple[bytes, str, str, str, int] | None = None
    hang_up: int | None = None

    @property
    def name(self) -> str:
        """What it asks for, in few characters."""
        return str(self.malformed or self.body)[:300]

    def send(self, url: str) -> ClientAnswer:
        if self.malformed is not None:
            content, kind, path, method, _ = self.malformed
            return ask(url, content, path, kind=kind, method=method)
        return ask(url, self.body, self.path, hang_up=self.hang_up)

    @property
    def texts(self) -> int:
        """How many texts it asks for."""
        prompts = self.body.get("prompt", "")
        return (1 if isinstance(prompts, str) else len(prompts)) * int(self.body.get("n", 1))

    @property
    def asked(self) -> str:
        """The same for all jobs that get the same texts, up to their number."""
        fields = {key: x for key, x in self.body.items() if not key.startswith("stream")}
        if not isinstance(fields.get("prompt", ""), tuple):
            fields.pop("n", 1)  # with fewer texts of the same seed, the first ones are the same
        return json.dumps([self.path, fields])


@dataclass
class Soak:
    """What came of it. faults: every promise that was broken; none is as it should be.

    same_as_alone: greedy texts. same_as_before: texts of the same request with its seed, of which
    the idle service gave same_again at the end. resident, threads, files: of the service, when it
    was idle after each round, in MiB and numbers. default_requests: MiB before and after them."""

    seconds: float = 0.0
    clients: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    hung_up: int = 0
    same_as_alone: int = 0
    same_as_before: int = 0
    same_again: int = 0
    resident: list[float] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    default_requests: tuple[float, float] | None = None
    faults: list[str] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """MiB that the service has grown by since the first two rounds, of which one has clients
        that hang up and one has none."""
        return self.resident[-1] - self.resident[min(1, len(self.resident) - 1)]


def soak(
    url: str,
    process: psutil.Process,
    texts: Texts,
    *,
    seconds: float,
    clients: int,
    rounds: int = 6,
    seed: int = 0,
    defaults: int = 0,
) -> Soak:
    """Let clients do what clients do, in rounds. process: the service's. texts: of a service that
    decodes in float32, so that a text does not depend on those beside it. Clients hang up in every
    second round only: the counters of the others must be the sums of the answers' counts. At the
    end the idle service gets each seeded request again. defaults: so many requests that name no
    length follow."""
    result = Soak(clients=clients)
    seeded: Seeded = {}
    begun = time.monotonic()
    for number in range(rounds):
        # Each round has its time, however long the one before took to its end.
        before, end = read_metrics(url), time.monotonic() + seconds / rounds
        hang_ups = number % 2 == 0

        def client(dice: random.Random, end: float = end, hang_ups: bool = hang_ups) -> Log:
            return _client(url, texts, dice, end, hang_ups)

        dices = [random.Random(f"{seed} {number} {one}") for one in range(clients)]
        with ThreadPoolExecutor(clients) as pool:
            log = [entry for part in pool.map(client, dices) for entry in part]
        answers = []
        for job, outcome in log:
            if isinstance(outcome, ClientAnswer):
                answers.append((job, outcome))
                _judge(job, outcome, texts, seeded, result)
            else:  # the connection broke, though nobody hung up
                result.faults.append(f"{job.name}: {outcome!r}")
        if not _until(lambda: _held(url) == 0):
            result.faults.append(f"round {number}: {_held(url):g} rows are held when all is done")
        result.faults += [
            f"round {number}: {fault}"
            for fault in _differences(before, read_metrics(url), answers, exact=not hang_ups)
        ]
        _look(process, result)
    for job, known in seeded.values():
        _compare(job, job.send(url), known, result)
        result.same_again += len(known)
    result.seconds = time.monotonic() - begun
    for what, counts in (("threads", result.threads), ("open files", result.files)):
        if counts[-1] > counts[0]:
            result.faults.append(f"{what} after each round: {counts}")
    if defaults:
        result.default_requests = _send_defaults(url, process, texts, defaults, result)
    return result


def _send_defaults(
    url: str, process: psutil.Process, texts: Texts, count: int, result: Soak
) -> tuple[float, float]:
    """MiB of the service before and after so many requests that name no length."""
    prompts = sorted({prompt for prompt, _ in texts})

    def send(number: int) -> ClientAnswer:
        prompt = prompts[number // 3 % len(prompts)]
        path, field = (
            (CHAT, {"messages": [{"role": "user", "content": prompt}]}),
            (COMPLETIONS, {"prompt": prompt}),
            (RESPONSES, {"input": prompt}),
        )[number % 3]
        return ask(url, {"model": MODEL, "temperature": 1.0, **field}, path)

    before = process.memory_info().rss / MIB
    with ThreadPoolExecutor(min(result.clients, count)) as pool:
        for number, answer in enumerate(pool.map(send, range(count))):
            if not answer.complete:
                result.faults.append(f"default request {number}: {answer.error}")
    return before, process.memory_info().rss / MIB


# {what is asked: the first job that asks for it, with its texts}
Seeded = dict[str, tuple[Job, dict[int, str]]]
Log = list[tuple[Job, ClientAnswer | Exception]]


def _client(url: str, texts: Texts, dice: random.Random, end: float, hang_ups: bool) -> Log:
    log: Log = []
    while time.monotonic() < end:
        job = draw_job(texts, dice, hang_ups)
        try:
            answer = job.send(url)
            log.append((job, answer))
            busy = answer.status == 503
        except (OSError, ValueError, http.client.HTTPException) as error:
            log.append((job, error))
            busy = True
        if busy:
            time.sleep(0.05)
    return log


def draw_job(texts: Texts, dice: random.Random, hang_ups: bool) -> Job:
    """One request of any kind."""
    prompt, limit = dice.choice(sorted(texts))
    common: dict[str, Any] = {"model": MODEL, "max_tokens": limit, "stream": dice.random() < 0.5}
    if common["stream"]:
        common["stream_options"] = {"include_usage": True}
    chat = common | {"messages": [{"role": "user", "content": prompt}], "temperature": 0}
    kinds = ["greedy", "greedy", "response", "stop", "sampled", "several", "malformed"]
    kind = dice.choice(kinds + ["hang-up"] * 3 * hang_ups)
    if kind == "malformed":
        return Job(malformed=dice.choice(MALFORMED))
    if kind == "hang-up":
        long = {"ignore_eos": True, "n": dice.randint(1, 2), "max_tokens": 4 * limit}
        return Job(chat | long, hang_up=dice.randint(1, 12))
    drawn = dice.choice(SAMPLINGS) | {"seed": 1}
    if kind == "response":
        body = {"model": MODEL, "stream": common["stream"], "input": prompt}
        return Job(body | drawn | {"max_output_tokens": limit}, RESPONSES)
    if kind == "sampled":
        return Job(chat | drawn | {"n": dice.randint(1, 4)})
    if kind == "several":
        prompts = sorted({prompt for prompt, _ in texts})
        pair = prompt, prompts[prompts.index(prompt) - 1]
        body = common | drawn | {"prompt": pair, "n": dice.randint(1, 2)}
        del body["max_tokens"]  # 16 is the default
        return Job(body, COMPLETIONS)
    if kind == "stop" and (text := texts[prompt, limit]):
        at = dice.randrange(len(text))
        stop = text[at : at + dice.randint(1, 6)]
        if "�" not in stop:  # half a character, which the next token may complete
            never = [f"never said {number}" for number in range(dice.randint(1, 6))]
            return Job(chat | {"stop": [stop, *never]}, prompt=prompt)
    return Job(chat | {"n": dice.choice((1, 1, 2))}, prompt=prompt)


def _judge(job: Job, answer: ClientAnswer, texts: Texts, seeded: Seeded, result: Soak) -> None:
    """Compare one answer with what it must be."""
    result.statuses["none" if answer.status is None else str(answer.status)] += 1
    result.tokens += answer.usage.get("completion_tokens", 0)
    if job.hang_up is not None and not answer.ended:
        result.hung_up += 1
        return
    full = answer.status == 503 and (answer.error or {}).get("code") == "full"
    expected = 200 if job.malformed is None else job.malformed[-1]
    what = f"{job.name}: status {answer.status}"
    if answer.status != expected and not full:
        result.faults.append(f"{what}, not {expected}: {answer.error}")
    if answer.status != 200:
        if set(answer.error or {}) != {"message", "type", "param", "code"}:
            result.faults.append(f"{what}: the error is {answer.error}")
        if full and int(answer.headers.get("retry-after", 0)) < 1:
            result.faults.append(f"{what}: no Retry-After")
        return
    if not answer.complete or not len(answer.reasons) == len(answer.texts) == job.texts:
        result.faults.append(f"{what}: the answer is not complete: {answer}")
    elif job.prompt:
        text = texts[job.prompt, job.body["max_tokens"]]
        if "stop" in job.body:
            text = text[: text.index(job.body["stop"][0])]
        for got in answer.texts.values():
            if got == text:
                result.same_as_alone += 1
            else:
                result.faults.append(f"{what}: the text is {got!r}, alone it is {text!r}")
    elif "seed" in job.body:
        first, known = seeded.setdefault(job.asked, (job, {}))
        if job.texts > first.texts:  # it gives all the texts that any of them has
            seeded[job.asked] = job, known
        _compare(job, answer, known, result)


def _compare(job: Job, answer: ClientAnswer, known: dict[int, str], result: Soak) -> None:
    """Compare texts with those that the same request has got before."""
    for index, text in answer.texts.items():
        if known.setdefault(index, text) == text:
            result.same_as_before += 1
        else:
            result.faults.append(f"{job.name}: a seed gave two texts at {index}")


def _differences(
    before: Mapping[str, float],
    after: Mapping[str, float],
    answers: Sequence[tuple[Job, ClientAnswer]],
    *,
    exact: bool,
) -> list[str]:
    """Counters that are not the sums of the answers' counts. exact: no client hung up; otherwise
    the counters may be larger."""
    sums: Counter[str] = Counter()
    for job, answer in answers:
        if answer.status == 503:
            sums['request_failure_total{reason="full"}'] += 1
        if not answer.complete:
            continue
        # Each text of a prompt counts as a prompt of its own.
        sums["prompt_tokens_total"] += answer.usage["prompt_tokens"] * job.body.get("n", 1)
        sums["generation_tokens_total"] += answer.usage["completion_tokens"]
        sums["spec_decode_num_draft_tokens_total"] += answer.counts["drafted"]
        sums["spec_decode_num_accepted_tokens_total"] += answer.counts["accepted"]
        for reason in answer.reasons.values():
            sums[f'request_success_total{{finished_reason="{reason}"}}'] += 1
    counted = {name: after[name] - before.get(name, 0) for name in after}
    names = {name for name in after if name.startswith(("request_success", "request_failure"))}
    return [
        f"{name} grew by {counted.get(name, 0):g}, the answers have {sums[name]}"
        for name in sorted(sums | dict.fromkeys(names, 0))
        if counted.get(name, 0) < sums[name] or (exact and counted.get(name, 0) > sums[name])
    ]


def _held(url: str) -> float:
    """Texts that run or wait."""
    metrics = read_metrics(url)
    return metrics["num_requests_running"] + metrics["num_requests_waiting"]


def _look(process: psutil.Process, result: Soak) -> None:
    """Note the service's memory, threads and files, when its connections are closed."""
    _until(lambda: not result.files or process.num_fds() <= result.files[0], 2.0)
    result.resident.append(process.memory_info().rss / MIB)
    result.threads.append(process.num_threads())
    result.files.append(process.num_fds())


def _until(condition: Callable[[], bool], seconds: float = IDLE_SECONDS) -> bool:
    """Wait for a condition. False: it did not come in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def soak_service(
    target: Target,
    drafter: str,
    options: Sequence[str],
    examples: Sequence[Example],
    seconds: float,
    clients: int,
    defaults: int,
) -> Soak:
    """Soak a service that has fewer rows than clients. The texts that greedy answers must have are
    those of plain decoding here."""
    decoder = Decoder(target.model, DRAFTERS["none"](), eos_token_ids=target.eos_token_ids)
    limits = (4, 24)
    texts = {}
    for example in spread(examples, 6):
        prompt = str(example.prompt)
        ids = prompt_ids([{"role": "user", "content": prompt}], target.tokenizer)
        tokens = decoder.decode([ids], max(limits)).outputs[0]
        for limit in limits:
            texts[prompt, limit] = decode(target.tokenizer, tokens[:limit])
    rows = ["--limits", f"max_rows={max(1, clients // 2)},max_waiting={clients}"]
    with ServiceProcess(serve_command(target.name, drafter, *options, *rows)) as service:
        service.warm_up()
        how: Any = {"seconds": seconds, "clients": clients, "defaults": defaults}
        return soak(service.url, service.process, texts, **how)


def report_soak(result: Soak, reporter: Reporter) -> None:
    reporter.say(
        f"{result.clients} clients for {result.seconds:.0f} s; statuses {dict(result.statuses)}; "
        f"{result.tokens} tokens; {result.hung_up} hung up; texts as alone: "
        f"{result.same_as_alone}, as before with their seed: {result.same_as_before}, of them "
        f"from the idle service: {result.same_again}"
    )
    reporter.say(
        f"after each round: MiB {[round(size) for size in result.resident]} (grown by "
        f"{result.growth:.1f}), threads {result.threads}, open files {result.files}"
    )
    if result.default_requests is not None:
        before, after = result.default_requests
        reporter.say(f"requests that name no length: {before:.0f} MiB before, {after:.0f} after")
    for fault in result.faults:
        reporter.say(f"FAULT {fault}")
    reporter.say(f"faults: {len(result.faults)}")


def main(
    seconds: Annotated[float, typer.Option(help="how long")] = 120.0,
    clients: Annotated[int, typer.Option(min=1, help="clients at once")] = 16,
    target: TargetOption = TARGET,
    drafter: Annotated[str, typer.Option(help="a directory, ngram, or none")] = "ngram",
    gamma: Annotated[int, typer.Option(min=1, help="depth of drafts")] = 4,
    device: DeviceOption = "auto",
    prompts: PromptsOption = PROMPTS / "dev.jsonl",
    default_requests: Annotated[
        int, typer.Option(min=0, help="at the end, send so many requests that name no length")
    ] = 0,
    json_file: JsonOption = None,
) -> None:
    """Soak the service with clients that do everything."""
    # The texts of seeds are compared, so drafts do not depend on times.
    reporter, loaded, examples, options = prepare(
        target, prompts, dtype="float32", device=device, gamma=gamma, policy="fixed"
    )
    result = soak_service(loaded, drafter, options, examples, seconds, clients, default_requests)
    report_soak(result, reporter)
    if json_file is not None:
        # `asdict` makes no Counter of a Counter.
        said = {**asdict(result), "statuses": dict(result.statuses), "growth": result.growth}
        write_json(json_file, {"soak": said, "process": describe_machine()})
    if result.faults:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(main)
