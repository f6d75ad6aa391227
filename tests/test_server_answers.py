"""A generate stage whose answers come from a server, and the server's faults."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response
from tokenizers import normalizers

from decode.base.errors import UserError
from decode.draw.sampling import Sampling
from decode.model.loading import Target
from tests.answer_server import (
    NEW,
    SETTINGS,
    AnswerEngine,
    answer_with,
    answers_of,
    broken_answer,
    dripping_answer,
    without_reason,
)
from tests.stages import make_stage, plan_stage, run_stage
from tests.test_data import example
from tests.tiny import EOS_ID, tiny_target
from tests.training import Killed
from tests.upstream import served
from train.base.stage import StageInputs
from train.data.answer_files import AnswerFiles, draw_number
from train.engines import ask_servers
from train.engines.answers.protocols import (
    PROTOCOLS,
    AnswerReader,
    AskSettings,
    Reply,
    WantedAnswer,
)
from train.settings.server_config import ServerConfig


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask_servers, "LONGEST_WAIT", 0.0)


@pytest.fixture
def ours(context: StageInputs) -> list[dict[str, Any]]:
    """The greedy answers of our own loop."""
    run_stage(context, make_stage("generate", "ours", **SETTINGS))
    return answers_of(context, "ours")


@pytest.mark.parametrize("protocol", ["completions", "llama-server"])
def test_greedy_answers_are_those_of_our_own_loop(
    context: StageInputs, ours: Any, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    engines = AnswerEngine(), AnswerEngine()
    with served(engines[0].app()) as one, served(engines[1].app()) as two:
        outcome = answer_with(context, [one, two], protocol=protocol, key_env="SOME_KEY")
    answers = answers_of(context)
    assert without_reason(answers) == ours
    for answer in answers:
        assert answer["finish_reason"] == ("stop" if answer["tokens"][-1] == EOS_ID else "length")
    asked = engines[0].asked() + engines[1].asked()
    assert len(asked) == 10 + 2
    probes = 2 * 2
    assert asked.total() == 10 + probes
    assert min(len(engine.bodies) for engine in engines) > 2
    assert engines[0].keys == engines[1].keys == {"Bearer secret"}
    assert outcome.summary["left_out"] == "0"
    assert not list(context.directory.glob("answers/answers-*"))
    assert (
        context.corpus.samples("answers")[3].tokens[-len(ours[3]["tokens"]) :]
        == (ours[3]["tokens"])
    )


def test_samples_are_drawn_with_seeds_of_their_own_and_with_every_setting(
    context: StageInputs,
) -> None:
    sampling = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    drawn = {"samples": 2, "sampling": sampling}
    engine = AnswerEngine()

    async def in_a_notebook() -> None:
        answer_with(context, url, "again", settings=drawn, probe_prompts=0)

    with served(engine.app()) as url:
        answer_with(context, url, settings=drawn, probe_prompts=0)
        asyncio.run(in_a_notebook())
    answers = answers_of(context)
    assert answers == answers_of(context, "again")
    assert len({str(answer["tokens"]) for answer in answers}) > 15
    assert set(engine.asked().values()) == {2}
    assert len(engine.asked()) == 20
    fields = engine.bodies[0]
    assert sampling.items() <= fields.items()
    assert (fields["repetition_penalty"], fields["presence_penalty"]) == (1.0, 0.0)


def test_faults_that_pass_are_waited_for(context: StageInputs, ours: Any) -> None:
    engine = AnswerEngine()
    engine.faults = [Response(status_code=429, headers={"retry-after": "0.3"})]
    with served(engine.app()) as url:
        answer_with(context, url, "one", concurrency=1)
        assert engine.seconds[1] - engine.seconds[0] >= 0.3
        engine.faults = [Response(status_code=503), broken_answer(), 1.0, dripping_answer()]
        answer_with(context, url, "two", concurrency=1, timeout_seconds=0.8, retries=40)
    assert not engine.faults
    assert without_reason(answers_of(context, "one")) == ours
    assert without_reason(answers_of(context, "two")) == ours


def test_a_server_that_is_down_or_refuses_is_named(context: StageInputs) -> None:
    engine = AnswerEngine()
    with served(engine.app()) as url:
        pass
    with pytest.raises(UserError, match=r"did not answer in 3 attempts \(ConnectError"):
        answer_with(context, url)
    engine.faults = [Response(b"who are you?", status_code=401)]
    with (
        served(engine.app()) as url,
        pytest.raises(UserError, match=r"status 401: who are you.*key_env"),
    ):
        answer_with(context, url)
    for asked in ("86400", "inf"):
        engine.faults = [Response(status_code=429, headers={"retry-after": asked})]
        with (
            served(engine.app()) as url,
            pytest.raises(UserError, match=rf"in 1 attempts .status 429.*asks to wait {asked} s"),
        ):
            answer_with(context, url)


def test_the_others_take_the_rows_of_a_server_that_is_lost(context: StageInputs, ours: Any) -> None:
    engines = AnswerEngine(), AnswerEngine()
    with served(engines[0].app()) as one, served(engines[1].app()) as two:
        engines[0].faults = [Response(status_code=500) for _ in range(99)]
        answer_with(context, [one, two], probe_prompts=0)
        assert sorted(engines[1].asked().values()) == [1] * 10
        assert not engines[0].bodies
        assert without_reason(answers_of(context)) == ours
        assert str(context.reporter).count(f"{one} did not answer in 3 attempts") == 1
        engines[1].faults = engines[0].faults[:]
        with pytest.raises(UserError, match="did not answer in 3 attempts"):
            answer_with(context, [one, two], "none", probe_prompts=0)


@pytest.mark.parametrize(
    ("protocol", "status", "count"), [("completions", 500, 2), ("llama-server", None, 1)]
)
def test_a_prompt_that_no_server_answers_costs_that_prompt_only(
    context: StageInputs, ours: Any, protocol: str, status: int | None, count: int
) -> None:
    poison = context.corpus.prompts(context.corpus.examples["train"][:1])
    given: dict[str, Any] = {
        "protocol": protocol, "max_unusable": 0.25, "probe_prompts": 0, "concurrency": 2,
        "retries": 0,
    }  # fmt: skip
    engines = [AnswerEngine(never=poison, status=status) for _ in range(count)]
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(served(engine.app())) for engine in engines]
        outcome = answer_with(context, urls, **given)
        assert without_reason(answers_of(context)) == ours[1:]
        assert outcome.summary["left_out"] == "1 not answered by the server"
        assert str(context.reporter).count("It answers other requests, so this one is left") == 1
        # One that another server answers is not lost, and one that was too much is asked again.
        engines[-1].never = []
        if count > 1:
            answer_with(context, urls, "all", **given)
            assert without_reason(answers_of(context, "all")) == ours
        engines[0].never = engines[-1].never = poison
        with pytest.raises(UserError, match=r"1 of \d answers .*It answers other requests"):
            answer_with(context, urls, "again", **given | {"max_unusable": 0.2})
        engines[0].never = []
        answer_with(context, urls, "again", **given)
        assert without_reason(answers_of(context, "again")) == ours


def test_a_full_disk_cuts_no_answer_in_two(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    wanted = AnswerFiles(tmp_path, [example(name) for name in "abc"], 1, "abc", {})
    wanted.add({0: {"tokens": [1] * 50}})
    [file] = tmp_path.iterdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 20, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*answers-0\.jsonl"):
            wanted.add({1: {"tokens": [2] * 50}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    wanted.add({2: {"tokens": [3] * 50}})  # of a request that was under way
    assert wanted.missing() == [1]


def test_a_kill_loses_no_answer(
    context: StageInputs, ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, kept = AnswerFiles.add, list[str]()

    def add(wanted: AnswerFiles, answers: Any) -> None:
        if len(kept) == 6:
            with open(wanted.directory / "answers-0.jsonl", "a", encoding="utf-8") as file:
                file.write('{"key": "9", "tok')  # cut short
            raise Killed
        kept.extend(wanted.keys[number] for number in answers)
        original(wanted, answers)

    with served(AnswerEngine().app()) as url, monkeypatch.context() as patch:
        patch.setattr(AnswerFiles, "add", add)
        with pytest.raises(Killed):
            answer_with(context, url, probe_prompts=0)
    engine = AnswerEngine()
    with served(engine.app()) as url:
        outcome = answer_with(context, url, probe_prompts=0)
    settings = AskSettings(Sampling(), NEW, SETTINGS["seed"], (EOS_ID,))
    missing = {draw_number(answer["key"]) for answer in answers_of(context)}
    missing -= {draw_number(key) for key in kept}
    assert set(engine.asked()) == {settings.row_seed(WantedAnswer(row, [])) for row in missing}
    assert len(missing) == 4
    assert set(engine.asked().values()) == {1}
    assert without_reason(answers_of(context)) == ours
    # Nothing is asked again for a stage that is whole.
    assert answer_with(context, url).summary["tokens"] == outcome.summary["tokens"]


def test_a_damaged_line_is_named(context: StageInputs, tmp_path: Path) -> None:
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "answers-0.jsonl").write_text('{"key": "1", "tokens": 3\n', "utf-8")
    engine = AnswerEngine()
    with served(engine.app()) as url, pytest.raises(UserError, match=r"answers-0.jsonl:1 is dam"):
        answer_with(context, url)


def other_prompt(reply: dict[str, Any], number: int) -> None:
    reply["choices"][0]["prompt_token_ids"] = [1, *reply["choices"][0]["prompt_token_ids"]]


def longer_prompt(reply: dict[str, Any], number: int) -> None:
    del reply["choices"][0]["prompt_token_ids"]
    reply["usage"]["prompt_tokens"] += 1


def large_id(reply: dict[str, Any], number: int) -> None:
    reply["choices"][0]["token_ids"][0] = 70000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_prompt, "read another prompt than was sent: .* differ first at position 1"),
        (longer_prompt, "read a prompt of .* tokens, but .* were sent"),
        (large_id, "token id 70000, but the target has ids from 0 to 299"),
        (lambda reply, number: reply.pop("choices"), "what is no answer .KeyError.*protocol"),
    ],
)
def test_replies_that_are_no_answers_are_refused(
    context: StageInputs, change: Any, message: str
) -> None:
    engine = AnswerEngine(change=change)
    with served(engine.app()) as url, pytest.raises(UserError, match=message):
        answer_with(context, url, probe_prompts=0)


def test_another_model_is_refused_before_it_answers(context: StageInputs) -> None:
    engine = AnswerEngine(tiny_target(seed=1))
    with (
        served(engine.app()) as url,
        pytest.raises(UserError, match=r"does not run the target tiny-llama: of \d+ tokens"),
    ):
        answer_with(context, url)
    assert len(engine.bodies) == 2
    assert not list((context.directory / "answers").iterdir())


def test_unusable_answers_are_left_out_and_counted(context: StageInputs, ours: Any) -> None:
    def change(reply: dict[str, Any], number: int) -> None:
        if number == 2:
            reply["choices"][0]["finish_reason"] = "abort"
        if number == 9:
            reply["choices"][0]["token_ids"] = [EOS_ID, 5]

    settings: dict[str, Any] = {"concurrency": 1, "probe_prompts": 0}
    engine = AnswerEngine(change=change)
    with served(engine.app()) as url:
        with pytest.raises(UserError, match=r"1 of 2 answers cannot be used.*ended with abort"):
            answer_with(context, url, **settings)
        engine.faults = [Response(b"too long", status_code=400)]
        outcome = answer_with(context, url, max_unusable=0.5, **settings)
    assert outcome.summary["left_out"] == (
        "1 goes on after an end-of-text token, 1 refused by the server"
    )
    answers = without_reason(answers_of(context))
    assert len(answers) == 8
    assert all(answer in ours for answer in answers)


def test_answers_without_ids_are_retokenised_by_a_stage(context: StageInputs) -> None:
    text = "the dog sells a sea shell"

    def texts(reply: dict[str, Any], number: int) -> None:
        choice = reply["choices"][0]
        del choice["token_ids"], choice["stop_reason"], reply["usage"]["completion_tokens"]
        choice["text"] = "half a character: \ufffd" if number == 2 else text
        choice["finish_reason"] = "stop"

    with served(AnswerEngine(change=texts).app()) as url:
        outcome = answer_with(context, url, probe_prompts=0, max_unusable=0.5)
    ids = [*context.target.tokenizer(text).input_ids, EOS_ID]
    assert [answer["tokens"] for answer in answers_of(context)] == [ids] * 9
    assert outcome.summary["retokenized"] == 9
    assert outcome.summary["left_out"] == "1 not the same after retokenising"


def reader(target: Target) -> AnswerReader:
    settings = AskSettings(Sampling(), NEW, 0, target.eos_token_ids)
    return AnswerReader.of_target(target, settings)


def test_replies_without_ids_are_retokenised_if_that_is_sure() -> None:
    target = tiny_target()
    text = "the dog sells a sea shell"
    ids = target.tokenizer(text).input_ids

    def tokens(text: str, reason: str = "stop", count: int | None = None) -> Any:
        answer = reader(target).answer(Reply(text, reason, token_count=count), [1, 2], "url")
        assert bool(answer.left_out) is not bool(answer.tokens)
        assert answer.retokenized
        return answer.tokens or None

    assert len(ids) < NEW
    assert tokens(text) == [*ids, EOS_ID]
    assert tokens(text, count=len(ids)) == tokens(text, count=len(ids) + 1) == [*ids, EOS_ID]
    assert tokens(text, "length", len(ids)) == ids
    assert tokens(text, "length", len(ids) + 1) is None
    assert tokens(text, count=len(ids) - 1) is None  # other tokens with the same text
    assert tokens("half a character: \ufffd") is None
    target.tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert tokens("The dog") is None


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["completions", "llama-server"])
def test_every_sampling_setting_is_in_a_request(name: str) -> None:
    """Settings that are not sent get an engine's own defaults."""
    sampling = Sampling(0.5, top_k=7, top_p=0.75, min_p=0.125, repetition_penalty=1.5)
    sent = PROTOCOLS[name].body(
        WantedAnswer(3, [1, 2]), AskSettings(sampling, NEW, 0, (2,), "tiny")
    )
    assert {0.5, 7, 0.75, 0.125, 1.5} <= {v for v in sent.values() if isinstance(v, int | float)}
    plain = PROTOCOLS[name].body(
        WantedAnswer(4, [1, 2]), AskSettings(Sampling(), NEW, 0, (2,), "tiny")
    )
    assert plain.keys() == sent.keys()
    assert plain["seed"] != sent["seed"]


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({}, "either url or launch"),
        ({"url": "http://a", "launch": "vllm"}, "either url or launch"),
        ({"url": "http://a:1/v1"}, "leave /v1 out"),
        ({"url": "a:1"}, "expected http://HOST:PORT"),
        ({"url": "http://a:99999"}, "expected http://HOST:PORT"),
        ({"url": "http://[::1"}, "expected http://HOST:PORT"),
        ({"url": "http://user:secret@a:1"}, "expected http://HOST:PORT"),
        ({"url": "http://a", "options": {"x": 1}}, "they need launch"),
    ],
)
def test_settings_that_do_not_fit(server: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerConfig.model_validate(server)


def test_what_is_missing_is_said_in_the_plan(
    context: StageInputs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAFTSMITH_ENGINES", str(tmp_path / "none"))
    for server, message in (
        ({"url": "http://127.0.0.1:9", "key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY, which is not set"),
        ({"launch": "vllm"}, "make engine-vllm"),
    ):
        with pytest.raises(UserError, match=message):
            plan_stage(context, make_stage("generate", "answers", server=server))
