"""Greedy answers of an audit: what rounding explains, and what not. Nothing ends a report."""

import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from rich.console import Console

import draftsmith
from decode.base.errors import UserError
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from draftsmith import Audit, AuditOptions
from draftsmith.auditing import report, tails
from draftsmith.auditing.asking import _Ids, _LlamaIds, ask_texts
from draftsmith.auditing.contract import Said
from draftsmith.auditing.engine_acceptance import acceptance_finding
from draftsmith.auditing.entry import server_root
from draftsmith.auditing.findings import Finding, Judgement
from draftsmith.auditing.greedy import greedy_findings
from draftsmith.auditing.questions import Questions
from draftsmith.auditing.texts import EngineText, JudgedText, TextJudge, rounding_scale
from draftsmith.export.compare_acceptance import Acceptance, OwnLoop
from tests.answer_server import AnswerEngine
from tests.audit_controls import CONTROLS, PROMPTS
from tests.test_audit_law import START, TABLE, VOCAB, bigrams
from tests.tiny import tiny_target
from tests.upstream import served
from train.engines.counters import DraftCounts
from train.settings.server_config import ServerConfig

TARGET = tiny_target()
EPS = torch.finfo(torch.bfloat16).eps
UNIT = EPS * float(np.abs(TABLE).max())


def texts_of(choose: Any, seed: int, texts: int = 40, weights: Any = TABLE) -> list[JudgedText]:
    """Judged by the rounding of bfloat16. choose: of logits [V] and random numbers, a token."""
    rng = np.random.default_rng(seed)
    judge = TextJudge(bigrams(), Sampling(), 0, torch.bfloat16)
    found = []
    for number in range(texts):
        prompt = np.random.default_rng(number).integers(0, VOCAB, START).tolist()
        text = list(prompt)
        for _ in range(30):
            text.append(int(choose(weights[text[-1]], rng)))
        found.append(judge.judge(EngineText(number, prompt, text[START:])))
    return found


def rounded(logits: np.ndarray, rng: np.random.Generator) -> Any:
    """Errors of real models of 16 bits: the difference of two has half an ε at the largest."""
    return np.argmax(logits + rng.normal(0, UNIT / 8**0.5, VOCAB))


def within_rounding(logits: np.ndarray, rng: np.random.Generator) -> Any:
    """Takes any token that is below the likeliest by less than the allowance."""
    return rng.choice(np.flatnonzero(logits > logits.max() - 3.6 * EPS * np.abs(logits).max()))


def test_the_number_of_tokens_within_rounding_is_tested() -> None:
    for seed in range(20):
        found = greedy_findings(texts_of(rounded, seed), 1e-3)
        assert {x.verdict for x in found} == {Judgement.EQUAL}, found
    found = greedy_findings(texts_of(within_rounding, 0), 1e-3)
    assert [x.name for x in found if x.verdict is Judgement.WRONG] == ["rounding"]


