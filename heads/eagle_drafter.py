"""Drafts of EAGLE heads: each token is computed from the drafter's last state.

In the decode loop the drafter keeps its own key-value cache. Entries of committed tokens are
computed from the target's features, entries of draft tokens from the drafter's states, which are
dropped after each draft.

Shapes: B rows, n tokens, H hidden size.
"""

import numpy as np
import torch
from torch import Tensor

from decode.base.device import to_device
from decode.draft import Contexts
from decode.drafters import DRAFTERS
from decode.draw.sampling import Sampling
from decode.shapes import Growth
from heads.autoregressive_heads import AutoregressiveHeads
from heads.heads_drafter import AttendingDrafter
from heads.layers.llama_layer import Attend


class AutoregressiveDrafter(AttendingDrafter):
    """Drafts in any shape, at most `depth` deep.

    Entry i of a row's cache is a step that reads the features of token i and the embedding of token
    i + 1. So the last entry predicts the next token of the text. Draft nodes use the slots after
    the last entry.
    """

    heads: AutoregressiveHeads

    def growth(self, contexts: Contexts, sampling: Sampling, max_depth: int) -> Growth:
        return _Growth(self, contexts, sampling)

    def layer(self, contexts: Contexts, columns: np.ndarray, states: Tensor) -> Tensor:
        tokens = contexts.tokens[np.arange(len(columns))[:, None], columns + 1]
        device, most = states.device, columns.shape[1]
        new = (columns >= self._since[:, None]) & (columns < self._until[:, None])
        if new.all():
            attend = self.attention(columns[:, 0], most)
            return self.heads.step(
                states, to_device(tokens, device), to_device(columns, device), attend
            )
        # Only new entries are computed: a list, as of one row.
        attend = self.attention(self._since, most, counts=new.sum(1))
        places = to_device(np.flatnonzero(new), device)
        text, positions = (to_device(x[new], device)[None] for x in (tokens, columns))
        outputs = torch.zeros_like(states).flatten(0, 1)
        read = states.flatten(0, 1)[places][None]
        outputs[places] = self.heads.step(read, text, positions, attend)[0]
        return outputs.view(states.shape)


class _Growth(Growth):
    """states: [B, 1 + m, H], the states of the end of the text and of the m fed nodes.

    The steps of their children read these states.
    """

    def __init__(
        self, drafter: AutoregressiveDrafter, contexts: Contexts, sampling: Sampling
    ) -> None:
        heads = drafter.heads
        super().__init__(contexts, sampling, drafter.device, drafter.vocab_size, heads.vocabulary)
        self.drafter, self.heads = drafter, heads
        self.entries = contexts.lengths - 1  # [B]
        self.first_B1 = to_device(self.entries, self.device)[:, None]
        self.states = drafter.newest(contexts)[:, None]

    def _first(self) -> Tensor:
        return self._logits(self.states)[:, 0]

    def _extend(self, count: int) -> Tensor:
        before, needed = self.fed.shape[1] - count, self.needed(count)
        if self.parents is None:
            each = None if needed is None else needed // count
            # In a chain, each step reads the output of the previous step.
            for node in range(before, before + count):
                attend = self.drafter.attention(self.entries + node, 1, counts=each)
                token = self.fed[:, node : node + 1]
                self._feed(self.states[:, -1:], token, self.first_B1 + node, attend)
        else:
            assert self.ancestors is not None, "a tree has both"
            visible = self.ancestors[:, before:]
            attend = self.drafter.attention(
                self.entries + before, count, self.entries, visible, needed
            )
            rows_B1 = torch.arange(self.rows, device=self.device)[:, None]
            states = self.states[rows_B1, self.parents + 1]  # the root's are the first
            positions = (self.first_B1 + (self.depth - 1)).expand(-1, count)
            self._feed(states, self.fed[:, before:], positions, attend)
        real, states = self.drafter.slots.real, self.states[:, -count:]
        if real is None or real.width != count:
            return self._logits(states)
        return real.padded(self._logits(real.flat(states)))

    def _feed(self, states: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> None:
        """Run the steps of n more nodes and append their states.

        states: [B, n, H], the states of their parents. Keys and values go to the slots after the
        last entry.
        """
        real = self.drafter.slots.real
        if real is None:
            new_states = self.heads.step(states, tokens, positions, attend)
        else:  # only the rows whose drafts go on
            at = real.flat(positions.expand(tokens.shape))
            listed = self.heads.step(real.flat(states), real.flat(tokens), at, attend)
            new_states = real.padded(listed)
        self.states = torch.cat([self.states, new_states], 1)

    def _logits(self, states: Tensor) -> Tensor:
        return self.heads.output.at(1, self.heads.readout(states))


@DRAFTERS.register("eagle1")
class Eagle1Drafter(AutoregressiveDrafter):
    """EAGLE, in any shape: EAGLE-1 with `static` trees, EAGLE-2 (2406.16858) with `dynamic`."""


@DRAFTERS.register("eagle3")
class Eagle3Drafter(AutoregressiveDrafter):
    """EAGLE-3, in any shape. The paper uses EAGLE-2's trees, `dynamic`."""
