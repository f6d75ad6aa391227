"""The pairings of drafter, draft and rule whose texts the joint tests sample, for the reference.

They are read from the tests' own parameters, and compared with the registries: a drafter, a
combination, a shape or a lossless rule without a pairing is named, or has its reason in `UNPAIRED`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import heads.kinds  # noqa: F401  (registers its drafters)
from decode.drafters import DRAFTERS, Drafter
from decode.opening.combinations import COMBINATIONS
from decode.rules import RULES
from decode.shapes import SHAPES
from tests import contract, test_drafter_contract, test_heads_contract, test_lossless
from tests.contract import name_of
from tests.lossless import LONGER

# Registered drafters that no joint test samples, and why.
UNPAIRED = {"none": "drafts nothing"}
# Joint tests of what is not a pairing: the file and function, and which texts are sampled.
ELSEWHERE = {
    "test_drafters.py::test_texts_have_the_targets_distribution": (
        "a drafter with another sampling than the target"
    ),
    "test_encoder_decoder_students.py::test_sampled_texts_have_the_targets_distribution": (
        "targets and drafters with an encoder"
    ),
    "test_heads_contract.py::test_drafters_that_see_a_window_keep_the_distribution": (
        "heads that see a window of the text"
    ),
    "test_heads_contract.py::test_a_stop_by_the_confidence_head_keeps_the_distribution": (
        "drafts that a confidence head ends"
    ),
    "test_online.py::test_learning_and_swapping_after_every_pass_keeps_the_targets_distribution": (
        "a small model that learns after every pass"
    ),
    "test_online_heads.py"
    "::test_learning_and_swapping_after_every_pass_keeps_the_targets_distribution": (
        "heads that learn after every pass"
    ),
    "test_recurrent.py::test_sampled_texts_have_the_targets_distribution": (
        "targets with linear attention"
    ),
}


@dataclass(frozen=True)
class Pairing:
    """drafter: its registered name, or that of its class. draft: what it drafts, in words. shape:
    its registered name, or `""` for a shape of the tests. test: which texts are sampled, in
    words."""

    drafter: str
    draft: str
    shape: str
    rule: str
    test: str


def _parameters(test: Callable[..., Any]) -> list[dict[str, Any]]:
    marks: Any = test.pytestmark  # type: ignore[attr-defined]
    # `more_texts` is one too: it says how often, not what.
    (mark,) = (x for x in marks if x.name == "parametrize" and x.args[0] != "times")
    # Those of longer tests are `pytest.param`s.
    each = (getattr(values, "values", values) for values in mark.args[1])
    return [dict(zip(mark.args[0], values, strict=True)) for values in each]


def _shape(drafter: Drafter) -> str:
    kind = type(getattr(drafter, "shape", None))
    return next((name for name in SHAPES if SHAPES[name] is kind), "")


def pairings() -> Iterator[Pairing]:
    """All pairings of the joint tests, in the tests' order."""
    short, longer = (
        test_lossless.test_texts_have_the_targets_distribution,
        test_drafter_contract.test_ragged_texts_of_many_rounds,
    )
    for values in _parameters(short):
        label = values["drafter"]
        drafter = test_lossless.DRAFTERS[label]()
        yield Pairing(f"`{name_of(drafter)}`", label, _shape(drafter), values["rule"], "one block")
    for values in _parameters(longer):
        label = values["drafter"]
        drafter = contract.RECIPES[label](LONGER)
        words = f"many rounds, {values['case']}"
        yield Pairing(f"`{name_of(drafter)}`", label, _shape(drafter), values["rule"], words)
    for values in _parameters(test_heads_contract.test_ragged_texts_of_many_rounds):
        drawn = values["draw"]
        draft = "drawn chain" if drawn is None else f"tree, {drawn}"
        shape = "chain" if drawn is None else "static"
        words = "many rounds, plain"
        yield Pairing(f"`{values['kind']}`", draft, shape, values["rule"], words)


def unpaired() -> tuple[list[str], list[str], list[str]]:
    """The registered drafters and combinations, the shapes, and the lossless rules, that no joint
    test samples."""
    found = list(pairings())
    drafters = {pairing.drafter for pairing in found}
    shapes = {pairing.shape for pairing in found}
    rules = {pairing.rule for pairing in found}
    return (
        [name for name in (*DRAFTERS, *COMBINATIONS) if f"`{name}`" not in drafters],
        [name for name in SHAPES if name not in shapes],
        [name for name in RULES if RULES[name].lossless and name not in rules],
    )


def pairings_reference() -> str:
    """A table of all pairings, a row for each drafter and draft."""
    rows: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for pairing in pairings():
        shape = f"`{pairing.shape}`" if pairing.shape else "–"
        tests = rows.setdefault((pairing.drafter, pairing.draft, shape), {})
        rules = tests.setdefault(pairing.test, [])
        if pairing.rule not in rules:
            rules.append(pairing.rule)
    lines = [
        "# Pairings in the joint tests",
        "",
        "Generated by `python -m tests.reference --pages` from the registries and the tests'",
        "own parameters. For each pairing of a drafter, what it drafts, and a rule, the whole",
        "loop samples thousands of texts, and a χ² test compares them with the target's exact",
        "joint distribution. `one block`: texts of one draft and its verification. `many",
        "rounds`: rows of different lengths, several rounds, ends inside a block; `penalised`",
        "and `processed` are texts with a repetition penalty, or with a logits processor.",
        "A dash: a shape of the tests (two children of every node), or a drafter without shapes.",
        "`tests/test_lossless.py`, `tests/test_drafter_contract.py` and",
        "`tests/test_heads_contract.py` have them. The rules themselves are also enumerated",
        "exactly (`tests/test_rules.py`, `tests/test_shapes_lossless.py`).",
        "",
        "| drafter | draft | shape | rules |",
        "| --- | --- | --- | --- |",
    ]
    for (drafter, draft, shape), tests in sorted(
        rows.items(), key=lambda row: row[0][0].strip("`").lower()
    ):
        cells = "; ".join(
            f"{words}: {', '.join(f'`{rule}`' for rule in rules)}" for words, rules in tests.items()
        )
        lines.append(f"| {drafter} | {draft} | {shape} | {cells} |")
    lines += ["", "Registered drafters that are not sampled:", ""]
    lines += [f"- `{name}` {reason}." for name, reason in UNPAIRED.items()]
    lines += ["", "Joint tests elsewhere in `tests/`:", ""]
    lines += [f"- {words} (`{test}`)" for test, words in ELSEWHERE.items()]
    return "\n".join(lines) + "\n"
