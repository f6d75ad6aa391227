"""One verification pass: what was drafted, what the target predicted, what was accepted.

Shapes: B rows, N draft nodes, R = N+1 positions where a token is predicted (position 0 follows the
committed text, position i+1 follows node i), D draft tokens on the longest path, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.base.device import dtype_name
from decode.base.errors import UserError
from decode.draft import Contexts, Draft
from decode.draw.logits import LogitsProcessor, penalise, process, tokens_before
from decode.draw.sampling import Sampling
from decode.model.cache.probes import Probes
from decode.model.features import Features
from decode.text_stream import Stop


class Scores:
    """The target's logits for a draft. Computes only what a rule asks for: all distributions, one
    distribution per row, or tokens.

    logits: [B, R, V], after processors, before temperature and filters. float32 if a penalty or a
    processor changed them, else in the model's dtype. raw: the logits as the model returned them.
    failed: what processors raised, by row. Their logits are NaN.
    """

    def __init__(
        self,
        logits: Tensor,
        sampling: Sampling,
        draft: Draft | None = None,
        contexts: Contexts | None = None,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.raw = logits
        self.sampling = sampling
        self.failed: dict[int, Exception] = {}
        if sampling.penalises or processors:
            assert draft is not None
            assert contexts is not None
            ancestors = draft.ancestors()
            # Not `pad`: before torch 2.10 it refuses a draft without nodes.
            root = ancestors.new_zeros(len(ancestors), 1, ancestors.shape[2])
            before = torch.cat([root, ancestors], 1)  # [B, R, N]
            text = (contexts.tokens, contexts.lengths, draft.tokens, before)
            if sampling.penalises:
                logits = penalise(logits, tokens_before(*text), sampling.penalty(logits.device))
            if processors:
                logits, self.failed = process(processors, logits, *text)
        self.logits = logits
        self._probs: Tensor | None = None

    def probs(self) -> Tensor:
        """float32 [B, R, V]: the distributions that tokens are drawn from."""
        if self._probs is None:
            self._probs = self.sampling.probs(self.logits)
        return self._probs

    def probs_at(self, positions: Tensor) -> Tensor:
        """float32 [B, V]: the distribution at one position of each row, int64 [B]. A tree has many
        more positions than a walk through it visits."""
        return self.sampling.probs(self.logits_at(positions))

    def probs_of(self, rows: Tensor, positions: Tensor) -> Tensor:
        """float32 [n, V]: the distributions at some positions of some rows, int64 [n] each."""
        return self.sampling.at(rows).probs(self.logits[rows, positions])

    def logits_at(self, positions: Tensor) -> Tensor:
        """[B, V]: the processed logits at one position of each row, int64 [B]."""
        return self.logits[torch.arange(len(positions), device=positions.device), positions]

    def peaks_at(self, positions: Tensor) -> Tensor:
        """[B, P]: the largest processed logit at some positions of each row, int64 [B, P]. It is
        not finite if the model's logits are NaN or the processors mask all tokens."""
        if positions.shape[1] >= self.logits.shape[1]:
            return self.logits.amax(-1).gather(1, positions)
        rows_B1 = torch.arange(len(positions), device=positions.device)[:, None]
        return self.logits[rows_B1, positions].amax(-1)