def test_log_probabilities_show_a_larger_rounding() -> None:
    exact = texts_of(rounded, 0)
    rng = np.random.default_rng(1)

    def told(scale: float) -> list[JudgedText]:
        """With the log-probabilities of logits whose differences have this many units."""
        changed = []
        for text in exact:
            p = np.exp(TABLE - TABLE.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            last = [text.text.prompt[-1], *text.text.tokens[:-1]]
            noise = rng.normal(0, scale * UNIT / 2**0.5, (len(last), VOCAB))
            moved = noise[np.arange(len(last)), text.text.tokens] - (p[last] * noise).sum(1)
            log_p = (text.log_p + moved).tolist()
            changed.append(
                JudgedText(
                    **vars(text) | {"text": EngineText(**vars(text.text) | {"log_p": log_p})}
                )
            )
        return changed

    assert rounding_scale(exact) == 1.0
    assert rounding_scale(told(0.5)) == 1.0
    largest = EPS * np.abs(TABLE).max(1).mean() / UNIT  # units are those of each place
    assert rounding_scale(told(3.0)) == pytest.approx(3.0 / largest, rel=0.25)


def test_each_text_is_compared_with_its_own_baseline() -> None:
    """Both have other weights. One token of the baseline that is far off allows no other."""
    other = TABLE + np.random.default_rng(2).normal(0, 0.3, TABLE.shape)

    def engine(logits: np.ndarray, rng: np.random.Generator) -> Any:
        return np.argmax(logits + rng.normal(0, 0.05, VOCAB))

    def lossy(logits: np.ndarray, rng: np.random.Generator) -> Any:
        return rng.choice(np.flatnonzero(logits > logits.max() - 1.5))

    baseline = texts_of(engine, 0, weights=other)
    baseline[0].gap[3] = 10.0
    for seed in range(1, 21):
        found = greedy_findings(texts_of(engine, seed, weights=other), 1e-3, baseline)
        assert {x.verdict for x in found} == {Judgement.EQUAL}, found
    found = greedy_findings(texts_of(lossy, 1, weights=other), 1e-3, baseline)
    assert [x.name for x in found if x.verdict is Judgement.WRONG] == ["tokens beside the baseline"]


def test_a_worse_token_than_the_baselines_worst_may_be_chance() -> None:
    """Each of two servers of one law has the worst of all tokens as often as the other. One that no
    such law explains is still found, and without common prompts nothing is said."""
    shape = texts_of(rounded, 0, texts=1)[0]

    def drawn(seed: int, first: int = 0) -> list[JudgedText]:
        rng = np.random.default_rng(seed)
        found = []
        for number in range(first, first + 32):
            tokens, gap = rng.integers(0, VOCAB, (2, 30))
            gap = np.where(gap % 5 == 0, rng.exponential(0.2, 30), 0.0)
            text = EngineText(number, shape.text.prompt, tokens.tolist())
            found.append(JudgedText(**vars(shape) | {"text": text, "gap": gap}))
        return found

    worse = 0
    for seed in range(0, 40, 2):
        texts, baseline = drawn(seed), drawn(seed + 1)
        worse += max(x.gap.max() for x in texts) > max(x.gap.max() for x in baseline)
        found = greedy_findings(texts, 1e-3, baseline)
        assert {x.verdict for x in found} == {Judgement.EQUAL}, found
    assert worse > 5
    tokens, beside = greedy_findings(texts, 1e-3, drawn(1, first=32))
    assert (tokens.verdict, beside.verdict) == (Judgement.EQUAL, Judgement.UNJUDGED)
    texts[0].gap[3] = 6.0
    assert greedy_findings(texts, 1e-3, baseline)[0].verdict is Judgement.WRONG


def test_tails_of_signs() -> None:
    assert tails.sign_tail([1.0] * 10) == pytest.approx(2.0**-10)
    assert tails.sign_tail([1.0, -3.0]) == 1.0
    many = np.random.default_rng(0).normal(size=40)
    signs = np.random.default_rng(1).choice([-1, 1], (20_000, 40))
    share = (signs @ many >= 2 * (many**2).sum() ** 0.5).mean()
    found = np.abs(many) * np.sign(many)
    scaled = found * (2 * (many**2).sum() ** 0.5 / found.sum())
    assert share <= tails.sign_tail(scaled.tolist()) or found.sum() <= 0


def test_lossy_acceptance_in_bfloat16_is_found() -> None:
    control = next(control for control in CONTROLS if control.half)
    found = control.audit(0, broken=True)
    assert [x.name for x in found.findings if x.verdict is Judgement.WRONG] == ["rounding"]


# What cannot be judged, and what is refused


def test_a_part_that_cannot_be_asked_costs_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def contract(self: Questions) -> list[Finding]:
        raise UserError("no streams here")

    monkeypatch.setattr(Questions, "contract", contract)
    with served(AnswerEngine().app()) as url:
        options = AuditOptions(max_new_tokens=8, samples=1)
        found = draftsmith.audit(f"{url}/v1/", TARGET, PROMPTS[:3], options)
    by_name = {f"{x.group} {x.name}": x for x in found.findings}
    assert by_name["contract asked"].detail == "no streams here"
    assert by_name["sampled ends and usage"].verdict is Judgement.EQUAL
    assert found.subject["url"] == url


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": []}, {"choices": [{"token_ids": ["a"]}]}, {"timings": [1]},
        {"usage": {"completion_tokens": "x"}}, {"timings": {"draft_n": "x"}},
        {"timings": {"draft_n": 10**400}},
    ],
    ids=str,
)  # fmt: skip
def test_an_answer_of_another_shape_is_refused_in_words(odd: dict[str, Any]) -> None:
    """Of a greedy answer the audit ends; of a later one only that part, whose texts it costs."""
    prompts, options = PROMPTS[:3], AuditOptions(max_new_tokens=8, samples=1)
    for count in (0, len(prompts)):

        def change(reply: dict[str, Any], number: int, count: int = count) -> None:
            if number > count:
                reply |= odd

        with served(AnswerEngine(change=change).app()) as url:
            if count:
                found = draftsmith.audit(url, TARGET, prompts, options)
                assert any("no answer" in x.detail for x in found.findings[3:])
            elif odd != {"choices": []}:
                with pytest.raises(UserError, match="replied what is no answer"):
                    draftsmith.audit(url, TARGET, prompts, options)


