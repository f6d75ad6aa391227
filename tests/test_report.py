"""The run report, made from a run directory that is written by hand."""

import io
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from decode.base.errors import UserError
from draftsmith.cli.train import print_report
from train.base.console import Reporter
from train.base.stage import ReportSection, Stage, StagePlot
from train.report.drafter_table import drafter_table, row_labels
from train.report.format_figures import format_duration, format_ratio, format_share
from train.report.report_files import make_report
from train.report.report_summary import footnotes, headline
from train.stages import STAGES

PROMPT = "Say <b>hello</b> & goodbye"
EVIL = "<script>alert('x')</script>"
drawn = pytest.mark.usefixtures("plots")
PLOTS = ("speed", "time", "acceptance", "tokens", "positions", "accepted")


def figures(speedup: float | None, acceptance: float, **changes: Any) -> dict[str, Any]:
    """An evaluation at γ = 2 as `Evaluation.to_dict` makes it; speedup None: nothing timed."""

    def around(value: float) -> dict[str, float]:
        return {"value": value, "low": value - 0.05, "high": value + 0.06}

    plain = {"prefill": 1.0, "draft": 0.0, "verify": 8.0, "overhead": 1.0, "steps": 100}
    timed = speedup is not None
    drafted = {
        "prefill": 1.0,
        "draft": 2.0,
        "verify": 10 / (speedup or 1) - 3.5,
        "overhead": 0.5,
        "steps": 60,
    }
    nothing = dict.fromkeys(plain, 0.0)
    return {
        "steps": 100,
        "emitted": 180,
        "drafted": 200,
        "reached": 150,
        "accepted": 80,
        "tokens_per_step": 1 + acceptance,
        "acceptance_rate": acceptance,
        "draft_efficiency": 0.8 * acceptance,
        "nodes_per_step": 2.0,
        "acceptance_by_position": [acceptance, None],
        "reached_by_position": [100, 0],
        "steps_by_accepted": [50, 20, 30],
        "gamma": 2,
        "rule": "speculative",
        "lossless": True,
        "dtype": "float32",
        "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0},
        "prompts": 20,
        "timed_prompts": 4 if timed else 0,
        "c": 0.12 if timed else None,
        "v": 1.1 if timed else None,
        "verify_width": 3.0 if timed else None,
        "overhead_ms": 0.4 if timed else None,
        "break_even_acceptance": 0.31 if timed else None,
        "speedup": around(speedup) if speedup else None,
        "speedup_without_prefill": around(speedup) if speedup else None,
        "speedup_not_repeating": None,
        "tokens_per_step_not_repeating": None,
        "repetition": 0.04,
        "share_repeating": 0.1,
        "identical_to_plain": 1.0 if timed else None,
        "identical_within_rounding": 1.0 if timed else None,
        "seconds": {
            "plain": plain if timed else nothing,
            "drafted": drafted if timed else nothing,
        },
        "vs_generate": around(speedup) if speedup else None,
        "plain_vs_generate": around(1.02) if timed else None,
        **changes,
    }


