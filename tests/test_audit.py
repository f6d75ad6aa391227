"""`draftsmith audit`: honest servers pass, and servers with an error are found, over HTTP."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from starlette.responses import Response
from typer.testing import CliRunner

import draftsmith
from decode.base.errors import UserError
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from decode.settings import DecodeSettings
from draftsmith import Audit, AuditOptions
from draftsmith.auditing import contract
from draftsmith.auditing.findings import Judgement
from draftsmith.auditing.questions import Questions
from draftsmith.cli.main import app
from tests.answer_server import AnswerEngine
from tests.audit_controls import CONTROLS, PROMPTS, ROWS
from tests.service import Running, serving
from tests.tiny import near_drafter, shortened, tiny_target, write_rows
from tests.upstream import served

TARGET = tiny_target()


@pytest.fixture(autouse=True)
def few_repeated_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_audit_contract` has the questions that ask for texts again, with all of them."""
    monkeypatch.setattr(contract, "PROMPTS", 2)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(TARGET, near_drafter(), DecodeSettings(gamma=3), max_rows=ROWS) as running:
        yield running


def names(found: Audit, verdict: Judgement) -> set[str]:
    return {f"{x.group} {x.name}" for x in found.findings if x.verdict is verdict}


def test_an_honest_server_passes_and_its_report_says_so(server: Running, tmp_path: Path) -> None:
    TARGET.model.save_pretrained(tmp_path / "target")
    TARGET.tokenizer.save_pretrained(tmp_path / "target")
    rows = [{"prompt": text} for text in ("the dog", "12 and 30", "sea shells")]
    write_rows(tmp_path / "prompts.jsonl", rows)
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "html", "junit")}
    result = CliRunner().invoke(
        app,
        [
            "audit", server.url, "--target", str(tmp_path / "target"),
            "--prompts", str(tmp_path / "prompts.jsonl"), "--samples", "15",
            "--max-new-tokens", "32", "--concurrency", "32",
            *(part for kind, file in files.items() for part in (f"--{kind}", str(file))),
        ],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "equal: nothing was found" in result.output
    found = json.loads(files["json"].read_text("utf-8"))
    assert found["verdict"] == "equal"
    assert {x["group"] for x in found["findings"]} == {"greedy", "drafts", "contract", "sampled"}
    assert found["subject"]["level"] == 1e-3
    suite = ElementTree.parse(files["junit"]).getroot()
    assert suite.get("failures") == "0"
    assert len(suite) == len(found["findings"])
    page = files["html"].read_text("utf-8")
    assert server.url in page
    assert "http://" not in page.replace(server.url, "")


@pytest.mark.parametrize(
    ("name", "texts", "finds"),
    [
        ("path committed one slot off", 0, "greedy tokens"),
        ("one seed for all requests", 48, "sampled answers to one prompt agree"),
        ("text after its end", 48, "sampled ends and usage"),
        ("text dropped at a stop string", 0, "contract stop strings"),
        *(
            pytest.param(*error, marks=pytest.mark.thorough)
            for error in (
                ("penalty not along the path", 0, "greedy tokens"),
                ("text after a stop string", 0, "contract stop strings"),
            )
        ),
    ],
)
def test_servers_with_an_error_are_found(name: str, texts: int, finds: str) -> None:
    control = next(control for control in CONTROLS if control.name == name)
    found = control.audit(texts, broken=True)
    assert found.exit_status == 1
    assert finds in names(found, Judgement.WRONG)


def test_a_server_is_judged_beside_its_baseline(server: Running) -> None:
    """Both have other weights than the target, which alone could not judge them."""
    other = tiny_target(seed=1)
    options = AuditOptions(samples=4, max_new_tokens=24)
    found = draftsmith.audit(
        server.url, other, PROMPTS[:12], options, baseline=server.url, concurrency=ROWS
    )
    assert found.exit_status == 0, found
    assert sum(x.name.startswith("beside the baseline") for x in found.findings) == 8


@pytest.mark.parametrize(
    ("missing", "verdict"),
    shortened([(1, Judgement.EQUAL), (4, Judgement.UNJUDGED)], [(4, Judgement.UNJUDGED)]),
)
def test_what_a_baseline_does_not_answer_costs_its_comparison_only(
    server: Running, missing: int, verdict: Judgement
) -> None:
    baseline = AnswerEngine(never=list(map(list, PROMPTS[:missing])))
    options = AuditOptions(samples=1, max_new_tokens=24)
    with served(baseline.app()) as url:
        found = draftsmith.audit(server.url, TARGET, PROMPTS[:4], options, baseline=url, retries=0)
    told = {x.group: x for x in found.findings if x.name == "answers of the baseline"}
    assert {x.verdict for x in told.values()} == {verdict}
    assert told["greedy"].detail.startswith(f"{missing} of 4 are missing")
    assert told["sampled"].detail.startswith(f"{missing} of 4 are missing")
    assert not names(found, Judgement.WRONG)
    equal = names(found, Judgement.EQUAL)
    assert equal >= {"greedy ends and usage", "sampled ends and usage", "contract stop strings"}
    assert ("greedy tokens beside the baseline" in equal) == (missing < 4)


def test_another_model_is_not_judged(server: Running) -> None:
    other = tiny_target(seed=1)
    found = draftsmith.audit(server.url, other, PROMPTS[:2], AuditOptions(sampling=Sampling()))
    assert found.exit_status == 2
    assert names(found, Judgement.UNJUDGED) == {"greedy weights"}


def hide_ids(reply: dict[str, Any], number: int) -> None:
    del reply["choices"][0]["token_ids"]


def rewrite_prompt(reply: dict[str, Any], number: int) -> None:
    reply["choices"][0]["prompt_token_ids"] = [5, 6]


def other_vocabulary(reply: dict[str, Any], number: int) -> None:
    reply["choices"][0]["token_ids"][0] = 4000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (hide_ids, "gives no token ids"),
        (rewrite_prompt, "read another prompt than was sent"),
        (other_vocabulary, "replied the token id 4000"),
    ],
)
def test_servers_that_cannot_be_judged_are_named(
    change: Callable[[dict[str, Any], int], None], said: str
) -> None:
    with served(AnswerEngine(change=change).app()) as url, pytest.raises(UserError, match=said):
        draftsmith.audit(url, TARGET, PROMPTS[:1])


