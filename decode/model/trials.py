"""Trials: does a model compute over slots what its own forward computes over the whole text?

Families of models differ in ways that no config names: some count the keys to make a mask or
positions, some ignore the cache, some forget their window in it. So a small copy of each kind of
model (`decode.model.small_copy`) is tried in float32, before the first text: two rows of different
lengths, a prompt read in parts, tokens that are fed and taken back, texts past the window. A token
tree must give each of its nodes the logits of the text above it.

The result is remembered for the config in this process. What a trial costs does not depend on the
number of layers or their size.

Shapes: B rows, n tokens fed per row, m nodes, V vocabulary.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.model.forward.sublayers import Sublayers
from decode.model.kinds.layer_kinds import require_slots
from decode.model.pretrained import config_text
from decode.model.small_copy import small_model
from decode.tree_structure import ancestors_of

# The largest difference of logits, as a share of the largest logit. In 16 bits only a model is
# tried of which there is no small copy.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}

# The rows: their prompts, and the tokens after them.
PROMPTS = np.array([9, 4])
MORE = 8
# The tokens of a prompt that one pass reads, over both rows.
PASS = 6
# The parent of each node of a tree. Node 0 follows the prompt.
PARENTS = (-1, 0, 0, 1, 2)


class Tried(Protocol):
    """A model over slots: see the members of `CachedLM` with these names."""

    model: PreTrainedModel
    device: torch.device
    vocab_size: int
    pass_tokens: int
    forward_pass: Any
    sources: Any

    @property
    def slots(self) -> Any: ...

    @property
    def layers(self) -> int: ...

    def like(self, model: PreTrainedModel) -> "Tried": ...

    def view(self, skipped: Sublayers) -> "Tried": ...

    def reset(self, rows: int, capacity: int) -> None: ...

    def encode(self, sources: Sequence[Sequence[int]], first: int) -> None: ...

    def read(self, ids_BN: Tensor, start: np.ndarray, counts: np.ndarray) -> Tensor: ...

    def forward(
        self,
        ids_BN: Tensor,
        start: np.ndarray,
        *,
        depth_BN: Tensor | None = None,
        ancestors_BNM: Tensor | None = None,
    ) -> Tensor: ...


Trial = Callable[[Tried], str | None]

# The reason against each kind of model that was tried, or None; and the models whose kind passed.
_REASONS: dict[tuple[Any, ...], str | None] = {}
_PASSED: WeakKeyDictionary[PreTrainedModel, set[tuple[Trial, str]]] = WeakKeyDictionary()


@torch.no_grad()
def trial_fault(lm: Tried, trial: Trial) -> str | None:
    """What a trial finds wrong with a model over slots, as the end of a sentence, or None.

    lm: the model with the forward that it runs. Another one like it is made for the trial.
    """
    model, attention = lm.model, str(lm.model.config._attn_implementation)
    if (trial, attention) in _PASSED.get(model, ()):
        return None
    forward = type(lm.forward_pass), lm.forward_pass.has_our_attention
    kind = (trial, type(model), attention, *forward, config_text(model.config))
    reason = _REASONS[kind] if kind in _REASONS else _tried(lm, trial, kind)
    if reason is None and lm.device.type != "meta":
        _PASSED.setdefault(model, set()).add((trial, attention))
    return reason


def _tried(lm: Tried, trial: Trial, kind: tuple[Any, ...]) -> str | None:
    small = small_model(type(lm.model), lm.model.config) or lm.model
    if small is lm.model and lm.device.type == "meta":
        return None  # it has no weights yet, and is tried when it has
    try:
        reason = trial(lm.like(small))
    except UserError as error:
        reason = f"fails: {error}"
    except Exception as error:  # code of any library, on inputs that it may not know
        first = str(error).strip().partition("\n")[0][:120]
        reason = f"fails ({type(error).__name__}: {first})"
    if small is not lm.model:
        _REASONS[kind] = reason
    return reason


def require_chains(lm: Tried) -> None:
    """Check that a model decodes chains in rows of different lengths. Raises UserError."""
    require_slots(lm.model)
    reason = trial_fault(lm, chains)
    if reason is not None:
        raise UserError(
            f"{type(lm.model).__name__} cannot be decoded here, with drafts or without: over a "
            f"cache of slots it {reason}. Use its generate(), or another model"
        )


def require_tree_masks(lm: Tried) -> None:
    """Check that a model verifies token trees. Raises UserError."""
    reason = trial_fault(lm, trees)
    if reason is not None:
        raise UserError(
            f"{type(lm.model).__name__} does not honour 4-D attention masks and position_ids, "
            f"which token trees need: it {reason}. Draft chains (shape chain) or use another model"
        )


def require_skipping(lm: Tried, skipped: Sublayers) -> None:
    """Check that drafts can skip these sublayers of a model. Raises UserError."""
    reason = trial_fault(lm, Without.of(skipped, lm.layers))
    if reason is not None:
        raise UserError(
            f"drafts cannot skip layers of {type(lm.model).__name__}: without some it "
            f"{reason}. Use a drafter that does not run the target's layers"
        )


def chains(lm: Tried) -> str | None:
    """The trial of chains of tokens, in two rows of different lengths and in one alone."""
    texts = _TrialTexts(lm)
    rows, lengths = np.arange(2), PROMPTS
    if not texts.own_is_causal():
        return "would give another text: its own logits for a text change when more tokens follow"
    texts.begin(rows)
    logits = texts.read(lengths)
    if not texts.agree(logits, rows, lengths - 1):
        return "gives other logits for a prompt that is read in parts"
    texts.feed(lengths, 3, right=1)
    for width in (3, 1):
        lengths = lengths + 1
        if not texts.agree(texts.feed(lengths, width), rows, lengths):
            return "gives other logits after tokens were taken back"
        lengths = lengths + width - 1
    for row in range(2):
        texts.begin(rows[row : row + 1])
        length = PROMPTS[row : row + 1]
        texts.read(length)
        for width in (1, 2):
            if not texts.agree(texts.feed(length, width), [row], length):
                return "gives other logits for a row alone"
            length = length + width
    return None


def trees(lm: Tried) -> str | None:
    """The trial of token trees: all nodes in one pass, and the deepest ones after the others."""
    texts = _TrialTexts(lm)
    rows = np.arange(2)
    texts.begin(rows)
    texts.read(PROMPTS)
    seen = torch.as_tensor(ancestors_of(np.array([PARENTS]))[0], device=lm.device)
    paths = [texts.path(row, node) for row in range(2) for node in range(len(PARENTS))]
    expected = torch.stack([texts.own(*path)[-1] for path in paths]).unflatten(0, (2, -1))
    nodes = [[path[1][-1] for path in paths[row * len(PARENTS) :][: len(PARENTS)]] for row in rows]
    ids = torch.tensor(nodes, device=lm.device)
    for parts in ([0, len(PARENTS)], [0, 3, len(PARENTS)]):
        for first, end in itertools.pairwise(parts):
            logits = lm.forward(
                ids[:, first:end],
                PROMPTS + first,
                depth_BN=(seen.sum(1) - 1)[None, first:end].expand(2, -1),
                ancestors_BNM=seen[None, first:end, :end].expand(2, -1, -1),
            )
            if not _agree(logits, expected[:, first:end]):
                return "gives other logits for the nodes of a token tree than for their texts"
    return None


@dataclass(frozen=True)
class Without:
    """The trial of drafts without some sublayers: the last layers, any layer, or any attention or
    MLP block. Whether a draft is good is not the question, because the target judges it. It must be
    finite, and the target must read on as before."""

    last: bool
    layers: bool
    attention: bool
    mlp: bool

    @classmethod
    def of(cls, skipped: Sublayers, layers: int) -> "Without":
        """The trial for such sets of sublayers of a model with this number of layers."""
        attention, mlp = skipped.attention, skipped.mlp
        last = attention == mlp == frozenset(range(min(attention, default=0), layers))
        whole = bool(attention & mlp) and not last
        return cls(last, whole, bool(attention - mlp), bool(mlp - attention))

    def _sets(self, count: int) -> Iterator[Sublayers]:
        if self.last:
            yield from (Sublayers.later(kept, count) for kept in range(1, count))
        for number in range(count):
            one, none = frozenset([number]), frozenset[int]()
            chosen = (self.layers, one, one), (self.attention, one, none), (self.mlp, none, one)
            yield from (Sublayers(attention, mlp) for asked, attention, mlp in chosen if asked)

    def __call__(self, lm: Tried) -> str | None:
        """Why drafts cannot skip these, or None."""
        texts = _TrialTexts(lm)
        rows = np.arange(2)
        texts.begin(rows)
        texts.read(PROMPTS)
        for skipped in self._sets(lm.layers):
            with lm.slots.restored(PROMPTS, 2):
                view = lm.view(skipped)
                if not bool(texts.feed(PROMPTS, 2, by=view).isfinite().all()):
                    return f"gives logits that are not finite ({skipped})"
        agrees = texts.agree(texts.feed(PROMPTS, 2), rows, PROMPTS)
        return None if agrees else "leaves traces in the cache"


class _TrialTexts:
    """Two texts, and the model's own logits for them."""

    def __init__(self, lm: Tried) -> None:
        self.lm = lm
        lm.pass_tokens = PASS
        # Small ids may mean something to the model, such as padding.
        first = 8 if lm.vocab_size > 64 else 0
        count = int(PROMPTS.max()) + MORE
        ids = first + (np.arange(4 * count) * 37 + 5) % (lm.vocab_size - first)
        texts, self._others, self._sources = ids[: 2 * count], ids[2 * count :], ids[-2 * MORE :]
        self.ids = texts.reshape(2, count)
        if lm.sources is not None:
            self.ids[:, 0] = lm.sources.start_id
        self._own = [self.own(row, text.tolist()) for row, text in enumerate(self.ids)]

    def _source(self, row: int) -> list[int]:
        return self._sources[row : 2 * MORE - 5 * row].tolist()

    def own(self, row: int, text: Sequence[int]) -> Tensor:
        """The model's own logits for a text, [n, V]."""
        ids: dict[str, Any] = {"input_ids": [text]}
        if self.lm.sources is not None:
            ids = {"input_ids": [self._source(row)], "decoder_input_ids": [text]}
        tensors = {name: torch.tensor(value, device=self.lm.device) for name, value in ids.items()}
        logits: Tensor = self.lm.model(**tensors, use_cache=False).logits[0]
        return logits

    def own_is_causal(self) -> bool:
        """Whether the model's own logits for a text are those of a longer one's beginning."""
        beginnings = (
            (row, self.own(row, text[:-MORE].tolist())) for row, text in enumerate(self.ids)
        )
        return all(_agree(own, self._own[row][: len(own)]) for row, own in beginnings)

    def path(self, row: int, node: int) -> tuple[int, list[int]]:
        """A row, and its text down to a node of the tree after its prompt."""
        above = []
        while node >= 0:
            above.append(int(self._others[2 * node + row]))
            node = PARENTS[node]
        return row, [*self.ids[row, : PROMPTS[row]].tolist(), *reversed(above)]

    def begin(self, rows: np.ndarray) -> None:
        """Start these rows anew."""
        self.rows = rows
        self.lm.reset(len(rows), self.ids.shape[1])
        if self.lm.sources is not None:
            self.lm.encode([self._source(row) for row in rows.tolist()], 0)

    def read(self, counts: np.ndarray) -> Tensor:
        """Read the prompts."""
        ids = torch.tensor(self.ids[self.rows, : counts.max()], device=self.lm.device)
        return self.lm.read(ids, np.zeros_like(counts), counts)

    def feed(
        self, start: np.ndarray, n: int, right: int | None = None, by: Tried | None = None
    ) -> Tensor:
        """Feed the next n tokens of each text. right: how many of them are the text's; the others
        are wrong. by: the model without some sublayers."""
        columns = start[:, None] + np.arange(n)
        ids = self.ids[self.rows[:, None], columns]
        if right is not None:
            ids[:, right:] = self._others[: n - right]
        return (by or self.lm).forward(torch.tensor(ids, device=self.lm.device), start)

    def agree(self, logits: Tensor, rows: Sequence[int] | np.ndarray, start: np.ndarray) -> bool:
        """Whether these logits, [B, n, V], are those of the texts from `start` on."""
        n = logits.shape[1]
        pairs = zip(rows, start.tolist(), strict=True)
        return _agree(logits, torch.stack([self._own[row][at : at + n] for row, at in pairs]))


def _agree(logits: Tensor, expected: Tensor) -> bool:
    largest = (logits.float() - expected.float()).abs().max()
    # Not true for NaN.
    return bool(largest <= TOLERANCE[expected.dtype] * expected.float().abs().max())
