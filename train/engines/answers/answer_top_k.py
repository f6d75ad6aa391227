"""The top k log-probabilities that a server gives with its answers: a teacher's signal without a
second pass of the target. The log-probabilities are those before temperature and filters."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save, save_file

from decode.base.errors import UserError
from distill.teacher.teacher_signal import TopK
from train.data.corpus import ANSWERS, answer_parts

FILE = "top_k.safetensors"  # in a part, beside the answers
ROUNDING = 1e-2  # of 16 bits, in log-probabilities near 0
LEAST = -9999.0  # what vLLM writes for probability 0
_NAMES = ("ids", "log_p", "log_tail")


def top_k_of(rows: Sequence[Mapping[int, float]], k: int, token_count: int) -> TopK:
    """The signal from log-probabilities by token id, at least k for each of n tokens. Shapes are
    those of `TopK`; float32. token_count: ids from there on are padding of the output layer.

    The tail is 1 − Σ, in float32. Raises ValueError for a row of less than k, and for a NaN or a
    number above 0 (up to rounding).
    """
    ids = torch.zeros(len(rows), k, dtype=torch.int64)
    log_p = torch.zeros(len(rows), k)
    for n, row in enumerate(rows):
        if len(row) < k:
            raise ValueError("fewer log-probabilities than server.logprobs")
        if not all(value <= ROUNDING for value in row.values()):  # NaN is not
            raise ValueError("values that no log-probability has: NaN or above 0")
        best = sorted(row.items(), key=lambda item: -item[1])[:k]
        listed = {token for token, _ in best}
        # No drafter says padding. Ids that are not listed take its place: they are as unlikely.
        unlisted = (token for token in range(token_count) if token not in listed)
        tokens = [token if token < token_count else next(unlisted) for token, _ in best]
        ids[n] = torch.tensor(tokens)
        # Of probability 0, 0 · −∞ would be NaN in a loss.
        log_p[n] = torch.tensor([max(value, LEAST) for _, value in best])
    # A sum of rounded numbers may reach 1.
    tail = (1 - log_p.double().exp().sum(-1)).clamp(min=torch.finfo(torch.float32).eps)
    return TopK(ids, log_p, tail.log().float())


def packed(signal: TopK) -> str:
    """The signal as text for a line of a journal: ids int32, log_p float16, log_tail float32."""
    tensors = {
        "ids": signal.ids.int(),
        "log_p": signal.log_p.half(),
        "log_tail": signal.log_tail,
    }
    return base64.b64encode(save(tensors)).decode()


def unpacked(signal: str) -> TopK:
    """The inverse of `packed`, up to rounding."""
    tensors = load(base64.b64decode(signal))
    return TopK(tensors["ids"].long(), tensors["log_p"].float(), tensors["log_tail"])


def save_top_k(directory: Path, signals: Sequence[str]) -> None:
    """Write the packed signals of a part's answers, in their order; no file if there are none."""
    if not signals:
        return
    tensors = [load(base64.b64decode(signal)) for signal in signals]
    joined = {name: torch.cat([tensor[name] for tensor in tensors]) for name in _NAMES}
    save_file(joined, directory / FILE)


def part_signals(part: Path, lengths: Sequence[int]) -> list[str]:
    """The packed signals of a part's answers, in their order; empty if it has none. lengths: the
    lengths of the answers in tokens."""
    if not (part / FILE).exists():
        return [""] * len(lengths)
    tensors = load_file(part / FILE)
    ends = list(accumulate(lengths))
    return [
        base64.b64encode(save({n: tensors[n][end - size : end].clone() for n in _NAMES})).decode()
        for end, size in zip(ends, lengths, strict=True)
    ]


@dataclass(frozen=True)
class AnswerTopK:
    """Reads the signals of generate stages. rows: the part of each sample, and its first row."""

    rows: Mapping[str, tuple[Path, int]]

    @classmethod
    def of_stages(cls, stages: Mapping[str, Path]) -> "AnswerTopK":
        """stages: directories by name. Samples have the names that `Corpus.samples` gives them.
        Raises UserError for a part without log-probabilities."""
        rows = {}
        for stage, directory in stages.items():
            for part in answer_parts(directory):
                begin = 0
                if not (part / FILE).exists():
                    raise UserError(
                        f"{part} has no log-probabilities: it was written before server.logprobs "
                        f"was set; delete {directory} to ask again"
                    )
                for line in (part / ANSWERS).read_text(encoding="utf-8").splitlines():
                    answer = json.loads(line)
                    rows[f"{answer['id']}#{stage}-{answer['sample']}"] = part, begin
                    begin += len(answer["tokens"])
        return cls(rows)

    def read(self, sample: str, tokens: int) -> TopK:
        """The signal at the first `tokens` tokens of a sample's answer."""
        part, begin = self.rows[sample]
        with safe_open(part / FILE, "pt") as file:
            ids, log_p, log_tail = (file.get_slice(name)[begin : begin + tokens] for name in _NAMES)
        return TopK(ids.long(), log_p.float(), log_tail)
