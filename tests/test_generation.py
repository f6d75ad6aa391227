"""The checkpoint's `generation_config`: put aside beside us, followed where users expect it."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from decode.base.errors import UserError
from decode.draw.sampling import Sampling
from decode.model.generation_config import nothing_filled_in, sampling_as_generate
from decode.model.loading import Target
from decode.settings import EvaluationProtocol
from decode.text import SpeculativeGenerator
from decode.text_stream import decode
from tests.tiny import EOS_ID, PAD_ID, plain_texts, tiny_model, tiny_target, tiny_tokenizer
from train.measure.timed_prompts import time_generate
from train.settings.generate_config import GenerateConfig
from train.stages.generate import _beam_search

NEW = 24
TEXTS = ["The quick brown fox", "sea shells", "She sells sea shells by the sea"]
IDS = [tiny_tokenizer()(text).input_ids for text in TEXTS]
# What chat models come with, and more.
CHECKPOINT: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 3,
    "top_p": 0.8,
    "min_p": 0.1,
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 2,
    "suppress_tokens": [5, 6, 7],
    "min_new_tokens": 20,
    "num_beams": 2,
    "prompt_lookup_num_tokens": 3,
}


def with_config(target: Target, **settings: Any) -> Target:
    special = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    target.model.generation_config = GenerationConfig(**special, **settings)
    return target


def ours(target: Target, ids: list[int], sampling: Sampling) -> list[int]:
    options = {"eos_token_ids": target.eos_token_ids, "sampling": sampling}
    return plain_texts(target.model, [ids], NEW, **options)[0]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(repetition_penalty=1.1),
        Sampling(0.9, top_k=1),  # sampled, and yet there is one text only
    ],
    ids=["greedy", "penalty", "sampled"],
)
def test_generate_beside_us_is_timed_on_the_same_settings(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = with_config(tiny_target(), **CHECKPOINT)
    kept, generate = target.model.generation_config, target.model.generate
    said = []

    def watched(ids: torch.Tensor, **options: Any) -> torch.Tensor:
        found = generate(ids, **options)
        said.append(found[0, ids.shape[1] :].tolist())
        return found

    monkeypatch.setattr(target.model, "generate", watched)
    protocol = EvaluationProtocol(sampling=sampling, timed_tokens=NEW)
    for ids in IDS:
        assert time_generate(target, [ids], protocol)[1] == len(ours(target, ids, sampling))
    assert said == [ours(target, ids, sampling) for ids in IDS]
    assert target.model.generation_config is kept


def test_the_checkpoints_config_is_put_back_after_an_error() -> None:
    lm = with_config(tiny_target(), **CHECKPOINT).model
    kept = lm.generation_config
    with pytest.raises(KeyError), nothing_filled_in(lm):
        raise KeyError
    assert lm.generation_config is kept


def test_beam_search_answers_on_the_stages_settings_alone() -> None:
    settings = GenerateConfig(name="answers", num_beams=3, max_new_tokens=NEW)
    plain = _beam_search(with_config(tiny_target()), IDS, settings)
    assert _beam_search(with_config(tiny_target(), **CHECKPOINT), IDS, settings) == plain


# --- text in, text out ----------------------------------------------------------------------------


def generator(**config: Any) -> SpeculativeGenerator:
    target = with_config(tiny_target(), **config)
    return SpeculativeGenerator(target.model, target.tokenizer, "ngram")


def generated(lm: Any, ids: list[int], **options: Any) -> str:
    """What `model.generate()` answers where it fills in the rest itself."""
    tokens = torch.tensor([ids])
    found = lm.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW, **options
    )
    return decode(tiny_tokenizer(), found[0, len(ids) :].tolist())


@pytest.mark.parametrize(
    "config",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 1.3, "temperature": 0.7, "top_k": 5},  # greedy: no do_sample
        {"repetition_penalty": 1.3, "do_sample": True, "temperature": 0.7, "top_k": 1},
    ],
    ids=["penalty", "filters", "sampled"],
)
def test_text_is_that_of_generate_on_this_checkpoint(config: dict[str, Any]) -> None:
    found = generator(**config)
    wanted = [generated(found.model, ids) for ids in IDS]
    assert found.generate(TEXTS, max_new_tokens=NEW) == wanted
    # What the call says goes before what the checkpoint says.
    plain = [generated(tiny_model("llama"), ids, do_sample=False) for ids in IDS]
    assert plain != wanted
    said = {"temperature": 0.0, "repetition_penalty": 1.0}
    assert found.generate(TEXTS, max_new_tokens=NEW, **said) == plain


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
        {"do_sample": True, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05},
        {"temperature": 0.6, "top_k": 20},
    ],
)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 1.2},
        {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0},
        {"top_p": 0.5},
    ],
)
def test_settings_are_filled_in_as_transformers_does(
    config: dict[str, Any], given: dict[str, Any]
) -> None:
    lm = with_config(tiny_target(), **config).model
    found = sampling_as_generate(lm.generation_config, **given)
    drawn = {"do_sample": True} if "temperature" in given else {}
    theirs, _ = lm._prepare_generation_config(GenerationConfig(**drawn, **given))
    assert found.greedy is not theirs.do_sample
    assert found.repetition_penalty == theirs.repetition_penalty
    if not found.greedy:
        assert (found.temperature, found.top_k) == (theirs.temperature, theirs.top_k)
        assert (found.top_p, found.min_p) == (theirs.top_p, theirs.min_p or 0.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"no_repeat_ngram_size": 3}, r"no_repeat_ngram_size=3.*no_repeat_ngram_size = 0\)"),
        ({"suppress_tokens": [3], "min_new_tokens": 4}, "suppress_tokens=.3., min_new_tokens=4"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5, which generate.. applies"),
        ({"do_sample": True, "typical_p": 0.9}, "typical_p=0.9"),
        ({"num_beams": 4}, "num_beams is 4; expected 1, .* set num_beams=1"),
    ],
)
def test_what_this_loop_does_not_have_is_refused_by_name(
    config: dict[str, Any], message: str
) -> None:
    found = generator(**config)
    with pytest.raises(UserError, match=message):
        found.generate(TEXTS[0], max_new_tokens=2)


def test_what_is_switched_off_is_not_refused() -> None:
    off = {"no_repeat_ngram_size": 0, "suppress_tokens": [], "guidance_scale": 1.0, "min_length": 0}
    greedy = generator(**off, typical_p=0.9)  # a filter: greedy text does not know it
    assert greedy.generate(TEXTS[0], max_new_tokens=NEW) == generated(tiny_model("llama"), IDS[0])
    beams = generator(num_beams=4).generate(TEXTS[0], max_new_tokens=NEW, num_beams=1)
    assert beams == greedy.generate(TEXTS[0], max_new_tokens=NEW)
