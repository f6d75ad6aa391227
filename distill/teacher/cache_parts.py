"""On-disk caches of the target's outputs. A cache has numbered parts with tensors of some samples.

Each part is written completely or not at all. It stores a description of its target and a hash of
every text, so it cannot be used for another target or text. After a kill, the writer continues with
the next part. `distill.teacher.top_k_cache` (log-probabilities) and
`distill.teacher.feature_sources` (hidden states) define the tensors.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from decode.artifact import verify_directory, write_directory
from decode.errors import UserError

PART = "part-"
FILE = "cache.safetensors"
ROWS = "samples.json"


def text_sha256(tokens: Sequence[int], mask: Sequence[bool]) -> str:
    """Return a hash of one sample: its tokens, and which of them are predicted."""
    body = json.dumps([list(tokens), [int(bit) for bit in mask]])
    return hashlib.sha256(body.encode()).hexdigest()[:32]


def write_part(
    directory: Path,
    number: int,
    samples: Sequence[tuple[str, str]],
    tensors: Mapping[str, Sequence[Tensor]],
    meta: dict[str, Any],
) -> None:
    """Write one part.

    samples: (id, text_sha256) of each sample. tensors: by name, one tensor per sample, in the dtype
    to store. All tensors of one sample have the same first dimension.
    """

    def fill(path: Path) -> None:
        joined = {name: torch.cat(list(x)).cpu().contiguous() for name, x in tensors.items()}
        save_file(joined, path / FILE)
        lengths = [len(x) for x in next(iter(tensors.values()))]
        rows = [
            {"id": name, "text": text, "tokens": length}
            for (name, text), length in zip(samples, lengths, strict=True)
        ]
        (path / ROWS).write_text(json.dumps(rows))

    write_directory(directory / f"{PART}{number}", fill, meta=meta)


class Parts:
    """Reads the parts of a cache. It loads only the requested tensors.

    metas: the metadata of each part, by its directory. samples: the ids of all stored samples.

    what: a name for the content of the directory, for messages. Raises UserError if the directory
    has no part or a part is damaged.
    """

    def __init__(self, directory: Path, what: str) -> None:
        self.directory, self.what = directory, what
        parts = sorted(
            directory.glob(f"{PART}*"), key=lambda path: int(path.name.removeprefix(PART))
        )
        if not parts:
            raise UserError(f"{directory} holds no {what}; expected directories {PART}N")
        self.metas = {part: verify_directory(part) for part in parts}
        # By sample id: the file, the first row and the end in it, and the hash of the text.
        self._rows: dict[str, tuple[Path, int, int, str]] = {}
        for part in parts:
            begin = 0
            for row in json.loads((part / ROWS).read_text()):
                end = begin + row["tokens"]
                self._rows[row["id"]] = (part / FILE, begin, end, row["text"])
                begin = end

    @property
    def samples(self) -> Iterable[str]:
        return self._rows

    def require(self, samples: Sequence[tuple[str, str]]) -> None:
        """Raise UserError unless the parts hold every (id, text_sha256)."""
        for name, text in samples:
            if name not in self._rows:
                raise UserError(
                    f"the {self.what} {self.directory} has no sample {name!r}; it was made from "
                    "other data. Make the cache again from this text."
                )
            if self._rows[name][3] != text:
                raise UserError(
                    f"the text of sample {name!r} is not the text that the {self.what} "
                    f"{self.directory} was made from. Make the cache again from this text."
                )

    def read(self, sample: str, names: Sequence[str]) -> list[Tensor]:
        """Return the tensors with these names for a sample.

        Raises KeyError for a sample that is not stored; check with `require` first.
        """
        file, begin, end, _ = self._rows[sample]
        with safe_open(file, "pt") as stored:
            return [stored.get_slice(name)[begin:end] for name in names]
