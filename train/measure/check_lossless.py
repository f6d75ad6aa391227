"""A short check, on the machine at hand, that decoding with drafts changes no text.

It takes a second or two on tiny models with random weights, in float32. The tests check far more;
this finds a machine, a device or a version of a library that computes wrong.

Shapes: V vocabulary, T sampled tokens of a text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from decode.drafters import DRAFTERS, Drafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.model.pretrained import input_device
from decode.shapes import Chain
from decode.shapes.static import Static
from train.measure.joint_law import chi_square, joint_laws
from train.measure.time_passes import CPU

# Wide weights: the likeliest token is a clear one, and each token depends on the text before it.
SHAPE: dict[str, Any] = {
    "vocab_size": 6,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
NOISE = 0.03  # of the drafter's weights; it is right more often than not
PROMPTS = ((0, 2, 1, 0, 5), (3,), (4, 0, 2, 2, 1, 0, 3))  # rows of different lengths
GREEDY_TOKENS = 48
TEXTS, SAMPLED_TOKENS = 8192, 4
GAMMA = 3
# A sampled distribution further away than this, in standard deviations, is wrong.
FAR = 5.0


@dataclass(frozen=True)
class LosslessCheck:
    """The result of the check.

    greedy: for each way of decoding, whether its greedy texts equal those of full forwards without
    a cache. sampled: for each way, the distance of the counts of sampled texts from their exact
    joint distribution, in standard deviations (chi-square). accepted: the share of draft tokens
    that were accepted in the greedy texts; the check says something only between 0 and 1.
    """

    greedy: dict[str, bool]
    sampled: dict[str, float]
    accepted: float

    @property
    def failures(self) -> list[str]:
        """What failed, in words."""
        return [f"greedy text, {name}" for name, same in self.greedy.items() if not same] + [
            f"sampled text, {name}" for name, far in self.sampled.items() if not far < FAR
        ]

    def to_dict(self) -> dict[str, Any]:
        """Converts to JSON values."""
        return vars(self) | {"failures": self.failures, "passed": not self.failures}


def check_lossless(target: PreTrainedModel, drafter: PreTrainedModel) -> LosslessCheck:
    """Compares greedy and sampled texts, decoded plainly, with a chain and with a tree, with full
    forwards of the target. Both models: the same small vocabulary, float32."""
    counts, greedy = 0, {}
    expected = [_greedy_text(target, prompt) for prompt in PROMPTS]
    tried = 0
    for name, used in _drafters(drafter, "top").items():
        decoded = Decoder(target, used, gamma=GAMMA).decode(PROMPTS, GREEDY_TOKENS)
        greedy[name] = decoded.outputs == expected
        counts += int(decoded.counts.accepted.sum())
        tried += int(decoded.counts.drafted.sum())
    drawn = Sampling(1.0)
    probabilities = joint_laws(target, PROMPTS[0], SAMPLED_TOKENS, drawn)[-1].values()
    law = np.array([*probabilities]).reshape((target.config.vocab_size,) * SAMPLED_TOKENS)
    sampled = {}
    for name, used in _drafters(drafter, "distinct").items():
        decoder = Decoder(target, used, gamma=GAMMA, sampling=drawn)
        texts = decoder.decode([PROMPTS[0]] * TEXTS, SAMPLED_TOKENS).outputs
        sampled[name] = distance(np.array(texts), law)
    return LosslessCheck(greedy, sampled, counts / tried)


def check_loop(device: torch.device) -> LosslessCheck:
    """`check_lossless` on a tiny llama on a device, and on a drafter made of it with noise."""
    target = random_llama(**SHAPE).to(device)
    drafter = random_llama(**SHAPE)
    generator = torch.Generator().manual_seed(1)
    for weight in drafter.parameters():
        weight += NOISE * torch.randn(weight.shape, generator=generator)
    return check_lossless(target, drafter.to(device))


def random_llama(
    kind: type[LlamaForCausalLM] = LlamaForCausalLM,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    **shape: Any,
) -> Any:
    """A llama with random weights, in eval mode and without gradients; the same each time.

    shape: fields of its config.
    """
    on_gpu = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu), torch.device(device):
        torch.manual_seed(0)
        model = kind._from_config(LlamaConfig(**shape), dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def distance(texts: np.ndarray, law: np.ndarray) -> float:
    """How far counts of texts, int [N, T], are from their exact law, float64 [V, …, V] with T
    dimensions: chi-square, as standard deviations of a normal distribution (Wilson–Hilferty)."""
    counts = np.zeros(law.shape)
    np.add.at(counts, tuple(texts.T), 1)
    statistic, freedom = chi_square(counts.ravel(), law.ravel() * len(texts))
    share = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - share)) / math.sqrt(share))


def _drafters(model: PreTrainedModel, draw: Any) -> dict[str, Drafter]:
    """draw: how a tree picks siblings."""
    tree = Static(widths=[2, 2, 1], draw=draw)
    return {
        "plain": DRAFTERS["none"](),
        "chain": SmallLMDrafter(model, shape=Chain()),
        "tree": SmallLMDrafter(model, shape=tree),
    }


@torch.inference_mode()
def _greedy_text(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """GREEDY_TOKENS tokens, each from a forward over the text so far, without a cache."""
    ids = torch.tensor([list(prompt)], device=input_device(model))
    for _ in range(GREEDY_TOKENS):
        logits = model(input_ids=ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    text: list[int] = ids[0, len(prompt) :].tolist()
    return text
