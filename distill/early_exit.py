"""LayerSkip (2404.16710): a model learns to predict well after each of its layers.

Two parts: layers are left out at random, the later ones more often (section 4.1.1), and the output
layer reads the states after earlier layers too (section 4.1.2).

Shapes: B rows, T tokens, n predicted tokens, M layers, H hidden size.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.base.device import to_device
from decode.base.errors import UserError
from decode.model.hidden_states import Recorder, layer_list_name
from distill.chunked_loss import LossSum, TokenLoss
from distill.losses import WeightedLoss
from distill.teacher.teacher_signal import Teacher


def dropout_rates(layers: int, largest: float) -> Tensor:
    """float32 [M]: p_l = p_max · (2^{l / (M − 1)} − 1), the rate at which layer l is left out.

    >>> [round(rate, 3) for rate in dropout_rates(3, 0.2).tolist()]
    [0.0, 0.083, 0.2]
    """
    depth = torch.arange(layers) / (layers - 1)
    return largest * (2**depth - 1)


def exit_weights(
    layers: int, scale: float, *, step: int, done: float, rotation: int | None
) -> dict[int, float]:
    """The loss weights ẽ(l) of the layers that count at a step; they add up to 1.

    e(l) = scale · Σ_{i ≤ l} i for an early layer, and M − 1 + scale · Σ_{i ≤ M − 2} i for the last,
    normalised. A layer of weight 0 is left out. rotation: R, every R-th layer counts, beginning one
    layer later at each step. None: at first only the last layer, and one more from there down
    each time that 1 / (2·M) of the steps is done. The last layer always counts. step: from 0.
    done: the share of the steps that is done.
    """
    last = layers - 1
    if rotation is None:
        counted = range(max(0, last - int(done * 2 * layers)), last)
    else:
        counted = range(step % rotation, last, rotation)
    weights = {layer: scale * layer * (layer + 1) / 2 for layer in counted}
    weights[last] = last + scale * (last - 1) * last / 2
    total = sum(weights.values())
    return {layer: weight / total for layer, weight in weights.items() if weight}


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm after the model's last layer. Raises UserError if there is not exactly one."""
    name = layer_list_name(model)
    holder = model if name is None else model.get_submodule(name.rpartition(".")[0])
    norms = [x for x in holder.children() if type(x).__name__.endswith("Norm")]
    if name is None or len(norms) != 1:
        raise UserError(
            f"{type(model).__name__} has no single list of layers with one norm after it, so its "
            "early layers cannot be trained to predict; use a model of another family"
        )
    return norms[0]


class EarlyExitTraining(nn.Module):
    """The losses after several layers of a model, through its final norm and output layer.

    Raises UserError as `final_norm` does, and for layers that cannot be told apart.
    """

    def __init__(
        self, backbone: PreTrainedModel, weighted_loss: WeightedLoss, *, chunk: int = 256
    ) -> None:
        super().__init__()
        self.backbone, self.weighted_loss, self.chunk = backbone, weighted_loss, chunk
        name = layer_list_name(backbone)
        # In a list, so that no weight is registered twice.
        self._norm = [final_norm(backbone)]
        layers: Any = backbone.get_submodule(name or "")
        self._layers: list[nn.Module] = list(layers)
        self._recorder = Recorder(backbone, range(len(self._layers) - 1))

    @property
    def sums(self) -> list[str]:
        """Names of the sums of `forward`, in order."""
        names = self.weighted_loss.names
        return [f"{part}/{name}" for part in ("last", "early") for name in ("tokens", *names)]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        exits: Mapping[int, float],
        left_out: Tensor | None = None,
        teacher: Teacher | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The weighted loss summed over tokens, and `sums`, float64.

        input_ids, attention_mask: int64 [B, T]. loss_mask: bool [B, T], True where the token is
        predicted. exits: loss weights by layer. left_out: bool [M, B], the layers that a row does
        not run. teacher(slice): the signal for the n predicted tokens, if a term reads it.
        """
        with self._without(left_out), self._recorder.recording() as states:
            final = self.backbone.base_model(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=False
            ).last_hidden_state
        # A GPU is waited for here only: a mask as an index would be a wait for each use.
        predicted = loss_mask[:, 1:].nonzero(as_tuple=True)
        labels = input_ids[:, 1:][predicted]
        output: Any = self.backbone.get_output_embeddings()
        count = len(self.weighted_loss.names) + 1
        sums = torch.zeros(2 * count, dtype=torch.float64, device=input_ids.device)
        loss = LossSum(self.weighted_loss, chunk=self.chunk)
        last = len(self._layers) - 1
        losses = []
        for layer, weight in exits.items():
            hidden = final if layer == last else self._norm[0](states[layer])
            read = hidden[:, :-1][predicted]
            losses.append(TokenLoss(read, output.weight, output.bias, labels, scale=weight))
        for layer, terms in zip(exits, loss.add(teacher, *losses), strict=True):
            begin = 0 if layer == last else count
            sums[begin : begin + count] += torch.cat([terms.new_full((1,), len(labels)), terms])
        return loss.total, sums

    def figures(self, sums: Mapping[str, float], tokens: int = 0) -> dict[str, float]:
        """The mean of each term after the last layer, and over the earlier layers that counted."""
        return {
            name: value / sums[f"{part}/tokens"]
            for name, value in sums.items()
            for part, _, term in [name.partition("/")]
            if term != "tokens" and sums[f"{part}/tokens"]
        }

    @contextmanager
    def _without(self, left_out: Tensor | None) -> Iterator[None]:
        """Inside this context, a row's states pass unchanged through the layers it leaves out."""
        with ExitStack() as hooks:
            if left_out is not None:
                # One read of the device for all layers.
                needed = left_out.any(1).tolist()
                for layer, rows, is_needed in zip(self._layers, left_out, needed, strict=True):
                    if is_needed:
                        hook = partial(_pass_by, rows)
                        hooks.enter_context(layer.register_forward_hook(hook, with_kwargs=True))
            yield


def _pass_by(rows: Tensor, _: nn.Module, inputs: Any, named: Any, output: Any) -> Any:
    """A layer's output, with the input in its place for these rows, bool [B]."""
    before = inputs[0] if inputs else named["hidden_states"]
    after = output if isinstance(output, Tensor) else output[0]
    kept = torch.where(to_device(rows, after.device)[:, None, None], before, after)
    return kept if isinstance(output, Tensor) else (kept, *output[1:])
