"""The memory of the stages that train heads and small language models, for their plans."""

from decode.model.hidden_states import FINAL
from decode.model.loading import Target
from distill.students import Student
from heads.heads_module import Heads
from train.base.stage import StageMemory
from train.loop.estimates import (
    activation_bytes,
    heads_bytes,
    loss_bytes,
    mask_bytes,
    model_loss_bytes,
    optimizer_bytes,
    source_memory,
    tokens_per_rank,
)
from train.loop.trained_target import trained_parameters
from train.settings.distill_config import DistillConfig
from train.settings.heads_config import HeadsConfig


def heads_memory(
    config: HeadsConfig,
    heads: Heads,
    target: Target,
    *,
    target_bytes: int,
    parameters: int,
    trained: int,
    processes: int,
    itemsize: int,
) -> StageMemory:
    """The memory of one of `processes`.

    parameters: all of the heads' weights, with an adapter's. trained: those that are trained.
    itemsize: the itemsize of the matrix products' precision.
    """
    batch = tokens_per_rank(config.loop.tokens_per_batch, config.max_length, processes)
    recompute = config.gradient_checkpointing
    memory = StageMemory(
        target=target_bytes,
        weights=4 * parameters,
        optimizer=optimizer_bytes(trained, average=config.optimizer.ema is not None),
        activations=heads_bytes(heads, target.model, batch, itemsize, recompute=recompute)
        + mask_bytes(batch, config.max_length, heads.mask_pairs, heads.masks, itemsize),
        # Of heads and target, for one chunk.
        logits=2 * 4 * config.chunk_tokens * heads.rows
        + loss_bytes(
            sum(p.numel() for p in heads.output.parameters()),
            itemsize,
            gradients=0 if config.lora is not None else 1 + (config.loop.accumulation > 1),
        ),
    )
    memory += source_memory(
        target,
        heads.captured_layers,
        batch,
        tokens_per_pass=config.tokens_per_pass,
    )
    if config.backbone is not None:
        # The trained float32 copy of the target, and the complete one that becomes the new target.
        memory += StageMemory(
            weights=2 * 4 * target.model.num_parameters(),
            optimizer=12 * trained_parameters(config.backbone, target),
            logits=model_loss_bytes(
                target.model,
                itemsize,
                config.loop,
                trained=config.backbone.lora is None,
                read_twice=not len(heads.output.layers),
            ),
        )
    return memory


def distill_memory(
    config: DistillConfig,
    student: Student,
    *,
    target_bytes: int,
    parameters: int,
    trained: int,
    processes: int,
    itemsize: int,
) -> StageMemory:
    """The memory of one of `processes`.

    parameters: all of the student's weights, with an adapter's. trained: those that are trained.
    itemsize: the itemsize of the matrix products' precision.
    """
    batch = tokens_per_rank(config.loop.tokens_per_batch, config.max_length, processes)
    model, target = student.model, student.target
    tokens = int(batch * student.tokens_per_text_token)
    layers = model.config.get_text_config().num_hidden_layers
    recompute = config.gradient_checkpointing
    memory = StageMemory(
        target=target_bytes,
        weights=4 * parameters,
        optimizer=optimizer_bytes(trained, average=config.optimizer.ema is not None),
        activations=activation_bytes(model, layers, tokens, itemsize, recompute=recompute),
        # Of student and teacher, for one chunk.
        logits=2 * 4 * config.chunk_tokens * target.vocab_size
        + model_loss_bytes(
            model,
            itemsize,
            config.loop,
            trained=config.lora is None and model.get_output_embeddings().weight.requires_grad,
        ),
    )
    # Attention makes the additive form of a mask again in each layer.
    copies = 1 if recompute else layers
    memory += StageMemory(
        activations=mask_bytes(batch, config.max_length, student.mask_pairs, copies, itemsize)
    )
    if config.teacher != "live":
        return memory
    return memory + source_memory(
        target,
        [FINAL],
        batch,
        tokens_per_pass=config.tokens_per_pass,
    )
