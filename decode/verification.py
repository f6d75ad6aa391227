"""One verification pass: what the rule decided, what the texts got, and what the loop knows of it.

Shapes: B rows, D draft tokens on the longest path.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from decode.draft import Contexts
from decode.model.features import Features
from decode.verdict import Verdict

if TYPE_CHECKING:
    from decode.text_stream import Stop


@dataclass(eq=False, repr=False, kw_only=True)
class Outcome:
    """What the texts get from a verdict.

    accepted, reached: int [B], those of the verdict; 0 for a row that is broken.
    emitted: int [B], how many tokens of the block the text gets. ended: bool [B], whether it ends.
    broken: bool [B], the rows that fail: their logits are not finite, or their stop raised. They
    get nothing and end. sits_out: bool [B], the rows that sit the pass out: they get nothing and go
    on. Their logits do not matter. failed: the errors of the stops, by row.
    """

    accepted: np.ndarray
    reached: np.ndarray
    emitted: np.ndarray
    ended: np.ndarray
    broken: np.ndarray
    sits_out: np.ndarray
    failed: dict[int, Exception] = field(default_factory=dict)

    @classmethod
    def after(
        cls,
        verdict: Verdict,
        rows: np.ndarray,
        room: np.ndarray,
        eos: np.ndarray,
        ignore_eos: np.ndarray,
        stops: "Sequence[Stop | None]" = (),
        stop_ids: np.ndarray | None = None,
    ) -> "Outcome":
        """A text ends inside the block after one of the ids `eos`, int64 [n], except in the rows
        `ignore_eos`, bool [B], after one of its `stop_ids`, int64 [B, n'], where the row's stop
        says so, or with its last token of `room`, int [B]; 0: it sits the pass out. rows: int
        [B], the numbers by which a stop knows them."""
        block, sits_out = verdict.block, room == 0
        broken = verdict.broken & ~sits_out
        emitted = np.minimum(np.minimum(verdict.accepted + 1, block.shape[1]), room)
        emitted = np.where(broken, 0, emitted)
        inside = np.arange(block.shape[1])[None, :] < emitted[:, None]
        is_eos = (block[..., None] == eos).any(-1) & ~ignore_eos[:, None]
        if stop_ids is not None and stop_ids.size:
            is_eos |= (block[..., None] == stop_ids[:, None]).any(-1)
        is_eos &= inside
        ended = is_eos.any(1)
        emitted = np.where(ended, is_eos.argmax(1) + 1 if is_eos.size else 0, emitted)
        ended = ended | ((emitted == room) & ~sits_out) | broken
        failed: dict[int, Exception] = {}
        for index, stop in enumerate(stops):
            if stop is None or not emitted[index]:
                continue
            try:
                kept = stop.cut(int(rows[index]), block[index, : emitted[index]].tolist())
            except Exception as error:
                failed[index], kept = error, 0
            if kept is not None:
                emitted[index], ended[index] = kept, True
        if failed:
            broken = broken.copy()
            broken[[*failed]] = True
        sound = ~broken
        return cls(
            accepted=verdict.accepted * sound,
            reached=verdict.reached * sound,
            emitted=emitted,
            ended=ended,
            broken=broken,
            sits_out=sits_out,
            failed=failed,
        )


@dataclass
class Seconds:
    """The time of a pass by part, for the batch as a unit. The clock of the loop sets them; on a
    CUDA device it does so when the device has done the work."""

    draft: float = 0.0
    verify: float = 0.0
    overhead: float = 0.0
    draft_prefill: float = 0.0  # the drafter read new texts


@dataclass(eq=False, repr=False, kw_only=True)
class Verification(Outcome, Verdict):
    """One verification pass over B rows: a verdict, its outcome, and what the loop knows. Integer
    arrays are on the host.

    contexts: the committed texts, which already end with the emitted tokens.
    lengths: int [B], the length of each text before the pass.
    rows: int [B], the number of each row, as `Decoding.begin` gives it. In `Decoder.decode` it is
        the index of the prompt.
    number: the number of the pass. 0 is the prefill: the verification of an empty draft.
    depths: int [B], the max depth allowed for each draft. drafted: int [B], nodes drafted.
        nodes_by_depth: int [B, D'], how many of them at depth 1, 2, ….
    fed: tokens that the target computed, of all rows, with padding where its forward pads.
        fed_beside: those of prompts that the same pass read. draft_steps: how deep the drafter
        went. A small language model takes this number of passes; other drafters may take fewer.
    features: the target's hidden states of the tokens fed and kept, if the drafter captures layers.
        previous_features: those of the pass before. They end with the text's second-to-last token,
        at position lengths − 2. The draft was made from them.
    seconds: the time of its parts.
    signals: the numbers that a policy looked at, float64 [B, D] by name, NaN where it did not look.

    Tensors and contexts belong to the loop. They are for the observers of this pass: read them
    during the call, do not keep or change them. `release` drops them afterwards.
    """

    contexts: Contexts
    lengths: np.ndarray
    rows: np.ndarray
    number: int
    depths: np.ndarray
    drafted: np.ndarray
    nodes_by_depth: np.ndarray
    fed: int
    fed_beside: int
    draft_steps: int
    features: Features | None
    previous_features: Features | None
    seconds: Seconds
    signals: dict[str, np.ndarray]

    @classmethod
    def of(
        cls,
        verdict: Verdict,
        outcome: Outcome,
        contexts: Contexts,
        *,
        rows: np.ndarray,
        lengths: np.ndarray | None = None,
        number: int = 0,
        depths: np.ndarray | None = None,
        fed: int | None = None,
        fed_beside: int = 0,
        features: Features | None = None,
        previous_features: Features | None = None,
        seconds: Seconds | None = None,
        signals: dict[str, np.ndarray] | None = None,
    ) -> "Verification":
        """The record of a pass. lengths: None: those of the contexts. depths: None: 0. fed: None: a
        token of each row, and its draft. The other arguments have their names as attributes."""
        draft, signals = verdict.draft, signals or {}
        by_depth = draft.nodes_by_depth()
        # A policy that stopped a draft has seen the logits of one more token.
        looked = [values.shape[1] for values in signals.values()]
        levels = int(by_depth.any(0).sum()) if by_depth.size else 0
        return cls(
            **{**vars(verdict), **vars(outcome)},
            contexts=contexts,
            lengths=contexts.lengths if lengths is None else lengths,
            rows=rows,
            number=number,
            depths=np.zeros(len(rows), dtype=np.int64) if depths is None else depths,
            drafted=draft.sizes,
            nodes_by_depth=by_depth,
            fed=len(rows) + int(draft.sizes.sum()) if fed is None else fed,
            fed_beside=fed_beside,
            draft_steps=max([draft.went, levels, *looked]),
            features=features,
            previous_features=previous_features,
            seconds=seconds or Seconds(),
            signals=signals,
        )

    @classmethod
    def of_nothing(
        cls,
        rows: np.ndarray,
        contexts: Contexts,
        device: torch.device,
        features: Features | None = None,
    ) -> "Verification":
        """The record of a pass that drafted, judged and emits nothing, for these rows, int [B], and
        their texts."""
        verdict = Verdict.without_draft(len(rows), device)
        zeros, no = verdict.accepted, verdict.broken
        outcome = Outcome(
            accepted=zeros, reached=zeros, emitted=zeros, ended=no, broken=no, sits_out=no
        )
        return cls.of(verdict, outcome, contexts, rows=rows, features=features)

    @property
    def width(self) -> float:
        """The tokens fed per row."""
        return self.fed / max(len(self.rows), 1)

    @property
    def draft_s(self) -> float:
        return self.seconds.draft

    @property
    def verify_s(self) -> float:
        return self.seconds.verify

    @property
    def overhead_s(self) -> float:
        return self.seconds.overhead

    @property
    def draft_prefill_s(self) -> float:
        return self.seconds.draft_prefill

    @property
    def next_token(self) -> np.ndarray:
        """int64 [B]: the token after the accepted ones."""
        return np.take_along_axis(self.block, self.accepted[:, None], axis=1)[:, 0]

    def release(self) -> None:
        """Drop the tensors and the texts. The figures stay."""
        del self.draft, self.scores, self.positions, self.tokens, self.contexts
        self.features = self.previous_features = None

    def longest(self) -> np.ndarray:
        """int [B]: the most draft tokens of a row that could be accepted. In a tree, they are on
        one path."""
        return np.minimum(self.drafted, np.minimum(self.depths, self.draft_steps))

    def accepted_share(self) -> np.ndarray:
        """float64 [B]: la/k, accepted tokens / draft tokens (for a tree: / the draft's depth). It
        is 0 for a row without a draft."""
        share: np.ndarray = self.accepted / np.maximum(self.longest(), 1)
        return share

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON values, times in milliseconds. gamma: the max depth allowed for each
        row's draft. la_k: None for a row without a draft. Each signal is one list per row, without
        the positions where the policy did not look."""
        shares = np.where(self.drafted > 0, self.accepted_share(), np.nan)
        return {
            "rows": self.rows.tolist(),
            "gamma": self.depths.tolist(),
            "drafted": self.drafted.tolist(),
            "reached": self.reached.tolist(),
            "accepted": self.accepted.tolist(),
            "emitted": self.emitted.tolist(),
            "la_k": [None if np.isnan(share) else float(share) for share in shares],
            "fed": self.fed,
            "draft_steps": self.draft_steps,
            "draft_ms": 1000 * self.draft_s,
            "verify_ms": 1000 * self.verify_s,
            "overhead_ms": 1000 * self.overhead_s,
            **{
                name: [row[~np.isnan(row)].round(4).tolist() for row in values]
                for name, values in self.signals.items()
            },
        }


Observer = Callable[[Verification], None]
