"""Compares greedy texts, up to choices that the dtype cannot separate."""

from collections.abc import Sequence

import torch

from decode.model.loading import Target
from decode.model.pretrained import decoder_start


def identical(
    target: Target,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
    *,
    rounding: float | None = None,
) -> tuple[float, float]:
    """The share of prompts whose two greedy texts are equal, and the share of those equal up to a
    choice between two logits that are too close to separate.

    rounding: the largest difference of such logits, relative to the largest logit. None: that of
    the target's dtype. If one text ends where the other goes on, it chose an end-of-text token
    there, which texts may leave out.
    """
    if rounding is None:
        # Both logits are rounded, and their sums were rounded in different orders.
        rounding = 4 * torch.finfo(target.dtype).eps
    same, close = 0, 0
    for prompt, text, other in zip(prompts, texts, others, strict=True):
        if list(text) == list(other):
            same += 1
            continue
        pairs = zip(text, other, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(other)))
        logits = _next_logits(target, prompt, text[:at])
        ends = list(target.eos_token_ids)
        end = logits[ends].max() if ends else torch.tensor(-torch.inf)
        a, b = (logits[each[at]] if at < len(each) else end for each in (text, other))
        close += bool((a - b).abs() <= rounding * logits.abs().max())
    return same / len(prompts), (same + close) / len(prompts)


@torch.inference_mode()
def _next_logits(target: Target, prompt: Sequence[int], text: Sequence[int]) -> torch.Tensor:
    """float32 [V]: the logits of transformers' forward after a text that answers a prompt."""
    if target.has_encoder:
        inputs = {"input_ids": prompt, "decoder_input_ids": [decoder_start(target.model), *text]}
        tensors = {key: torch.tensor([ids], device=target.device) for key, ids in inputs.items()}
        logits: torch.Tensor = target.model(**tensors).logits
    else:
        ids = torch.tensor([[*prompt, *text]], device=target.device)
        logits = target.model(input_ids=ids, logits_to_keep=1).logits
    return logits[0, -1].float()
