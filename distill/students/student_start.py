"""Where a small language model that is trained starts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.drafters.draft_vocabulary import ReducedVocabulary, load_vocabulary
from decode.model.forward.low_rank_output import LowRankLinear
from decode.model.identity import Fingerprint, require_same_vocabulary
from decode.model.loading import Target, load_target
from decode.model.without_weights import load_shapes
from decode.opening.directory import describe_drafter
from distill.student_settings import StudentConfig
from distill.untrained_student import student_from_config, student_from_layers


def start_provenance(start: StudentConfig, earlier: Mapping[str, Path]) -> Any:
    """The drafter's start, for the provenance in its description. earlier: the directories of
    earlier stages by name."""
    if start.stage is not None:
        return describe_drafter(earlier[start.stage] / "drafter")["provenance"]
    return start.model_dump(exclude_none=True)


def start_model(
    start: StudentConfig, target: Target, earlier: Mapping[str, Path]
) -> tuple[PreTrainedModel, ReducedVocabulary | None]:
    """The model to train, float32 on the CPU, and its reduced draft vocabulary, if it has one. It
    has no weights if the target has none (`decode.model.without_weights`).

    earlier: the directories of earlier stages by name. Raises UserError for layers that the target
    does not have, a model with another vocabulary (unless `vocabulary` is shared) or with too few
    output rows for it, a model without an encoder if the target has one, and a damaged drafter.
    """
    with torch.device("cpu" if target.has_weights else "meta"):
        if start.layers is not None:
            return student_from_layers(target.model, start.layers), None
        if start.config is not None:
            return student_from_config(target.model, start.config), None
    spec = start.spec(earlier)
    if start.stage is not None:
        describe_drafter(Path(spec))
    if target.has_weights:
        loaded = load_target(spec, dtype="float32", device="cpu", encoder=target.has_encoder)
    else:
        loaded = load_shapes(spec, dtype="float32", device="cpu")
    if target.has_encoder and not loaded.has_encoder:
        raise UserError(
            f"drafter {spec} has no encoder, but the target has one; start the drafter from a "
            "model with an encoder, or from layers of the target's decoder"
        )
    drafter = loaded.fingerprint
    if start.vocabulary is None:
        _require_target_tokens(drafter, target, spec)
    return loaded.model.train(), load_vocabulary(Path(spec), loaded.model)


def _require_target_tokens(drafter: Fingerprint, target: Target, spec: str) -> None:
    try:
        require_same_vocabulary(drafter, target.fingerprint, f"drafter {spec}", padding=True)
    except UserError as error:
        raise UserError(
            f"{error} Or set `vocabulary: shared` for this drafter: then it learns to draft the "
            "tokens that both have"
        ) from error
    if drafter.vocab_size < target.token_count:
        raise UserError(
            f"drafter {spec} has {drafter.vocab_size} output rows, but its tokenizer knows "
            f"{target.token_count} tokens, so some tokens have no output row; resize it first "
            "(transformers: resize_token_embeddings)"
        )


def choose_trained(model: PreTrainedModel, *, embeddings: bool) -> None:
    """Make all weights trainable, or all except the token embeddings and the output layer. Factors
    of an output layer are always trained."""
    model.requires_grad_(True)
    if not embeddings:
        model.get_input_embeddings().requires_grad_(False)
        output = model.get_output_embeddings()
        output.requires_grad_(isinstance(output, LowRankLinear))


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Recompute the layers' activations in the backward pass instead of keeping them."""
    # transformers 5.23 uses another name.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    # The embeddings may be frozen, but a checkpointed layer needs an input with a gradient.
    model.enable_input_require_grads()