def write_run(directory: Path, rows: list[tuple[str, str, dict[str, Any]]]) -> Any:
    """A run of one generate and one distill stage with the given (stage, drafter, evaluation)."""

    def put(path: str, value: Any) -> None:
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(json.dumps(value), "utf-8")

    stages = [{"name": "text", "kind": "generate"}, {"name": "one", "kind": "distill"}]
    stages.append({"name": "two", "kind": "distill", "drafter": {"stage": "one"}})
    named = {stage.removesuffix(" (start)") for stage, _, _ in rows if "+" not in stage}
    named -= {"before", *(stage["name"] for stage in stages)}
    stages += [{"name": name, "kind": "distill"} for name in sorted(named)]
    baselines = [drafter for stage, drafter, _ in rows if stage == "before"]
    combined = {"in_turn": ["ngram"], "in_one_tree": ["ngram"]}
    put(
        "config.json",
        {
            "name": "trial",
            "target": {"model": "tiny", "dtype": "auto", "device": "auto"},
            "evaluation": {"gamma": 2, "baselines": baselines} | combined,
            "stages": stages,
        },
    )
    machine = {"processor": "Fast CPU", "cores": 4, "threads": 1, "gpus": []}
    start = {
        "time": "2026-01-02T03:04:05+0000",
        "argv": ["draftsmith", "train"],
        "machine": machine,
    }
    put("provenance.json", [{**start, "versions": {"torch": "2.9"}, "git_commit": None}])
    put(
        "stages/00-text/done.json",
        {"drafter": False, "summary": {"tokens": 12345, "seconds": 65.0}},
    )
    history = [
        {"loss": 3.0 / step, "forward_kl": 3.0 / step, "lr": 1e-3, "step": step, "epoch": 0}
        for step in range(1, 41)
    ]
    training = {"steps": 40, "tokens_per_second": None, "history": history}
    summary = {"training": training, "padding_share": 0.051, "peak_memory_bytes": 3 * 2**30}
    put("stages/01-one/done.json", {"drafter": True, "summary": summary})
    put("stages/.tmp-02-two-1-0a0b0c0d/done.json", {})  # being written: not part of the run
    (directory / "stages/02-two").mkdir(exist_ok=True)  # not complete either
    samples = [{"prompt": PROMPT, "plain": EVIL, "drafted": EVIL}, {"prompt": "", "drafted": "x"}]
    for order, (stage, drafter, evaluation) in enumerate(rows):
        row = {"stage": stage, "drafter": drafter, "order": order, "evaluation": evaluation}
        if order % 2:
            row["samples"] = samples
        put(f"evaluations/{order + 8:02d}-row/evaluation.json", row)
    return directory


ROWS = [
    ("before", "ngram", figures(1.1, 0.4, gamma=8)),
    ("one (start)", "small_lm", figures(0.6, 0.3, break_even_acceptance=None)),
    ("one", "small_lm", figures(None, 0.5)),
    ("two", "small_lm", figures(1.5, 0.8)),
]


