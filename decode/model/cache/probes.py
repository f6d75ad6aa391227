"""Inputs of a drafter that the target reads behind the nodes of a draft, in the pass that verifies
it.

Shapes: B rows, N nodes of a draft, P places, k probes behind each place, H hidden size, V
vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from decode.base.device import to_device
from decode.draft import Contexts, Draft
from decode.model.cache.cached_model import CachedLM, LayerView
from decode.model.hidden_states import FINAL


class Probes:
    """The same k inputs behind each of the first places of a draft, for one pass. A drafter makes
    them (`decode.drafters.Drafter.probes`) and drafts from their states after the verdict.

    Place 0 is the text's last token, and place i is node i − 1. A probe sees what its place sees,
    the place itself, and the probes before it. No node sees a probe. Rules get the logits of the
    draft only. The keys and values of the probes are in slots after those of the draft, and the
    next pass overwrites them.

    view: the complete target with its embeddings of the probes. ids: int64 [k], which ids it embeds
    as the probes. places: the most places that get probes. None: all.
    states: after `verify`, the target's last hidden states at the probes, [B, P, k, H].
    """

    states: Tensor

    def __init__(self, view: LayerView, ids: Tensor, places: int | None = None) -> None:
        self.view, self.ids, self.places = view, ids, places

    @staticmethod
    def count(probes: int, places: int | None, nodes: int) -> int:
        """The probes of a row, with the same number behind each place of a draft of N nodes."""
        return probes * min(nodes + 1, nodes + 1 if places is None else places)

    def verify(self, lm: CachedLM, contexts: Contexts, draft: Draft, counts: np.ndarray) -> Tensor:
        """`CachedLM.verify` of the target `lm`, with the probes in the same pass: logits
        [B, N+1, V]. Raises UserError as `CachedLM.forward` does for trees."""
        layers = tuple(dict.fromkeys((*lm.captured_layers, FINAL)))
        if self.view.captured_layers != layers:
            self.view.capture(layers)
        rows, nodes = draft.tokens.shape
        judged = np.tile(np.arange(nodes + 1), (rows, 1))
        behind = self._behind(draft)
        # The probes are behind the longest draft, so each row that is fed has all of it.
        fed = np.where(counts, behind.sizes + 1, 0)
        logits = self.view.feed(contexts, behind, judged, fed)
        features, lm.fed = self.view.features, self.view.fed
        lm.take_features({layer: features[layer] for layer in lm.captured_layers})
        self.states = features[FINAL][:, nodes + 1 :].unflatten(1, (-1, len(self.ids)))
        return logits

    def _behind(self, draft: Draft) -> Draft:
        """The nodes of the draft, then the probes, place by place. It is fed, never judged."""
        rows, nodes = draft.tokens.shape
        k = len(self.ids)
        fed = self.count(k, self.places, nodes)
        number = np.arange(fed)
        above = np.where(number % k == 0, number // k - 1, nodes + number - 1)
        parents = np.append(draft.parents_on_host(), np.tile(above, (rows, 1)), axis=1)
        return Draft(
            torch.cat([draft.tokens, self.ids.repeat(fed // k).expand(rows, -1)], 1),
            np.full(rows, nodes + fed),
            parents=to_device(parents, self.ids.device),
            _host_parents=parents,
        )
