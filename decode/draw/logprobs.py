"""Log-probabilities of emitted tokens, for the rows that ask for them."""

from dataclasses import dataclass

import numpy as np
import torch

from decode.base.device import to_device
from decode.draw.top import top
from decode.verification import Verification


@dataclass(frozen=True)
class TokenLogprob:
    """An emitted token, its log-probability (in nats), and the likeliest tokens at its position
    with theirs, likeliest first. Of tokens that tie for the last place, any may be here."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(verification: Verification, counts: np.ndarray) -> dict[int, list[TokenLogprob]]:
    """For each row of a pass that asks, by its number: one entry per token that its text got.

    counts: int [B], how many of the likeliest tokens a row asks for, −1 for a row that does not
    ask. The log-probabilities are the log-softmax in float32 of the model's own logits: without
    repetition penalty, processors, temperature and filters. Only the positions of these tokens are
    computed. On an accelerator the host waits for them.
    """
    asking = np.flatnonzero(counts >= 0)
    emitted = verification.emitted[asking]
    rows = asking.repeat(emitted)
    places = np.concatenate([np.arange(count) for count in emitted])
    tokens = verification.block[rows, places]
    # The position of a token is that of the node before it.
    columns = np.pad(verification.nodes + 1, ((0, 0), (1, 0)))[rows, places]
    raw = verification.scores.raw
    logits = raw[to_device(rows, raw.device), to_device(columns, raw.device)].float()
    log_p = logits.log_softmax(-1)
    of_tokens = log_p.gather(1, to_device(tokens, raw.device)[:, None])
    values, ids = top(log_p, max(int(counts.max()), 1))
    # float64 holds ids and float32 exactly, so one copy brings all.
    host = torch.cat([of_tokens.double(), values.double(), ids.double()], 1).cpu().numpy()
    likeliest, their_ids = np.split(host[:, 1:], 2, axis=1)
    entries: dict[int, list[TokenLogprob]] = {}
    numbers = verification.rows
    for index, row in enumerate(rows.tolist()):
        n = int(counts[row])
        best = zip(their_ids[index, :n].astype(int), likeliest[index, :n], strict=True)
        pairs = tuple((int(id_), float(value)) for id_, value in best)
        entry = TokenLogprob(int(tokens[index]), float(host[index, 0]), pairs)
        entries.setdefault(int(numbers[row]), []).append(entry)
    return entries