@dataclass(eq=False, repr=False)
class Decision:
    """What a rule decides, on the device.

    path: int64 [B, D], the accepted nodes by depth. Past accepted[b] it is padding. accepted,
    reached: int64 [B], as in `Verification`. next_token: int64 [B], the token after the accepted
    ones.
    """

    path: Tensor
    accepted: Tensor
    reached: Tensor
    next_token: Tensor

    @classmethod
    def of_chain(cls, draft: Draft, accepted: Tensor, next_token: Tensor) -> "Decision":
        """For chains, which may be empty: the first accepted[b] tokens."""
        rows, nodes = draft.tokens.shape
        return cls(
            path=torch.arange(nodes, device=accepted.device).expand(rows, -1),
            accepted=accepted,
            reached=torch.minimum(accepted + 1, draft.valid().sum(1)),
            next_token=next_token,
        )

    def replaced(self, rows: Tensor, other: "Decision") -> "Decision":
        """The same, where another decision holds for these rows, bool [B]."""
        depth = max(self.path.shape[1], other.path.shape[1])
        path, its_path = (
            torch.nn.functional.pad(x, (0, depth - x.shape[1])) for x in (self.path, other.path)
        )
        return Decision(
            torch.where(rows[:, None], its_path, path),
            torch.where(rows, other.accepted, self.accepted),
            torch.where(rows, other.reached, self.reached),
            torch.where(rows, other.next_token, self.next_token),
        )

    def packed(self, draft: Draft, scores: Scores) -> Tensor:
        """int64 [B, 4 + 2·D]: accepted, reached, the next token, whether logits along the path are
        not finite (1; 2: those after the text), the path and its tokens. All that the host reads in
        a step."""
        peaks = scores.peaks_at(_positions(self.path))
        places = torch.arange(peaks.shape[1], device=peaks.device)
        lost = ~peaks.isfinite()
        broken = (lost & (places <= self.accepted[:, None])).any(1).long() + lost[:, 0]
        figures = torch.stack([self.accepted, self.reached, self.next_token, broken], 1)
        return torch.cat([figures, self.path, draft.tokens.gather(1, self.path)], 1)


def _no_rows() -> np.ndarray:
    return np.zeros(0, dtype=np.int64)


