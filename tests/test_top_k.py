"""Blockwise decoding's relaxations: which tokens they let pass, and where they stop."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decode.base.errors import UserError
from decode.draft import Draft
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.rules import RULES
from decode.rules.exact import longest_path
from decode.verdict import Scores
from tests.tiny import verify

# What the target says after the text and after each node: token 0 is likeliest, then 1, 2, 3.
LOGITS = torch.tensor([[4.0, 3.0, 2.0, 1.0]] * 4)[None]
NOISE = CounterRNG(0, torch.arange(1))


def verdict(draft: Draft, **options: Any) -> tuple[list[int], int, int]:
    found = verify(RULES["top_k"](**options), draft, Scores(LOGITS, Sampling()), NOISE)
    accepted = int(found.accepted[0])
    return found.nodes[0, :accepted].tolist(), int(found.reached[0]), int(found.next_token[0])


@pytest.mark.parametrize(
    ("options", "path", "reached"),
    [
        ({"k": 1}, [], 1),
        ({"k": 2}, [0], 2),
        ({"k": 3}, [0, 1, 2], 3),
        ({"k": 1, "min_accepted": 1}, [0], 2),
        # What stands behind the minimum is judged again.
        ({"k": 2, "min_accepted": 2}, [0, 1, 2], 3),
        ({"k": 1, "min_accepted": 9}, [0, 1, 2], 3),
        # SpecDec: not too far below the likeliest.
        ({"k": 3, "tolerance": 1.0}, [0], 2),
        ({"k": 3, "tolerance": 2.0}, [0, 1, 2], 3),
        ({"k": 3, "tolerance": 0.5}, [], 1),
        ({"k": 1, "tolerance": 9.0}, [], 1),
        ({"k": 3, "tolerance": 0.5, "min_accepted": 2}, [0, 1, 2], 3),
    ],
)
def test_a_chain(options: dict[str, Any], path: list[int], reached: int) -> None:
    chain = Draft(torch.tensor([[1, 2, 0]]), np.array([3]))
    assert verdict(chain, **options) == (path, reached, 0)


def test_a_tree_keeps_its_longest_path_and_padding_is_no_node() -> None:
    tokens, parents = torch.tensor([[0, 1, 2]]), torch.tensor([[-1, -1, 1]])
    tree = Draft(tokens, np.array([3]), parents=parents)
    assert verdict(tree, k=2) == ([0], 1, 0)
    assert verdict(tree, k=3) == ([1, 2], 2, 0)
    assert verdict(tree, k=1, min_accepted=2) == ([1, 2], 2, 0)
    assert verdict(Draft(tokens, np.array([2]), parents=parents), k=3) == ([0], 1, 0)
    assert verdict(Draft.none(1, "cpu"), k=3) == ([], 0, 0)


def test_with_one_token_it_is_exact_match_of_greedy_text() -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 6, 5, generator=g)
    tokens = torch.randint(5, (500, 5), generator=g)
    parents = torch.tensor([[-1, -1, 0, 0, 2]]).expand(500, -1)
    sizes = torch.randint(0, 6, (500,), generator=g).numpy()
    draft = Draft(tokens, sizes, parents=parents)
    rng = CounterRNG(0, torch.arange(500))
    ours, exact = (
        verify(rule, draft, Scores(logits, Sampling()), rng)
        for rule in (RULES["top_k"](k=1), RULES["exact"]())
    )
    for name in ("accepted", "reached", "next_token"):
        assert (getattr(ours, name) == getattr(exact, name)).all()
    assert not RULES["top_k"].lossless


@pytest.mark.parametrize("options", [{"k": 0}, {"min_accepted": -1}, {"k": 1.5}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="expected a whole number"):
        RULES["top_k"](**options)
    with pytest.raises(UserError, match="tolerance is -1; expected nats"):
        RULES["top_k"](tolerance=-1)


@pytest.mark.parametrize("parents", [None, torch.zeros(2, 0, dtype=torch.int64)])
def test_nothing_drafted_has_no_path_on_a_device_either(
    parents: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode.rules.exact.reads_are_free", lambda device: False)
    draft = Draft(torch.zeros(2, 0, dtype=torch.int64), np.zeros(2, dtype=np.int64), None, parents)
    path, *ends = longest_path(draft, torch.zeros(2, 0, dtype=torch.bool))
    assert path.shape == (2, 0)
    assert all(not end.any() for end in ends)
