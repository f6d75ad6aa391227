"""A diagnosis of an honest service is that it is equal, and counts choose between mistakes."""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from typer.testing import CliRunner

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.draw.sampling import Sampling
from decode.model.loading import Target
from decode.settings import DecodeSettings
from draftsmith.auditing import engine_acceptance
from draftsmith.auditing.verify_export import verify_export
from draftsmith.cli.main import app as cli
from draftsmith.diagnosis import engine
from draftsmith.diagnosis.engine import template_fault
from draftsmith.diagnosis.entry import Diagnosis, cause_in_engine, diagnose
from draftsmith.diagnosis.explain import EQUAL, NONE, Explanation, as_keys, explain
from draftsmith.diagnosis.mistakes import MISTAKES
from draftsmith.export.engine_kinds import ENGINES
from draftsmith.export.export_directory import export_drafter
from heads.heads_directory import save_heads
from tests.answer_server import AnswerEngine
from tests.export import make_heads, task
from tests.service import serving
from tests.tiny import VOCAB, tiny_target
from tests.upstream import served
from tools.diagnosis_controls import GAMMA, KINDS, TOKENS, prompts, target, taught, through_service
from train.base.exit_status import ExitStatus
from train.engines import counters
from train.engines.child_process import NoAnswer
from train.engines.counters import DraftCounts, parse_counters
from train.settings.server_config import ServerConfig

PROMPTS = 24


def diagnosed(served: Drafter | None) -> Diagnosis:
    assert served is not None
    return through_service("eagle3", served, PROMPTS)


def test_an_honest_service_is_equal() -> None:
    found = diagnosed(taught("eagle3"))
    assert found.explanation.verdict == EQUAL
    assert found.there == found.here
    shorter, longer = found.by_length
    assert shorter.longest <= longer.shortest
    assert (shorter.there + longer.there) / 2 == pytest.approx(sum(found.there))
    assert sum(found.here) > GAMMA / 2  # else a mistake has little to spoil
    assert found.sound
    assert {*found.together} == {8, 16}
    # Half as many are accepted with 16 at a time.
    rows = replace(found.alone, accepted=found.alone.accepted / 2)
    mixed = replace(found, together=found.together | {16: rows})
    assert (mixed.mixed, mixed.sound) == ([16], False)
    assert mixed.headline.startswith("rows mixed at concurrency: ")


def test_another_chat_template_is_named() -> None:
    tokenizer = copy.deepcopy(target().tokenizer)
    tokenizer.chat_template = "{{ 'word1 ' }}" + tokenizer.chat_template
    one, other = target(), replace(target(), tokenizer=tokenizer)
    prompt = prompts(1, 0)[0]
    with serving(one, taught("eagle3")) as running:
        config = ServerConfig(url=[running.url])
        assert template_fault(running.url, one, prompt, config) is None
        fault = template_fault(running.url, other, prompt, config)
    assert fault is not None
    assert "the server makes" in fault
    counts = DraftCounts(10.0, 5.0)
    sound = Explanation(EQUAL, (), 1.0, {EQUAL: 1.0}, (), False)
    found = Diagnosis("draftsmith", 24, [0.5], [0.5], 9, sound, GAMMA, counts, {}, [], None)
    assert found.sound
    spoilt = replace(found, template=fault)
    assert not spoilt.sound
    assert spoilt.headline.startswith("another chat template: the server makes")


# In the gate: `test_a_verification_that_finds_less_ends_with_the_diagnosis`.
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["layers_below", "first_slot"])
def test_a_mistake_in_a_service_is_named(name: str) -> None:
    found = diagnosed(MISTAKES[name](TOKENS).make(taught("eagle3"), target()))
    assert found.explanation.verdict == name
    assert found.headline.startswith(f"{name}: {MISTAKES[name].says}")
    assert sum(found.there) < sum(found.here)


def test_an_unknown_mistake_is_not_named() -> None:
    rng = np.random.default_rng(0)
    said = {name: as_keys(rng.integers(0, 4, (200, 1))) for name in (EQUAL, "a", "b", "c")}
    for _ in range(100):
        assert explain(as_keys(rng.integers(0, 4, (200, 1))), said, {}).verdict == NONE