class Page(HTMLParser):
    """Open tags at the end, and every attribute that could load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.loads: list[str] = []
        self.alts: list[str | None] = []
        self.ids: list[str | None] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if not self.get_starttag_text().endswith("/>") and tag != "meta":
            self.stack.append(tag)
        self.loads += [str(given[key]) for key in ("src", "href", "data") if key in given]
        self.ids += [given["id"]] if "id" in given else []
        if tag == "svg":
            self.alts.append(given.get("aria-label"))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag, f"</{tag}> closes something else"


def rendered(report: dict[str, Any], width: int = 120) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(drafter_table(report))
    return stream.getvalue()


def test_report_json(tmp_path: Path) -> None:
    report = make_report(write_run(tmp_path, ROWS))
    assert report == json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert list(report) == [
        *("format", "name", "finished", "rows", "stages", "data_notes", "provenance", "config"),
        "forecast",
    ]
    assert report["format"] == 1
    assert report["name"] == "trial"
    assert [row["stage"] for row in report["rows"]] == [stage for stage, _, _ in ROWS]
    assert [list(row) for row in report["rows"]] == [
        ["stage", "drafter", "order", "evaluation"]
    ] * 4
    assert report["rows"][3]["evaluation"] == ROWS[3][2]
    assert [(stage["name"], stage["kind"]) for stage in report["stages"]] == [
        ("text", "generate"),
        ("one", "distill"),
    ]
    assert len(report["stages"][1]["summary"]["training"]["history"]) == 40
    assert row_labels(report) == ["ngram γ=8", "one (start)", "one", "two"]


@drawn
def test_page(tmp_path: Path) -> None:
    """It comes out the same again."""
    run = write_run(tmp_path, ROWS)
    made = []
    for _ in range(2):
        make_report(run)
        made.append([(tmp_path / f"report.{end}").read_bytes() for end in ("json", "html")])
    assert made[0] == made[1]
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert len(text) < 1_000_000
    page = Page(text)
    assert not page.stack
    assert all(load.startswith("#") for load in page.loads)
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    assert len(page.ids) == len(set(page.ids))
    # The six of the drafters, and the loss of the one stage that trained.
    assert [name for name in (*PLOTS, "loss-1") if f'id="plot-{name}"' not in text] == []
    assert len(page.alts) == len(PLOTS) + 1
    assert all(page.alts)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "Say &lt;b&gt;hello&lt;/b&gt; &amp; goodbye" in text
    assert "(identical to plain decoding)" in text
    for heading in ("12,345", "1 min 5 s", "3.0 GiB", "5%", "3.000 → 0.075", "Fast CPU"):
        assert heading in text


@drawn
def test_heads_are_plotted_one_by_one(tmp_path: Path) -> None:
    run = write_run(tmp_path, ROWS)
    history = [
        {
            "loss": 9.0,
            "head1/top1": 0.2,
            "head1/forward_kl": 4.0,
            "head2/forward_kl": 5.0,
            "step": 3,
        }
    ]
    dev = [{"head1/top1": 0.25, "head2/top1": 0.1, "tokens_per_step": 1.3, "step": 3}]
    training = {"steps": 3, "tokens_per_second": None, "history": history, "dev": dev}
    summary = {"training": training, "losses": {"forward_kl": 1.0}}
    done = {"drafter": True, "summary": summary}
    (run / "stages/01-one/done.json").write_text(json.dumps(done), "utf-8")
    make_report(run)
    alts = [alt for alt in Page((run / "report.html").read_text("utf-8")).alts if alt]
    (agreement,) = [alt for alt in alts if alt.startswith("Agreement")]
    assert agreement.endswith("at step 3: head1, top-1 0.25, head2, top-1 0.10.")
    text = (run / "report.html").read_text("utf-8")
    assert "head2/forward_kl" in text
    # No figure of its kind: it is not drawn on the loss's axis.
    assert "tokens_per_step<" not in text


@drawn
def test_a_kind_of_stage_says_what_is_shown_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(Stage):
        @classmethod
        def show(cls, summary: dict[str, Any], number: int) -> ReportSection:
            plot = StagePlot(f"own-{number}", "A plot & more.", "<svg></svg>")
            nothing = StagePlot(f"nothing-{number}", "Never seen.", "")
            return ReportSection({"pass_seconds": 61.0, "kept": summary["tokens"]}, [plot, nothing])

    monkeypatch.setitem(STAGES._parts, "generate", Own)
    make_report(write_run(tmp_path, ROWS))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<figure id="plot-own-0">' in text
    assert "A plot &amp; more." in text
    assert "<dt>pass time</dt><dd>1 min 1 s</dd>" in text
    assert "<dt>kept</dt><dd>12,345</dd>" in text
    assert "Never seen." not in text


def test_what_the_config_no_longer_has_is_not_reported(tmp_path: Path) -> None:
    """And a row that was measured twice, as earlier versions did, counts once: the newer one."""
    run = write_run(tmp_path, [*ROWS, ("two", "small_lm", figures(1.7, 0.8))])
    os.utime(run / "evaluations/11-row/evaluation.json", (1, 1))
    report = make_report(run)
    assert [row["evaluation"]["speedup"] for row in report["rows"][3:]] == [
        figures(1.7, 0.8)["speedup"]
    ]
    config = json.loads((run / "config.json").read_text("utf-8"))
    config["stages"] = [config["stages"][0], config["stages"][2]]
    config["evaluation"]["baselines"] = []
    (run / "config.json").write_text(json.dumps(config), "utf-8")
    report = make_report(run)
    assert [stage["name"] for stage in report["stages"]] == ["text"]
    assert [row["stage"] for row in report["rows"]] == ["two"]


@drawn
def test_names_are_text(tmp_path: Path) -> None:
    """Neither HTML nor matplotlib's or rich's markup."""
    name = "[red]<i>$x_1^2$</i>"
    report = make_report(write_run(tmp_path, [*ROWS[:3], (name, EVIL, figures(1.5, 0.8))]))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not Page(text).stack
    assert "<i>" not in text
    assert "<script" not in text
    assert "[red]&lt;i&gt;$x_1^2$&lt;/i&gt;" in text
    assert name in rendered(report, 200)


@pytest.mark.parametrize("width", [80, 140])
def test_table(tmp_path: Path, width: int) -> None:
    report = make_report(write_run(tmp_path, ROWS))
    lines = rendered(report, width).splitlines()
    assert max(map(len, lines)) <= width
    body = lines[next(i for i, line in enumerate(lines) if "──" in line) + 1 :]
    ngram, start, one, two = (line for line in body if re.search(r"\d\.\d\d", line))
    # acceptance, efficiency, tokens per step, c, break-even, speed-up
    assert ngram.split()[:2] == ["before", "ngram"]
    assert "0.40 0.32 1.40 0.12 0.31 1.10× [1.05, 1.16]" in " ".join(ngram.split())
    assert "0.12 never 0.60× [0.55, 0.66]" in " ".join(start.split())
    assert one.split() == ["one", "small_lm", "0.50", "0.40", "1.50", "–", "–", "–"]
    assert two.rstrip().endswith("1.50× [1.45, 1.56]")


def test_footnotes(tmp_path: Path) -> None:
    report = make_report(write_run(tmp_path, ROWS))
    text = "\n".join(footnotes(report))
    for part in (
        "γ 2, but 8 for ngram",
        "greedy decoding",
        "speculative (lossless)",
        "20 prompts",
        "4 of them timed, but 0 for one",
        "tiny in float32",
        "Fast CPU, 4 cores, 1 thread",
        "1.02× the speed of generate()",
        "identical to plain decoding: 100%",
        "8-gram: 4%",
    ):
        assert part in text
    assert "LOSSY" not in text
    assert "the target's forward" not in text  # a report of a version that did not store it


def test_the_forward_that_ran_is_named(tmp_path: Path) -> None:
    exact = figures(2.0, 0.9, kernels={"forward": "lean", "exact_bits": True})
    other = figures(2.0, 0.9, kernels={"forward": "transformers", "exact_bits": False})
    rows = [("one", "small_lm", other), ("two", "small_lm", exact), ("three", "small_lm", exact)]
    text = "\n".join(footnotes(make_report(write_run(tmp_path, rows))))
    line = (
        "the target's forward: lean, with the bits of plain decoding, but that of "
        "transformers for one"
    )
    assert line in text


def test_lossy_rule_is_called_lossy(tmp_path: Path) -> None:
    lossy = figures(2.0, 0.9, rule="typical", lossless=False, identical_to_plain=0.5)
    lossy["sampling"] = {"temperature": 0.7, "top_k": 50, "top_p": 0.9}
    report = make_report(write_run(tmp_path, [ROWS[0], ("two", "small_lm", lossy)]))
    assert "typical, LOSSY" in rendered(report, 200)
    assert any("typical (LOSSY" in line for line in footnotes(report))
    assert any("temperature 0.7, top-k 50, top-p 0.9" in line for line in footnotes(report))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "The rule typical is LOSSY" in text
    assert "small_lm (typical, LOSSY)" in text


def test_draft_lengths_that_vary(tmp_path: Path) -> None:
    """There is no one γ to show, and no break-even of it; 'never' would say that nothing pays."""
    policy = "heuristic:max_depth=8"
    lengths = {"mean_gamma": 4.5, "la_k": 0.62, "plain_share": 0.25}
    timed = {"ms_per_step": {"draft": 1.5, "verify": 20.0, "overhead": 0.25}}
    varied = figures(
        1.5,
        0.8,
        policy=policy,
        gamma=8,
        break_even_acceptance=None,
        draft_lengths=lengths,
        draft_lengths_timed=timed,
        shape="chain",
    )
    report = make_report(write_run(tmp_path, [ROWS[0], ("two", "small_lm", varied)]))
    lines = rendered(report, 200).splitlines()
    assert "–" in next(line for line in lines if line.startswith("two"))
    assert "never" not in "".join(lines)
    notes = " ".join(footnotes(report))
    assert "≤ 8 by heuristic:max_depth=8, but 8 for ngram" in notes
    assert "drafts: chain " in notes  # ngram's are chains too
    varied = figures(1.5, 0.8, drafts="tree of 5 nodes, 2 deep")
    stored = make_report(write_run(tmp_path / "tree", [ROWS[0], ("two", "medusa", varied)]))
    notes = " ".join(footnotes(stored))
    assert "drafts: tree of 5 nodes, 2 deep, but chain for ngram" in notes
    # What γ is and a tree is deeper: the tree was drafted whole, and that is said.
    deep = figures(1.5, 0.8, drafts="tree of 5 nodes, 3 deep", gamma=3, policy="fixed")
    stored = make_report(write_run(tmp_path / "deep", [ROWS[0], ("two", "medusa", deep)]))
    assert (
        "two drafts 3 deep (tree of 5 nodes, 3 deep): γ 2 does not apply, because the drafter "
        "sets the depth"
    ) in footnotes(stored)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    for shown in ("4.50", "0.62", "25%", "1.50, 20.00, 0.25"):
        assert shown in text


@pytest.mark.parametrize(
    ("ngram", "trained", "both", "verdict", "ranking"),
    [
        (1.1, 1.5, 1.9, "decodes 1.50 times as fast", "ngram+two is faster than two and ngram."),
        (1.5, 1.2, None, "decodes 1.20 times as fast", "ngram is faster than two."),
        (
            1.0,
            1.02,
            1.04,
            "neither clearly faster nor clearly slower",
            "ngram+two is not clearly faster than two and ngram (intervals overlap).",
        ),
        (
            1.1,
            1.5,
            1.45,
            "decodes 1.50 times as fast",
            "two is not clearly faster than ngram+two (intervals overlap), but it is faster than "
            "ngram.",
        ),
        (1.1, 0.8, None, "is slower than the target alone", "ngram is faster than two."),
        (1.1, None, None, "its speed is not known", "the fastest one is not known."),
    ],
)
def test_headline(
    tmp_path: Path,
    ngram: float,
    trained: float | None,
    both: float | None,
    verdict: str,
    ranking: str,
) -> None:
    rows = [
        ("before", "ngram", figures(ngram, 0.4)),
        ("one (start)", "small_lm", figures(0.5 if trained else None, 0.3)),
        ("two", "small_lm", figures(trained, 0.8)),
    ]
    if both is not None:
        rows.append(("ngram+two", "ngram+small_lm", figures(both, 0.9)))
    best = headline(make_report(write_run(tmp_path, rows)))
    assert best is not None
    # Also where both in turn are faster: that is said beside it.
    assert best["label"] == "two"
    assert verdict in best["verdict"]
    assert best["ranking"].endswith(ranking)
    assert best["warnings"] == []
    # Stage two went on with what stage one began.
    assert best["before"]["acceptance_rate"] == 0.3
    shown = [(entry["what"], entry["label"]) for entry in best["compared"]]
    everyone = [("trained", "two"), ("untrained", "ngram"), ("in turn", "ngram+two")]
    assert shown == (everyone if both else everyone[:2])
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert best["ranking"] in text
    assert all(f"Speed-up, {label} ({what})" in text for what, label in shown)


def test_the_headline_of_the_terminal_has_every_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ("ngram+two", "ngram+small_lm", figures(1.6, 0.9))
    one_tree = ("ngram++two", "ngram++small_lm", figures(1.7, 0.9))
    report = make_report(write_run(tmp_path, [*ROWS, both, one_tree]))
    print_report(SimpleNamespace(reporter=Reporter(), directory=tmp_path), report)
    said = capsys.readouterr().out
    assert (
        "two (trained) 1.50× [1.45, 1.56], 1.80 tokens per step; "
        "ngram (untrained) 1.10× [1.05, 1.16], 1.40 tokens per step; "
        "ngram+two (in turn) 1.60× [1.55, 1.66], 1.90 tokens per step; "
        "ngram++two (in one tree) 1.70× [1.65, 1.76], 1.90 tokens per step\n"
    ) in said
    assert "ngram++two is not clearly faster than ngram+two (intervals overlap), but it is" in said


@pytest.mark.parametrize(
    ("rows", "warning"),
    [
        ([ROWS[0]], "untrained baseline"),
        ([ROWS[0], ("one (start)", "small_lm", ROWS[3][2])], "this is one before its training"),
        (
            [("one (start)", "small_lm", figures(1.6, 0.8)), ROWS[3]],
            "was better before its training",
        ),
        ([("two", "s", figures(1.5, 0.8, identical_within_rounding=0.75))], "Only 75%"),
        (
            [
                (
                    "two",
                    "s",
                    figures(1.5, 0.8, plain_vs_generate={"value": 0.8, "low": 0.7, "high": 1}),
                )
            ],
            "0.80× the speed of generate()",
        ),
    ],
)
def test_warnings(tmp_path: Path, rows: list[Any], warning: str) -> None:
    report = make_report(write_run(tmp_path, rows))
    best = headline(report)
    assert best is not None
    assert warning in " ".join(best["warnings"])
    assert warning in (tmp_path / "report.html").read_text(encoding="utf-8").replace("&#39;", "'")


def test_rows_without_a_stage_are_named_after_their_drafters(tmp_path: Path) -> None:
    noise = figures(1.1, 0.4, v=0.9, break_even_note="noise")
    report = make_report(write_run(tmp_path, [("–", "suffix", noise), ("–", "a/b", ROWS[3][2])]))
    assert row_labels(report) == ["suffix", "a/b"]
    assert "suffix has no break-even: noise" in footnotes(report)


@drawn
def test_without_intervals_there_is_no_verdict(tmp_path: Path) -> None:
    few = [("before", "ngram", figures(1.1, 0.4)), ("two", "small_lm", figures(1.5, 0.8))]
    for _, _, evaluation in few:
        evaluation["speedup"] = {"value": evaluation["speedup"]["value"]}
    report = make_report(write_run(tmp_path, few))
    best = headline(report)
    assert best is not None
    assert best["verdict"].endswith("fewer than 6: too few for an interval or a verdict")
    assert best["ranking"].startswith("Fewer than 6 prompts were timed")
    assert any("too few for intervals" in line for line in footnotes(report))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "too few prompts for an interval" in page
    assert "two 1.50" in page


def test_a_machine_that_was_not_alone_is_told(tmp_path: Path) -> None:
    busy = figures(1.5, 0.8, alone=False, others_share=0.23)
    report = make_report(write_run(tmp_path / "busy", [ROWS[0], ("two", "small_lm", busy)]))
    lines = rendered(report, 200).splitlines()
    assert next(line for line in lines if line.startswith("two")).rstrip().endswith("]*")
    assert not next(line for line in lines if line.startswith("before")).rstrip().endswith("*")
    told = "other processes took 23% of the processor while this was timed"
    assert any(line.startswith(f"* two: {told}") for line in footnotes(report))
    best = headline(report)
    assert best is not None
    assert f"The speed of two is not reliable: {told}" in best["warnings"][0]
    text = (tmp_path / "busy" / "report.html").read_text(encoding="utf-8")
    assert text.count(told) == 2
    # Nor is a comparison with a baseline that was disturbed.
    before = figures(1.1, 0.4, gamma=8, alone=False, others_share=0.5)
    best = headline(make_report(write_run(tmp_path / "b", [("before", "ngram", before), ROWS[3]])))
    assert best is not None
    assert "The speed of ngram is not reliable: other processes took 50%" in best["warnings"][0]
    for alone, share in ((True, 0.02), (None, None)):
        quiet = figures(1.5, 0.8, alone=alone, others_share=share)
        report = make_report(write_run(tmp_path / str(alone), [("two", "small_lm", quiet)]))
        assert "other processes" not in " ".join(footnotes(report))
        assert "*" not in rendered(report)


def test_how_times_were_taken_is_told(tmp_path: Path) -> None:
    found = figures(
        1.5,
        0.8,
        timed_batch_size=4,
        speedup_basis="time per token",
        v=0.97,
        break_even_acceptance=None,
        break_even_note="a verification pass took 0.97 plain steps",
    )
    report = make_report(write_run(tmp_path, [("two", "small_lm", found)]))
    notes = " ".join(footnotes(report))
    assert "timed in batches of 4; intervals are 95% intervals over the timed batches" in notes
    assert "speed-ups compare the time per token" in notes
    assert "two has no break-even: a verification pass took 0.97 plain steps" in notes
    assert "never" not in rendered(report)
    plain = make_report(write_run(tmp_path / "plain", [ROWS[3]]))
    assert "of them timed; intervals" in " ".join(footnotes(plain))


@drawn
def test_without_any_figure(tmp_path: Path) -> None:
    run = write_run(tmp_path, [])
    report = make_report(run)
    assert report["rows"] == []
    assert "No drafter was evaluated yet." in (tmp_path / "report.html").read_text("utf-8")
    assert footnotes(report) == ["No drafter was evaluated yet."]
    rendered(report)
    # Figures that do not exist may be None, or absent.
    bare = {"gamma": 2, "rule": "exact", "lossless": True, "acceptance_rate": None}
    report = make_report(write_run(tmp_path, [("one", "small_lm", bare)]))
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert len(page.alts) == 1  # the loss
    assert rendered(report).split()[-8:] == ["one", "small_lm", *"––––––"]


def test_damaged_file_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path, ROWS)
    (tmp_path / "evaluations/09-row/evaluation.json").write_text("{", "utf-8")
    with pytest.raises(UserError, match=r"09-row.*cannot be read"):
        make_report(run)


def test_not_a_number_does_not_exist(tmp_path: Path) -> None:
    run = write_run(tmp_path, [("two", "small_lm", figures(1.5, 0.8, v=float("nan")))])
    report = make_report(run)
    assert report["rows"][0]["evaluation"]["v"] is None
    assert "NaN" not in (tmp_path / "report.json").read_text("utf-8")


def test_how_figures_are_written() -> None:
    assert format_ratio({"value": 1.234, "low": 1.18, "high": 1.29}) == "1.23× [1.18, 1.29]"
    assert [format_share(x) for x in (None, 0, 0.0001, 0.004, 0.126, 0.996, 0.9999, 1)] == [
        "–", "0%", "<0.1%", "0.4%", "13%", "99.6%", ">99.9%", "100%",
    ]  # fmt: skip
    assert [format_duration(x) for x in (None, 0.84, 42.2, 185, 7620)] == [
        "–", "0.8 s", "42 s", "3 min 5 s", "2 h 7 min",
    ]  # fmt: skip


def test_a_stage_that_is_done_shows_the_settings_of_its_figures(tmp_path: Path) -> None:
    """Not those that a later start of the run has."""
    run = write_run(tmp_path, ROWS)
    done = run / "stages/01-one/done.json"
    made_by = {"name": "one", "kind": "distill", "optimizer": {"lr": 0.01}}
    done.write_text(
        json.dumps(json.loads(done.read_text("utf-8")) | {"settings": made_by}), "utf-8"
    )
    report = make_report(run)
    assert report["config"]["stages"][1] == made_by
    assert report["stages"][1]["changed_since"] == ["optimizer"]
    assert "stage one was done before its optimizer changed" in "\n".join(footnotes(report))
    config = json.loads((run / "config.json").read_text("utf-8"))
    config["stages"][1] = made_by
    (run / "config.json").write_text(json.dumps(config), "utf-8")
    assert "changed_since" not in make_report(run)["stages"][1]
