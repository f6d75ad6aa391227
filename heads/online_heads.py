"""Heads on the target that learn while they draft (the method of 2310.07177, applied to heads).

The training data are the drafts. Head d predicted the token at a position from the hidden states at
position − d − 1. Its loss compares it with the target's distribution at this position. The hidden
states and the distribution were computed during decoding, so only the heads run again. What heads
drafted before that position was accepted, so it is the text: heads that read drafted tokens, or
their own states, do so again.

Heads that attend to the text (EAGLE, multi-token prediction, block drafters, Kangaroo) learn from
the input states of all tokens of a text. A layer that makes these states (EAGLE-3's `fc`) stays as
it is, so that the states of running texts are those of any version. The confidence head of DSpark
stays too.

Shapes: B texts, T tokens of the longest, n recorded tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.drafters.trained import require_weights
from decode.model.loading import Target
from decode.shapes.structure import Structure
from distill.choose_vocabulary import rows_of_tokens
from distill.chunked_loss import LossSum, TokenLoss
from distill.losses import WeightedLoss
from distill.replay.online_student import OnlineStudent, require_same_ids
from distill.replay.replay_buffer import (
    HeadDrafts,
    Record,
    from_numpy,
    padded_tokens,
    padded_values,
    recorded_signal,
)
from heads.attending_heads import AttendingHeads
from heads.heads_directory import write_heads
from heads.heads_drafter import AttendingDrafter, HeadsDrafter
from heads.heads_module import HEADS, HeadBatch, Heads


class DraftLoss:
    """The loss of heads on records of what they drafted. They draft it again.

    heads: on the device that computes, with what they borrow. vocab_size: the target's. chunk: the
    number of tokens whose logits are in memory at a time.

    whole_text, features: as in `distill.replay.online_student.OnlineStudent`.
    """

    def __init__(self, heads: Heads, vocab_size: int, chunk: int) -> None:
        self.heads, self.chunk = heads, chunk
        ids = heads.vocabulary
        self._label_rows = None if ids is None else rows_of_tokens(ids, vocab_size)
        self.captured_layers = tuple(heads.captured_layers)
        self.whole_text = heads.replayed_from == "text"
        self.features = heads.hidden_size * (1 if self.whole_text else len(self.captured_layers))
        # Whether the states of a text are made by weights.
        self.fused = isinstance(heads, AttendingHeads) and (
            type(heads).fuse is not AttendingHeads.fuse
        )

    def __call__(
        self, records: Sequence[Record], weighted_loss: WeightedLoss
    ) -> tuple[Tensor, Tensor]:
        """The loss summed over the recorded tokens, and each term's sum, float64 [terms]."""
        input_ids, depths, features, inputs = self.batch(records)
        device = input_ids.device
        signal = recorded_signal(records, device)
        signal_depths = torch.cat([torch.as_tensor(d.depths) for d in _head_drafts(records)])
        loss = LossSum(weighted_loss, chunk=self.chunk)
        extra = torch.zeros((), dtype=torch.float64, device=device)
        sums = torch.zeros(len(weighted_loss.names), dtype=torch.float64, device=device)
        for depth in sorted(set(signal_depths.tolist())):
            # Only the positions that this head drafted.
            batch = HeadBatch(input_ids, depths == depth, features, inputs, replayed=True)
            (prediction,) = self.heads.predictions(batch, [depth])
            # The states are ordered by text and then by position, like the records.
            labels = input_ids[depths == depth]
            labels = labels if self._label_rows is None else self._label_rows[labels]
            of_depth = (signal_depths == depth).to(device)
            teacher = signal[of_depth]
            states, weight, bias = self.heads.output.last_product(depth, prediction.states)
            of_head = TokenLoss(states, weight, bias, labels, added=prediction.added)
            sums += loss.add(teacher.__getitem__, of_head)[0]
            if prediction.extra_loss is not None:
                extra = extra + prediction.extra_loss.sum()
        return loss.total + extra, sums

    def batch(
        self, records: Sequence[Record]
    ) -> tuple[Tensor, Tensor, dict[int, Tensor], Tensor | None]:
        """Return token ids, depths, features and input states of the records as one batch.

        Token ids: int64 [B, T]. Depths: int64 [B, T], the head that drafted each token (0: none).
        Features: by captured layer, in the target's dtype, 0 where they were not recorded. Input
        states: [B, T, H], where weights make them; then there are no features.
        """
        drafts = _head_drafts(records)
        device = next(self.heads.parameters()).device
        input_ids, _ = padded_tokens(records)
        depths = padded_values(
            records,
            [record.positions for record in records],
            [torch.as_tensor(d.depths).long() for d in drafts],
        )
        features = padded_values(
            records, [d.read_positions for d in drafts], [from_numpy(d.features) for d in drafts]
        )
        features = features.to(device)
        if self.fused:
            return input_ids.to(device), depths.to(device), {}, features
        layers = self.captured_layers
        by_layer = dict(zip(layers, features.chunk(len(layers), -1), strict=True))
        return input_ids.to(device), depths.to(device), by_layer, None

    def text_states(self, drafter: Drafter) -> Callable[[int], Tensor] | None:
        """What `Collector` gets the input states of a text from. None: from nowhere."""
        if not self.whole_text:
            return None
        assert isinstance(drafter, AttendingDrafter)
        return drafter.text_states

    def longest_text(self, target: Target, max_length: int | None) -> int:
        """The max number of tokens of a text. Raises UserError if it is too short for the deepest
        head."""
        longest = min(target.max_positions, max_length or target.max_positions)
        # Each token has at least half of the window before it, see `Record.pieces`.
        depth = self.heads.depth
        if longest < 2 * (depth + 1):
            raise UserError(
                f"{depth} heads learn from texts of at least {2 * (depth + 1)} tokens, "
                f"but max_length is {longest}; make it larger"
            )
        return longest