def test_counts_that_are_all_alike_are_equal_if_the_drafter_has_them_too() -> None:
    alike = [(1, 1, 1)] * 199 + [(1, 1, 0)]
    found = explain(alike, {EQUAL: alike, "a": [(1, 1, 0)] * 200}, {})
    assert found.verdict == EQUAL


def test_rounding_of_some_prompts_hides_no_mistake_and_makes_none() -> None:
    rng = np.random.default_rng(0)
    said = {name: rng.integers(0, 4, (200, 1)) for name in (EQUAL, "a", "b")}
    values = {name: as_keys(x) for name, x in said.items()}
    for name in said:
        for _ in range(100):
            other = rng.integers(0, 4, (200, 1))
            counted = np.where(rng.random((200, 1)) < 0.05, other, said[name])
            assert explain(as_keys(counted), values, {}).verdict == name


def test_mistakes_that_say_the_same_are_not_told_apart() -> None:
    one, other = [(0,), (1,)] * 20, [(1,), (1,)] * 20
    found = explain(other, {EQUAL: one, "a": other, "b": other, "c": one}, {})
    assert (found.verdict, found.like, found.unseen) == ("a", ("b",), ("c",))


def test_an_engine_that_accepts_nothing_has_one_of_the_mistakes_that_accept_nothing() -> None:
    def accepts(prompts: int) -> list[tuple[int, int]]:
        return [(1, 1)] * prompts + [(0, 0)] * (200 - prompts)

    said = {EQUAL: accepts(150), "a": accepts(3), "b": accepts(0), "c": accepts(90)}
    found = explain(accepts(0), said, {})
    assert found.little
    assert found.names == ("b", "a")
    # A drafter that accepts nothing in our own loop is no matter of the engine.
    assert explain(accepts(0), said | {EQUAL: accepts(2)}, {}).names == ()
    # No known mistake accepts so little.
    assert explain(accepts(0), said | {"a": accepts(80), "b": accepts(80)}, {}).verdict == NONE
    # The counts of prompts that accept something say which.
    assert explain(accepts(90), said, {}).names == ("c",)


def page(engine: str, drafted: int, *accepted: int, position: str = 'model_name="m",') -> str:
    """A page for Prometheus with accepted tokens at each place."""
    name, labels = f"{engine}:spec_decode_num", "{" + position.rstrip(",") + "}"
    return f"{name}_draft_tokens_total{labels} {drafted}.0\n" + "".join(
        [
            f"{name}_accepted_tokens_total{labels} {sum(accepted)}.0\n",
            *(
                f'{name}_accepted_tokens_per_pos_total{{{position}position="{place}"}} {count}.0\n'
                for place, count in enumerate(accepted)
            ),
        ]
    )


SGLANG = """\
sglang:generation_tokens_total{model_name="m"} 30.0
sglang:num_requests_total{model_name="m"} 2.0
sglang:spec_verify_calls_total{model_name="m"} 10.0
sglang:spec_num_draft_tokens{model_name="m"} 4.0
"""


@pytest.mark.parametrize(
    ("text", "name", "by_place", "gamma"),
    [
        (page("vllm", 30, 6, 3, 0), "vllm", (6, 3, 0), 3),
        (page("llamacpp", 30, 6, 3, position=""), "llamacpp", (6, 3), 2),
        (page("llamacpp", 30, position=""), "llamacpp", None, None),
        (page("draftsmith", 30, 6), "draftsmith", (6,), 1),
        (SGLANG, "sglang", None, 3),
    ],
)
def test_counters_are_read_by_place(
    text: str, name: str, by_place: tuple[int, ...] | None, gamma: int | None
) -> None:
    found = parse_counters(text)
    assert found is not None
    assert (found.engine, found.by_place, found.gamma) == (name, by_place, gamma)
    assert found.engine in engine_acceptance.COUNTING


