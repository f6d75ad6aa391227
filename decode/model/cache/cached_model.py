"""A Hugging Face causal LM over a preallocated cache of slots (`decode.model.cache.slots`).

Shapes: B rows (sequences), n tokens fed per row, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.base.device import to_device
from decode.draft import Contexts, Draft
from decode.model.cache.cached_rows import CachedRows
from decode.model.cache.long_read import LongRead, ReadPart
from decode.model.cache.pass_size import PASS_TOKENS, SHORT_PASS_TOKENS, pass_limit
from decode.model.cache.real_tokens import Listed, RealTokens
from decode.model.cache.sliding_window import SlidingWindow
from decode.model.cache.slots import Slots
from decode.model.forward.attention_mask import AttentionMask
from decode.model.forward.lean_forward import LeanForward
from decode.model.forward.prepare_model import Forward, prepare, refresh_packed
from decode.model.forward.sublayers import Sublayers, changed_forward
from decode.model.forward.transformers_forward import TransformersForward
from decode.model.hidden_states import captured_modules
from decode.model.kinds.decoder_positions import NodePositions, at_positions
from decode.model.kinds.encoder_decoder import CrossAttentionCache
from decode.model.kinds.layer_kinds import layer_windows, require_no_states, require_slots
from decode.model.kinds.recurrent_states import RecurrentStates
from decode.model.memory import scored_heads
from decode.model.pretrained import input_device, longest_text
from decode.model.trials import require_chains, require_skipping, require_tree_masks


class CachedLM:
    """A causal LM and the slots of the sequences it is decoding.

    Works with any model that takes a 4-D attention mask, `position_ids` and a `transformers` cache.
    Layers with a sliding window see the slots inside of it. `require_slots` rejects models without
    attention (mamba), chunked attention (llama4) and flash attention. A trial
    (`decode.model.trials`) rejects models that would compute something else over slots than over
    their text; `require_trees` those that compute masks or positions themselves, at the latest when
    the first tree is fed. Raises UserError for all of these.

    Layers with linear attention or a short convolution keep a state of each row (`states`; None
    for a model without such layers). `forward` may still go back to any `start`: it replays the
    tokens since the last snapshot, or reads the row again if it goes back further than that. These
    layers read a tree path by path; `commit` says which path stays.

    A model with an encoder (t5, bart, marian; tested with trees) decodes the texts of its decoder,
    each from its row's source (`sources`; None for a model without an encoder).

    It runs the model in its prepared form (`decode.model.forward.prepare_model.prepare`).
    captured_layers: the layers whose hidden states are captured (`decode.model.hidden_states`).
    Each forward stores them in `features`, [B, n, H], and in `fed` how many tokens it computed,
    over all rows, with its padding. pass_tokens: see `read`. trial: it serves a trial
    (`decode.model.trials`), so it needs none itself. forward: what runs the model; None: its
    prepared form. window: what all layers see of the text; None: what the model's config says. See
    `narrow`.

    drafter_bytes: what a drafter keeps of each token beside this model. repeats_rows: `keep_rows`
    may name a row more than once. Its copies are then rows too. kept_layers: those whose hidden
    states the slots keep of all tokens of all rows. See `reset`.
    """

    repeats_rows: bool = True
    kept_layers: tuple[int, ...] = ()
    sources: CrossAttentionCache | None = None
    states: RecurrentStates | None = None
    window: SlidingWindow | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        captured_layers: Sequence[int] = (),
        pass_tokens: int = PASS_TOKENS,
        trial: bool = False,
        forward: Forward | None = None,
    ) -> None:
        self.model, self.pass_tokens = model, pass_tokens
        self.capture(captured_layers)
        self.forward_pass = forward or prepare(model)
        self.device, self.dtype = input_device(model), model.dtype
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.max_positions = longest_text(config)
        windows = layer_windows(model)
        self._use_windows([None if size is None else SlidingWindow(size) for size in windows])
        self._rows = CachedRows(model, self.forward_pass)
        self.sources, self.states = self._rows.sources, self._rows.states
        self.drafter_bytes = 0
        self.features: Mapping[int, Tensor] = {}
        self.fed = 0
        self._trial = trial
        self._takes_trees = trial  # known after the first tree
        self._nodes = NodePositions()
        if not trial:
            require_chains(self)

    def like(self, model: PreTrainedModel) -> "CachedLM":
        """For a trial: another model, or this one, with a forward of the same kind."""
        forward = self.forward_pass
        if model is not self.model:
            lean = isinstance(forward, LeanForward)
            if not lean and forward.model is self.model:  # it runs as it is
                forward = TransformersForward(model)
            else:
                forward = prepare(model, lean=None if lean else False)
        return CachedLM(model, trial=True, forward=forward)

    @property
    def keeps_bits(self) -> bool:
        """Whether each token of a draft gets the logits of plain decoding to the bit. Only in 16
        bits, where the layers run in C++, which add up each token's sums in one order; float32
        promises equal texts, not equal bits."""
        return self.dtype.itemsize == 2 and self.forward_pass.keeps_bits

    @property
    def pads(self) -> bool:
        """Whether passes compute padding: transformers' forward does."""
        return self.forward_pass.pads

    @property
    def layers(self) -> int:
        """The number of its layers."""
        return len(self._windows)

    def view(self, skipped: Sublayers, embedding: nn.Module | None = None) -> "LayerView":
        """The model without some sublayers, over the same slots. embedding: in the place of its
        layer of embeddings; None: its layer. Raises UserError for a model with running states,
        for one that a trial shows to fail without some layers, and as
        `decode.model.forward.sublayers.changed_forward` does."""
        require_no_states(self.model)
        view = LayerView(self, skipped, embedding)
        if len(skipped) and not self._trial:
            require_skipping(self, skipped)
        return view

    def narrow(self, window: SlidingWindow | None) -> None:
        """Let all layers see only this much of the text from now on, at positions of the text as
        before. Layers with a narrower window keep it. Slots that no layer sees are not read, except
        those of a decoder with an encoder. None changes nothing. Long texts are read in passes of
        about a window's size.
        """
        if window is None:
            return
        self.window = window
        self._use_windows(
            [
                old if old is not None and old.size <= window.size else window
                for old in self._windows
            ]
        )
        self.pass_tokens = min(self.pass_tokens, max(window.size, SHORT_PASS_TOKENS))

    def refresh(self) -> None:
        """Use weights that were changed in place. Cached keys and values are not computed again."""
        refresh_packed(self.forward_pass)

    def _use_windows(self, windows: Sequence[SlidingWindow | None]) -> None:
        """Let each layer see only this much of the text."""
        self._windows = list(windows)
        # Layers with the same window have the same mask: which one each layer has.
        self._distinct_windows = list(dict.fromkeys(windows))
        self._mask_of = [self._distinct_windows.index(window) for window in windows]

    @property
    def max_prompt(self) -> int:
        """Prompts must have fewer tokens."""
        return self.max_positions if self.sources is None else self.sources.max_prompt

    def texts_and_sources(
        self, prompts: Sequence[Sequence[int]]
    ) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]] | None]:
        """The first tokens of the texts of these prompts, and the sources that an encoder reads.
        Without an encoder the texts begin with the prompts, and sources is None."""
        if self.sources is None:
            return prompts, None
        return [[self.sources.start_id]] * len(prompts), prompts

    def encode(self, sources: Sequence[Sequence[int]], first: int) -> None:
        """Let the encoder read the sources (token ids) of the rows from `first` on, before their
        first `forward`. Raises UserError if memory is missing."""
        assert self.sources is not None
        self.sources.read(sources, first, self.pass_tokens)

    def capture(self, layers: Sequence[int]) -> None:
        """Capture these layers from now on. Raises UserError for a layer that the model lacks."""
        captured_modules(self.model, layers)
        self.captured_layers = tuple(layers)
        if self.captured_layers != self.kept_layers:
            self.kept_layers = ()  # the texts would have holes

    @property
    def shared_layers(self) -> tuple[int, ...] | None:
        """The layers whose hidden states texts in the slots have, if those of all tokens are kept
        there and no others. None: such texts are of no use to other decodes."""
        layers = self.kept_layers
        whole = layers == self.captured_layers and len(layers) == self.slots.states
        return layers if whole else None

    def reset(self, rows: int, capacity: int, *, keep_states: bool = False) -> None:
        """Start `rows` empty sequences of at most `capacity` slots. keep_states: keep the captured
        hidden states of all tokens beside their keys (`kept_layers`). Raises as `require_slots` and
        `require_memory`."""
        require_slots(self.model)
        self.kept_layers = self.captured_layers if keep_states else ()
        self._rows.reset(
            rows,
            capacity,
            step=self.forward_pass.slot_step,
            states=len(self.kept_layers),
            other_bytes=self._other_bytes,
        )
        refresh_packed(self.forward_pass)

    @property
    def _other_bytes(self) -> int:
        """What each token takes beside the model's keys and values."""
        width = self.model.config.get_text_config().hidden_size * self.dtype.itemsize
        return self.drafter_bytes + len(self.kept_layers) * width

    def add_rows(self, count: int, capacity: int) -> None:
        """Append empty sequences to those that run. `capacity` is as for `reset`, for all rows.
        Raises as `reset` does, and then changes nothing."""
        self._rows.add_rows(count, capacity, self._other_bytes)

    def keep_rows(self, rows: np.ndarray) -> None:
        """See `CachedRows.keep_rows`."""
        self._rows.keep_rows(rows)

    def forward(
        self,
        ids_BN: Tensor,
        start: np.ndarray,
        *,
        columns: np.ndarray | None = None,
        counts: np.ndarray | None = None,
        depth_BN: Tensor | None = None,
        ancestors_BNM: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:
        """Feed n tokens of each of the B rows from `first` on, and return their logits, in the
        model's dtype. Other rows stay as they are.

        start: int [B], the slot of each row's first token; all slots below it are its past.
        columns: int [B, k], return the logits of only these columns of each row, [B, k, V]. None:
            all n.
        counts: int [B], the first of the n tokens that each row feeds; one row feeds some. What
            follows is padding, which is not fed but where the forward `pads`. What is returned of
            padding means nothing. With running states, no chain goes back further than its last
            token. None: all n, as far as is known.
        depth_BN, ancestors_BNM: for a token tree with m ≥ n nodes. Its last n nodes are fed, and
            its first m−n nodes are in the slots before `start`. depth_BN is each token's distance
            from the first slot of the tree. ancestors_BNM says which of the m nodes each token may
            see, itself included. None: a chain.
        Raises UserError if a tree is fed to a model that ignores masks or positions.
        """
        at = None if columns is None else to_device(columns, self.device)
        logits, real = self._feed(ids_BN, start, at, counts, depth_BN, ancestors_BNM, first)
        if real is None:
            return logits
        self.features = {layer: real.padded(x) for layer, x in self.features.items()}
        return real.padded(logits) if at is None else logits[0].unflatten(0, at.shape)

    def _feed(
        self,
        ids_BN: Tensor,
        start: np.ndarray,
        columns: Tensor | None,
        counts: np.ndarray | None,
        depth_BN: Tensor | None,
        ancestors_BNM: Tensor | None,
        first: int = 0,
        places: Tensor | None = None,
        reads: bool = True,
    ) -> tuple[Tensor, RealTokens | None]:
        """As `forward` and, for `reads`, `Slots.place`. Where the pass is a list of tokens, returns
        it too, and all values are those of it, [1, …]. places: int64 [W], which get logits."""
        if ancestors_BNM is not None and not self._takes_trees:
            require_tree_masks(self)
            self._takes_trees = True
        slots, n, root = self.slots, ids_BN.shape[1], start
        if ancestors_BNM is not None:
            root = start - (ancestors_BNM.shape[2] - n)
        with ExitStack() as contexts:
            if self.states is not None:
                if ancestors_BNM is None or ancestors_BNM.shape[2] == n:  # else a tree goes on
                    self._rewind(self.states, start, first)
                ends = None if counts is None else start + counts
                pass_ = self.states.feeding(ids_BN, start, ends, ancestors_BNM, first)
                contexts.enter_context(pass_)
            # A bias by position (T5, GPT-Neo) counts keys by their slots, so it needs all of them.
            window = None if self.forward_pass.reads_positions else self.window
            own = None if self.pads else counts
            slots.place(start, n, window, root, counts=own, first=first, reads=reads)
            self.fed = ids_BN.numel() if own is None else int(own.sum())
            root_B1 = to_device(root, self.device)[:, None]
            if depth_BN is None:
                depth_BN = torch.arange(n, device=self.device)[None, :]
            positions = self.positions(root_B1, depth_BN)
            masks = self._masks(root_B1, n, ancestors_BNM)
            if self.forward_pass.reads_positions:
                at = self._nodes.of_pass(positions, root_B1, ancestors_BNM)
                contexts.enter_context(at_positions(at))
            if self.sources is not None:
                contexts.enter_context(self.sources.reading(first, len(start)))
            real = slots.real
            if real is not None:
                ids_BN, positions = real.flat(ids_BN), real.flat(positions)
                if columns is not None:
                    places = real.places(columns).flatten()
                columns = None if places is None else places[None]
            logits, self.features = self.forward_pass(
                ids_BN,
                positions,
                masks,
                slots.layers if self.states is None else self.states.among(slots.layers),
                columns,
                self.captured_layers,
            )
        if self.kept_layers:
            slots.keep_states([self.features[layer] for layer in self.kept_layers], waits=True)
        return logits, real

    def _rewind(
        self, states: RecurrentStates, start: np.ndarray, first: int = 0, *, settle: bool = False
    ) -> None:
        """See `RecurrentStates.rewind`. Rows that go back further are read again."""
        for row in states.lost(start, first).tolist():
            count = start[row : row + 1]
            ids = states.tokens(first + row, int(count[0]))
            self.read(ids, np.zeros_like(count), count, first + row)
        states.rewind(start, first, settle=settle)

    def positions(self, base_B1: Tensor, depth_BN: Tensor) -> Tensor:
        """int64 [B, n]: the positions of fed tokens that are so far behind the slots `base_B1`."""
        # Only padding can be past the last position. It must not index past the end of a learned
        # table.
        return (base_B1 + depth_BN).clamp(max=self.max_positions - 1)

    def verify(
        self,
        contexts: Contexts,
        draft: Draft,
        counts: np.ndarray | None = None,
        beside: Sequence[ReadPart] = (),
    ) -> Tensor | Listed:
        """One pass over the last committed token of each text and the N nodes of its draft: logits
        [B, N+1, V], or those of the tokens that were fed. counts: int [B], how many of these
        tokens each row feeds, 0 for none; one row feeds some. None: its draft.

        beside: parts of other texts, in the order of their rows behind these. Where the forward
        does not pad, the same pass reads them; each gets what it is to know of them.
        """
        counts = draft.sizes + 1 if counts is None else counts
        start, depth, ancestors = contexts.lengths - 1, None, None
        ids = torch.cat([contexts.last_tokens(self.device), draft.tokens], 1)
        if self.states is not None:
            self._rewind(self.states, start, settle=True)
        if not draft.is_chain:
            ancestors, depth = draft.with_root()
        if beside:
            return self._beside(ids, start, counts, ancestors, beside)
        # The rule says how far each row of a chain with states goes back.
        fed = None if self.states is not None and draft.is_chain else counts
        logits, real = self._feed(ids, start, None, fed, depth, ancestors, reads=False)
        if real is None:
            return logits
        self.features = {layer: real.padded(x) for layer, x in self.features.items()}
        return Listed(logits, real)

    def _beside(
        self,
        ids_BN: Tensor,
        start: np.ndarray,
        counts: np.ndarray,
        ancestors_BNN: Tensor | None,
        parts: Sequence[ReadPart],
    ) -> Listed:
        """One pass over these tokens, and parts of texts behind them in the list."""
        rows, n = ids_BN.shape
        every = [ReadPart(slice(0, rows), ids_BN, start, counts, lambda *_: None), *parts]
        lists = [RealTokens(part.counts, part.ids.shape[1], self.device) for part in every]
        # One column more than any row has, so the pass is a list.
        width = max(part.ids.shape[1] for part in every) + 1
        ids = ids_BN.new_zeros(every[-1].rows.stop, width)
        starts, fed = np.zeros((2, len(ids)), dtype=np.int64)
        for part in every:
            ids[part.rows, : part.ids.shape[1]] = part.ids
            starts[part.rows], fed[part.rows] = part.start, part.counts
        depth = ancestors = None
        if ancestors_BNN is not None:
            ancestors = ancestors_BNN.new_ones(len(ids), width, width).tril()
            ancestors[:rows, :n, :n] = ancestors_BNN
            depth = ancestors.sum(2) - 1
        # Of each part of a text, the last token has logits.
        ends, own = fed.cumsum(), len(lists[0])
        places = np.concatenate([np.arange(own), *(ends[part.rows] - 1 for part in parts)])
        at = to_device(places, self.device)
        logits, _ = self._feed(ids, starts, None, fed, depth, ancestors, places=at, reads=False)
        mine, *others = logits.split([own, *(len(part.counts) for part in parts)], 1)
        sizes = [len(some) for some in lists]
        states = {layer: x.split(sizes, 1) for layer, x in self.features.items()}
        self.features, *theirs = (
            {layer: some.padded(x[number]) for layer, x in states.items()}
            for number, some in enumerate(lists)
        )
        for part, x, features in zip(parts, others, theirs, strict=True):
            part.take(x.transpose(0, 1), features)
        return Listed(mine, lists[0])

    def read(self, ids_BN: Tensor, start: np.ndarray, counts: np.ndarray, first: int = 0) -> Tensor:
        """Feed long texts, of the B rows from `first` on, and return the logits after each row's
        last token, [B, 1, V].

        counts: int [B], row b has that many tokens, the rest of its ids is padding, whose slots are
        overwritten later. A pass takes at most `pass_tokens` tokens, in a long text fewer
        (`pass_limit`), at least one of each row, and little padding (`pads_little`). `features` has
        the hidden states of all passes, [B, n, H]. A row without tokens has logits without a
        meaning; one row has some.
        """
        read = LongRead(ids_BN, start, counts, pads=self.pads)
        while read.left:
            self.read_on(read, self.pass_tokens, first)
        self.features = read.features()
        assert read.logits is not None
        return read.logits

    def read_on(self, read: LongRead, tokens: int, first: int = 0) -> int:
        """One pass over the next part of texts in the rows from `first` on, of at most `tokens`
        tokens and `pass_limit`. Returns how many it fed, without padding."""
        part = read.part(min(tokens, self.pass_limit(read.longest)), first)
        logits = self.forward(
            part.ids,
            part.start,
            columns=np.maximum(part.counts - 1, 0)[:, None],
            counts=part.counts,
            first=part.rows.start,
        )
        part.take(logits, self.features)
        return int(part.counts.sum())

    @cached_property
    def _scored(self) -> int:
        return scored_heads(self.model)

    def pass_limit(self, slots: int) -> int:
        """See `pass_size.pass_limit`."""
        return pass_limit(slots, self._scored, self.pass_tokens)

    def _masks(self, base_B1: Tensor, n: int, ancestors_BNM: Tensor | None) -> list[AttentionMask]:
        """The mask of each layer. Layers with the same window have the same mask."""
        slots, dtype = self.slots, self.dtype
        masks = [
            AttentionMask(slots.mask(base_B1, n, ancestors_BNM, window), dtype)
            for window in self._distinct_windows
        ]
        return [masks[kind] for kind in self._mask_of]

    @property
    def slots(self) -> Slots:
        """The slots of the running sequences."""
        slots = self._rows.slots
        assert slots is not None, "reset() comes before forward()"
        return slots

    def commit(self, start: np.ndarray, columns_BM: np.ndarray, counts: np.ndarray) -> None:
        """See `Slots.commit`."""
        slots = self._rows.slots
        assert slots is not None
        slots.commit(start, columns_BM, counts)
        if self.states is not None:
            self.states.commit(start, columns_BM, counts)


class LayerView(CachedLM):
    """A model without some sublayers, or with another layer of embeddings, over the slots of that
    model.

    It reads the keys and values that the complete model made, and it writes its own into the same
    slots. That is sound where it feeds the tokens after a text, from the text's last token on:
    every verification writes these slots again, in all layers, and what lies beyond is masked.
    `Slots.restored` leaves no trace. Rows join and leave in the complete model, not here.
    """

    def __init__(
        self, lm: CachedLM, skipped: Sublayers, embedding: nn.Module | None = None
    ) -> None:
        super().__init__(lm.model, pass_tokens=lm.pass_tokens, trial=True)
        self.lm, self.skipped = lm, skipped
        self.forward_pass = changed_forward(lm.forward_pass, skipped, embedding)

    @property
    def slots(self) -> Slots:
        return self.lm.slots
