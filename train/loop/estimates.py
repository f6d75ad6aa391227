"""Estimates for plans: the memory and disk space of a stage, and its time.

Activations are counted per layer of a Llama-like model, as Korthikanti et al. (2205.05198,
section 4) count them, but for a gated MLP and an attention that stores no scores.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.model.cache.pass_size import pass_limit
from decode.model.kinds.layer_kinds import attention_sizes
from decode.model.loading import Target
from decode.model.memory import expanded_bytes, pass_bytes, scored_heads, slot_bytes
from distill.teacher.cached_features import bytes_per_token
from heads.heads_module import Heads
from heads.layers.layer_config import layer_config
from train.base.stage import StageMemory, StagePlan
from train.data.corpus import Corpus
from train.data.read import Example
from train.loop.live_window import WINDOW_PASSES
from train.settings.optimizer_config import OptimizerConfig
from train.settings.training import LoopConfig

PROMPTS_MEASURED = 64  # prompts whose mean length stands for all
LOGIT_BYTES = 12  # of a token's logit with its float64 copy, from which tokens are drawn


def layer_numbers(model: PreTrainedModel) -> int:
    """The numbers that one layer keeps for the backward pass of one token: the inputs of two norms,
    of the products (queries, keys, values, output, gate, up, down) and of the activation."""
    config = model.config.get_text_config()
    hidden: int = config.hidden_size
    inner: int = getattr(config, "intermediate_size", None) or 4 * hidden
    sizes = attention_sizes(model)
    keys = 2 * sum(x.key_heads * x.head_size for x in sizes) // max(1, len(sizes))
    return 8 * hidden + keys + 4 * inner


def forward_bytes(model: PreTrainedModel, tokens: int) -> int:
    """The memory of a forward pass over `tokens` without gradients, above the weights: the numbers
    of one layer at a time."""
    return tokens * layer_numbers(model) * model.dtype.itemsize


def activation_bytes(
    model: PreTrainedModel, layers: int, tokens: int, itemsize: int, *, recompute: bool = False
) -> int:
    """What `layers` of this model keep for the backward pass over a batch of `tokens`. itemsize: of
    the matrix products' precision. recompute: only the layers' inputs are kept, and one layer."""
    inner, hidden = layer_numbers(model), model.config.get_text_config().hidden_size
    numbers = layers * hidden + inner if recompute else layers * inner
    return tokens * numbers * itemsize


def heads_bytes(
    heads: Heads, model: PreTrainedModel, tokens: int, itemsize: int, *, recompute: bool = False
) -> int:
    """What heads on the target `model` keep for the backward pass over a text of `tokens`.

    The features they read; a decoder layer for each part, without scores; for each place of a
    draft, the input of the output layer, of its norm, and their gradient. recompute: the
    activations of the layers only states, keys and values are kept, and one layer. Heads without
    decoder layers keep less.
    """
    config = getattr(heads, "config", None) or layer_config(model)
    hidden, size = heads.hidden_size, config.head_dim
    keys = 2 * config.num_key_value_heads * size
    # As in `layer_numbers`, for an attention that reads tokens and states, each with a norm.
    layer = 8 * hidden + 2 * config.num_attention_heads * size + keys
    layer += 4 * config.intermediate_size
    layers = heads.batch_parts * (hidden + keys) + layer if recompute else heads.batch_parts * layer
    layers = int(layers * heads.tokens_per_part)
    places = (len(heads.captured_layers) + 3 * heads.depth) * hidden
    return tokens * (layers + places) * itemsize


def loss_bytes(weights: int, itemsize: int, *, gradients: int) -> int:
    """What the losses of a batch hold of output layers beside the layers and one float32 gradient
    (`distill.chunked_loss.LossSum`).

    weights: the number of their weights. itemsize: of the matrix products' precision, in which the
    losses have a copy of them. gradients: how many of them are in memory together.
    """
    return weights * (4 * max(0, gradients - 1) + (itemsize if itemsize < 4 else 0))


def model_loss_bytes(
    model: PreTrainedModel,
    itemsize: int,
    loop: LoopConfig,
    *,
    trained: bool,
    read_twice: bool = False,
) -> int:
    """`loss_bytes` of a model's output layer. trained: it has a gradient. read_twice: the losses of
    heads read it too."""
    layer: nn.Module = model.get_output_embeddings()
    # The embeddings have a gradient of their own, and so have the earlier batches of a step.
    tied = model.config.get_text_config().tie_word_embeddings
    gradients = 1 + bool(tied) + read_twice + (loop.accumulation > 1) if trained else 0
    weights = sum(p.numel() for p in layer.parameters())
    return loss_bytes(weights, itemsize, gradients=gradients)


def mask_bytes(tokens: int, longest: int, pairs: float, copies: int, itemsize: int) -> int:
    """The masks of a training that says for each pair of tokens whether one sees the other.

    tokens: the tokens of the batch's text. longest: the length of the longest row, in tokens.
    pairs: the mask's entries for each pair of a row's tokens. The mask and its parts are of one
    byte an entry. copies: the copies of its additive form, with `itemsize` bytes an entry, that
    attention keeps for the backward pass.
    """
    return int(tokens * min(longest, tokens) * pairs * (2 + copies * itemsize))


def decoding_memory(
    target: Target, target_bytes: int, *, rows: int, prompt: int, new: int, width: int = 1
) -> StageMemory:
    """The memory of decoding `rows` together: their prompts are read in passes, and they get at
    most `new` tokens each. width: the tokens of a row that a pass gives logits for."""
    tokens = rows * (prompt + new)
    fed = min(rows * prompt, pass_limit(prompt, scored_heads(target.model)))
    return StageMemory(
        target=target_bytes,
        activations=forward_bytes(target.model, fed)
        + pass_bytes(target.model, fed, prompt)
        + tokens * expanded_bytes(target.model),
        states=tokens * slot_bytes(target.model),
        logits=rows * width * target.vocab_size * LOGIT_BYTES,
    )


def prompt_length(corpus: Corpus, examples: Sequence[Example]) -> int:
    """The mean length of the prompts in tokens. Writing very many prompts with the template would
    take long, so give `PROMPTS_MEASURED` of them."""
    prompts = corpus.prompts(examples)
    return round(sum(map(len, prompts)) / len(prompts))


def source_memory(
    target: Target,
    captured_layers: Sequence[int],
    batch: int,
    *,
    tokens_per_pass: int | None,
) -> StageMemory:
    """The memory of the target's hidden states for a training: those of its pass, and of a window
    of passes. batch: tokens of a step."""
    states = bytes_per_token(target, captured_layers)
    window = 0 if tokens_per_pass is None else max(WINDOW_PASSES * tokens_per_pass, batch)
    return StageMemory(
        activations=forward_bytes(target.model, tokens_per_pass or batch),
        states=states * window,
    )


def optimizer_bytes(trained: int, *, average: bool) -> int:
    """The gradients and AdamW's two moments of `trained` float32 weights, and their average."""
    return (16 if average else 12) * trained


