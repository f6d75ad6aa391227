"""An offline cache of what the teacher says: top-k log-probabilities and the mass of the tail.

Written once, in parts, it serves any number of trainings without the target's forward; k ids and
log-probabilities a token take 4k + 4 bytes, where logits would take 2V.

Shapes: n tokens, V (draft) vocabulary, k.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.artifact import verify_directory, write_directory
from decode.errors import UserError
from decode.fingerprint import Fingerprint, require_same_vocabulary
from decode.target import Target
from distill.signal import Teacher, TopK

PART = "part-"
FILE = "cache.safetensors"
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
        "target": target.name,
        "revision": target.revision,
        "fingerprint": target.fingerprint.to_dict(),
        "weights": weights_sha256(target),
        "dtype": str(target.dtype).removeprefix("torch."),
        "k": k,
        "temperature": temperature,
        "vocabulary": None if vocabulary is None else ids_sha256(vocabulary),
    }


def weights_sha256(target: Target) -> str:
    """Tells targets of one name and vocabulary apart: a hash over some of every weight."""
    found = hashlib.sha256()
    for name, tensor in sorted(target.model.state_dict().items()):
        some = tensor.flatten()[:: max(1, tensor.numel() // 64)][:64]
        found.update(name.encode())
        found.update(some.float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def ids_sha256(ids: Tensor) -> str:
    return hashlib.sha256(ids.to("cpu", torch.int64).contiguous().numpy().tobytes()).hexdigest()


def text_sha256(tokens: Sequence[int], mask: Sequence[bool]) -> str:
    """Of one sample: which tokens, and which of them are predicted."""
    body = json.dumps([list(tokens), [int(bit) for bit in mask]])
    return hashlib.sha256(body.encode()).hexdigest()[:32]


def require_same_teacher(
    found: dict[str, Any], expected: dict[str, Any], target: Target, what: str
) -> None:
    """Raise UserError unless numbers described by `found` are those of the teacher `expected`, both
    as of `describe_teacher` (k and temperature aside). what: names what holds them."""
    made_for = Fingerprint.from_dict(found["fingerprint"])
    require_same_vocabulary(made_for, target.fingerprint, f"the teacher of {what}")
    for key, other in (
        # Either of the first two changes the third, and says more.
        ("revision", "another revision of the target"),
        ("dtype", "the target in another dtype"),
        ("weights", "a target with other weights"),
        ("vocabulary", "another draft vocabulary"),
    ):
        if found[key] != expected[key]:
            raise UserError(
                f"{what} was made from {other}: found {found[key]!r} ({found['target']}), expected "
                f"{expected[key]!r} ({target.name}). Make it again, or use the target it was made "
                "from."
            )


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

    def fill(path: Path) -> None:
        save_file(
            {
                "ids": torch.cat([s.ids for s in signals]).cpu().to(_id_dtype(vocab_size)),
                "log_p": torch.cat([s.log_p for s in signals]).cpu().half(),
                "log_tail": torch.cat([s.log_tail for s in signals]).cpu().float(),
            },
            path / FILE,
        )
        rows = [
            {"id": name, "text": text, "tokens": len(signal.ids)}
            for (name, text), signal in zip(samples, signals, strict=True)
        ]
        (path / "samples.json").write_text(json.dumps(rows))

    write_directory(directory / f"{PART}{number}", fill, meta={"teacher": teacher})


def _id_dtype(vocab_size: int) -> torch.dtype:
    return torch.uint16 if vocab_size <= 1 << 16 else torch.int32


class CachedTeacher:
    """Reads a cache; only what a batch needs is loaded.

    Raises UserError when the cache was made from another target, revision or dtype, or a part of
    it is damaged. `require` and `signal` raise it for text that it was not made of.
    """

    def __init__(self, directory: Path, target: Target) -> None:
        self.directory = directory
        parts = sorted(
            directory.glob(f"{PART}*"), key=lambda path: int(path.name.removeprefix(PART))
        )
        if not parts:
            raise UserError(f"{directory} holds no teacher cache; expected directories {PART}N")
        self.vocabulary: Tensor | None = None
        if (directory / "vocabulary").exists():
            verify_directory(directory / "vocabulary")
            self.vocabulary = load_file(directory / "vocabulary" / VOCABULARY)["ids"]
        self._places: dict[str, tuple[Path, int, int, str]] = {}
        self.k, self.temperature = 0, 1.0
        for part in parts:
            teacher = verify_directory(part)["teacher"]
            expected = describe_teacher(
                target,
                k=teacher["k"],
                temperature=teacher["temperature"],
                vocabulary=self.vocabulary,
            )
            require_same_teacher(teacher, expected, target, f"the teacher cache {directory}")
            made_with = int(teacher["k"]), float(teacher["temperature"])
            if part is not parts[0] and made_with != (self.k, self.temperature):
                raise UserError(
                    f"{part} was made with k and temperature {made_with}, and {parts[0]} with "
                    f"{(self.k, self.temperature)}; delete {directory} and make the cache again"
                )
            self.k, self.temperature = made_with
            begin = 0
            for row in json.loads((part / "samples.json").read_text()):
                end = begin + row["tokens"]
                self._places[row["id"]] = (part / FILE, begin, end, row["text"])
                begin = end

    def require(self, samples: Sequence[tuple[str, str]]) -> None:
        """Raise UserError unless it holds every (id, text_sha256)."""
        for name, text in samples:
            if name not in self._places:
                raise UserError(
                    f"the teacher cache {self.directory} has no sample {name!r}; it was made from "
                    "other data. Make it again from this text."
                )
            if self._places[name][3] != text:
                raise UserError(
                    f"sample {name!r} is another text than the one the teacher cache "
                    f"{self.directory} was made from. Make it again from this text."
                )

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
        file, begin, end, _ = self._places[name]
        with safe_open(file, "pt") as stored:
            ids, log_p, tail = (
                stored.get_slice(key)[begin:end] for key in ("ids", "log_p", "log_tail")
            )
        return TopK(ids.to(torch.int64), log_p.float(), tail)