def test_counters_that_move_are_good_enough_for_an_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its requests among others; a diagnosis is refused, below."""
    page = busy()
    monkeypatch.setattr(counters, "ask", lambda *_, **__: page().encode())
    monkeypatch.setattr(counters, "LONGEST_SETTLE", 0.05)
    monkeypatch.setattr(counters, "SLOW_SECONDS", 0.01)
    last, still = counters.settled_counters("http://engine")
    assert not still
    audited = engine_acceptance.counters_if_shown("http://engine", None)
    assert audited is not None
    assert (audited.counts - last.counts).drafted > 0


def asked_of(text: str | Callable[[], str], **options: Any) -> str:
    """What is said of a server whose counters are always these."""
    asked, kind = prompts(20, 0), options.get("kind", AnswerEngine)
    if "status" in options:
        options["never"] = asked
    made = {name: x for name, x in options.items() if name != "kind"}
    app = kind(**{"target": target()} | made).app()

    def metrics(_: Request) -> PlainTextResponse:
        return PlainTextResponse(text if isinstance(text, str) else text())

    if text:
        app.router.routes.append(Route("/metrics", metrics))
    with served(app) as url, pytest.raises(UserError) as raised:
        diagnose(
            url, target(), NgramDrafter(1, 2), asked,
            ServerConfig(url=[url], concurrency=1, retries=1), gamma=GAMMA,
        )  # fmt: skip
    assert "\n" not in str(raised.value)
    return str(raised.value)


class ForcedSampling(AnswerEngine):
    """Draws its texts, whatever it is asked for."""

    def _decode(self, prompt: list[int], count: int, sampling: Any, seed: int) -> list[int]:
        return super()._decode(prompt, count, Sampling(temperature=3.0), seed)


def rewritten(reply: dict[str, Any], number: int) -> None:
    reply["choices"][0]["prompt_token_ids"].insert(0, 1)


class Rewriting(AnswerEngine):
    """Puts a token before each prompt, and does not say so."""

    def _decode(self, prompt: list[int], count: int, sampling: Any, seed: int) -> list[int]:
        return super()._decode([9, *prompt], count, sampling, seed)


def other_target() -> Target:
    return tiny_target(vocab=VOCAB + 8, layers=2, max_positions=512, seed=5)


IDLE = page("vllm", 0, *[0] * GAMMA)


def busy() -> Callable[[], str]:
    drafted = itertools.count(1)
    return lambda: page("vllm", next(drafted), *[0] * GAMMA)


def busy_meanwhile() -> Callable[[], str]:
    """Each answer counts what this answer alone cannot; between answers the counters stand still,
    and each is read until two readings are equal."""
    read = itertools.count()

    def text() -> str:
        answers = next(read) // 2
        return page("vllm", 4 * GAMMA * answers, *[4 * answers] * GAMMA)

    return text


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("", {}, "hides its counters"),
        ("vllm:num_requests_running 0\n", {}, "the server has no drafter, or hides them"),
        (IDLE, {}, "drafted nothing for 20 prompts: it ignores its drafter, or has none"),
        (busy(), {}, "do not stand still: it answers other requests meanwhile"),
        (busy_meanwhile(), {}, "it is busy with other requests"),
        (IDLE, {"status": 429}, "did not answer in 2 attempts (status 429"),
        (IDLE, {"target": other_target()}, "has another target (or a fine-tune of it)"),
        (IDLE, {"change": rewritten}, "read another prompt than was sent"),
        (IDLE, {"kind": Rewriting}, "or rewrites prompts"),
        (IDLE, {"kind": ForcedSampling}, "samples by force"),
        (page("vllm", 0, *[0] * (GAMMA - 1)), {}, f"give --gamma {GAMMA - 1}"),
        (page("vllm", 0, *[0] * (GAMMA + 1)), {}, f"give --gamma {GAMMA + 1}"),
    ],
)
def test_servers_that_cannot_be_diagnosed_are_refused_by_name(
    text: Any, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "LONGEST_SETTLE", 0.6)
    monkeypatch.setattr(counters, "SLOW_SECONDS", 0.01)
    assert said in asked_of(text, **options)


def test_a_verification_that_finds_less_ends_with_the_diagnosis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter: Any = taught("eagle3")
    planted = MISTAKES["layers_below"](TOKENS).make(drafter, target())
    for part in (target().model, target().tokenizer):
        part.save_pretrained(tmp_path / "target")
    one = replace(target(), name=str(tmp_path / "target"))
    save_heads(tmp_path / "drafter", drafter.heads, target=one, provenance={"stage": "heads"})
    export_drafter(tmp_path / "drafter", "vllm", tmp_path / "out")

    @contextmanager
    def serve(*_: Any) -> Iterator[str]:
        with serving(target(), planted, DecodeSettings(gamma=GAMMA)) as running:
            yield running.url

    vllm = type(ENGINES["vllm"])
    monkeypatch.setattr(vllm, "serving", serve)
    monkeypatch.setattr(vllm, "version", lambda *_: "1")

    def said(count: int, trained: bool = True) -> str:
        asked = task(one, tmp_path / "out", prompts=prompts(count, 0))
        drafter = tmp_path / "drafter" if trained else None
        diagnosed = partial(cause_in_engine, drafter, asked)
        (failure,) = verify_export("vllm", asked, diagnosed).failures
        return failure

    assert "The cause, by draftsmith diagnose: layers_below: " in said(24)
    assert "layers_below: " in said(24, trained=False)
    few = said(8)
    assert "run: draftsmith diagnose URL" in few
    assert "expected at least 20" in few


def test_a_server_that_chooses_the_length_of_its_drafts_is_said_by_name() -> None:
    """Its counts are those of shorter drafts, which no mistake explains."""
    policy = {"name": "by_batch", "table": {1: 1, 2: GAMMA}}
    with pytest.raises(UserError, match=r"drafts fewer than 3 tokens at a time for \d+% .* fixed"):
        through_service("eagle3", taught("eagle3"), PROMPTS, policy=policy)


def test_a_server_that_is_gone_is_said_by_name() -> None:
    with pytest.raises(NoAnswer, match="does not answer"):
        engine.still_counters("http://127.0.0.1:1")


def test_what_is_known_early_is_said_before_the_target_is_loaded(tmp_path: Path) -> None:
    """The target is not there: were it loaded first, that would be said."""
    drafter, few = tmp_path / "drafter", tmp_path / "few.jsonl"
    make_heads(drafter, target(), KINDS["medusa"])
    few.write_text('{"prompt": "one"}\n{"prompt": "two"}\n', "utf-8")
    app = AnswerEngine(target=target()).app()
    text = page("vllm", 0, *[0] * GAMMA)
    app.router.routes.append(Route("/metrics", lambda _: PlainTextResponse(text)))
    with served(app) as url:

        def said(*more: str) -> str:
            asked = ["diagnose", url, "--target", str(tmp_path / "no-target"), *more]
            result = CliRunner().invoke(cli, [*asked, "--drafter", str(drafter)])
            assert result.exit_code == ExitStatus.BAD_INPUT
            return " ".join(result.output.split())

        assert f"give --gamma {GAMMA}" in said("--gamma", str(GAMMA + 1))
        assert "there are 2 prompts; expected at least 20" in said("--prompts", str(few))
        assert "missing.jsonl" in said("--prompts", str(tmp_path / "missing.jsonl"))
        assert "no-target" in said("--gamma", str(GAMMA))
        (drafter / "heads.safetensors").write_bytes(b"")
        assert "heads.safetensors" in said("--gamma", str(GAMMA))
        drafter = tmp_path / "no-drafter"
        assert "no-drafter" in said("--gamma", str(GAMMA))


def test_a_service_that_drafts_fewer_tokens_is_told_by_its_places() -> None:
    asked = prompts(20, 0)
    with serving(target(), NgramDrafter(1, 2), DecodeSettings(gamma=GAMMA - 1)) as running:
        config = ServerConfig(url=[running.url], concurrency=1)
        with pytest.raises(UserError, match=f"give --gamma {GAMMA - 1}"):
            diagnose(running.url, target(), NgramDrafter(1, 2), asked, config, gamma=GAMMA)