def training_disk_bytes(
    parameters: int, trained: int, *, average: bool, loop: LoopConfig | None = None
) -> int:
    """The checkpoints that are kept, one more while it is written, the best versions that they
    name, the drafter and its start. loop: None for the defaults."""
    loop = loop or LoopConfig()
    checkpoint = 4 * parameters + (12 if average else 8) * trained
    best = (loop.keep_checkpoints + 2) * 4 * trained if loop.keep_best else 0
    return (loop.keep_checkpoints + 1) * checkpoint + best + 2 * 4 * parameters


def tokens_per_rank(tokens_per_batch: int, longest: int, processes: int) -> int:
    """The tokens of a batch that one of `processes` holds. Rows are dealt to them, so that is at
    least one row. longest: the length of the longest row, in tokens."""
    return max(-(-tokens_per_batch // processes), min(longest, tokens_per_batch))


def planned_tokens(tokens: int, loop: LoopConfig) -> int:
    """The tokens that a training learns from: those of its epochs, or fewer if `max_steps` ends it.
    tokens: the tokens of the text."""
    total = tokens * loop.epochs
    if loop.max_steps is None:
        return total
    return min(total, loop.max_steps * loop.tokens_per_batch * loop.accumulation)


def steps_in_words(tokens: int, loop: LoopConfig, optimizer: OptimizerConfig) -> str:
    """The number of optimizer steps over `tokens`, with a warning if the warm-up needs more."""
    steps = max(1, -(-tokens // (loop.tokens_per_batch * loop.accumulation)))
    words = f"about {steps} steps"
    if steps <= (warm_up := optimizer.warm_up(steps)):
        words += f", all in the warm-up: lower optimizer.warmup_steps, which is {warm_up}"
    return words


def idle_in_words(lengths: Sequence[int], loop: LoopConfig, processes: int) -> str:
    """How many of the processes get no row of a batch, and what to set; "" if all get one.

    lengths: of the rows, in tokens, or the greatest one, if it is all that is known.
    """
    size = loop.tokens_per_batch
    rows = [max(1, size // length) for length in lengths]
    batches = [1 / count for count in rows]  # that each row is
    idle = sum(max(0, processes - count) * n for count, n in zip(rows, batches, strict=True))
    idle /= sum(batches)
    if idle < processes / 100:
        return ""
    longest = max(lengths)
    return (
        f"; about {idle:.1f} of {processes} processes get no row of a batch of {size} tokens, with "
        f"rows of up to {longest}: set loop.tokens_per_batch={processes * longest} to use all"
    )


def read_speeds(option: str) -> dict[str, float]:
    """Tokens per second by stage or kind of stage, and those of all evaluations as `evaluation`,
    from `generate=900,distill=4000` or from the directory of a run that measured them. Raises
    UserError for anything else."""
    file = Path(option) / "report.json"
    if file.is_file():
        report, speeds = json.loads(file.read_text(encoding="utf-8")), dict[str, float]()
        for stage in report["stages"]:
            summary = stage["summary"]
            speed = (summary.get("training") or summary).get("tokens_per_second")
            if speed:
                speeds |= {stage["kind"]: speed, stage["name"]: speed}
        # Runs of earlier versions have no seconds and tokens.
        rows = [row for row in report["rows"] if row.get("seconds")]
        if rows:
            seconds = sum(row["seconds"] for row in rows)
            speeds["evaluation"] = sum(row["tokens"] for row in rows) / seconds
        return speeds
    try:
        pairs = [pair.split("=") for pair in option.split(",")]
        speeds = {name: float(number) for name, number in pairs}
    except ValueError:
        speeds = {}
    if not speeds or min(speeds.values()) <= 0:
        raise UserError(
            f"--speed is {option!r}; expected KIND=TOKENS_PER_SECOND,… such as "
            "generate=900,distill=4000, or the directory of a run with a report"
        )
    return speeds


def time_limit(loop: LoopConfig) -> float:
    """The most seconds that a training takes by its `max_minutes`; infinite without it."""
    return 60 * loop.max_minutes if loop.max_minutes else math.inf


def seconds_of(name: str, kind: str, plan: StagePlan, speeds: Mapping[str, float]) -> float | None:
    """The time of a stage at the speed of that stage, or of its kind, or its limit if that is less.
    None: none of them is known."""
    speed = speeds.get(name) or speeds.get(kind)
    seconds = plan.tokens / speed if speed and plan.tokens else math.inf
    seconds = min(seconds, plan.max_seconds)
    return seconds if math.isfinite(seconds) else None
