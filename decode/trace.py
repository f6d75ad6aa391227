"""Shows a verification pass token by token, for debugging a drafter."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from decode.verification import Verification


@dataclass
class DraftedToken:
    """One node: its token, target and drafter probability (q = 1: chosen, not drawn), verdict."""

    node: int
    parent: int
    token: int
    p: float
    q: float
    verdict: str  # accepted, rejected, or not reached


def drafted_tokens(verification: Verification) -> list[list[DraftedToken]]:
    """The draft tokens of each row. Call it from an observer, while the pass has its tensors.

    Greedy decoding has no p, so p at temperature 1 is shown.
    """
    draft, scores = verification.draft, verification.scores
    positions = draft.parent_rows()
    rows_B1 = torch.arange(len(positions), device=positions.device)[:, None]
    p_all = scores.sampling.warmed.probs(scores.logits)
    p_BN = p_all[rows_B1, positions, draft.tokens].double()
    p, q = torch.stack([p_BN, draft.q_of_tokens()]).tolist()  # one copy for all rows
    rows = []
    for row, accepted in enumerate(verification.accepted):
        parents = draft.parents_on_host()[row].tolist()
        tokens = verification.tokens[row].tolist()
        kept = verification.nodes[row, :accepted].tolist()
        nodes = []
        for node in range(int(draft.sizes[row])):
            # The rule judged the children of the text and of each accepted token, up to and
            # including the accepted child.
            elders = [other for other in kept if parents[other] == parents[node] and other < node]
            judged = parents[node] in (-1, *kept) and not elders
            verdict = "accepted" if node in kept else "rejected" if judged else "not reached"
            nodes.append(
                DraftedToken(node, parents[node], tokens[node], p[row][node], q[row][node], verdict)
            )
        rows.append(nodes)
    return rows


def rejected_tokens(verification: Verification, index: int) -> list[int]:
    """The draft tokens of a row, by its index, below its last accepted one: of a chain the rest of
    the draft, of a tree shallow nodes first. Empty if the text ended before. Call it from an
    observer."""
    accepted = int(verification.accepted[index])
    if verification.emitted[index] <= accepted:
        return []
    draft = verification.draft
    parents = draft.parents_on_host()[index].tolist()
    below = {int(verification.nodes[index, accepted - 1]) if accepted else -1}
    rejected = []
    for node in range(int(draft.sizes[index])):
        if parents[node] in below:
            below.add(node)
            rejected.append(node)
    tokens: list[int] = verification.tokens[index, rejected].tolist()
    return tokens


def format_trace(verification: Verification, tokenizer: PreTrainedTokenizerBase) -> str:
    """One line per draft token: text, p, q, verdict. Then the token that the target added."""

    def text(token: int) -> str:
        return repr(tokenizer.decode([token]))

    lines = []
    for row, nodes, added in zip(
        verification.rows, drafted_tokens(verification), verification.next_token, strict=True
    ):
        lines += [
            f"  row {row}: draft token {node.node + 1} after {_place(node.parent):<8}  "
            f"{text(node.token):<16} p={node.p:.4f} q={node.q:.4f}  {node.verdict}"
            for node in nodes
        ]
        lines.append(f"  row {row}: the target adds {text(int(added))}")
    return "\n".join(lines)


def _place(parent: int) -> str:
    return "the text" if parent < 0 else f"token {parent + 1}"
