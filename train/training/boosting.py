"""Boost-tuned drafters (SpecInfer, 2305.09781, section 3): each learns what the ones before miss.

Drafted together in one tree (`A++B`), drafters that were trained alike guess the same tokens. So
the next drafter is trained on the tokens that the earlier ones do not guess. The paper leaves out
each sample that an earlier drafter continues as the target does. Here each token of a sample has a
weight, because small drafters get few samples right from beginning to end.

Shapes: B rows, T tokens, n predicted tokens.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from decode.drafters.directory import describe_drafter
from decode.drafters.draft_vocabulary import load_vocabulary
from decode.errors import UserError
from decode.target.identity import require_same_vocabulary
from decode.target.loading import Target, load_target
from decode.target.without_weights import load_shapes
from distill.teacher.teacher_signal import LiveTeacher, split_model
from train.data.batches import Inputs, bucket_batches, collate, inputs
from train.data.chat import Sample
from train.online.learners import drafts_in_parallel, has_other_tokenizer, heads_stage
from train.schema import StageConfig, Strict, closest_stage
from train.training.student_and_teacher import DRAFTER_STAGES


class BoostConfig(Strict):
    """A drafter that learns the tokens that earlier drafters miss (SpecInfer, 2305.09781)."""

    missed_by: str | Annotated[list[str], Field(min_length=1)]
    """The earlier drafters: the name of a distill or online stage, a drafter directory, or several
    of them. A token is missed if it is the likeliest token of none of them."""
    hit_weight: float = Field(0.1, ge=0, lt=1)
    """The weight of a token that an earlier drafter guesses; that of a missed token is 1. 0: learn
    only the missed tokens."""

    @property
    def names(self) -> list[str]:
        """The earlier drafters, as a list."""
        return [self.missed_by] if isinstance(self.missed_by, str) else self.missed_by


def check_boost(config: BoostConfig, earlier: Sequence[StageConfig], *, stage: str) -> None:
    """Raise UserError if an earlier drafter is neither a directory nor that of an earlier stage, or
    if that stage makes another kind of drafter."""
    for name in config.names:
        if name not in {other.name for other in earlier} and Path(name).is_dir():
            continue
        closest_stage(name, earlier, *DRAFTER_STAGES)
        if (
            heads_stage(name, earlier) is not None
            or drafts_in_parallel(name, earlier)
            or has_other_tokenizer(name, earlier)
        ):
            raise UserError(
                f"stage {stage}: boost.missed_by names {name}, whose drafter is heads, drafts in "
                "parallel or has another tokenizer than the target; expected a stage whose drafter "
                "is a small language model that drafts one token after the other"
            )


def check_earlier_drafter(path: Path, target: Target) -> None:
    """Raise UserError for a directory that is not that of a small language model which drafts one
    token after the other, or whose vocabulary is not the target's."""
    kind = describe_drafter(path)["kind"]
    if kind != "small_lm":
        raise UserError(
            f"boost.missed_by: the drafter {path} is of the kind {kind}; expected a small language "
            "model that drafts one token after the other"
        )
    shapes = load_shapes(str(path), dtype="float32", device="cpu").fingerprint
    require_same_vocabulary(shapes, target.fingerprint, f"drafter {path}", padding=True)


class _Guesses:
    """The likeliest next tokens of a stored drafter, computed in float32 on `device`."""

    def __init__(self, path: Path, device: torch.device, tokens: int) -> None:
        model = load_target(str(path), dtype="float32", device="cpu").model
        vocabulary = load_vocabulary(path, model)
        model.to(device)
        self._ids = None if vocabulary is None else vocabulary.ids.to(device)
        self._known = model.config.get_text_config().vocab_size
        # A reduced output layer has the rows of its vocabulary only.
        self._logits = LiveTeacher(split_model(model), tokens=tokens)

    @torch.no_grad()
    def are_right(self, batch: Inputs, labels: Tensor, chunk: int) -> Tensor:
        """bool [n]: whether the likeliest token is the text's. labels: int64 [n]. chunk: the
        number of tokens whose logits are in memory at a time."""
        # Ids past the drafter's embeddings become its last one, as in training.
        known = batch | {"input_ids": batch["input_ids"].clamp(max=self._known - 1)}
        logits = self._logits.signal(**known, ids=[])
        right = torch.zeros_like(labels, dtype=torch.bool)
        for begin in range(0, len(labels), chunk):
            part = slice(begin, begin + chunk)
            guesses = logits(part).logits.argmax(-1)
            right[part] = (guesses if self._ids is None else self._ids[guesses]) == labels[part]
        return right


class TokenWeights:
    """The loss weights of a text's predicted tokens, with a mean of 1.

    of_samples: float32 [n] by the id of a sample. missed: the share of the text's tokens that the
    earlier drafters miss.
    """

    def __init__(self, of_samples: dict[str, Tensor], missed: float) -> None:
        self.of_samples, self.missed = of_samples, missed

    def of(self, ids: Sequence[str], device: torch.device) -> Tensor:
        """float32 [n]: the weights of a batch's predicted tokens, in the order of its rows."""
        parts = [self.of_samples[sample] for sample in ids]
        return torch.cat(parts).to(device) if parts else torch.zeros(0, device=device)


def token_weights(
    config: BoostConfig,
    paths: Sequence[Path],
    samples: Sequence[Sample],
    device: torch.device,
    *,
    tokens: int,
    tokens_per_batch: int,
    chunk: int,
    progress: Callable[[int], None] = lambda done: None,
) -> TokenWeights:
    """The weights of all predicted tokens of the samples.

    They are computed once, in batches that do not depend on the training, so a training that was
    stopped continues with the same ones. One drafter is in memory at a time.

    paths: the directories of the earlier drafters. tokens: the number of ids that are tokens.
    progress: gets the number of samples that were read. Raises UserError if no weight is above 0.
    """
    lengths = [len(sample.tokens) for sample in samples]
    batches = bucket_batches(lengths, tokens_per_batch=tokens_per_batch, seed=0, epoch=0)
    right = [torch.zeros(sum(sample.mask[1:]), dtype=torch.bool) for sample in samples]
    done = 0
    for path in paths:
        guesses = _Guesses(path, device, tokens)
        for rows in batches:
            batch = inputs(collate([samples[i] for i in rows], 0), device)
            labels = batch["input_ids"][:, 1:][batch["loss_mask"][:, 1:]]
            found = guesses.are_right(batch, labels, chunk).cpu()
            for i, part in zip(rows, found.split([len(right[i]) for i in rows]), strict=True):
                right[i] |= part
            done += len(rows)
            progress(done)
    count = sum(len(part) for part in right)
    hits = sum(int(part.sum()) for part in right)
    total = count - hits + config.hit_weight * hits
    if not total:
        raise UserError(
            f"boost: {', '.join(config.names)} guess every token of the text, so nothing is left "
            "to learn; set boost.hit_weight above 0, or train on other text"
        )
    scale = count / total
    weights = {
        sample.id: torch.where(part, config.hit_weight * scale, scale).float()
        for sample, part in zip(samples, right, strict=True)
    }
    return TokenWeights(weights, (count - hits) / count)
