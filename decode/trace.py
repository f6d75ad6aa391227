"""A readable record of each step: the draft tokens, their probabilities and their verdicts."""

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from decode.draft import Draft
from decode.logits import Scores
from decode.rules import Verdict
from decode.sampling import Sampling


@dataclass
class DraftedToken:
    """One node: its token, target and drafter probability (q = 1: chosen, not drawn), verdict."""

    node: int
    parent: int
    token: int
    p: float
    q: float
    verdict: str  # accepted, rejected, or not reached


@dataclass
class RowTrace:
    """One row of a step: its draft tokens and the token that the target added."""

    row: int
    drafted: list[DraftedToken]
    next_token: int


TraceStep = list[RowTrace]


def trace_rows(
    rows: np.ndarray,
    draft: Draft,
    scores: Scores,
    verdict: Verdict,
    block: np.ndarray,
) -> TraceStep:
    """Describe a step. Greedy decoding has no p, so p at temperature 1 is shown."""
    shown = Sampling(temperature=1.0) if scores.sampling.greedy else scores.sampling
    judged_in = draft.parent_rows()
    p_all = shown.probs(scores.logits).gather(
        1, judged_in[..., None].expand(-1, -1, scores.logits.shape[2])
    )
    p = p_all.gather(2, draft.tokens[..., None])[..., 0].tolist()
    q = None
    if draft.q is not None:
        q_all = draft.q.gather(1, draft.rows_of_q()[..., None].expand(-1, -1, draft.q.shape[2]))
        q = q_all.gather(2, draft.tokens[..., None])[..., 0].tolist()
    steps = []
    paths, accepted = verdict.path.tolist(), verdict.accepted.tolist()
    for place, row in enumerate(rows):
        parents = (judged_in[place] - 1).tolist()
        tokens = draft.tokens[place].tolist()
        kept = paths[place][: accepted[place]]
        drafted = []
        for node in range(int(draft.sizes[place])):
            # The rule judged the children of the text and of each accepted token, up to and
            # including the accepted child.
            elders = [other for other in kept if parents[other] == parents[node] and other < node]
            judged = parents[node] in (-1, *kept) and not elders
            became = "accepted" if node in kept else "rejected" if judged else "not reached"
            drafted.append(
                DraftedToken(
                    node,
                    parents[node],
                    tokens[node],
                    p[place][node],
                    q[place][node] if q else 1.0,
                    became,
                )
            )
        steps.append(RowTrace(int(row), drafted, int(block[place, accepted[place]])))
    return steps


def format_trace(step: TraceStep, tokenizer: PreTrainedTokenizerBase) -> str:
    """One line per draft token: text, p, q, verdict. Then the token that the target added."""

    def text(token: int) -> str:
        return repr(tokenizer.decode([token]))

    lines = []
    for row in step:
        lines += [
            f"  row {row.row} node {node.node} after {node.parent:>2}  {text(node.token):<16} "
            f"p={node.p:.4f} q={node.q:.4f}  {node.verdict}"
            for node in row.drafted
        ]
        lines.append(f"  row {row.row} target adds {text(row.next_token)}")
    return "\n".join(lines)
