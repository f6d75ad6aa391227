"""Multi-token prediction: the module in a checkpoint drafts as it does in transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from decode.base.errors import UserError
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.several.combined import CompositeDrafter
from decode.loop.decoding import Decoder
from decode.model.loading import load_target
from decode.opening.directory import open_drafter
from decode.shapes import SHAPES
from heads.mtp_drafter import MtpDrafter
from heads.mtp_heads import MtpHeads
from heads.options import MtpOptions
from tests.contract import (
    check_greedy_texts_survive_everything,
    check_rows_are_their_own,
)
from tests.lossless import LONGER
from tests.mtp_targets import AFTER, change_tensors, save_mtp_target
from tests.tiny import tiny_target
from tests.trained_heads import check_drafts_are_trained

# transformers needs prompts with more tokens than the module has layers.
PROMPTS = [[5, 3, 4, 1, 3, 0, 5, 4], [7, 11, 13, 2, 7, 11, 13, 9, 8, 6, 4], [15, 16, 3, 15]]
NEW = 8
OTHERS = [
    pytest.param(name, marks=pytest.mark.thorough) for name in ("qwen3_next", "qwen3_5_moe_text")
]
# A prompt, the text after it, and the drafts, one after the other.
Run = tuple[list[int], list[int], list[list[int]]]


def their_runs(target: Any, patch: pytest.MonkeyPatch) -> list[Run]:
    """The texts and drafts of transformers' own decoding with the module."""
    drafts: list[list[int]] = []
    draft = MTPCandidateGenerator.get_candidates

    def recorded(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        ids, logits = draft(self, input_ids, *args, **kwargs)
        if ids.shape[1] > input_ids.shape[1]:
            drafts.append(ids[0, input_ids.shape[1] :].tolist())
        return ids, logits

    patch.setattr(MTPCandidateGenerator, "get_candidates", recorded)
    if target.model.config.model_type in AFTER:
        # transformers knows the numbers of the published checkpoints only.
        patch.setattr(target.model, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[2-9]"])
    runs = []
    for prompt in PROMPTS:
        ids, begin = torch.tensor([prompt]), len(drafts)
        text = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            use_mtp=True,
            eos_token_id=None,
        )
        runs.append((prompt, text[0, len(prompt) :].tolist(), drafts[begin:]))
    return runs


def our_runs(target: Any, drafter: Any, gamma: int) -> list[Run]:
    drafts: list[list[int]] = []

    def recorded(*args: Any) -> Any:
        made = type(drafter).draft(drafter, *args)
        drafts.append(made.tokens[0, : made.sizes[0]].tolist())
        return made

    drafter.draft = recorded
    decoder, runs = Decoder(target.model, drafter, gamma=gamma), []
    for prompt in PROMPTS:
        begin = len(drafts)
        text = decoder.decode([prompt], NEW).outputs[0]
        runs.append((prompt, text, drafts[begin:]))
    return runs


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("deepseek_v3", 3),
        ("mellum", 1),
        pytest.param("glm4_moe", 1, marks=pytest.mark.thorough),
        pytest.param("glm4_moe", 2, marks=pytest.mark.thorough),
        pytest.param("deepseek_v3", 1, marks=pytest.mark.thorough),
    ],
)
def test_drafts_are_those_of_transformers(
    family: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(str(save_mtp_target(tmp_path / "target", family, layers)))
    ours = our_runs(target, open_drafter("mtp", target), layers)
    seen = set()
    for run, other in zip(ours, their_runs(target, monkeypatch), strict=True):
        assert run[1] == other[1]
        for draft, their in zip(run[2], other[2], strict=False):  # they draft beyond the end
            assert draft == their[: len(draft)]
            seen.add(tuple(draft))
    assert len(seen) > 4


@pytest.mark.parametrize("family", ["qwen3_5_text", *OTHERS])
def test_drafts_of_families_that_transformers_does_not_draft_with(
    family: str, tmp_path: Path
) -> None:
    """Their targets have running states. The module alone is one that transformers can run."""
    target = load_target(str(save_mtp_target(tmp_path / "target", family)))
    runs = our_runs(target, open_drafter("mtp", target), 1)
    model = target.model
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    module = MtpModel.from_pretrained(model).eval()
    seen = set()
    for prompt, text, drafts in runs:
        states = model.model(torch.tensor([prompt + text])).last_hidden_state
        place = 1  # the first token comes without a draft
        for draft in drafts:
            ids = torch.tensor([prompt + text[:place]])
            length = ids.shape[1]
            expected, _, _ = module(
                ids[:, 1:], states[:, : length - 1], None, torch.arange(1, length)[None], None
            )
            assert draft == expected[0, : len(draft)].tolist()
            seen.add(tuple(draft))
            place += 1 + (draft == text[place : place + len(draft)]) * len(draft)
        assert place >= NEW - 1
    assert len(seen) > 4


def layered() -> MtpDrafter:
    """A drafter with a layer for each of two tokens."""
    lm = LONGER.model(0.0)
    heads = MtpHeads(MtpOptions(layers=2, depth=2), lm)
    heads.init_weights(lm)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    heads.borrow(lm)
    return MtpDrafter(heads, LONGER.vocab)


def test_a_layer_for_each_token() -> None:
    """Their last entries read drafted tokens, and are computed again."""
    check_rows_are_their_own(layered)
    check_greedy_texts_survive_everything(lambda: CompositeDrafter([NgramDrafter(2, 3), layered()]))


def test_a_layer_for_each_token_predicts_as_in_training() -> None:
    check_drafts_are_trained(layered().heads, LONGER.model(0.0))


def test_trees_of_several_layers_are_refused() -> None:
    with pytest.raises(UserError, match="2 layers, one for each token of a draft, and draft chain"):
        layered().with_shape(SHAPES["dynamic"](width=2, nodes=4))
    with pytest.raises(UserError, match=r"each of the 2 layers .* set depth to at most 2"):
        MtpOptions(layers=2, depth=3).require_window()


def test_checkpoints_without_a_sound_module_are_refused(tmp_path: Path) -> None:
    directory = save_mtp_target(tmp_path / "target", "qwen3_5_text")

    def refused(match: str, target: Any = None) -> None:
        with pytest.raises(UserError, match=match):
            open_drafter("mtp", target or load_target(str(directory)))

    refused("is of the family llama, whose module", tiny_target())
    target = load_target(str(directory))
    with pytest.raises(UserError, match="heads of type mtp have no option 'gamma'"):
        open_drafter("mtp:gamma=2", target)
    with pytest.raises(UserError, match=r"layers is 2, but the module of .* has 1"):
        open_drafter("mtp:layers=2", target)
    target.model.config.mtp_num_hidden_layers = None
    refused(r"has the tensors of a module .* of 1 layers, .* Set mtp_num_hidden_layers: 1", target)
    left = directory / "model-mtp.safetensors"
    save_file({"mtp.norm.weight": torch.ones(32)}, left)
    refused(r"has mtp.norm.weight in model-mtp.safetensors and in model.safetensors; one of them")
    left.unlink()
    norm = {"mtp.norm.weight": torch.ones(31)}
    change_tensors(directory, norm)
    refused(r"mtp.norm.weight in .* is \[31\], expected \[32\]")
    change_tensors(directory, {"mtp.norm.weight": torch.ones(32, dtype=torch.float8_e4m3fn)})
    refused("is quantised: mtp.norm.weight is F8_E4M3, expected one of")
    change_tensors(directory, {"mtp.layers.1.mlp.up_proj.weight": torch.ones(2)}, "mtp.norm")
    refused("lacks mtp.norm.weight and has mtp.layers.1.mlp.up_proj.weight, which the config does")
    change_tensors(directory, {}, "mtp.")
    refused("has no tensor of a module .* no name begins with mtp.layers.0.")
    target.model.config.mtp_num_hidden_layers = 0
    refused("config of .* says that it has no module .*mtp_num_hidden_layers is 0", target)
