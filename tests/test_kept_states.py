"""What a generate stage keeps for a later cache: the states of a pass over the whole text."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from decode.base.errors import UserError
from decode.model.hidden_states import FINAL
from distill.teacher import cache_parts
from distill.teacher.cached_features import CachedFeatures
from distill.teacher.feature_sources import LiveFeatures
from tests.answer_server import AnswerEngine
from tests.export import needs, save_target
from tests.stages import examples, make_stage, plan_stage, run_stage, stage_context, with_examples
from tests.state_server import Tensors, states_file
from tests.tiny import as_target, tiny_llama
from tests.training import Killed, before_call
from tests.upstream import served
from train.base.stage import StageInputs, StageResult
from train.data.answer_files import AnswerFiles, read_answers
from train.engines import launch
from train.engines.answers import server_answers
from train.engines.programs import VLLMBuild
from train.stages import generate

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

LAYERS = [FINAL, 0]
SAMPLED = {"samples": 3, "sampling": {"temperature": 1.5}}
ANSWERS = {"max_new_tokens": 12, "batch_size": 4, "part_prompts": 6}


@pytest.fixture
def ending(context: StageInputs) -> StageInputs:
    return with_ends(context)


def with_ends(context: StageInputs) -> StageInputs:
    """A quarter of the tokens end a text, so that the lengths of answers differ."""
    ends = tuple(range(0, context.target.token_count, 4))
    return replace(context, target=replace(context.target, eos_token_ids=ends))


def cache_stage(**settings: Any) -> Any:
    earlier = [make_stage("generate", name) for name in ("answers", "others")]
    settings = {"captured_layers": LAYERS, "part_samples": 4, "text": "answers"} | settings
    return make_stage("feature_cache", "cache", *earlier, **settings)


def answer(context: StageInputs, *later: Any, name: str = "answers", **settings: Any) -> None:
    stage = make_stage("generate", name, **(ANSWERS | settings))
    run_stage(replace(context, later=later), stage)


def cached(
    context: StageInputs, stage: Any
) -> tuple[StageResult, dict[str, dict[int, torch.Tensor]]]:
    """A cache stage's outcome, and the states of each sample by layer."""
    outcome = run_stage(context, stage)
    cache = CachedFeatures(context.earlier["cache"], context.target, stage.captured_layers)
    return outcome, {
        name: {k: x[0] for k, x in cache.read_batch([name]).items()} for name in cache.samples
    }


def assert_those_of_whole_texts(
    context: StageInputs, states: dict[str, dict[int, torch.Tensor]], longest: int
) -> None:
    live = LiveFeatures(context.target.model, LAYERS)
    samples = context.corpus.samples("answers")
    assert {sample.id for sample in samples} == states.keys()
    for sample in samples:
        ids = torch.tensor([sample.tokens[:longest]])
        whole = live.features(ids, torch.ones_like(ids), [sample.id])
        for layer in LAYERS:
            stored, expected = states[sample.id][layer], whole[layer][0]
            assert stored.dtype == expected.dtype == context.target.dtype
            # Of each token. Passes over other numbers of tokens round in another order, an engine's
            # kernels too: some of bfloat16's roundings lie in a state. Other tokens' differ by 1.
            off = (stored.double() - expected.double()).norm(dim=-1)
            bound = 1e-5 if stored.dtype == torch.float32 else 8 * torch.finfo(stored.dtype).eps
            assert (off < bound * expected.double().norm(dim=-1)).all()