def no_choices(reply: dict[str, Any], number: int) -> None:
    reply["choices"] = [None]


def break_off(reply: dict[str, Any], number: int) -> None:
    reply["choices"][0]["finish_reason"] = "abort"


@pytest.mark.parametrize("change", [rewrite_prompt, no_choices, break_off])
def test_one_odd_answer_costs_that_answer_only(
    change: Callable[[dict[str, Any], int], None],
) -> None:
    replies = []

    def first(reply: dict[str, Any], number: int) -> None:
        replies.append(reply)
        if len(replies) % 8 == 2:
            change(reply, number)

    with served(AnswerEngine(change=first).app()) as url:
        options = AuditOptions(samples=4, max_new_tokens=8)
        found = draftsmith.audit(url, TARGET, PROMPTS[:4], options)
    ends = [x.detail for x in found.findings if x.name == "ends and usage"]
    assert len(ends) == 2
    assert all("cannot be judged and are left out" in detail for detail in ends)
    assert "greedy tokens" in names(found, Judgement.EQUAL)


@pytest.mark.parametrize("status", [500, None])
def test_a_prompt_that_is_never_answered_costs_its_answers_only(status: int | None) -> None:
    """The server fails at it, or ends the connection."""

    engine = AnswerEngine(never=[list(PROMPTS[1])], status=status)
    options = AuditOptions(samples=4, max_new_tokens=8)
    limits: Any = {"retries": 0}
    with served(engine.app()) as url:
        found = draftsmith.audit(url, TARGET, PROMPTS[:4], options, **limits)
        ends = [x.detail for x in found.findings if x.name == "ends and usage"]
        assert [re.findall(r"; (\d+) cannot be judged", detail) for detail in ends] == [
            ["1"],
            ["4"],
        ]
        assert all("did not answer in 1 attempts" in detail for detail in ends)
        assert "greedy tokens" in names(found, Judgement.EQUAL)
        engine.never = list(map(list, PROMPTS))
        with pytest.raises(UserError, match="did not answer in 1 attempts"):
            draftsmith.audit(url, TARGET, PROMPTS[:4], options, **limits)


