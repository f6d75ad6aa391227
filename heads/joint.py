"""Trains heads and target together: Medusa-2, and Blockwise's fine-tuned variant.

Shapes: B rows, T tokens, n predicted tokens.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.target.hidden_states import Recorder
from distill.chunked import chunked_loss
from distill.losses import WeightedLoss
from distill.teacher.signal import Teacher
from heads.base import output_layer
from heads.training import HeadTraining


class JointTraining(nn.Module):
    """L = L_backbone + λ₀ · L_heads (2401.10774, section 2.2.2).

    The heads read the current hidden states of the backbone, so their loss also trains the
    backbone.

    terms: the backbone's losses. They compare its next-token distribution with the text or with
    the distribution of the original target. Raises UserError for a backbone without a linear output
    layer. An output layer with an adapter counts as not linear.
    """

    def __init__(
        self,
        backbone: PreTrainedModel,
        heads: HeadTraining,
        terms: WeightedLoss,
        *,
        chunk: int = 256,
    ) -> None:
        super().__init__()
        output_layer(backbone)
        self.backbone, self.heads, self.terms, self.chunk = backbone, heads, terms, chunk
        self._recorder = Recorder(backbone, heads.captured_layers)

    @property
    def sums(self) -> list[str]:
        """Names of the sums of `forward`, in order: first the heads', then the backbone's."""
        own = [f"backbone/{name}" for name in ("tokens", *self.terms.names)]
        return [*self.heads.sums, *own]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        losses: Mapping[int, float],
        weight: float,
        teacher: Teacher | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The combined loss summed over tokens, and `sums`, float64.

        input_ids, attention_mask: int64 [B, T]. loss_mask: bool [B, T]. losses: as for
        `HeadTraining`. weight: λ₀. teacher(slice): the teacher signal of the original target for
        the n predicted tokens; needed only if a term reads it.
        """
        with self._recorder.recording() as features:
            hidden = self.backbone.base_model(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=False
            ).last_hidden_state
        layer = output_layer(self.backbone)
        predicted = loss_mask[:, 1:]
        labels = input_ids[:, 1:][predicted]
        own, terms = chunked_loss(
            hidden[:, :-1][predicted],
            layer.weight,
            layer.bias,
            teacher,
            labels,
            self.terms,
            chunk=self.chunk,
        )
        # Use the layer here, not outside: engines that shard weights gather them only in a forward.
        with self.heads.following(layer):
            of_heads, sums = self.heads(input_ids, loss_mask, features, losses)
        return own + weight * of_heads, torch.cat([sums, terms.new_tensor([len(labels)]), terms])

    def figures(self, sums: Mapping[str, float], tokens: int = 0) -> dict[str, float]:
        """Like `HeadTraining.figures`, plus the mean of each of the backbone's terms."""
        count = sums["backbone/tokens"]
        names = [f"backbone/{name}" for name in self.terms.names] if count else []
        return self.heads.figures(sums, tokens) | {name: sums[name] / count for name in names}
