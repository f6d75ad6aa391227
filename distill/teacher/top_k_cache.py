"""An offline cache of what the teacher says: top-k log-probabilities and the mass of the tail.

Written once, in parts, it serves any number of trainings without the target's forward; k ids and
log-probabilities a token take 4k + 4 bytes, where logits would take 2V.

Shapes: n tokens, V (draft) vocabulary, k.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.artifact import verify_directory, write_directory
from decode.errors import UserError
from decode.target.loading import Target
from distill.teacher import parts
from distill.teacher.parts import Parts, require_same, require_same_target
from distill.teacher.signal import Teacher, TopK

WHAT = "teacher cache"
VOCABULARY = "vocabulary.safetensors"


def top_k(logits: Tensor, k: int, temperature: float = 1.0) -> TopK:
    """The k likeliest of each row's tokens, and the others' mass; float32 from logits [n, V]."""
    log_p = (logits.float() / temperature).log_softmax(-1)
    kept, ids = log_p.topk(k)
    # Σ over the others rather than 1 − Σ: where the tail is small that would be rounding.
    tail = log_p.exp().scatter_(1, ids, 0.0).sum(-1)
    return TopK(ids, kept, tail.clamp(min=torch.finfo(tail.dtype).tiny).log())


def bytes_per_token(k: int, vocab_size: int) -> int:
    """What a cached token takes on disk: k ids and float16 log-probabilities, a float32 tail."""
    return k * (_id_dtype(vocab_size).itemsize + 2) + 4


def describe_teacher(
    target: Target, *, k: int, temperature: float, vocabulary: Tensor | None
) -> dict[str, Any]:
    """What a cache's numbers depend on beside the text; JSON values."""
    return {
        **parts.describe_target(target),
        "k": k,
        "temperature": temperature,
        "vocabulary": None if vocabulary is None else ids_sha256(vocabulary),
    }


def ids_sha256(ids: Tensor) -> str:
    return hashlib.sha256(ids.to("cpu", torch.int64).contiguous().numpy().tobytes()).hexdigest()


def require_same_teacher(
    found: dict[str, Any], expected: dict[str, Any], target: Target, what: str
) -> None:
    """Raise UserError unless numbers described by `found` are those of the teacher `expected`, both
    as of `describe_teacher` (k and temperature aside). what: names what holds them."""
    require_same_target(found, target, what, f"the teacher of {what}")
    require_same(found, expected, "vocabulary", "another draft vocabulary", what)


def write_vocabulary(directory: Path, ids: Tensor) -> None:
    """Keep the draft vocabulary that the cache is over beside its parts."""
    write_directory(
        directory / "vocabulary", lambda path: save_file({"ids": ids.cpu()}, path / VOCABULARY)
    )


def write_part(
    directory: Path,
    number: int,
    samples: Sequence[tuple[str, str]],
    signals: Sequence[TopK],
    vocab_size: int,
    teacher: dict[str, Any],
) -> None:
    """Write one part, whole or not at all.

    samples: (id, text_sha256) of each, with its signal in the same place. teacher: as
    `describe_teacher` gives it.
    """
    tensors = {
        "ids": [s.ids.cpu().to(_id_dtype(vocab_size)) for s in signals],
        "log_p": [s.log_p.cpu().half() for s in signals],
        "log_tail": [s.log_tail.cpu().float() for s in signals],
    }
    parts.write_part(directory, number, samples, tensors, {"teacher": teacher})


def _id_dtype(vocab_size: int) -> torch.dtype:
    return torch.uint16 if vocab_size <= 1 << 16 else torch.int32


class CachedTeacher:
    """Reads a cache; only what a batch needs is loaded.

    Raises UserError when the cache was made from another target, revision or dtype, or a part of
    it is damaged. `require` and `signal` raise it for text that it was not made of.
    """

    def __init__(self, directory: Path, target: Target) -> None:
        self.directory = directory
        self._parts = Parts(directory, WHAT)
        self.vocabulary: Tensor | None = None
        if (directory / "vocabulary").exists():
            verify_directory(directory / "vocabulary")
            self.vocabulary = load_file(directory / "vocabulary" / VOCABULARY)["ids"]
        self.k, self.temperature = 0, 1.0
        first, *_ = self._parts.metas
        for part, meta in self._parts.metas.items():
            teacher = meta["teacher"]
            expected = describe_teacher(
                target,
                k=teacher["k"],
                temperature=teacher["temperature"],
                vocabulary=self.vocabulary,
            )
            require_same_teacher(teacher, expected, target, f"the {WHAT} {directory}")
            made_with = int(teacher["k"]), float(teacher["temperature"])
            if part != first and made_with != (self.k, self.temperature):
                raise UserError(
                    f"{part} was made with k and temperature {made_with}, and {first} with "
                    f"{(self.k, self.temperature)}; delete {directory} and make the cache again"
                )
            self.k, self.temperature = made_with

    def require(self, samples: Sequence[tuple[str, str]]) -> None:
        """Raise UserError unless it holds every (id, text_sha256)."""
        self._parts.require(samples)

    def signal(
        self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, ids: Sequence[str]
    ) -> Teacher:
        """As `LiveTeacher.signal`; a batch without samples has nothing to predict."""
        device = input_ids.device
        found = [self._read(name) for name in ids]
        if not found:
            nothing = torch.zeros(0, self.k, device=device)
            whole = TopK(nothing.long(), nothing, nothing[:, 0])
        else:
            whole = TopK(
                torch.cat([s.ids for s in found]).to(device),
                torch.cat([s.log_p for s in found]).to(device),
                torch.cat([s.log_tail for s in found]).to(device),
            )
        return whole.__getitem__

    def _read(self, name: str) -> TopK:
        ids, log_p, tail = self._parts.read(name, ("ids", "log_p", "log_tail"))
        return TopK(ids.to(torch.int64), log_p.float(), tail)