def tokens(context: StageInputs, name: str = "answers") -> list[list[int]]:
    return [answer["tokens"] for answer in read_answers(context.earlier[name])]


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: (path / cache_parts.FILE).read_bytes() for path in directory.glob("part-*")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_states_of_answers_are_those_of_a_pass_over_the_whole_text(
    tmp_path: Path, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    """Also where a training reads the beginning of some texts only. No text is read again."""
    model = tiny_llama().requires_grad_(False).to(dtype)
    ending = with_ends(stage_context(tmp_path, as_target(model)))
    answer(ending, name="plain", **settings)
    longest = max(map(len, ending.corpus.prompts(ending.corpus.examples["train"]))) + 2
    cache = cache_stage(max_length=longest)
    answer(ending, cache, **settings)
    lengths = {*map(len, tokens(ending))}
    assert tokens(ending) == tokens(ending, "plain")
    assert min(lengths) < 3 < max(lengths)
    outcome, states = cached(ending, cache)
    assert outcome.summary["samples"]["truncated"] > 0
    assert outcome.summary["tokens"] == sum(len(x[FINAL]) for x in states.values())
    assert outcome.summary["tokens_scored"] == 0
    assert_those_of_whole_texts(ending, states, longest)


def test_only_what_the_answers_do_not_give_is_read(ending: StageInputs) -> None:
    """Texts of other stages, other layers, and texts that fill the target's context: the last token
    of such a text was never fed."""
    answer(ending, cache_stage(captured_layers=[FINAL]))
    answer(ending, name="others", split="dev")
    both = cache_stage(text=["answers", "others"], captured_layers=[FINAL])
    outcome, states = cached(ending, both)
    others = ending.corpus.samples("others")
    assert outcome.summary["tokens_scored"] == sum(len(sample.tokens) for sample in others)
    assert len(states) == 10 + len(others)
    for case, context, layers in (
        ("layers", ending, [FINAL]),
        ("ends", replace(ending, target=replace(ending.target, eos_token_ids=())), LAYERS),
    ):
        context = replace(context, directory=ending.directory / case)
        answer(context, cache_stage(captured_layers=layers), max_new_tokens=2048, prompts=2)
        outcome, states = cached(context, cache_stage())
        assert outcome.summary["tokens_scored"] == outcome.summary["tokens"]
        assert_those_of_whole_texts(context, states, 2048)
    assert {len(x[FINAL]) for x in states.values()} == {ending.target.max_positions}


def test_a_kill_loses_no_state(ending: StageInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_stage()
    for name in ("whole", "killed"):
        context = replace(ending, directory=ending.directory / name)
        if name == "killed":
            with monkeypatch.context() as patch:
                before_call(patch, AnswerFiles, "add", 2)
                with pytest.raises(Killed):
                    answer(context, cache)
        answer(context, cache)
        if name == "killed":
            with monkeypatch.context() as patch:
                before_call(patch, cache_parts, "link_directory", 2)
                with pytest.raises(Killed):
                    run_stage(context, cache)
        assert run_stage(context, cache).summary["tokens_scored"] == 0
    whole, killed = (ending.directory / name for name in ("whole", "killed"))
    assert files(killed / "cache") == files(whole / "cache") == files(whole / "answers" / "states")
    # They are on the disk once.
    assert {(part / cache_parts.FILE).stat().st_nlink for part in whole.glob("cache/part-*")} == {2}


def test_the_plan_counts_kept_states_once(ending: StageInputs) -> None:
    stage, cache = make_stage("generate", "answers", **ANSWERS), cache_stage()
    alone, before = (plan_stage(replace(ending, later=later), stage) for later in ([], [cache]))
    assert before.what == alone.what + "; keeps 2 hidden states a token for cache"
    read, kept = (plan_stage(ending, cache, answers=plan) for plan in (alone, before))
    assert kept.what == read.what + "; kept while answering: answers"
    assert (kept.tokens, kept.disk_bytes) == (0, 0)
    assert before.disk_bytes - alone.disk_bytes == read.disk_bytes > 0
    # Those of the answers of a part, in memory until it is written: two layers of 32 float32.
    prompt = alone.text_tokens // 10 - 12
    assert before.memory.states - alone.memory.states == 256 * 6 * (prompt + 12)
    for settings in ({"num_beams": 2}, {"name": "others"}):
        other = stage.model_copy(update=settings)
        assert plan_stage(replace(ending, later=[cache]), other).captured_layers == []


# --- answers of vLLM ------------------------------------------------------------------------------

SERVER = {"keep_states": True, "launch": "vllm", "concurrency": 2, "probe_prompts": 2}


@pytest.fixture
def vllm(
    ending: StageInputs, monkeypatch: pytest.MonkeyPatch
) -> dict[int, Callable[[Tensors], Tensors | None]]:
    """A server in place of vLLM. It goes on after a text's end, and stores what it has read.
    Returns changes of what is stored, by the number of the answer."""
    engine, options = AnswerEngine(ending.target), dict[str, Any]()
    prompts = ending.corpus.prompts(ending.corpus.examples["train"])
    faults: dict[int, Callable[[Tensors], Tensors | None]] = {}

    def store(reply: dict[str, Any], number: int) -> None:
        body, choice = engine.bodies[number - 1], reply["choices"][0]
        if "kv_transfer_params" not in body:  # a probe
            return
        assert (body["ignore_eos"], body["stop_token_ids"]) == (True, [])
        assert body["kv_transfer_params"]["include_output_tokens"]
        ends = body["kv_transfer_params"]["end_token_ids"]
        tokens = choice["token_ids"]
        if tokens[-1] in ends:
            tokens += [7, 4, 9]
        choice |= {"finish_reason": "length", "stop_reason": None}
        read = (body["prompt"] + tokens)[:-1]
        ids = options["speculative_config"]["draft_model_config"]["hf_config"]
        tensors = states_file(ending.target, ids["eagle_aux_hidden_state_layer_ids"], read)
        extra = options["kv_transfer_config"]["kv_connector_extra_config"]
        path = Path(extra["shared_storage_path"], f"cmpl-{body['request_id']}-0-a.safetensors")
        path.with_name(path.name + ".lock").touch()
        row = prompts.index(body["prompt"])
        if (changed := faults.get(row, lambda x: x)(tensors)) is not None:
            save_file(changed, path)

    @contextmanager
    def launched(*_: Any, **given: Any) -> Iterator[list[str]]:
        options.update(given.get("options", {}))
        with served(engine.app()) as url:
            yield [url]

    engine.change = store
    monkeypatch.setattr(server_answers, "launched", launched)
    monkeypatch.setattr(server_answers, "engine_in_words", lambda config: "starting")
    monkeypatch.setattr(generate, "require_server", lambda *_: None)
    monkeypatch.setattr(launch, "find_vllm", lambda _: None)  # one for GPUs, as in a plan elsewhere
    return faults


def assert_kept(context: StageInputs, server: dict[str, Any], settings: dict[str, Any]) -> None:
    """A server's answers, of different lengths, have the states of a pass over the whole text.
    Greedy ones are those of our own loop."""
    answer(context, cache_stage(), server=server, **settings)
    if not settings:
        answer(context, name="ours")
        assert tokens(context) == tokens(context, "ours")
    lengths = {*map(len, tokens(context))}
    assert min(lengths) < 3 < max(lengths) <= 12  # vLLM draws other texts each time
    outcome, states = cached(context, cache_stage())
    assert outcome.summary["tokens_scored"] == 0
    assert_those_of_whole_texts(context, states, 2048)


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_states_of_a_servers_answers_are_those_of_the_whole_text(
    ending: StageInputs, settings: dict[str, Any], vllm: Any
) -> None:
    assert_kept(ending, SERVER, settings)
    assert not list(ending.directory.glob("answers/.tmp-*"))


def test_what_a_server_stores_wrongly_is_read_again(ending: StageInputs, vllm: Any) -> None:
    """A file that is missing or not complete, one of other tokens, one without the last token, and
    states that are not finite."""
    vllm[0] = lambda tensors: None
    vllm[2] = lambda tensors: tensors | {"token_ids": tensors["token_ids"] + 1}
    vllm[4] = lambda tensors: {name: x[:-3].clone() for name, x in tensors.items()}
    vllm[6] = lambda tensors: tensors | {"hidden_states": tensors["hidden_states"] * float("nan")}
    answer(ending, cache_stage(), server=SERVER)
    outcome, states = cached(ending, cache_stage())
    again = [sample for i, sample in enumerate(ending.corpus.samples("answers")) if i in vllm]
    assert outcome.summary["tokens_scored"] == sum(len(sample.tokens) for sample in again)
    assert_those_of_whole_texts(ending, states, 2048)


def test_which_servers_keep_states(
    ending: StageInputs, vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cache = replace(ending, later=[cache_stage()])
    drawn = {"temperature": 0.5}
    for kept, sampling, server, for_cpu in (
        (True, {}, SERVER, True),
        (True, drawn, SERVER, False),
        (None, drawn, SERVER, True),
        (None, drawn | {"min_p": 0.1}, SERVER, False),
        (False, {}, {"launch": "vllm"}, False),
    ):
        build = VLLMBuild(Path("python"), "0.32.0", for_cpu)
        monkeypatch.setattr(launch, "find_vllm", lambda _, found=build: found)
        settings = ANSWERS | {"sampling": sampling, "server": server}
        stage = make_stage("generate", "answers", **settings)
        if kept is None:
            with pytest.raises(UserError, match="vLLM cannot draw with"):
                plan_stage(with_cache, stage)
            continue
        assert plan_stage(with_cache, stage).captured_layers == ([FINAL, 0] if kept else [])
    for server, said in (
        (SERVER | {"options": {"enable-prefix-caching": True}}, "sets itself"),
        ({"url": "http://a", "keep_states": True}, "needs launch: vllm"),
    ):
        with pytest.raises(ValueError, match=said):
            make_stage("generate", "answers", **ANSWERS, server=server)
    monkeypatch.setattr(launch, "find_vllm", lambda _: None)
    # vLLM stores no state in a step in which a text comes near its limit.
    longest = max(map(len, ending.corpus.prompts(ending.corpus.examples["train"])))
    room = ending.target.max_positions - longest - server_answers.SPARE_TOKENS
    for new, some in ((room, True), (room + 1, False)):
        context = replace(ending, directory=ending.directory / str(new))
        answer(context, cache_stage(), server=SERVER, max_new_tokens=new)
        assert (context.earlier["answers"] / "states").exists() is some
    assert str(ending.reporter).count("so no states are kept") == 1


@pytest.mark.engine
@pytest.mark.timeout(280)
@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_vllm_keeps_the_states_of_the_whole_text(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("vllm")
    # On a CPU vLLM draws another text, which has its states too.
    monkeypatch.setattr(generate, "require_states", lambda *_: None)
    context = with_ends(stage_context(tmp_path, save_target(tmp_path / "target")))
    context = with_examples(context, train=examples("train", 6))
    options = {"enforce_eager": True, "max_num_seqs": 3}
    # In parts: with a seed of its own, such a prompt ends vLLM on a CPU.
    options |= {} if settings else {"max_num_batched_tokens": 16}
    server = SERVER | {"concurrency": 4, "options": options}
    assert_kept(context, server, settings)
