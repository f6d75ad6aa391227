"""Heads and the target are trained together (Medusa-2, and Blockwise's fine-tuned variant).

Shapes: B rows, T tokens, n trained tokens.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.model.hidden_states import Recorder
from distill.chunked_loss import chunked_loss
from distill.losses import WeightedLoss
from distill.teacher.teacher_signal import Teacher
from heads.head_training import HeadTraining
from heads.heads_module import output_layer


class JointTraining(nn.Module):
    """L = L_backbone + λ₀ · L_heads (2401.10774, section 2.2.2).

    The heads read the current hidden states of the backbone, so their loss also trains the
    backbone.

    weighted_loss: the backbone's loss. Its terms compare its next-token distribution with the text
    or with the distribution of the original target. Raises UserError for a backbone without a
    linear output layer. An output layer with an adapter counts as not linear.
    """

    def __init__(
        self,
        backbone: PreTrainedModel,
        heads: HeadTraining,
        weighted_loss: WeightedLoss,
        *,
        chunk: int = 256,
    ) -> None:
        super().__init__()
        output_layer(backbone)
        self.backbone, self.heads, self.chunk = backbone, heads, chunk
        self.weighted_loss = weighted_loss
        self._recorder = Recorder(backbone, heads.captured_layers)

    @property
    def sums(self) -> list[str]:
        """Names of the sums of `forward`, in order: first the heads', then the backbone's."""
        names = ("tokens", *self.weighted_loss.names)
        return [*self.heads.sums, *(f"backbone/{name}" for name in names)]

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
        # A GPU is waited for here only: a mask as an index would be a wait for each use.
        predicted = loss_mask[:, 1:].nonzero(as_tuple=True)
        labels = input_ids[:, 1:][predicted]
        backbone_loss, term_sums = chunked_loss(
            hidden[:, :-1][predicted],
            layer.weight,
            layer.bias,
            teacher,
            labels,
            self.weighted_loss,
            chunk=self.chunk,
        )
        # Use the layer here, not outside: engines that shard weights gather them only in a forward.
        with self.heads.following(layer):
            heads_loss, sums = self.heads(input_ids, loss_mask, features, losses)
        count = term_sums.new_full((1,), len(labels))
        return backbone_loss + weight * heads_loss, torch.cat([sums, count, term_sums])

    def figures(self, sums: Mapping[str, float], tokens: int = 0) -> dict[str, float]:
        """Like `HeadTraining.figures`, plus the mean of each of the backbone's terms."""
        count = sums["backbone/tokens"]
        names = [f"backbone/{name}" for name in self.weighted_loss.names] if count else []
        return self.heads.figures(sums, tokens) | {name: sums[name] / count for name in names}
