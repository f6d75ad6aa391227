"""What a generate stage keeps for a later cache: the states of a pass over the whole text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.model.hidden_states import FINAL
from decode.model.loading import Target
from distill.teacher import cache_parts
from distill.teacher.cached_features import CachedFeatures
from distill.teacher.feature_sources import LiveFeatures
from tests.stages import make_stage, plan_stage, run_stage
from tests.training import Killed, before_call
from train.base.stage import StageInputs, StageResult
from train.data.corpus import read_answers
from train.stages import generate

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

LAYERS = [FINAL, 0]
SAMPLED = {"samples": 3, "sampling": {"temperature": 1.5}}
ANSWERS = {"max_new_tokens": 12, "batch_size": 4, "part_prompts": 6}


@pytest.fixture
def ending(context: StageInputs, target: Target) -> StageInputs:
    """A quarter of the tokens end a text, so that the lengths of answers differ."""
    ends = tuple(range(0, target.token_count, 4))
    return replace(context, target=replace(target, eos_token_ids=ends))


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
            stored = states[sample.id][layer]
            torch.testing.assert_close(stored, whole[layer][0], rtol=1e-4, atol=1e-5)


def tokens(context: StageInputs, name: str = "answers") -> list[list[int]]:
    return [answer["tokens"] for answer in read_answers(context.earlier[name])]


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: (path / cache_parts.FILE).read_bytes() for path in directory.glob("part-*")}


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_states_of_answers_are_those_of_a_pass_over_the_whole_text(
    ending: StageInputs, settings: dict[str, Any]
) -> None:
    """Also where a training reads the beginning of some texts only. No text is read again."""
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
                before_call(patch, generate, "write_answers", 2)
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