def test_a_server_that_answers_nothing_is_given_up() -> None:
    engine = AnswerEngine(faults=[Response("down", 502)] * 1000)
    with served(engine.app()) as url, pytest.raises(UserError, match="status 502: down"):
        draftsmith.audit(url, TARGET, PROMPTS[:1] * 200, concurrency=2, retries=0)
    assert len(engine.faults) > 900


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Response("no token ids here", 400), "refuses a request with token ids: no token ids"),
        (Response("key", 401), "refuses with status 401.*--key-env"),
        (Response("busy", 429, {"retry-after": "900"}), "asks to wait 900 s.*--timeout-seconds"),
        (5.0, "no complete answer in 0.2 s"),
        (Response("", 307, {"location": "http://127.0.0.1:9/"}), "refuses with status 307"),
        (Response("[]"), "replied what is no answer"),
    ],
)
def test_faults_of_servers_are_named(fault: Any, said: str) -> None:
    seconds = 0.2 if fault == 5.0 else 30.0
    with served(AnswerEngine(faults=[fault]).app()) as url, pytest.raises(UserError, match=said):
        draftsmith.audit(url, TARGET, PROMPTS[:1], timeout_seconds=seconds, retries=0)


def test_usage_that_does_not_fit_is_wrong() -> None:
    def change(reply: dict[str, Any], number: int) -> None:
        reply["usage"]["completion_tokens"] += 7

    with served(AnswerEngine(change=change).app()) as url:
        greedy = AuditOptions(sampling=Sampling(), max_new_tokens=8)
        found = draftsmith.audit(url, TARGET, PROMPTS[:2], greedy)
    assert "greedy ends and usage" in names(found, Judgement.WRONG)


def accepted_as_certain(reply: dict[str, Any], number: int) -> None:
    for token in reply["completion_probabilities"][1:]:
        token["logprob"] = 0.0


def no_log_probabilities(reply: dict[str, Any], number: int) -> None:
    reply.pop("completion_probabilities", None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda reply, number: None, "0.0000 nats from the target's"),
        (accepted_as_certain, "wrong"),
        (no_log_probabilities, "the server gives no log-probabilities"),
    ],
)
def test_log_probabilities_of_llama_server_are_judged(
    change: Callable[[dict[str, Any], int], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Questions, "contract", lambda self: [])
    with served(AnswerEngine(change=change).app()) as url:
        options = AuditOptions(sampling=Sampling(), max_new_tokens=8)
        found = draftsmith.audit(url, TARGET, PROMPTS[:3], options, protocol="llama-server")
    wrong = names(found, Judgement.WRONG)
    assert wrong == ({"greedy log-probabilities"} if said == "wrong" else set())
    assert said == "wrong" or any(said in x.detail for x in found.findings)


ENUMERATED = {"exact": 100, "sampling": Sampling(1.0, top_k=4)}


@pytest.mark.parametrize(
    ("options", "parts", "said"),
    [
        ({"level": 0.5}, {}, "level is 0.5"),
        ({"samples": 0}, {}, "samples is 0"),
        ({"engine_dtype": "int8"}, {}, "engine_dtype is 'int8'"),
        ({"max_new_tokens": 500}, {}, "has 256 positions"),
        ({"exact": 100}, {}, "too many to enumerate"),
        ({"exact": 100, "sampling": Sampling()}, {}, "the temperature is 0"),
        ({}, {"prompts": [[5, 4000]]}, "the token id 4000"),
        (ENUMERATED, {"baseline": "http://127.0.0.1:10"}, "there is a baseline"),
        (ENUMERATED, {"drafter": SmallLMDrafter(TARGET.model), "gamma": 0}, "gamma is 0"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_asked(
    options: dict[str, Any], parts: dict[str, Any], said: str
) -> None:
    """Nothing listens there."""
    more: Any = {"prompts": PROMPTS[:2]} | parts
    with pytest.raises(UserError, match=said):
        draftsmith.audit("http://127.0.0.1:9", TARGET, options=AuditOptions(**options), **more)