@pytest.mark.parametrize("count", [2, 5, 40])
@pytest.mark.parametrize("place", [0, 7])
@pytest.mark.parametrize("others_tell", [True, False])
def test_one_odd_log_probability_does_not_tell_of_other_weights(
    count: int, place: int, others_tell: bool
) -> None:
    texts = []
    for text in texts_of(rounded, 0, texts=count):
        log_p = text.log_p.tolist() if others_tell or not text.text.number else None
        if not text.text.number:
            log_p[place] = -9999.0  # as vLLM writes what JSON cannot
        told = EngineText(**vars(text.text) | {"log_p": log_p})
        texts.append(JudgedText(**vars(text) | {"text": told}))
    verdicts = {x.name: x.verdict for x in greedy_findings(texts, 1e-3)}
    assert verdicts.pop("log-probabilities") is Judgement.WRONG
    assert set(verdicts.values()) == {Judgement.EQUAL}
    # Nor does it let other tokens be further off.
    assert rounding_scale(texts) == 1.0


@pytest.mark.parametrize("count", [2, 5, 40])
def test_one_odd_first_token_does_not_tell_of_other_weights(count: int) -> None:
    texts = texts_of(rounded, 0, texts=count)
    texts[0].gap[0] = 5.0
    verdicts = {x.name: x.verdict for x in greedy_findings(texts, 1e-3)}
    assert verdicts == dict.fromkeys(("weights", "rounding"), Judgement.EQUAL) | {
        "tokens": Judgement.WRONG
    }
    for text in texts:
        text.gap[0] = 5.0
    assert [x.name for x in greedy_findings(texts, 1e-3)] == ["weights"]


@pytest.mark.parametrize("odd", [{"text": "a"}, {"token_ids": ["a"]}, "x"], ids=str)
def test_an_answer_of_another_shape_leaves_the_other_of_its_request(odd: Any) -> None:
    def change(reply: dict[str, Any], number: int) -> None:
        whole = reply["choices"][0]
        reply["choices"].insert(0, whole | odd if "token_ids" in odd else odd)

    with served(AnswerEngine(change=change).app()) as url:
        config, drawn = ServerConfig(url=[url]), Sampling(1.0)
        asked = ask_texts(
            url, TARGET, PROMPTS[:3], drawn, config, samples=1, max_new_tokens=8, seed=0, each=2
        )
    assert sorted(text.number for text in asked.texts) == [0, 1, 2]
    assert len(asked.left_out) == 3
    assert asked.faults == []


@pytest.mark.parametrize("odd", [float("nan"), float("-inf"), 10**400, None, "x"])
def test_a_log_probability_that_is_no_number_is_none(odd: Any) -> None:
    """As of an engine that says none: the tokens of such an answer are judged."""
    choice = {"text": "a", "finish_reason": "length", "token_ids": [5, 6]}
    told = {"token_logprobs": [-1.5, odd]}
    for log_p, expected in ((told, None), ({"token_logprobs": [-1.5, -2]}, [-1.5, -2])):
        reply: dict[str, Any] = {"choices": [choice | {"logprobs": log_p}]}
        assert _Ids().reply(reply)[1] == expected
        probabilities = [{"logprob": value} for value in log_p["token_logprobs"]]
        reply = {"content": "a", "stop_type": "limit", "completion_probabilities": probabilities}
        assert _LlamaIds().reply(reply)[1] == expected


