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
) -> tuple[float, float]:
    """The share of prompts whose two greedy texts are equal, and the share of those equal up to a
    choice between two logits that are too close for the dtype to separate."""
    same, close = 0, 0
    for prompt, text, other in zip(prompts, texts, others, strict=True):
        if text == other:
            same += 1
            continue
        pairs = zip(text, other, strict=False)
        at = next((i for i, pair in enumerate(pairs) if len(set(pair)) > 1), None)
        if at is None:
            continue  # one text is a prefix of the other
        logits = _next_logits(target, prompt, text[:at])
        gap = (logits[text[at]] - logits[other[at]]).abs()
        # Both logits are rounded, and their sums were rounded in different orders.
        close += bool(gap <= 4 * torch.finfo(target.dtype).eps * logits.abs().max())
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
