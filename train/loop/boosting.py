"""Boost-tuned drafters (SpecInfer, 2305.09781, section 3): each learns what the ones before miss.

Drafted together in one tree (`A++B`), drafters that were trained alike guess the same tokens. So
the next drafter is trained on the tokens that the earlier ones do not guess. The paper leaves out
each sample that an earlier drafter continues as the target does. Here each token of a sample has a
weight, because small drafters get few samples right from beginning to end.

Shapes: B rows, T tokens, n predicted tokens of a batch, N of the text.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from decode.base.artifact import manifest_sha256, verify_directory, write_directory
from decode.base.errors import UserError
from decode.drafters.draft_vocabulary import load_vocabulary
from decode.model.identity import require_same_vocabulary
from decode.model.loading import Target, load_target
from decode.model.without_weights import load_shapes
from decode.opening.directory import describe_drafter
from distill.teacher.cache_parts import text_sha256
from distill.teacher.linear_logits import split_model
from distill.teacher.live_teacher import LiveTeacher
from train.base.drafter_stages import (
    DRAFTER_STAGES,
    drafts_in_parallel,
    has_other_tokenizer,
    heads_stage,
    require_whole,
)
from train.data.batches import Inputs, bucket_batches, collate, inputs
from train.data.chat_tokens import Sample
from train.data.stored_samples import sample_ids, sizes, take, texts
from train.measure.ranks import ALONE, Ranks
from train.settings.schema import StageConfig, closest_stage
from train.settings.training import BoostConfig

FILE = "right.npy"  # whether tokens are guessed, eight in a byte


def check_boost(config: BoostConfig, earlier: Sequence[StageConfig], *, stage: str) -> None:
    """Raise UserError if an earlier drafter is neither a directory nor that of an earlier stage, or
    if that stage makes another kind of drafter."""
    for name in config.names:
        if name not in {other.name for other in earlier} and Path(name).is_dir():
            continue
        closest_stage(name, earlier, *DRAFTER_STAGES)
        require_whole(stage, name, earlier)
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

    right: bool [N], whether an earlier drafter guesses a token, sample after sample. missed: the
    share of the text's tokens that none guesses. Raises UserError if no weight is above 0.
    """

    def __init__(self, config: BoostConfig, samples: Sequence[Sample], right: np.ndarray) -> None:
        count, hits = len(right), int(right.sum())
        total = count - hits + config.hit_weight * hits
        if not total:
            raise UserError(
                f"boost: {', '.join(config.names)} guess every token of the text, so nothing is "
                "left to learn; set boost.hit_weight above 0, or train on other text"
            )
        self._hit, self._miss = config.hit_weight * count / total, count / total
        self._right = right
        self._begins = np.append(0, np.cumsum(sizes(samples)[1], dtype=np.int64))
        names = sample_ids(samples, range(len(samples)))
        self._rows = {name: row for row, name in enumerate(names)}
        self.missed = (count - hits) / count

    def of(self, ids: Sequence[str], device: torch.device) -> Tensor:
        """float32 [n]: the weights of a batch's predicted tokens, in the order of its rows."""
        rows = [self._rows[name] for name in ids]
        parts = [self._right[self._begins[row] : self._begins[row + 1]] for row in rows]
        right = torch.as_tensor(np.concatenate([np.zeros(0, bool), *parts]), device=device)
        return torch.where(right, self._hit, self._miss).float()


@dataclass(frozen=True)
class ReadingSettings:
    """How earlier drafters read a text. tokens: the number of ids that are tokens.
    tokens_per_batch: the tokens of a batch on each rank. chunk: the number of tokens whose logits
    are in memory at a time."""

    device: torch.device
    tokens: int
    tokens_per_batch: int
    chunk: int


def stored_guesses(
    directory: Path,
    paths: Sequence[Path],
    samples: Sequence[Sample],
    reading: ReadingSettings,
    ranks: Ranks,
    progress: Callable[[int], None],
) -> np.ndarray:
    """`guesses`, from the directory if it has them already, else written there. A restart then runs
    no earlier drafter again. All ranks call this together."""
    made_by = ranks.main_only(lambda: _digest(paths, samples))
    name = directory / f"guesses-{made_by}"
    if not ranks.main_only(name.exists):
        right = guesses(paths, samples, reading, ranks, progress)
        packed = np.packbits(right)
        ranks.main_only(lambda: write_directory(name, lambda tmp: np.save(tmp / FILE, packed)))
    ranks.together(lambda: verify_directory(name))
    count = int(sizes(samples)[1].sum(dtype=np.int64))
    return np.unpackbits(np.load(name / FILE), count=count).astype(bool)


def guesses(
    paths: Sequence[Path],
    samples: Sequence[Sample],
    reading: ReadingSettings,
    ranks: Ranks = ALONE,
    progress: Callable[[int], None] = lambda done: None,
) -> np.ndarray:
    """bool [N]: of all predicted tokens of the samples, whether one of the drafters guesses them.

    Each rank reads a share of the text, with one drafter in memory at a time. The batches do not
    depend on the training. paths: the directories of the earlier drafters. progress: gets the
    number of samples that were read.
    """
    lengths, predicted = sizes(samples)
    batches = bucket_batches(
        lengths.tolist(), tokens_per_batch=reading.tokens_per_batch, seed=0, epoch=0
    )
    ends = np.cumsum(predicted, dtype=np.int64)
    right = np.zeros(ends[-1], bool)
    done = 0
    for path in paths:
        drafter = _Guesses(path, reading.device, reading.tokens)
        for rows in ranks.share(batches):
            batch = inputs(collate(take(samples, rows), 0), reading.device)
            labels = batch["input_ids"][:, 1:][batch["loss_mask"][:, 1:]]
            found = drafter.are_right(batch, labels, reading.chunk).cpu().numpy()
            parts = np.split(found, np.cumsum(predicted[rows])[:-1])
            for row, part in zip(rows, parts, strict=True):
                right[ends[row] - predicted[row] : ends[row]] |= part
            done += len(rows)
            progress(min(done * ranks.world, len(paths) * len(samples)))
    return np.unpackbits(
        np.bitwise_or.reduce(ranks.gather(np.packbits(right))), count=len(right)
    ).astype(bool)


def _digest(paths: Sequence[Path], samples: Sequence[Sample]) -> str:
    """A hash of the drafters and of the text."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(manifest_sha256(path).encode())
    for _, tokens, mask in texts(samples, 0, len(samples)):
        digest.update(text_sha256(tokens, mask).encode())
    return digest.hexdigest()[:12]