@dataclass(eq=False, repr=False)
class Verification:
    """One verification pass over B rows. Integer arrays are on the host.

    A rule makes it (`of`) and fills the first part:

    draft: the draft. scores: the target's logits after the text and after each node.
    path: int64 [B, D] on the device, the accepted nodes by depth. Past accepted[b] it is padding.
    accepted: int [B], the number of accepted draft tokens.
    reached: int [B], the number of judged draft positions whose predecessors were all accepted.
    block: int64 [B, D+1], the accepted tokens of each row, then the target's next token. A text
        that ends inside the block is not cut here.
    broken: bool [B], whether any logits along the accepted path were NaN, infinite or all masked,
        or the row's stop failed. lost: bool [B], whether those after the text were.
    nodes: int64 [B, D], `path` on the host.

    The loop adds the outcome:

    number: the number of the pass. 0 is the prefill: the verification of an empty draft.
    rows: int [B], the number of each row, as `Decoding.begin` gives it. In `Decoder.decode` it is
        the index of the prompt.
    contexts: the committed texts, which already end with the emitted tokens.
    lengths: int [B], the length of each text before the pass.
    depths: int [B], the max depth allowed for each draft. drafted: int [B], nodes drafted.
        nodes_by_depth: int [B, D'], how many of them at depth 1, 2, ….
    emitted: int [B], how many tokens of the block the text got. ended: bool [B], whether it ended.
        A broken row has accepted = reached = emitted = 0, and ends.
    waits: bool [B], the rows that sat this pass out: they drafted nothing and emitted nothing.
        None: no row.
    probes: what was fed behind the draft, with its states (`Drafter.probes`). None: nothing.
    width: tokens fed per row, with the probes. draft_steps: how deep the drafter went. A small
        language model takes this number of passes; other drafters may take fewer.
    features: the target's hidden states of the tokens fed and kept, if the drafter captures layers.
        previous_features: the features of the pass before. They end with the text's second-to-last
        token, at position lengths − 2. The draft was made from them.
    draft_s, verify_s, overhead_s: seconds, for the batch as a unit.
    signals: the numbers that a policy looked at, float64 [B, D] by name, NaN where it did not look.

    Tensors and contexts belong to the loop. They are for the observers of this pass: read them
    during the call, do not keep or change them. `release` drops them afterwards.
    """

    draft: Draft
    scores: Scores
    path: Tensor
    accepted: np.ndarray
    reached: np.ndarray
    block: np.ndarray
    broken: np.ndarray
    nodes: np.ndarray = field(default_factory=lambda: _no_rows()[:, None])
    lost: np.ndarray = field(default_factory=_no_rows)
    number: int = 0
    rows: np.ndarray = field(default_factory=_no_rows)
    contexts: Contexts = field(default_factory=lambda: Contexts(_no_rows()[:, None], _no_rows()))
    lengths: np.ndarray = field(default_factory=_no_rows)
    depths: np.ndarray = field(default_factory=_no_rows)
    drafted: np.ndarray = field(default_factory=_no_rows)
    nodes_by_depth: np.ndarray = field(default_factory=lambda: _no_rows()[:, None])
    emitted: np.ndarray = field(default_factory=_no_rows)
    waits: np.ndarray | None = None
    ended: np.ndarray = field(default_factory=_no_rows)
    width: int = 1
    draft_steps: int = 0
    features: Features | None = None
    previous_features: Features | None = None
    probes: Probes | None = None
    draft_s: float = 0.0
    verify_s: float = 0.0
    overhead_s: float = 0.0
    signals: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, draft: Draft, scores: Scores, decision: "Decision") -> "Verification":
        """The decision of a rule, copied to the host in one transfer."""
        host = decision.packed(draft, scores).cpu().numpy()
        kept, following = host[:, 0], host[:, 2]
        nodes, tokens = np.split(host[:, 4:], 2, axis=1)
        block = np.concatenate([tokens, np.zeros_like(host[:, :1])], axis=1)
        np.put_along_axis(block, kept[:, None], following[:, None], axis=1)
        broken = host[:, 3] > 0
        record = cls(draft, scores, decision.path, kept, host[:, 1], block, broken, nodes)
        record.lost = host[:, 3] > 1
        return record

    @classmethod
    def of_nothing(
        cls,
        rows: np.ndarray,
        contexts: Contexts,
        device: torch.device,
        logits: Tensor | None = None,
        features: Features | None = None,
    ) -> "Verification":
        """The record of a pass that drafted, judged and emits nothing, for these rows, int [B], and
        their texts."""
        count = len(rows)
        draft, zeros = Draft.none(count, device), np.zeros(count, dtype=np.int64)
        scores = Scores(torch.zeros(count, 1, 1) if logits is None else logits, Sampling())
        no = np.zeros(count, dtype=bool)
        record = cls(draft, scores, draft.tokens, zeros, zeros, zeros[:, None][:, :0], no)
        record.rows, record.contexts, record.lengths = rows, contexts, contexts.lengths
        record.emitted, record.ended, record.features = zeros, no, features
        return record

    @property
    def next_token(self) -> np.ndarray:
        """int64 [B]: the token after the accepted ones."""
        return np.take_along_axis(self.block, self.accepted[:, None], axis=1)[:, 0]

    def positions(self) -> Tensor:
        """int64 [B, D+1] on the device: the positions of `scores` along the path, first the one
        after the committed text. Past accepted[b] they are padding."""
        return _positions(self.path)

    def columns(self) -> Tensor:
        """`positions` on the host: the columns of the last forward that stay in the cache."""
        return _positions(torch.as_tensor(self.nodes))

    def sit_out(self, waits: np.ndarray) -> None:
        """These rows, bool [B], did not take part. Call it before `cut`. Logits that are not finite
        count when the row takes part."""
        self.waits, self.broken = waits, self.broken & ~waits

    def cut(
        self,
        room: np.ndarray,
        eos: np.ndarray,
        ignore_eos: np.ndarray,
        stops: Sequence[Stop | None] = (),
    ) -> dict[int, Exception]:
        """Set `emitted` and `ended`: a text ends inside the block after one of the ids `eos`, int64
        [n], except in the rows `ignore_eos`, bool [B], where the row's stop says so, or with its
        last token of `room`, int [B]. A broken row gets nothing and ends. A row that `waits` gets
        nothing and goes on. A row whose stop raises is broken; its error is returned, by row."""
        failed: dict[int, Exception] = {}
        block = self.block
        if self.broken.any():
            self.accepted = np.where(self.broken, 0, self.accepted)
            self.reached = np.where(self.broken, 0, self.reached)
        emitted = np.minimum(np.minimum(self.accepted + 1, block.shape[1]), room)
        emitted = np.where(self.broken, 0, emitted)
        inside = np.arange(block.shape[1])[None, :] < emitted[:, None]
        is_eos = np.isin(block, eos) & inside & ~ignore_eos[:, None]
        ended = is_eos.any(1)
        emitted = np.where(ended, is_eos.argmax(1) + 1 if is_eos.size else 0, emitted)
        ended = ended | (emitted == room) | self.broken
        if self.waits is not None:
            emitted, ended = np.where(self.waits, 0, emitted), ended & ~self.waits
        for index, stop in enumerate(stops):
            if stop is None or self.broken[index] or not emitted[index]:
                continue
            tokens = block[index, : emitted[index]].tolist()
            try:
                kept = stop.cut(int(self.rows[index]), tokens)
            except Exception as error:
                failed[index], self.broken[index], kept = error, True, 0
                self.accepted[index] = self.reached[index] = 0
            if kept is not None:
                emitted[index], ended[index] = kept, True
        self.emitted, self.ended = emitted, ended
        return failed

    def describe(self, depths: np.ndarray, watched: int) -> None:
        """Set the figures of the draft. depths: int [B], the max depth allowed. watched: see
        `Policy`."""
        draft = self.draft
        self.depths, self.drafted = depths, draft.sizes
        self.nodes_by_depth = draft.nodes_by_depth()
        self.width = 1 + draft.tokens.shape[1] + (self.probes.fed if self.probes else 0)
        # A policy that stopped a draft has seen the logits of one more token.
        self.draft_steps = max(int(self.nodes_by_depth.any(0).sum()), watched)

    def where(self, row: int) -> str:
        """Where this pass found the row with this index, for an error."""
        kind = "verification" if self.number else "prefill"
        text = f"after {self.lengths[row]} tokens of text"
        return f"in step {self.number} ({kind}) for prompt {self.rows[row]}, {text}"

    def problem(self, row: int) -> UserError:
        """The error of a broken row: it says whether the model or a logits processor is the
        cause. row: an index. Call it before `cut`."""
        where = self.where(row)
        on_path = self.positions()[row, : int(self.accepted[row]) + 1]
        if not self.scores.raw[row, on_path].amax(-1).isfinite().all():
            dtype = dtype_name(self.scores.raw.dtype)
            return UserError(
                f"the target's logits are NaN or infinite {where}; check its weights, or use a "
                f"dtype with more range than {dtype}"
            )
        if row in self.scores.failed:
            return failure("a logits processor", where, self.scores.failed[row])
        return UserError(
            f"the logits processors mask all tokens {where}; at least one logit must be finite: "
            "remove the processor that masks them all, or let it keep a token"
        )

    def release(self) -> None:
        """Drop the tensors and the texts. The figures stay."""
        del self.draft, self.scores, self.path, self.contexts
        self.features = self.previous_features = self.probes = None

    def longest(self) -> np.ndarray:
        """int [B]: the most draft tokens of a row that could be accepted. In a tree, they are on
        one path."""
        return np.minimum(self.drafted, np.minimum(self.depths, self.draft_steps))

    def kept_share(self) -> np.ndarray:
        """float64 [B]: la/k, accepted tokens / draft tokens (for a tree: / the draft's depth). It
        is 0 for a row without a draft."""
        share: np.ndarray = self.accepted / np.maximum(self.longest(), 1)
        return share

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON values, times in milliseconds. gamma: the max depth allowed for each
        row's draft. la_k: None for a row without a draft. Each signal is one list per row, without
        the positions where the policy did not look."""
        shares = np.where(self.drafted > 0, self.kept_share(), np.nan)
        return {
            "rows": self.rows.tolist(),
            "gamma": self.depths.tolist(),
            "drafted": self.drafted.tolist(),
            "reached": self.reached.tolist(),
            "accepted": self.accepted.tolist(),
            "emitted": self.emitted.tolist(),
            "la_k": [None if np.isnan(share) else float(share) for share in shares],
            "width": self.width,
            "draft_steps": self.draft_steps,
            "draft_ms": 1000 * self.draft_s,
            "verify_ms": 1000 * self.verify_s,
            "overhead_ms": 1000 * self.overhead_s,
            **{
                name: [row[~np.isnan(row)].round(4).tolist() for row in values]
                for name, values in self.signals.items()
            },
        }


def failure(what: str, where: str, error: Exception) -> UserError:
    """The error of a row for which something that the user gave raised an exception."""
    wrapped = UserError(f"{what} fails {where}: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _positions(path: Tensor) -> Tensor:
    return torch.nn.functional.pad(path + 1, (1, 0))


Observer = Callable[[Verification], None]