def test_no_rounding_at_all_is_judged_too() -> None:
    options = AuditOptions(max_new_tokens=8, samples=1, sampling=Sampling(), rounding=0)
    with served(AnswerEngine().app()) as url:
        found = draftsmith.audit(url, TARGET, PROMPTS[:3], options)
    greedy = [x for x in found.findings if x.group == "greedy"]
    assert {x.verdict for x in greedy} == {Judgement.EQUAL}, greedy
    assert "nan" not in str(greedy)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_an_address_may_have_the_path_of_the_api(end: str) -> None:
    assert server_root(f"http://host:8000{end}") == "http://host:8000"
    assert server_root(f"http://host/proxy{end}") == "http://host/proxy"


def test_the_parts_share_the_level() -> None:
    def level(drafter: Any = None, **options: Any) -> float:
        made = AuditOptions(**options)
        config = ServerConfig(url="http://127.0.0.1:9")
        work = Questions(config.urls, TARGET, PROMPTS, made, config, print, drafter, 3)
        return made.level / work.level

    assert level(sampling=Sampling()) == 1  # greedy tokens
    assert level() == 3  # sampled ones, and seeds
    assert level(exact=100) == 4
    assert level(object(), exact=100) == 6  # the acceptance of both


# Acceptance


def test_few_draft_tokens_give_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnLoop(TARGET, SmallLMDrafter(TARGET.model), PROMPTS[:1], 3, 8)

    def found(times: int, accepted: int = 6, drafted: int = 24) -> Finding:
        monkeypatch.setattr(
            "draftsmith.auditing.engine_acceptance.count_drafts",
            lambda *_: (24 * times, 12 * times),
        )
        counts = DraftCounts(drafted * times, accepted * times)
        return acceptance_finding(
            "greedy", counts, "vllm", own, Sampling(), level=1e-3, parting=0.0
        )

    few = found(1)
    assert few.verdict is found(1, 0, 0).verdict is Judgement.UNJUDGED
    assert "ask for more" in few.detail
    hardly = found(100, 0, 1)  # 100 draft tokens in place of 2,400
    assert hardly.verdict is Judgement.UNJUDGED
    assert "hardly drafts" in hardly.detail
    assert "ask for more" not in hardly.detail
    assert found(100).verdict is found(100, 0, 0).verdict is Judgement.WRONG
    assert found(100, 25).verdict is Judgement.UNJUDGED  # more accepted than drafted


def test_chance_exceeds_what_is_allowed_as_rarely_as_stated() -> None:
    """Tokens of a draft that are accepted or rejected together are the worst case."""
    rng, level, gamma, drafts = np.random.default_rng(0), 0.05, 4, 500
    wrong = 0
    for _ in range(400):
        one, two = (
            DraftCounts(drafts * gamma, gamma * rng.binomial(drafts, 0.6)) for _ in range(2)
        )
        found = Acceptance(one, two, gamma, level, 1.0)
        wrong += found.fault is not None
    assert wrong <= 400 * level


# Reports


def test_nothing_that_a_server_says_ends_a_report(tmp_path: Path) -> None:
    said = "[/INST] [bold red \x1b[31m \x00 \u2028 \x85 \ud800 \ufffe </table> ]]>"
    finding = Finding("contract", f"template {said}", Judgement.WRONG, said, 0.5, said)
    subject = {"url": "http://[::1]:8", "target": said, "seconds": 1.0}
    found = Audit(subject, [finding, Finding("greedy", "x", Judgement.EQUAL, said)])
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report.terminal_table(found))
    assert "[/INST] [bold red \\x1b[31m" in console.export_text()
    console.print(report.headline(found), markup=False)
    for write in (report.write_json, report.write_page, report.write_junit):
        write(found, tmp_path / write.__name__)
    assert (
        json.loads((tmp_path / "write_json").read_text("utf-8"))["findings"][0]["verdict"]
        == "wrong"
    )
    suite = ElementTree.parse(tmp_path / "write_junit").getroot()
    (failure,) = suite.iter("failure")
    assert failure.get("message", "").startswith("[/INST] [bold red \\x1b[31m \\x00 \\u2028 \\x85")
    assert "&lt;/table&gt;" in (tmp_path / "write_page").read_text("utf-8")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_stream_may_have_any_character_in_its_texts(end: str) -> None:
    texts = ["a\u2028b", "\x85\x1c", "\u2029\x0b"]
    events = [
        "data: " + json.dumps({"choices": [{"text": text}]}, ensure_ascii=False) for text in texts
    ]
    body = (2 * end).join([*events, "data: [DONE]", ""])
    assert Said.streamed(body.encode()).text == "".join(texts)
