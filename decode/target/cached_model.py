"""A Hugging Face causal LM over a preallocated cache of slots (`decode.target.slots`).

Shapes: B rows (sequences), n tokens fed per row, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from decode.errors import UserError
from decode.target.cpu_kernels import LONGEST_CHAIN, SLOT_STEP, each_token_alone
from decode.target.hidden_states import Recorder, layer_list_name
from decode.target.memory import require_memory
from decode.target.prepare_model import has_replaced_attention, prepare, refresh_packed
from decode.target.pretrained import input_device
from decode.target.slots import Slots
from decode.target.tree_support import reason_against_trees

# How many tokens of a prompt a pass feeds, over all rows. More make a pass longer and its masks and
# activations larger, but not cheaper per token.
PASS_TOKENS = 4096

# Models that passed the trial for trees, with the attention implementation and dtype they passed it
# in. No other object remembers this.
_PASSED: WeakKeyDictionary[nn.Module, set[tuple[str, torch.dtype]]] = WeakKeyDictionary()


def require_slots(model: PreTrainedModel, longest: int) -> None:
    """Check, before any computation, that the model's past is one key and value per token.

    Raises UserError for recurrent and hybrid models (their state cannot be rolled back), for
    sliding-window models if the window is smaller than the `longest` text, and for attention
    implementations that take no mask.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    stateful = getattr(model, "_is_stateful", False)
    if stateful or kinds - {"full_attention", "sliding_attention"}:
        raise UserError(
            f"{type(model).__name__} keeps a running state ({', '.join(sorted(kinds))}) that "
            "cannot be rolled back after a rejected draft; use a model with attention layers only"
        )
    window = sliding_window(model)
    if window is not None and longest > window:
        raise UserError(
            f"{type(model).__name__} attends to a sliding window of {window} tokens, and this run "
            f"needs {longest}; shorten prompts or max_new_tokens so that they fit in the window"
        )
    attention = str(model.config._attn_implementation)
    if "flash" in attention:
        raise UserError(
            f"{type(model).__name__} computes attention with {attention}, which takes no mask for "
            "rows of different lengths and for token trees; load it with "
            "attn_implementation='sdpa' or 'eager'"
        )


def sliding_window(model: PreTrainedModel) -> int | None:
    """How many tokens back the model's layers see. None: they see all tokens."""
    config = model.config.get_text_config()
    window: int | None = getattr(config, "sliding_window", None)
    return window if getattr(config, "use_sliding_window", True) else None


def require_trees(model: PreTrainedModel) -> None:
    """Check that a model can verify token trees, with a trial (`decode.target.tree_support`) of a
    few tiny forwards. A model that passed is not tried again.

    Call it before expensive work for a drafter that drafts trees. Raises UserError if the model
    ignores 4-D attention masks or positions, and as `require_slots` does.
    """
    kind = str(model.config._attn_implementation), model.dtype
    if kind in _PASSED.get(model, ()):
        return
    layers = range(model.config.get_text_config().num_hidden_layers)
    captured_layers = layers if layer_list_name(model) else ()
    reason = reason_against_trees(CachedLM(model, captured_layers=captured_layers, trial=True))
    if reason is not None:
        raise UserError(
            f"{type(model).__name__} does not honour 4-D attention masks and position_ids, which "
            f"token trees need: it {reason}. Draft chains (shape chain) or use another model"
        )
    _PASSED.setdefault(model, set()).add(kind)


