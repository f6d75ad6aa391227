"""The drafter that a distill stage trains: its init weights and its draft vocabulary."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import model_validator
from torch import Tensor
from transformers import PreTrainedModel

from decode.drafters.directory import describe_drafter
from decode.drafters.draft_vocabulary import ReducedVocabulary, load_vocabulary
from decode.errors import UserError
from decode.target.identity import require_same_vocabulary
from decode.target.loading import load_model_and_tokenizer
from distill.choose_vocabulary import most_frequent
from distill.teacher.teacher_signal import LiveTeacher, split_model
from distill.untrained_student import student_from_config, student_from_layers
from train.data.batches import collate, inputs
from train.data.chat import Sample
from train.data.read import spread
from train.schema import Strict
from train.stage import StageContext

# Kinds of stages that make small language models, which later stages can continue to train.
DRAFTER_STAGES = ("distill", "online")
# Number of samples for measuring the probability mass that a draft vocabulary loses.
LOST_MASS_SAMPLES = 16


class StudentConfig(Strict):
    """Where the drafter starts: exactly one of these settings."""

    layers: list[int] | None = None
    """A subset of the target's layers, by number from 0."""
    model: str | None = None
    """An existing smaller model with the same tokenizer: a hub id, directory or GGUF file. Its
    output layer may be padded to another size."""
    config: dict[str, Any] | None = None
    """Changes to the target's config, for a model with random weights."""
    stage: str | None = None
    """The stage whose drafter is trained further: an earlier distill or online stage."""

    @model_validator(mode="after")
    def _one(self) -> "StudentConfig":
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            raise ValueError(
                f"found {', '.join(given) or 'nothing'}; expected exactly one of layers, model, "
                "config, stage"
            )
        return self

    def provenance(self, context: StageContext) -> Any:
        """The drafter's start, for the provenance in its description."""
        if self.stage is not None:
            return describe_drafter(context.outcomes[self.stage] / "drafter")["provenance"]
        return self.model_dump(exclude_none=True)


def make_student(
    start: StudentConfig, context: StageContext
) -> tuple[PreTrainedModel, ReducedVocabulary | None]:
    """The model to train, float32 on the CPU, and its reduced draft vocabulary, if it has one.

    Raises UserError for layers that the target does not have, a model with another vocabulary or
    with too few output rows for it, and a damaged drafter.
    """
    target = context.target
    if start.layers is not None:
        return student_from_layers(target.model, start.layers).cpu(), None
    if start.config is not None:
        return student_from_config(target.model, start.config).cpu(), None
    spec = start.model or ""
    if start.stage is not None:
        spec = str(context.outcomes[start.stage] / "drafter")
        describe_drafter(Path(spec))
    loaded = load_model_and_tokenizer(spec, dtype="float32", device="cpu")
    actual = loaded.fingerprint
    require_same_vocabulary(actual, target.fingerprint, f"drafter {spec}", padding=True)
    if actual.vocab_size < target.token_count:
        raise UserError(
            f"drafter {spec} has {actual.vocab_size} output rows and its tokenizer knows "
            f"{target.token_count} tokens, so it has no row for some that it is to learn; resize "
            "it first (transformers: resize_token_embeddings)"
        )
    return loaded.model.train(), load_vocabulary(Path(spec), loaded.model)


def choose_trained(model: PreTrainedModel, *, embeddings: bool) -> None:
    """Make all weights trainable, or all except the token embeddings and the output layer."""
    model.requires_grad_(True)
    if not embeddings:
        model.get_input_embeddings().requires_grad_(False)
        model.get_output_embeddings().requires_grad_(False)


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Recompute the layers' activations in the backward pass instead of keeping them."""
    # transformers 5.23 uses another name.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    # The embeddings may be frozen, but a checkpointed layer needs an input with a gradient.
    model.enable_input_require_grads()


def frequent_tokens(
    context: StageContext, samples: Sequence[Sample], count: int
) -> tuple[Tensor, dict[str, float]]:
    """The `count` most frequent tokens of the samples' text, int64 ascending, always including the
    end-of-text tokens; and their coverage for the stage's summary. Also prints the coverage."""
    ids, coverage = most_frequent(
        (sample.tokens for sample in samples),
        count,
        context.target.vocab_size,
        always=context.target.eos_token_ids,
    )
    lost = lost_mass(context, spread(samples, LOST_MASS_SAMPLES), ids)
    context.reporter.say(
        f"  draft vocabulary: {len(ids)} tokens cover {coverage:.2%} of the text; the target gives "
        f"{lost:.2%} of its probability there to others"
    )
    return ids, {"draft_vocabulary_coverage": coverage, "draft_vocabulary_lost_mass": lost}


@torch.no_grad()
def lost_mass(context: StageContext, samples: Sequence[Sample], ids: Tensor) -> float:
    """The target's mean probability of tokens outside `ids`, over the predicted tokens of the
    samples. A drafter with this vocabulary has an expected acceptance of at most 1 − this value."""
    target = context.target
    teacher = LiveTeacher(split_model(target.model))
    kept = ids.to(target.device)
    lost, count = 0.0, 0
    for sample in samples:
        batch = collate([sample], target.tokenizer.pad_token_id or 0)
        predicted = sum(sample.mask[1:])
        signal = teacher.signal(**inputs(batch, target.device), ids=batch["ids"])
        logits = signal(slice(0, predicted)).logits
        lost += float((1 - logits.float().softmax(-1)[:, kept].sum(-1)).sum())
        count += predicted
    return lost / count
