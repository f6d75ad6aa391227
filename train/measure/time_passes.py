"""Times passes of a model over its cache, with no loop around them, on a CPU or a GPU."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.base.processor import computes_bfloat16
from decode.model.cache.cached_model import CachedLM
from decode.model.forward.lean_parts import PackedLinear
from decode.model.forward.prepare_model import prepare
from distill.float32_products import product

CPU = torch.device("cpu")
# A product that is timed to choose between dtypes.
TRIAL_ROWS, TRIAL_WIDTH, TRIAL_TURNS = 512, 1024, 4


def finish(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_by_turns(
    functions: Sequence[Callable[[], object]],
    *,
    turns: int,
    budget: float = math.inf,
    device: torch.device = CPU,
) -> list[float]:
    """The seconds per call of each function: the median of turns, after an uncounted one.

    In each turn, every function is called once. budget: after these seconds no further
    turn begins, but one is always counted. device: the one that the functions compute on.
    """
    seconds: list[list[float]] = [[] for _ in functions]
    start = time.perf_counter()
    for turn in range(turns + 1):
        if turn > 1 and time.perf_counter() - start > budget:
            break
        for index, function in enumerate(functions):
            finish(device)
            begin = time.perf_counter()
            function()
            finish(device)
            if turn:
                seconds[index].append(time.perf_counter() - begin)
    return [median(times) for times in seconds]


@functools.cache
def trains_in_bfloat16(device: torch.device) -> bool:
    """Whether wide products, as in training, take less time in bfloat16 than in float32.

    Some CPUs have instructions for bfloat16, but multiply faster in float32. There bfloat16 pays
    only for passes over a few tokens, in which reading the weights takes longest. So a CPU is
    timed, for a tenth of a second.
    """
    if device.type != "cpu" or not computes_bfloat16(device):
        return computes_bfloat16(device)
    sizes = (TRIAL_ROWS, TRIAL_WIDTH), (TRIAL_WIDTH, TRIAL_WIDTH)
    products = []
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = (torch.ones(size, dtype=dtype) for size in sizes)
        products.append(functools.partial(product, x, weight))
    bfloat16, float32 = seconds_by_turns(products, turns=TRIAL_TURNS)
    return bfloat16 < float32


def pass_seconds(
    lm: CachedLM,
    context: int,
    widths: Sequence[int],
    *,
    turns: int,
    budget: float = math.inf,
) -> dict[int, float]:
    """Seconds of a pass over n tokens of one row after a text of `context` tokens, for each n of
    `widths`. turns, budget: as for `seconds_by_turns`. Raises UserError if the context is too
    short for them."""
    ids = _random_ids(lm, context + max(widths))
    start = np.array([context])

    def one_pass(width: int) -> Callable[[], object]:
        return lambda: lm.forward(ids[:, context : context + width], start)

    with torch.inference_mode():
        lm.reset(1, ids.shape[1])
        _read(lm, ids[:, :context])
        passes = [one_pass(width) for width in widths]
        seconds = seconds_by_turns(passes, turns=turns, budget=budget, device=lm.device)
    return dict(zip(widths, seconds, strict=True))


def prefill_seconds(lm: CachedLM, tokens: int, *, turns: int, budget: float = math.inf) -> float:
    """Seconds of a prefill of one prompt of `tokens` tokens. turns, budget: as for
    `seconds_by_turns`. Raises UserError as `pass_seconds` does."""
    ids = _random_ids(lm, tokens)
    with torch.inference_mode():
        lm.reset(1, tokens)
        (seconds,) = seconds_by_turns(
            [lambda: _read(lm, ids)], turns=turns, budget=budget, device=lm.device
        )
    return seconds


def weight_bytes(model: PreTrainedModel) -> int:
    """The bytes of weights that a pass reads, in the form that they are packed in. A pass reads
    only a few rows of the embeddings, but all of them if they are the output layer too."""
    total = sum(p.nbytes for p in _weights_read(model))
    for part in prepare(model).modules():
        if isinstance(part, PackedLinear) and part.has_blocks:
            loaded = sum(layer.weight.nbytes for layer in part.layers)
            total += part.blocks[0].data.nbytes - loaded
    return total


def weight_count(model: PreTrainedModel) -> int:
    """The weights that a token is multiplied with. Of a mixture of experts that is all of them."""
    return sum(p.numel() for p in _weights_read(model))


def _weights_read(model: PreTrainedModel) -> list[Tensor]:
    embeddings, output = model.get_input_embeddings(), model.get_output_embeddings()
    unread = set()
    if output is not None and embeddings.weight is not output.weight:
        unread = {id(parameter) for parameter in embeddings.parameters()}
    return [p for p in model.parameters() if id(p) not in unread]


def _random_ids(lm: CachedLM, count: int) -> Tensor:
    """int64 [1, count]"""
    if count > lm.max_positions:
        raise UserError(
            f"passes up to position {count} were to be timed, but the context of "
            f"{type(lm.model).__name__} holds {lm.max_positions} tokens; choose shorter ones"
        )
    vocabulary = lm.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (1, count), generator=generator).to(lm.device)


def _read(lm: CachedLM, ids: Tensor) -> None:
    """Feed a prompt, int64 [1, n], and compute the logits after its last token."""
    lm.forward(ids, np.zeros(1, dtype=np.int64), columns=np.array([[ids.shape[1] - 1]]))
