"""What a rule does between the target's logits and the copy to the host is one graph: tensors in,
tensors out, the same graph in every step. Traced on the CPU by the frontend of `torch.compile`.
`traversal` of trees is missing: how many passes it needs depends on the tree.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decode.draft import Draft
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.rules import RULES, Rule
from decode.verdict import Scores

ROWS, NODES, TOKENS, STEPS = 3, 4, 40, 3
PLAIN = Sampling(temperature=1.0)
FILTERED = Sampling(temperature=0.8, top_k=9, top_p=0.9, min_p=0.02)
PARENTS = {"chain": None, "tree": ((-1, -1, 0, 0), (-1, 0, 0, 2), (-1, -1, -1, 1))}


def step_inputs(seed: int, shape: str, sampling: Sampling) -> tuple[Any, ...]:
    """The draft, logits and random numbers of one step."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(ROWS, NODES + 1, TOKENS, generator=g)
    q = (2 * torch.randn(ROWS, NODES + 1, TOKENS, generator=g)).softmax(-1)
    tokens = torch.randint(0, TOKENS, (ROWS, NODES), generator=g)
    parents = PARENTS[shape]
    draft = Draft(
        tokens,
        np.array([4, 3, 4]) - seed % 2,
        None if sampling.greedy else q[:, :NODES] if parents is None else q,
        None if parents is None else torch.tensor(parents),
    )
    # What the host knows of the structure comes before the traced part.
    draft.valid(), draft.ancestors(), draft.children(), draft.levels()
    rng = CounterRNG(7, torch.arange(ROWS))
    rng.at_lengths(np.array([5, 9, 7]) + seed)
    return draft, logits, rng


@pytest.mark.parametrize(
    ("rule", "shape", "sampling"),
    [
        ("speculative", "chain", FILTERED),
        ("block", "chain", FILTERED),
        ("multi_round", "tree", PLAIN),
        ("typical", "tree", FILTERED),
        # `test_device` counts the reads of each of these.
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("coupled", "chain", FILTERED),
                ("exact", "chain", Sampling()),
                ("spectr", "tree", PLAIN),
                ("exact", "tree", PLAIN),
                ("top_k", "tree", PLAIN),
                ("speculative", "chain", PLAIN),
                ("lenience", "chain", PLAIN),
                ("traversal", "chain", PLAIN),
                ("multi_round", "chain", PLAIN),
                ("spectr", "chain", PLAIN),
                ("threshold", "chain", PLAIN),
                ("exact", "chain", PLAIN),
                ("top_k", "chain", Sampling()),
                ("typical", "chain", PLAIN),
            )
        ),
    ],
)
def test_a_rule_is_one_graph_in_every_step(
    rule: str, shape: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on an accelerator: no walk ends early, so that paths are equally long.
    monkeypatch.setattr("decode.base.device.reads_are_free", lambda device: False)
    monkeypatch.setattr("decode.rules.exact.reads_are_free", lambda device: False)
    judge = RULES[rule]()

    def decide(draft: Draft, logits: Tensor, rng: CounterRNG) -> Tensor:
        scores = Scores(logits, sampling)
        found = judge.decide(draft, scores, rng)
        figures = torch.stack([found.accepted, found.reached, found.next_token], 1)
        return torch.cat([figures, found.path, scores.peaks_at(found.positions).isfinite()], 1)

    torch._dynamo.reset()
    traced = torch.compile(decide, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True), torch.inference_mode():
        for step in range(STEPS):
            inputs = step_inputs(step, shape, sampling)
            assert torch.equal(traced(*inputs), decide(*inputs))


class Peeking(RULES["speculative"]):  # type: ignore[misc]
    """Looks at a value."""

    def accepts(self, uniforms: Tensor, p_x: Tensor, q_x: Tensor) -> Tensor:
        stays: Tensor = super().accepts(uniforms, p_x, q_x)
        return stays if stays.any() else ~stays


def test_a_rule_that_looks_at_a_value_is_found() -> None:
    judge: Rule = Peeking()

    def decide(draft: Draft, logits: Tensor, rng: CounterRNG) -> Tensor:
        return judge.decide(draft, Scores(logits, PLAIN), rng).accepted

    torch._dynamo.reset()
    traced = torch.compile(decide, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported), torch.inference_mode():
        traced(*step_inputs(0, "chain", PLAIN))
