"""The exact joint law of the first tokens of sampled texts, by enumeration, and χ² against it.

Shapes: V vocabulary, T tokens of a text.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.draw.penalties import AnswerSpans, TextBefore, penalised
from decode.draw.sampling import Sampling
from decode.model.pretrained import input_device

Text = tuple[int, ...]
# The number of texts of one forward.
BATCH = 2048
# More take minutes, and most bins would be empty.
MOST_TEXTS = 80_000
SMALLEST_BIN = 5.0  # expected texts; rarer texts are counted together


@torch.inference_mode()
def joint_laws(
    model: PreTrainedModel,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling,
    *,
    ends: Sequence[int] = (),
    token_count: int | None = None,
) -> list[dict[Text, float]]:
    """The laws of the first 1, 2, …, `count` tokens after a prompt: the probability of each text
    that can occur, in lexicographic order.

    sampling: not greedy. ends: tokens that end a text, which is then shorter. token_count: the
    tokens that there are, the first rows of the logits; None: all. The forwards have no cache.
    Raises UserError if there are more than MOST_TEXTS texts.
    """
    laws: list[dict[Text, float]] = [{(): 1.0}]
    for _ in range(count):
        following = _following(model, prompt, laws[-1], sampling, ends, token_count)
        law: dict[Text, float] = {}
        for text, p in laws[-1].items():
            if text not in following:
                law[text] = p
                continue
            for token in np.flatnonzero(following[text]).tolist():
                law[(*text, token)] = p * float(following[text][token])
        if len(law) > MOST_TEXTS:
            raise UserError(
                f"the first {count} tokens can be more than {MOST_TEXTS:,} texts, too many to "
                "enumerate; ask for fewer tokens, set top_k to 4, or take a target with a small "
                "vocabulary"
            )
        laws.append(law)
    return laws[1:]


def _following(
    model: PreTrainedModel,
    prompt: Sequence[int],
    law: Mapping[Text, float],
    sampling: Sampling,
    ends: Sequence[int],
    token_count: int | None,
) -> dict[Text, np.ndarray]:
    """float64 [V]: what follows each text that has not ended."""
    texts = [text for text in law if not text or text[-1] not in ends]
    following: dict[Text, np.ndarray] = {}
    for first in range(0, len(texts), BATCH):
        part = texts[first : first + BATCH]
        ids = torch.tensor([[*prompt, *text] for text in part], device=input_device(model))
        logits = model(input_ids=ids, use_cache=False).logits[:, -1, :token_count].float()
        if sampling.penalises:
            logits = _penalised(logits, ids, len(prompt), sampling, ends)
        probs = sampling.probs(logits).double().cpu().numpy()
        following |= dict(zip(part, probs, strict=True))
    return following


def _penalised(
    logits: torch.Tensor, ids: torch.Tensor, begin: int, sampling: Sampling, ends: Sequence[int]
) -> torch.Tensor:
    """logits: [b, V] after each text of ids, int64 [b, L], whose first `begin` tokens are the
    prompt."""
    rows, tokens = len(ids), ids.cpu().numpy()
    answers = AnswerSpans(np.full(rows, begin), np.array(ends, dtype=np.int64))
    lengths = np.full(rows, tokens.shape[1])
    nodes = ids[:, :0]
    on_path = torch.zeros(rows, 1, 0, dtype=torch.bool, device=ids.device)
    before = TextBefore(
        [sampling] * rows, tokens, lengths, answers, nodes, on_path, None, logits.shape[1]
    )
    return penalised(logits[:, None], before)[:, 0]


def chi_square(counts: np.ndarray, due: np.ndarray) -> tuple[float, int]:
    """χ² of counts and the numbers that are due, float64 [M], and its degrees of freedom. Bins that
    are due less than SMALLEST_BIN texts become one, with the smallest of the others if that is
    still not enough."""
    order = np.argsort(-due, kind="stable")
    counts, due = counts[order], due[order]
    large = int((due >= SMALLEST_BIN).sum())
    if large and due[large:].sum() < SMALLEST_BIN:
        large -= 1
    counted, wanted = (np.append(x[:large], x[large:].sum()) for x in (counts, due))
    if wanted[-1] == 0:
        counted, wanted = counted[:-1], wanted[:-1]
    return float(((counted - wanted) ** 2 / wanted).sum()), len(wanted) - 1