class CachedLM:
    """A causal LM and the slots of the sequences it is decoding.

    Works with any model that takes a 4-D attention mask, `position_ids` and a `transformers` cache.
    Tested with trees: llama, qwen2, qwen3, gemma, gemma2, gemma3, gpt2, mistral, phi3 and opt, with
    sdpa and eager attention if they have both. Sliding-window layers work for texts that fit into
    the window. `require_slots` rejects recurrent and hybrid models (mamba, jamba, recurrent_gemma),
    chunked attention (llama4) and flash attention. `require_trees` rejects models that compute
    masks or positions themselves (ALiBi: bloom, mpt), at the latest when the first tree is fed.

    It runs the model in its prepared form (`decode.target.prepare_model.prepare`).
    captured_layers: the layers whose hidden states are captured (`decode.target.hidden_states`).
    Each forward stores them in `features`, [B, n, H].
    pass_tokens: see `read`.
    trial: it serves the trial of `require_trees`, so it feeds trees to a model that has not passed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        captured_layers: Sequence[int] = (),
        pass_tokens: int = PASS_TOKENS,
        trial: bool = False,
    ) -> None:
        self.model = model
        self._prepared = prepare(model)
        self._recorder = Recorder(self._prepared, captured_layers) if captured_layers else None
        self.features: Mapping[int, Tensor] = {}
        self.device = input_device(model)
        config = model.config.get_text_config()
        self.max_positions: int = getattr(config, "max_position_embeddings", None) or 1 << 30
        self._boolean_masks = self._prepared.config._attn_implementation == "sdpa"
        self._mask_dtype = model.dtype
        self._slots: Slots | None = None
        self._cache: Cache | None = None
        self.pass_tokens = pass_tokens
        self._trial = trial

    def reset(self, rows: int, capacity: int, *, longest: int | None = None) -> None:
        """Start `rows` empty sequences of at most `capacity` slots. Raises as `require_slots` and
        `require_memory`.

        longest: the number of tokens of the longest text, if less than `capacity`. Each node of a
        tree takes a slot, but a path is only as long as the tree is deep.
        """
        require_slots(self.model, capacity if longest is None else longest)
        self._slots = self._cache = None  # the memory of the old slots is free again
        require_memory(self.model, rows, capacity)
        self.refresh()
        layers = self.model.config.get_text_config().num_hidden_layers
        step = SLOT_STEP if has_replaced_attention(self._prepared) else 1
        self._slots = Slots(layers, rows, capacity, self.device, step=step)
        self._cache = Cache(layers=self._slots.layers)

    def add_rows(self, count: int, capacity: int, *, longest: int | None = None) -> None:
        """Append empty sequences to those that run. `capacity` and `longest` are as for `reset`,
        for all rows. Raises as `reset` does, and then changes nothing."""
        slots = self._slots
        assert slots is not None
        require_slots(self.model, capacity if longest is None else longest)
        new = slots.grown(slots.rows + count, capacity)
        require_memory(self.model, *new, slots.allocated)
        slots.add_rows(count, capacity)

    def only(self, first: int, end: int) -> AbstractContextManager[None]:
        """See `Slots.only`."""
        assert self._slots is not None
        return self._slots.only(first, end)

    def refresh(self) -> None:
        """Use weights that were changed in place. Cached keys and values are not computed again."""
        refresh_packed(self._prepared)

    def forward(
        self,
        ids_BN: Tensor,
        start: np.ndarray,
        *,
        columns: np.ndarray | None = None,
        depth_BN: Tensor | None = None,
        ancestors_BNM: Tensor | None = None,
    ) -> Tensor:
        """Feed n tokens per row and return their logits, in the model's dtype.

        start: int [B], the slot of each row's first token; all slots below it are its past.
        columns: int [B], return the logits of this one column per row, [B, 1, V]. None: all n.
        depth_BN, ancestors_BNM: for a token tree with m ≥ n nodes. Its last n nodes are fed, and
            its first m−n nodes are in the slots before `start`. depth_BN is each token's distance
            from the first slot of the tree. ancestors_BNM says which of the m nodes each token may
            see, itself included. None: a chain.
        Raises UserError if a tree is fed to a model that ignores masks or positions.
        """
        assert self._slots is not None, "reset() comes before forward()"
        n = ids_BN.shape[1]
        if ancestors_BNM is not None and not self._trial:
            require_trees(self.model)
        self._slots.place(start, n)
        base = start if ancestors_BNM is None else start + n - ancestors_BNM.shape[2]
        base_B1 = torch.as_tensor(base, device=self.device)[:, None]
        if depth_BN is None:
            depth_BN = torch.arange(n, device=self.device)[None, :]
        recording: AbstractContextManager[Mapping[int, Tensor]] = (
            self._recorder.recording() if self._recorder else nullcontext({})
        )
        chain = ancestors_BNM is None and n <= LONGEST_CHAIN
        alone = each_token_alone() if chain else nullcontext()
        with alone, recording as self.features, self._restricted_output(columns, n):
            logits = self._prepared(
                input_ids=ids_BN,
                # Only padding can be past the last position. It must not index past the end of a
                # learned table.
                position_ids=(base_B1 + depth_BN).clamp(max=self.max_positions - 1),
                attention_mask=self._mask(base_B1, start, n, ancestors_BNM),
                past_key_values=self._cache,
                use_cache=True,
            ).logits
        # `_restricted_output` does nothing for a model without an accessible output layer.
        if columns is not None and logits.shape[1] != 1:
            logits = _columns_of(logits, columns)
        return logits

    def read(self, ids_BN: Tensor, start: np.ndarray, counts: np.ndarray) -> Tensor:
        """Feed long texts and return the logits after each row's last token, [B, 1, V].

        counts: int [B], row b has that many tokens, the rest of its ids is padding. A pass takes at
        most `pass_tokens` tokens of all rows together, and at least one of each row. The slots of
        padding are overwritten later. `features` has the hidden states of all passes, [B, n, H].
        For a row without tokens the logits mean nothing.
        """
        rows, n = ids_BN.shape
        last = np.maximum(counts - 1, 0)
        if rows * n <= self.pass_tokens:
            return self.forward(ids_BN, start, columns=last)
        logits: Tensor | None = None
        parts: list[Mapping[int, Tensor]] = []
        begin = 0
        while begin <= last.max():
            # The rows up to the last one that has tokens left.
            live = int(np.flatnonzero(last >= begin)[-1]) + 1
            end = min(begin + max(self.pass_tokens // live, 1), n)
            columns = np.clip(last[:live] - begin, 0, end - begin - 1)
            with self.only(0, live):
                new = self.forward(ids_BN[:live, begin:end], start[:live] + begin, columns=columns)
            logits = new.new_zeros(rows, 1, new.shape[2]) if logits is None else logits
            reached = np.flatnonzero((begin <= last[:live]) & (last[:live] < end))
            at = torch.as_tensor(reached, device=logits.device)
            logits[at] = new[at]
            parts.append(self.features)
            begin = end
        self.features = {
            layer: torch.cat([_with_rows(part[layer], rows) for part in parts], 1)
            for layer in parts[0]
        }
        assert logits is not None
        return logits

    @contextmanager
    def _restricted_output(self, columns: np.ndarray | None, n: int) -> Iterator[None]:
        """Inside this context, the output layer gets the hidden state of only one of n columns per
        row. Logits of all columns would be by far the largest tensor of a prefill. Later operations
        of the model on its logits (scaling, soft caps) are not affected."""
        get_layer = getattr(self._prepared, "get_output_embeddings", None)
        layer = get_layer() if get_layer and columns is not None and n > 1 else None
        if layer is None:
            yield
            return
        assert columns is not None

        def pick(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            hidden, *others = inputs
            if hidden.shape[:2] != (len(columns), n):
                return None
            return _columns_of(hidden, columns), *others

        # Removed at the end: a hook that stays would affect other users of the model.
        hook = layer.register_forward_pre_hook(pick)
        try:
            yield
        finally:
            hook.remove()

    def _mask(
        self, base_B1: Tensor, start: np.ndarray, n: int, ancestors_BNM: Tensor | None
    ) -> Tensor | None:
        """The mask from `Slots.mask`, in the form that the model's attention takes."""
        assert self._slots is not None
        seen = self._slots.mask(base_B1, start, n, ancestors_BNM)
        if seen is None or self._boolean_masks:
            return seen
        blocked = torch.finfo(self._mask_dtype).min
        return torch.zeros_like(seen, dtype=self._mask_dtype).masked_fill_(~seen, blocked)

    @property
    def slots(self) -> Slots:
        """The slots of the running sequences."""
        assert self._slots is not None, "reset() comes first"
        return self._slots

    def commit(self, start: np.ndarray, columns_BM: Tensor, counts: np.ndarray) -> None:
        """See `Slots.commit`."""
        assert self._slots is not None
        self._slots.commit(start, columns_BM, counts)

    def keep_rows(self, rows: Tensor) -> None:
        """Keep only these rows (int64 [B']), in this order."""
        assert self._slots is not None
        self._slots.keep_rows(rows)


def _with_rows(x: Tensor, rows: int) -> Tensor:
    """x with so many rows: the missing ones are zeros."""
    return x if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def _columns_of(x_BND: Tensor, columns: np.ndarray) -> Tensor:
    """One column of each row, int [B]: [B, 1, D]."""
    rows = torch.arange(len(x_BND), device=x_BND.device)
    return x_BND[rows, torch.as_tensor(columns, device=x_BND.device)][:, None]
