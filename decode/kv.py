"""A Hugging Face causal LM over a preallocated cache of slots (`decode.slots`).

Shapes: B rows (sequences), n tokens fed per row, V vocabulary.
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from decode.errors import UserError
from decode.features import Recorder
from decode.packed import PackedModel, can_pack
from decode.placement import input_device
from decode.slots import Slots

# In the trial of a model with its first tree.
SIBLINGS = 16


def require_slots(model: PreTrainedModel, longest: int) -> None:
    """Refuse a model whose past is not one key and value per token, before anything is computed.

    Raises UserError for recurrent and hybrid models (their state cannot be rolled back), for
    sliding-window models when the window is smaller than the `longest` text, and for attention
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
    """How many tokens back the model's layers see; None where they see all."""
    config = model.config.get_text_config()
    window: int | None = getattr(config, "sliding_window", None)
    return window if getattr(config, "use_sliding_window", True) else None


class CachedLM:
    """A causal LM and the slots of the sequences it is decoding.

    Any model that takes a 4-D attention mask, `position_ids` and a `transformers` cache will do.
    Tested with trees: llama, qwen2, qwen3, gemma, gemma2, gemma3, gpt2, mistral, phi3 and opt, with
    sdpa and eager attention where they have both. Sliding-window layers will do for texts that fit
    into the window. Refused by `require_slots`: recurrent and hybrid models (mamba, jamba,
    recurrent_gemma), chunked attention (llama4), flash attention. Refused when the first tree is
    fed, by a trial: models that make masks or positions of their own (ALiBi: bloom, mpt).

    pack: run on a packed copy of its weights (see `decode.packed`); None: where that is possible.
    taps: whose hidden states (`decode.features`) each forward leaves in `features`, [B, n, H].
    """

    def __init__(
        self, model: PreTrainedModel, *, pack: bool | None = None, taps: Sequence[int] = ()
    ) -> None:
        self.model = model
        self._packed = PackedModel(model) if (can_pack(model) if pack is None else pack) else None
        self._runs: PreTrainedModel = self._packed.model if self._packed else model
        self._recorder = Recorder(self._runs, taps) if taps else None
        self.features: Mapping[int, Tensor] = {}
        self.device = input_device(model)
        config = model.config.get_text_config()
        self.max_positions: int = getattr(config, "max_position_embeddings", None) or 1 << 30
        parameters = inspect.signature(model.forward).parameters
        self._keeps_columns = "logits_to_keep" in parameters
        self._boolean_masks = model.config._attn_implementation == "sdpa"
        self._mask_dtype = model.dtype
        self._slots: Slots | None = None
        self._cache: Cache | None = None
        self._tried = False
        self.capacity = 0  # slots of each row

    def reset(self, rows: int, capacity: int, *, longest: int | None = None) -> None:
        """Start `rows` empty sequences of at most `capacity` slots; raises as `require_slots`.

        longest: tokens of the longest text, where that is less: the nodes of a tree take a slot
        each, and a path through it is no longer than the tree is deep.
        """
        require_slots(self.model, capacity if longest is None else longest)
        self.capacity = capacity
        self.refresh()
        layers = self.model.config.get_text_config().num_hidden_layers
        self._slots = Slots(layers, rows, capacity, self.device)
        self._cache = Cache(layers=self._slots.layers)

    def refresh(self) -> None:
        """Follow weights that were changed in place. What is cached stays as it was computed."""
        if self._packed:
            self._packed.refresh()

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

        start: int [B], the slot of each row's first token; everything below it is its past.
        columns: int [B], return the logits of this one column per row, [B, 1, V]; None: all n.
        depth_BN, ancestors_BNM: for a token tree, whose last n of m ≥ n nodes are fed and whose
            first m−n stand in the slots before `start`: each token's distance from the tree's
            first slot, and which of the m nodes it may see (itself included). None: a chain.
        Raises UserError where a tree is fed to a model that does not honour masks and positions.
        """
        assert self._slots is not None, "reset() comes before forward()"
        rows, n = ids_BN.shape
        if ancestors_BNM is not None and not self._tried:
            self._try_trees()
        self._slots.place(start, n)
        base = start if ancestors_BNM is None else start + n - ancestors_BNM.shape[2]
        base_B1 = torch.as_tensor(base, device=self.device)[:, None]
        if depth_BN is None:
            depth_BN = torch.arange(n, device=self.device)[None, :]
        extra: dict[str, object] = {}
        picked = None
        if columns is not None and self._keeps_columns:
            kept, picked = np.unique(columns, return_inverse=True)
            extra["logits_to_keep"] = torch.as_tensor(kept, device=self.device)
        elif columns is not None:
            picked = columns
        taken: AbstractContextManager[Mapping[int, Tensor]] = (
            self._recorder.recording() if self._recorder else nullcontext({})
        )
        with taken as self.features:
            logits = self._runs(
                input_ids=ids_BN,
                # Only padding can lie past the last position; it must not index out of a learned
                # table.
                position_ids=(base_B1 + depth_BN).clamp(max=self.max_positions - 1),
                attention_mask=self._mask(base_B1, start, n, ancestors_BNM),
                past_key_values=self._cache,
                use_cache=True,
                **extra,
            ).logits
        if picked is None:
            return logits
        if logits.shape[1] == 1:
            return logits
        index_B = torch.as_tensor(picked, device=self.device)
        return logits[torch.arange(rows, device=self.device), index_B][:, None]

    @torch.no_grad()
    def _try_trees(self) -> None:
        """Feed SIBLINGS tokens after one, and once more in the opposite order: each one's logits
        must be the same, whatever is beside it and wherever it stands. In a third row they are a
        chain, which tells how large an error would be."""
        size = self.model.config.get_text_config().vocab_size
        count = 1 + SIBLINGS
        row = torch.arange(count, device=self.device) * size // count
        ids = torch.stack([row, torch.cat([row[:1], row[1:].flip(0)]), row])
        chain = torch.ones(count, count, dtype=torch.bool, device=self.device).tril()
        star = torch.eye(count, dtype=torch.bool, device=self.device)
        star[:, 0] = True
        seen = torch.stack([star, star, chain])
        trial = CachedLM(self.model)
        trial._tried = True
        trial.reset(3, count, longest=1)
        start = np.zeros(3, dtype=np.int64)
        try:
            logits = trial.forward(ids, start, depth_BN=seen.sum(2) - 1, ancestors_BNM=seen)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reason = f"fails on one ({error})"
        else:
            there, back, chained = logits[:, 1:].float()
            apart = float((there - back.flip(0)).abs().max())
            wrong = float((there - chained).abs().max())
            unit = torch.finfo(self._mask_dtype).eps * float(there.abs().max())
            # Sums in another order differ by more in bfloat16 than some errors do in float32.
            if apart <= min(0.1 * wrong, 1000 * unit) + 4 * unit:
                self._tried = True
                return
            reason = "gives other logits for a token when a sibling stands before it"
        raise UserError(
            f"{type(self.model).__name__} does not honour 4-D attention masks and position_ids, "
            f"which token trees need: it {reason}. Draft chains (shape chain) or use another model"
        )

    def _mask(
        self, base_B1: Tensor, start: np.ndarray, n: int, ancestors_BNM: Tensor | None
    ) -> Tensor | None:
        """As `Slots.mask` says, in the form that the model's attention takes."""
        assert self._slots is not None
        seen = self._slots.mask(base_B1, start, n, ancestors_BNM)
        if seen is None or self._boolean_masks:
            return seen
        blocked = torch.finfo(self._mask_dtype).min
        return torch.zeros_like(seen, dtype=self._mask_dtype).masked_fill_(~seen, blocked)

    def commit(self, start: np.ndarray, columns_BM: Tensor, counts: np.ndarray) -> None:
        """See `Slots.commit`."""
        assert self._slots is not None
        self._slots.commit(start, columns_BM, counts)

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all rows but these (int64 [B']), in this order."""
        assert self._slots is not None
        self._slots.keep_rows(rows)
