"""Drafts with heads of multi-token prediction, also with the module in the target's checkpoint.

Shapes: B rows, n tokens, m missing cache entries, H hidden size.
"""

from typing import Self

import numpy as np
import torch
from torch import Tensor

from decode.base.device import dtype_name, to_device
from decode.base.errors import UserError
from decode.base.registry import Choice
from decode.draft import Contexts
from decode.drafters import DRAFTERS
from decode.drafters.trained import InTarget
from decode.draw.sampling import Sampling
from decode.model.loading import DTYPES, Target
from decode.shapes import Growth, Shape
from heads.eagle_drafter import AutoregressiveDrafter
from heads.heads_directory import make_ready
from heads.mtp_checkpoint import read_module
from heads.mtp_heads import MtpHeads


@DRAFTERS.register("mtp")
class MtpDrafter(AutoregressiveDrafter, InTarget):
    """Drafts in any shape with one layer, and chains with several.

    With several layers, entry i of layer d reads token i + d. The last entries of the later layers
    therefore have drafted tokens, and are computed again for the next draft.

    Raises UserError for trees with several layers.
    """

    heads: MtpHeads

    def __init__(self, heads: MtpHeads, vocab_size: int, shape: Shape | None = None) -> None:
        super().__init__(heads, vocab_size, shape)
        if len(heads.layers) > 1 and self.shape.branches:
            raise UserError(
                f"these mtp heads have {len(heads.layers)} layers, one for each token of a draft, "
                "and draft chains; use the shape chain, or heads with one layer"
            )

    @classmethod
    def in_target(cls, choice: Choice, target: Target, dtype: torch.dtype) -> Self:
        """The module in the target's checkpoint. The options are those of the heads: `depth`,
        `window` and `sinks`. Raises UserError as `read_module` does."""
        heads = read_module(target, choice.options)
        make_ready(heads, target, DTYPES[dtype_name(dtype)])
        return cls(heads, target.vocab_size)

    @property
    def token_bytes(self) -> int:
        config = self.heads.config
        if getattr(config, "kv_lora_rank", None) is None:
            return super().token_bytes
        width = 2 * config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        layers = len(self.heads.layers)
        return int(self.heads.hidden_size + layers * width) * int(self.heads.dtype.itemsize)

    def growth(self, contexts: Contexts, sampling: Sampling, max_depth: int) -> Growth:
        if len(self.heads.layers) == 1:
            return super().growth(contexts, sampling, max_depth)
        return _LayeredGrowth(self, contexts, sampling)

    def layer(self, contexts: Contexts, columns: np.ndarray, states: Tensor) -> Tensor:
        if len(self.heads.layers) == 1:
            return super().layer(contexts, columns, states)
        passes = LayerPasses(self, contexts, columns, states)
        for _ in self.heads.layers:
            passes.run()
        return passes.states

    def prefill(self, contexts: Contexts, first: int = 0) -> None:
        super().prefill(contexts, first)
        self.keep_sure(contexts, first)

    def skip_unseen(self, contexts: Contexts, entries: np.ndarray, since: int = 0) -> None:
        super().skip_unseen(contexts, entries - (len(self.heads.layers) - 1), since)

    def keep_sure(self, contexts: Contexts, first: int = 0) -> None:
        """Count only those entries as cached that read tokens of the text, in every layer."""
        layers = len(self.heads.layers)
        if layers > 1:
            sure = np.maximum(contexts.lengths - layers, 0)[first:]
            self.cached_entries[first:] = np.minimum(self.cached_entries[first:], sure)


class LayerPasses:
    """The passes of the layers, one after the other, over the same entries.

    columns: int [B, m], the entries. states: [B, m, H], the output of the layer that ran last.
    """

    def __init__(
        self, drafter: MtpDrafter, contexts: Contexts, columns: np.ndarray, states: Tensor
    ) -> None:
        self.heads, self.states, self._done = drafter.heads, states, 0
        device = states.device
        self.columns = to_device(columns, device)
        self._attends = drafter.attentions(columns[:, 0], columns.shape[1])
        # The tokens that the layers read. Past the end of a text they are those of a draft.
        wide = columns[:, :1] + 1 + np.arange(columns.shape[1] + len(self.heads.layers) - 1)
        known = np.minimum(wide, contexts.tokens.shape[1] - 1)
        self.tokens = to_device(np.take_along_axis(contexts.tokens, known, axis=1), device)
        self._first_B1 = to_device(columns[:, :1] + 1, device)

    def put(self, tokens: Tensor, places: Tensor) -> None:
        """Drafted tokens, int64 [B], at places of the texts, int64 [B]."""
        last = self.tokens.shape[1] - 1
        at = (places[:, None] - self._first_B1).clamp(0, last)
        self.tokens = self.tokens.scatter(1, at, tokens[:, None])

    def run(self) -> None:
        """Run the next layer."""
        number, count = self._done, self.columns.shape[1]
        tokens = self.tokens[:, number : number + count]
        self.states = self.heads.step(
            self.states, tokens, self.columns + number, self._attends[number], number=number
        )
        self._done += 1


class _LayeredGrowth(Growth):
    """A chain whose token d comes from layer d."""

    def __init__(self, drafter: MtpDrafter, contexts: Contexts, sampling: Sampling) -> None:
        heads = drafter.heads
        device = drafter.states.device
        super().__init__(contexts, sampling, device, drafter.vocab_size, heads.vocabulary)
        self.heads = heads
        entries = contexts.lengths - 1
        drafter.skip_unseen(contexts, entries)
        columns, states = drafter.take_missing(entries)
        drafter.keep_sure(contexts)
        self.passes = LayerPasses(drafter, contexts, columns, states)
        # A row without entries drafts nothing, so its value here does not matter.
        self.last = to_device(np.maximum(entries - columns[:, 0] - 1, 0), device)
        self.lengths = to_device(contexts.lengths, device)

    def _first(self) -> Tensor:
        return self._next()

    def _extend(self, count: int) -> Tensor:
        drafted = self.fed.shape[1]
        logits = []
        for place in range(drafted - count, drafted):
            self.passes.put(self.fed[:, place], self.lengths + place)
            logits.append(self._next())
        return torch.stack(logits, 1)

    def _next(self) -> Tensor:
        """[B, V']: the logits of the next layer for the last entries."""
        self.passes.run()
        rows = torch.arange(self.rows, device=self.device)
        states = self.passes.states[rows, self.last]
        return self.heads.output.at(1, self.heads.readout(states))
