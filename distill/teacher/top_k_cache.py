"""An offline cache of the teacher signal: top-k log-probabilities and the mass of the tail.

It is written once, in parts. Any number of training runs then need no forward of the target. With k
ids and log-probabilities, a token takes 4k + 4 bytes (6k + 4 if V > 65,536). Its logits would take
2V.

Shapes: n tokens, V (draft) vocabulary, k.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.base.artifact import verify_directory, write_directory
from decode.base.errors import UserError
from decode.model.loading import Target
from decode.model.same_target import describe_target, require_equal, require_same_target
from distill.teacher import cache_parts
from distill.teacher.cache_parts import CachedOutputs
from distill.teacher.teacher_signal import Teacher, TopK

CACHE_NAME = "teacher cache"
VOCABULARY = "vocabulary.safetensors"


def top_k(logits: Tensor, k: int, temperature: float = 1.0) -> TopK:
    """Return the k most likely tokens of each row and the mass of the others.

    logits: [n, V]. The result is float32.
    """
    log_p = (logits.float() / temperature).log_softmax(-1)
    top_log_p, ids = log_p.topk(k)
    # Sum over the other tokens. For a small tail, 1 − Σ would be only rounding error.
    tail = log_p.exp().scatter_(1, ids, 0.0).sum(-1)
    return TopK(ids, top_log_p, tail.clamp(min=torch.finfo(tail.dtype).tiny).log())


def bytes_per_token(k: int, vocab_size: int) -> int:
    """Bytes of a cached token on disk: k ids, k float16 log-probabilities, a float32 tail.

    An id takes 2 bytes, or 4 if vocab_size > 65,536.
    """
    return k * (_id_dtype(vocab_size).itemsize + 2) + 4


def describe_teacher(
    target: Target, *, k: int, temperature: float, vocabulary: Tensor | None
) -> dict[str, Any]:
    """Return the settings that a cache depends on, besides the text, as JSON values."""
    return {
        "target": target.name,
        **describe_target(target, weights=True),
        "k": k,
        "temperature": temperature,
        "vocabulary": None if vocabulary is None else ids_sha256(vocabulary),
    }


def ids_sha256(ids: Tensor) -> str:
    """Return a hash of token ids, int64 [n]."""
    return hashlib.sha256(ids.to("cpu", torch.int64).contiguous().numpy().tobytes()).hexdigest()


def require_same_teacher(
    stored: dict[str, Any], expected: dict[str, Any], target: Target, what: str
) -> None:
    """Raise UserError unless `stored` and `expected` describe the same teacher.

    Both are results of `describe_teacher`; k and temperature are not compared. what: for messages,
    the name of the object described by `stored`.
    """
    require_same_target(stored, target, what)
    require_equal(stored, expected, "vocabulary", "another draft vocabulary", what)


def write_vocabulary(directory: Path, ids: Tensor) -> None:
    """Store the draft vocabulary of the cache next to its parts."""
    write_directory(
        directory / "vocabulary", lambda path: save_file({"ids": ids.cpu()}, path / VOCABULARY)
    )


def write_top_k_part(
    directory: Path,
    number: int,
    samples: Sequence[tuple[str, str]],
    signals: Sequence[TopK],
    vocab_size: int,
    teacher: dict[str, Any],
) -> None:
    """Write one part, completely or not at all.

    samples: (id, text_sha256) of each sample. signals: one per sample, in the same order. teacher:
    the result of `describe_teacher`.
    """
    tensors = {
        "ids": [s.ids.cpu().to(_id_dtype(vocab_size)) for s in signals],
        "log_p": [s.log_p.cpu().half() for s in signals],
        "log_tail": [s.log_tail.cpu().float() for s in signals],
    }
    cache_parts.write_part(directory, number, samples, tensors, {"teacher": teacher})


def _id_dtype(vocab_size: int) -> torch.dtype:
    return torch.uint16 if vocab_size <= 1 << 16 else torch.int32


class CachedTeacher(CachedOutputs):
    """Reads a cache. It loads only the samples of a batch.

    Raises UserError if the cache was made from another target, other weights, another revision,
    dtype or draft vocabulary, if its parts differ in k or temperature, or if a part is damaged as
    `CachedOutputs` says. `require` raises UserError for text that is not in the cache; `signal`
    then raises KeyError.
    """

    def __init__(self, directory: Path, target: Target) -> None:
        super().__init__(directory, CACHE_NAME)
        self.vocabulary: Tensor | None = None
        if (directory / "vocabulary").exists():
            verify_directory(directory / "vocabulary")
            self.vocabulary = load_file(directory / "vocabulary" / VOCABULARY)["ids"]
        self.k, self.temperature = 0, 1.0
        first, *_ = self.metas
        for part, meta in self.kinds():
            teacher = meta["teacher"]
            expected = describe_teacher(
                target,
                k=teacher["k"],
                temperature=teacher["temperature"],
                vocabulary=self.vocabulary,
            )
            require_same_teacher(teacher, expected, target, f"the {CACHE_NAME} {directory}")
            options = int(teacher["k"]), float(teacher["temperature"])
            if part != first and options != (self.k, self.temperature):
                raise UserError(
                    f"{part} was made with k and temperature {options}, but {first} with "
                    f"{(self.k, self.temperature)}; delete {directory} and make the cache again"
                )
            self.k, self.temperature = options

    def signal(
        self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, ids: Sequence[str]
    ) -> Teacher:
        """Like `LiveTeacher.signal`. For a batch without samples the signal is empty."""
        device = input_ids.device
        if not ids:
            empty = torch.zeros(0, self.k, device=device)
            return TopK(empty.long(), empty, empty[:, 0]).__getitem__
        return TopK(**self._ahead.take(ids, device)).__getitem__

    def read_batch(self, ids: Sequence[str]) -> dict[str, Tensor]:
        stored = [self.read(sample, ("ids", "log_p", "log_tail")) for sample in ids]
        return {
            "ids": torch.cat([tokens.to(torch.int64) for tokens, _, _ in stored]),
            "log_p": torch.cat([log_p.float() for _, log_p, _ in stored]),
            "log_tail": torch.cat([log_tail for _, _, log_tail in stored]),
        }
