"""The FLOPs of each stage that computes, from the shapes of its models."""

from transformers import PreTrainedModel

from decode.model.loading import Target
from distill.flops import TextFlops, layers_flops, output_flops
from heads.heads_module import Heads
from heads.layers.target_layers import output_layer


def distill_flops(
    student: PreTrainedModel, target: PreTrainedModel, *, runs_target: bool, reads_logits: bool
) -> TextFlops:
    """A student that drafts one token after the other. runs_target: the target's layers run over
    each batch. reads_logits: its output layer gives the loss the rows of the draft vocabulary."""
    output = student.get_output_embeddings()
    flops = layers_flops(student, trained=True)
    # Two products if it is of low rank.
    for weight in (x for x in output.parameters() if x.dim() > 1):
        flops += output_flops(*weight.shape, trained=weight.requires_grad)
    return flops + _teacher_flops(target, output.out_features, runs_target, reads_logits)


def heads_flops(
    heads: Heads, target: PreTrainedModel, *, runs_target: bool, reads_logits: bool
) -> TextFlops | None:
    """Heads on a frozen target. None: not known for these heads. The output layer runs for each
    place of a draft that is trained, the target's once for all of them."""
    body = heads.body_flops()
    if body is None:
        return None
    width = heads.options.output_rank or heads.hidden_size
    layer = output_flops(heads.rows, width, trained=len(heads.output.layers) > 0)
    if heads.options.output_rank is not None:
        layer += output_flops(width, heads.hidden_size, trained=True)
    for _ in heads.loss_weights(0.0):
        body = body + layer
    return body + _teacher_flops(target, heads.rows, runs_target, reads_logits)


def pass_flops(target: Target, logits: int) -> TextFlops | None:
    """The target reads a text, and gives so many logits for each predicted token. None: not known,
    which is so for an encoder and for weights that a quantiser packs."""
    model = target.model
    if target.has_encoder or getattr(model, "hf_quantizer", None) is not None:
        return None
    width = model.config.get_text_config().hidden_size
    return layers_flops(model, trained=False) + output_flops(logits, width, trained=None)


def _teacher_flops(
    target: PreTrainedModel, rows: int, runs_target: bool, reads_logits: bool
) -> TextFlops:
    flops = layers_flops(target, trained=False) if runs_target else TextFlops()
    if reads_logits:
        flops += output_flops(rows, output_layer(target).in_features, trained=None)
    return flops
