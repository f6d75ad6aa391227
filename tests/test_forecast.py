"""A forecast: acceptance is extrapolated with an interval that holds, and set against costs."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from typer.testing import CliRunner

from benchmarks.forecast import _best
from decode.base.errors import UserError
from decode.costs import Costs
from draftsmith.cli.main import app
from draftsmith.forecast.answer import (
    Cell,
    EngineCell,
    Line,
    Range,
    Speed,
    advice,
    losers,
    read_forecast,
)
from draftsmith.forecast.curve import Point, acceptance_at, spread_of, tokens_per_step
from draftsmith.forecast.entry import _enough
from draftsmith.forecast.pilots import PilotResult, as_row, next_rows, pilot_config, write_data
from tests.first_run import make_first_run, settings
from tests.tiny import write_rows
from tests.upstream import served
from train.base.run_files import stored_forecast
from train.data.read import read_examples
from train.engines import counters
from train.report.report_summary import footnotes
from train.run.config import dump_config
from train.run.entry import resolve, train

ROWS = 50, 100, 200
TOTAL = 1000
JUDGED = np.array([2000.0, 1000.0, 500.0])


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_accelerate: None) -> Path:
    return make_first_run(tmp_path, monkeypatch)


def refused(*arguments: str) -> str:
    """What the command says of bad input."""
    done = CliRunner().invoke(app, ["forecast", *arguments])
    assert done.exit_code == 2
    return " ".join(done.output.split())


def measured(rates: np.ndarray, rng: np.random.Generator) -> list[Point]:
    """Trainings on ROWS with this acceptance, [3, D], as counts would tell of it."""
    counts = [rng.binomial(JUDGED.astype(int), row).astype(float) for row in rates]
    return [Point(x, JUDGED, count) for x, count in zip(ROWS, counts, strict=True)]


def law(rows: int, rate: float, most: float) -> np.ndarray:
    """A power law with a floor: not what is assumed, as no real drafter learns just so."""
    rejected = 1 - most + np.array([0.5, 0.6, 0.7]) * (rows / ROWS[0]) ** -rate
    return 1 - np.minimum(rejected, 1.0)


def after(
    rows: int, points: Sequence[Point], kind: str = "eagle3", **beside: Sequence[Point]
) -> np.ndarray:
    """Draws of tokens per step of a drafter. beside: others of the run, by kind."""
    others = {name: (name, of) for name, of in beside.items()}
    return tokens_per_step(acceptance_at([rows], others | {"one": (kind, points)})["one"][0])


def ends(draws: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(draws, [0.05, 0.95]).tolist()
    return low, high


def test_intervals_hold_what_comes_out() -> None:
    rng, inside = np.random.default_rng(0), 0
    for _ in range(40):
        rate, most = rng.uniform(0.1, 0.8), rng.uniform(0.75, 0.95)
        points = measured(np.stack([law(rows, rate, most) for rows in ROWS]), rng)
        low, high = ends(after(TOTAL, points))
        inside += low <= tokens_per_step(law(TOTAL, rate, most)) <= high
        assert high - low < 1.2  # and says something
    assert inside >= 32


def test_a_drafter_that_learns_no_more_is_inside() -> None:
    # One training, and as much acceptance after five times the data.
    rng, rates = np.random.default_rng(0), np.array([0.06, 0.03, 0.01])
    for _ in range(20):
        counts = rng.binomial(JUDGED.astype(int), rates).astype(float)
        low, high = ends(after(240, [Point(48, JUDGED, counts)]))
        assert low - 0.01 <= tokens_per_step(counts / JUDGED) < 1.3 < high


def test_fewer_counts_make_a_wider_interval() -> None:
    rates = np.stack([law(rows, 0.3, 0.9) for rows in ROWS])
    points = measured(rates, np.random.default_rng(0))
    few = [replace(one, spread=300.0) for one in points]
    widths = [np.ptp(ends(after(TOTAL, of))) for of in (points, few)]
    assert widths[1] > 1.5 * widths[0]


def once(*rates: float) -> list[Point]:
    """One training on 48 rows."""
    return [Point(48, JUDGED, JUDGED * rates)]


def test_what_one_kind_has_learnt_tells_how_much_others_can() -> None:
    late = once(0.06, 0.03, 0.01)
    easy, hard = once(0.6, 0.7, 0.7), once(0.1, 0.1, 0.1)
    beside = [np.median(after(TOTAL, late, small_lm=of)) for of in (easy, hard)]
    assert beside[0] > beside[1] + 0.3


def test_a_kind_that_learns_late_overtakes_in_a_long_training_only() -> None:
    # Dolly, on the embedded target: 1.43 and 1.49 came out of 1,100 rows.
    ahead, late = once(0.13, 0.09, 0.14), once(0.09, 0.03, 0.03)

    def lead(rows: int) -> float:
        draws = acceptance_at([rows], {"a": ("small_lm", ahead), "b": ("eagle3", late)})
        small_lm, eagle3 = (np.median(tokens_per_step(draws[name][0])) for name in "ab")
        return small_lm - eagle3

    assert lead(96) > 0 > lead(1100)


def test_every_kind_of_heads_has_a_curve() -> None:
    # One that was in no training yet is taken for the usual.
    draws = [after(TOTAL, once(0.2, 0.2, 0.2), kind) for kind in ("eagle3", "dspark")]
    assert abs(np.median(draws[0]) - np.median(draws[1])) < 0.3


def test_tokens_of_one_text_count_less() -> None:
    accepted = np.array([60.0, 30.0])
    reached = np.array([100.0, 60.0])
    alone = spread_of(reached, accepted, 100, 0.0)
    assert alone == 1.0
    assert spread_of(reached, accepted, 100, 0.3) > 5


def test_a_drafter_that_seldom_drafts_gains_as_little_as_was_measured() -> None:
    found = {
        **{"reached_by_position": [40, 20], "acceptance_by_position": [0.5, 0.5]},
        **{"steps": 1000, "tokens_per_step": 1.03, "nodes_per_step": 0.06},
        "tokens_per_step_interval": None,
    }
    low, high = ends(tokens_per_step(PilotResult.of("ngram", found, TOTAL).point.again()))
    assert low < 1.03 < high < 1.06


def test_the_next_training_fits_into_time_and_data() -> None:
    slow, free = [(48, 100.0)], [(48, 10.0), (96, 10.0)]
    assert [next_rows(10_000, slow, left) for left in (199.0, 211.0, 900.0)] == [None, 96, 192]
    # Most of what a training took may be the evaluation, which does not grow.
    assert next_rows(10_000, free, 25.0) == 3072
    assert next_rows(10_000, [(48, 10.0)], 200.0, judging=90.0) == 96
    assert [next_rows(total, slow, 1e6) for total in (191, 192, 400)] == [None, 96, 192]


def test_a_row_is_read_as_the_example_that_it_was_written_from(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "1"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    turns = [
        {"role": "user", "content": "2024-01-02"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    rows = [
        {"prompt": "why", "response": "so", "kind": "chat", "id": "a"},
        {"messages": turns, "tools": [tool]},
        {"text": "plain 1.0"},
        {"prompt": "give one", "json_schema": {"type": "integer"}},
    ]
    file = tmp_path / "rows.jsonl"
    write_rows(file, rows)
    first, _ = read_examples(str(file))
    other = tmp_path / "again.jsonl"
    write_rows(other, map(as_row, first))
    again, _ = read_examples(str(other))
    for old, new in zip(first, again, strict=True):
        assert vars(old) | {"source": ""} == vars(new) | {"source": ""}


def test_a_small_run_has_a_part_of_the_text_and_of_the_steps(base: Path) -> None:
    answers = {"name": "answers", "kind": "generate", "prompts": 20}
    config = settings(base)
    stage = config["stages"][0]
    more = {"loop": {"max_steps": 40}, "optimizer": {"lr": 1e-3, "warmup_steps": 10}}
    config["stages"] = (answers, stage | {"text": "answers", **more})
    whole = resolve(config)
    examples, _ = read_examples(str(base / "rows.jsonl"))
    splits = {"train": examples, "test": examples.select(range(3))}
    files = write_data(splits, 6, base / "data")
    small = pilot_config(whole, files, 6 / 30, base / "here" / "rows-6", bare=False)
    assert (small.stages[0].prompts, small.stages[1].loop.max_steps) == (4, 8)
    assert small.stages[1].optimizer.warmup_steps == 2
    assert (small.run_dir, small.evaluation.timed_prompts) == (base / "here" / "rows-6", 0)
    assert [len(read_examples(files[split])[0]) for split in ("train", "test")] == [6, 3]
    bare = pilot_config(whole, files, 6 / 30, base / "here" / "untrained", bare=True)
    assert (bare.stages[0].max_new_tokens, bare.stages[1].loop.max_steps) == (16, 1)


WHERE = "with 1 text of 256 tokens at a time"
COSTS = Costs(0.1, 1, 0.1, (1, 2), (1.0, 1.1))


def line(name: str, trained: bool, low: float, high: float) -> Line:
    speedup = Range((low + high) / 2, low, high)
    slower = min(max((1 - low) / (high - low), 0.0), 1.0)
    cells = [Cell(1, 256, 1.5, COSTS, speedup, slower)]
    return Line(name, trained, "a chain", speedup, [], {}, {}, None, cells)


@pytest.mark.parametrize(
    ("heads", "lookup", "said", "slow"),
    [
        (
            (1.3, 1.5),
            (1.0, 1.2),
            "train heads, with 50 of 200 rows: it will gain 1.40 [1.30, 1.50]",
            "",
        ),
        (
            (0.7, 0.9),
            (0.8, 1.1),
            "do not train: the best stage, heads, would gain 0.80",
            "heads (100%), ngram (67%)",
        ),
        ((1.0, 1.2), (1.3, 1.5), "ngram is enough: it needs no training and gains 1.40", ""),
        ((0.9, 1.3), (0.9, 1.1), "not certain: heads would gain 1.10", "ngram (50%)"),
    ],
)
def test_the_advice_follows_the_intervals(
    heads: tuple[float, float], lookup: tuple[float, float], said: str, slow: str
) -> None:
    lines = [replace(line("heads", True, *heads), enough=50), line("ngram", False, *lookup)]
    assert advice(lines, 200).startswith(said)
    assert losers(lines) == (
        [f"how likely drafters are slower than plain decoding {WHERE}: {slow}"] if slow else []
    )
    lines[0] = replace(lines[0], enough=200)
    assert advice(lines, 200).startswith(said.replace("50 of", "all"))


def test_no_more_data_is_recommended_than_helps() -> None:
    rng, sizes = np.random.default_rng(0), [100, 200, 400, 800]

    def recommended(rate: float, most: float) -> int:
        points = measured(np.stack([law(x, rate, most) for x in ROWS]), rng)
        draws = acceptance_at(sizes, {"heads": ("medusa", points)})["heads"]
        return _enough(dict(zip(sizes, map(tokens_per_step, draws), strict=True)), 800)

    assert recommended(0.0, 0.95) < 800  # a flat curve
    assert recommended(0.4, 0.95) == 800  # one that rises


def test_a_kind_that_is_named_best_may_be_as_good_as_the_best() -> None:
    def row(said: float, outcome: float) -> dict[str, Any]:
        figure = {"forecast": {"value": said}, "outcome": outcome, "inside": True, "noise": 0.05}
        return {"training": 0, "speedup": figure}

    near, far = [row(1.5, 1.43), row(1.4, 1.49)], [row(1.5, 1.3), row(1.4, 1.49)]
    assert [list(_best(rows, "speedup")) for rows in (near, far)] == [[False], [False]]
    assert [list(_best(rows, "speedup", noisy=True)) for rows in (near, far)] == [[True], [False]]


def write_run(base: Path, rows: int) -> Path:
    """The config of a run of heads on this many prompts, 4 of them held out."""
    lines = [{"prompt": f"the dog {i}", "response": f"it sells {i}"} for i in range(rows)]
    write_rows(base / "rows.jsonl", lines)
    data = {"train": "rows.jsonl", "held_out": 4, "duplicates": "keep", "system": "sells it"}
    run = settings(base, data=data)
    run["evaluation"] |= {"baselines": ("ngram",), "baseline_gammas": (4,)}
    file = base / "run.yaml"
    file.write_text(json.dumps(dump_config(resolve(run))), encoding="utf-8")
    return file


def forecast(*arguments: str) -> tuple[dict[str, Any], str]:
    """What the command wrote, and what it said."""
    done = CliRunner().invoke(app, ["forecast", *arguments, "--json", "f.json"])
    assert done.exit_code == 0, done.output
    return json.loads(Path("f.json").read_text(encoding="utf-8")), " ".join(done.output.split())


def test_a_forecast_stands_beside_what_comes_out(base: Path) -> None:
    file = write_run(base, 230)
    command = [str(file), "--load", "1,2", "--lengths", "16"]
    found, said = forecast(*command, "--minutes", "1e-6")
    assert found["pilots"] == [48]
    assert "no second one fitted into --minutes" in said
    found, _ = forecast(*command)
    heads, ngram = found["lines"]
    assert found["pilots"] == [48, 96]
    assert [(cell["load"], cell["length"]) for cell in heads["cells"]] == [(1, 16), (2, 16)]
    assert 1 <= heads["tokens_per_step"]["low"] <= heads["tokens_per_step"]["high"] <= 3
    half, twice = heads["with_rows"].values()
    assert half["value"] <= heads["tokens_per_step"]["value"] <= twice["value"]
    report = train(file, quiet=True).report

    def beside() -> list[str]:
        return [said for said in footnotes(report) if said.startswith("heads: forecast ")]

    assert ["tokens per step" in said for said in beside()] == [True]
    trained = report["rows"][-1]["evaluation"]
    trained |= {"speedup_without_prefill": {"value": 1.0}, "timed_batch_size": 2}
    assert ["speed-up" in said for said in beside()] == [False, True]
    report["forecast"]["elsewhere"] = True
    assert ["speed-up" in said for said in beside()] == [False]
    # Finished trainings are used, and costs alone replace no forecast.
    again, _ = forecast(*command, "--minutes", "1e-6")
    assert (again["pilots"], again["afterwards"]) == ([48, 96], True)
    costs, _ = forecast(*command, "--minutes", "0")
    assert costs["pilots"] == []
    assert stored_forecast(base / "runs" / "first")["pilots"] == [48, 96]
    tokens, (once,) = ngram["tokens_per_step"], ngram["measured"].values()
    assert tokens["low"] - 0.01 <= once <= tokens["high"]
    # The run judges on the same prompts.
    (judged,) = (row["evaluation"] for row in report["rows"] if row["drafter"] == "ngram")
    assert list(ngram["measured"].values()) == [judged["tokens_per_step"]]


def test_costs_of_another_machine_are_used(base: Path) -> None:
    file = write_run(base, 120)
    there, said = forecast(str(file), "--minutes", "0", "--lengths", "16")
    assert there["pilots"] == []
    assert "not known, as nothing was trained" in said
    Path("f.json").rename("there.json")
    here, said = forecast(str(file), "--surface", "there.json")
    assert "a curve needs 192" in said
    assert here["pilots"] == [48]
    for line_here, line_there in zip(here["lines"], there["lines"], strict=True):
        costs = [
            [(cell["load"], cell["length"], cell["costs"]) for cell in found["cells"]]
            for found in (line_here, line_there)
        ]
        assert costs[0] == costs[1]
    few, said = forecast(str(write_run(base, 60)), "name=few", "--surface", "there.json")
    assert few["pilots"] == []
    assert "so no training was tried" in said

    assert "leave out the others" in refused(str(file), "--surface", "there.json", "--load", "2")
    renamed, said = forecast(
        str(file), "name=renamed", "stages.heads.name=other", "--surface", "there.json"
    )
    assert "other: the file of --surface has no costs of it" in said
    assert renamed["lines"][0]["cells"] == []
    for broken in ([], [1.0], [float("nan")] * len(there["lines"][0]["cells"][0]["costs"]["v"])):
        other = json.loads(json.dumps(there))
        other["lines"][0]["cells"][0]["costs"]["v"] = broken
        Path("broken.json").write_text(json.dumps(other), encoding="utf-8")
        assert "they are no figures" in refused(str(file), "--surface", "broken.json")
    there["target"] = "llama of 5 weights"
    Path("there.json").write_text(json.dumps(there), encoding="utf-8")
    assert "but that of the file of --surface a llama of 5" in refused(
        str(file), "--surface", "there.json"
    )
    Path("there.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="expected what `draftsmith forecast --json FILE`"):
        read_forecast(Path("there.json"))


def test_kinds_that_the_config_lacks_are_forecast_beside_its_own(base: Path) -> None:
    run = [str(write_run(base, 120)), "--minutes", "0", "--load", "1", "--lengths", "16"]
    every = ["--kinds", "small_lm,medusa,eagle1", "stages.eagle1.heads.depth=2"]

    def trained(*more: str) -> list[str]:
        return [line["name"] for line in forecast(*run, *more)[0]["lines"] if line["trained"]]

    found, said = forecast(*run, *every)
    assert [line["name"] for line in found["lines"]] == ["heads", "eagle1", "small_lm"]
    assert "medusa: the config has it already, as its stage heads" in said
    planned = next(x for x in said.split("add this stage to the config: ")[1:] if "eagle1" in x)
    stage = yaml.safe_load(planned[: planned.index("}}") + 2])
    assert (stage["heads"]["depth"], stage["loop"]["max_steps"]) == (2, 4)
    files = Path("runs/first-forecast/untrained/stages").glob("*/done.json")
    made = {file: file.stat().st_mtime_ns for file in files}
    # Without one of them, and with all of them again, nothing is made anew.
    assert trained("--kinds", "small_lm") == ["heads", "small_lm"]
    assert trained(*every) == ["heads", "eagle1", "small_lm"]
    assert made == {file: file.stat().st_mtime_ns for file in made}

    assert 'Did you mean "eagle1"' in refused(*run, "--kinds", "eagel1")
    # Its drafter was made with another depth.
    assert trained() == ["heads"]
    assert "was started with other settings" in refused(*run, "--kinds", "eagle1")


@dataclass
class SimulatedEngine:
    """A server in which each step accepts as many draft tokens. accepted: of three; None: it has no
    drafter. name: of its counters. metrics: whether llama-server has its page."""

    accepted: int | None
    name: str = "vllm"
    metrics: bool = False
    counts: list[int] = field(default_factory=lambda: [0, 0])

    def app(self) -> Starlette:
        routes = [
            Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "tiny"}]})),
            Route("/v1/completions", self._answer, methods=["POST"]),
        ]
        return Starlette(
            routes=[*routes, Route("/metrics", self._metrics)] if self.name else routes
        )

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        steps = 0
        if self.accepted is not None:
            steps = (body["max_tokens"] - 1) // (self.accepted + 1)
            self.counts[0] += 3 * steps
            self.counts[1] += self.accepted * steps
        reply: dict[str, Any] = {"usage": {"completion_tokens": body["max_tokens"]}}
        if self.name == "llamacpp":
            drafts = {} if self.accepted is None else {"draft_n": 3 * steps}
            reply["timings"] = drafts | {"draft_n_accepted": (self.accepted or 0) * steps}
        return JSONResponse(reply)

    def _metrics(self, _: Request) -> Response:
        hidden = self.name == "llamacpp" and not self.metrics
        if hidden or (self.accepted is None and self.name != "llamacpp"):
            return PlainTextResponse("", 501 if hidden else 200)
        kinds = zip(("draft", "accepted"), self.counts, strict=True)
        lines = (f"{self.name}:spec_decode_num_{kind}_tokens_total {x}" for kind, x in kinds)
        return PlainTextResponse("\n".join(lines) + "\n")


def test_speeds_of_engines_become_what_drafts_are_worth_there(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "SLOW_SECONDS", 0.01)
    run = [str(write_run(base, 230)), "--load", "2", "--lengths", "16"]
    with ExitStack() as stack:

        def up(accepted: int | None, **options: Any) -> str:
            return stack.enter_context(served(SimulatedEngine(accepted, **options).app()))

        few, many, plain = up(1), up(3), up(None)
        servers = f"heads={few},{plain},http://{many.partition('//')[2]}/v1"
        found, said = forecast(*run, "--engine", servers)
        (at,) = found["lines"][0]["engines"]
        assert [point["tokens_per_step"] for point in at["speeds"]] == [2.0, 4.0]
        assert (at["engine"], at["load"], at["drafted"]) == ("vllm", 2, 3)
        assert at["plain"] > 0
        # The heads of the run draft two tokens, so their acceptance at a third is not known.
        assert at["speedup"] is None
        assert "set evaluation.gamma to 3" in said
        found, said = forecast(*run, "--minutes", "0", "--engine", up(0, name="draftsmith"))
        (at,) = found["lines"][0]["engines"]
        assert (at["plain"], at["speeds"][0]["tokens_per_step"]) == (None, 1.0)
        assert "draftsmith has no simulated acceptance" in said
        assert "no server without a drafter" in said
        # llama-server says the drafts of an answer beside it, and may hide its page. The page has
        # counters without a drafter too.
        for page in (False, True):
            llama: dict[str, Any] = {"name": "llamacpp", "metrics": page}
            both = f"{up(1, **llama)},{up(None, **llama)}"
            (at,) = forecast(*run, "--minutes", "0", "--engine", both)[0]["lines"][0]["engines"]
            assert (at["speeds"][0]["tokens_per_step"], at["plain"] is None) == (2.0, False)

        assert 'Did you mean "heads"' in refused(*run, "--engine", f"head={few}")
        assert "expected http://HOST:PORT" in refused(*run, "--engine", "somewhere")
        assert "hides its counters" in refused(*run, "--engine", up(1, name=""))
        assert "say whose it is" in refused(*run, "--engine", few, "--kinds", "eagle1")
    assert "does not answer" in refused(*run, "--engine", few)


def test_the_worth_in_an_engine_follows_its_speeds() -> None:
    # A step of two rows takes 0.1 s with two tokens per step, and 0.2 s with four.
    speeds = (Speed(2.0, 40.0, 0.0), Speed(4.0, 40.0, 0.0))
    cell = EngineCell(2, 16, "vllm", 2, speeds, plain=20.0)
    assert np.allclose(cell.step(np.array([1.0, 2.0, 3.0, 9.0])), [0.1, 0.1, 0.15, 0.2])
    assert cell.pays_above == pytest.approx(1.0)
    drawn = cell.judged(np.full((9, 3), 1.0))  # all of two tokens, of which each step adds one
    assert drawn.speed is not None
    assert drawn.speedup is not None
    assert (drawn.speed.value, drawn.speedup.value) == pytest.approx((40.0, 2.0))
    slow = EngineCell(2, 16, "vllm", 2, speeds[:1], plain=30.0)
    assert slow.pays_above == pytest.approx(1.5)
    assert EngineCell(2, 16, "vllm", 2, speeds, None).pays_above is None
    assert slow.judged(np.full((9, 1), 1.0)).speedup is None