class HeadStudent(OnlineStudent):
    """The heads that are trained, in float32 on `device`.

    heads: as returned by `heads.heads_directory.read_heads`. Each recorded token counts once, for
    the head that drafted it. So the weight of a head is how often its draft tokens are reached.

    tree: stored with the heads. max_length: the max length of a text, in tokens. Raises UserError
    if it is too short for the deepest head, and for heads that `require_learns` refuses.
    """

    def __init__(
        self,
        heads: Heads,
        weighted_loss: WeightedLoss,
        target: Target,
        *,
        tree: Structure | None = None,
        device: torch.device | None = None,
        max_length: int | None = None,
        chunk: int = 256,
    ) -> None:
        self.kind = heads.options.type
        require_learns(self.kind)
        heads = heads.float().to(device or target.device).requires_grad_(True)
        self.module = self._heads = heads.eval()  # without noise
        heads.borrow(target.model, torch.float32, self.device)
        self.weighted_loss = weighted_loss
        self._total_variation = WeightedLoss({"total_variation": 1.0})
        self._target, self._tree = target, tree
        self.ids = None if heads.vocabulary is None else heads.vocabulary.to(self.device)
        heads.vocabulary = self.ids
        self.drafts = DraftLoss(heads, target.vocab_size, chunk)
        self.heads, self.captured_layers = heads.depth, self.drafts.captured_layers
        self.whole_text, self.features = self.drafts.whole_text, self.drafts.features
        self.longest_text = self.drafts.longest_text(target, max_length)

    def loss(self, records: Sequence[Record]) -> tuple[Tensor, Tensor]:
        return self.drafts(records, self.weighted_loss)

    @torch.no_grad()
    def expected_rejections(self, records: Sequence[Record]) -> Tensor:
        return self.drafts(records, self._total_variation)[1][0]

    def require_fits(self, drafter: Drafter) -> None:
        if not isinstance(drafter, HeadsDrafter) or drafter.heads.options.type != self.kind:
            raise UserError(
                f"{type(drafter).__name__} cannot take the weights of {self.kind} heads; expected "
                f"the {self.kind} drafter that was copied"
            )
        require_same_ids(self.ids, drafter.heads.vocabulary)
        require_weights(drafter.heads, self.trained())

    def text_states(self, drafter: Drafter) -> Callable[[int], Tensor] | None:
        return self.drafts.text_states(drafter)

    def hand_over(self, weights: Mapping[str, Tensor], drafter: Drafter) -> None:
        assert isinstance(drafter, HeadsDrafter)
        drafter.take_weights(weights)

    def write(self, directory: Path) -> None:
        write_heads(directory, self._heads, self._target, self._tree)


def require_learns(kind: str) -> None:
    """Raise UserError for a type of heads whose drafts cannot be repeated from a record."""
    learning = [name for name in HEADS if HEADS[name].replayed_from]
    if kind not in learning:
        raise UserError(
            f"heads of type {kind} do not learn from their drafts, because a record does not hold "
            f"all that these were made from; types of heads that do: {', '.join(learning)}"
        )


def _head_drafts(records: Sequence[Record]) -> list[HeadDrafts]:
    """Return the head drafts of all records. For heads, the collector sets them in every record."""
    return [record.head_drafts for record in records if record.head_drafts is not None]
