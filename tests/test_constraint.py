"""Masks along the paths of drafts: the law of every rule under them, and errors that are found."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decode.base.errors import UserError
from decode.draft import Contexts, Draft, Siblings
from decode.drafters import Drafter
from decode.drafters.grammar import GrammarDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw import logits as logits_of_text
from decode.draw.constraint import Guide, constrain
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder, Decoding
from decode.loop.rows import RowSettings
from decode.rules import RULES
from decode.verdict import Scores
from tests.enumeration import PLAIN, TOKENS, Contextual, logits_of, total_variation
from tests.lossless import CONSTRAINED, LONGER, Sums, small_lm
from tests.test_rules import CHAINS, Exact, enumerated
from tests.tiny import finish


class Table:
    """A constraint of three tokens that says at random what may follow a text of up to two tokens,
    always something that p can draw. No text ends. rolls_back: False is an error."""

    ends = frozenset({TOKENS})

    def __init__(self, random: np.random.Generator, p: Contextual, rolls_back: bool = True) -> None:
        self.rolls_back, self.table = rolls_back, {}
        for text, probs in p.table.items():
            allowed = random.random(TOKENS) < 0.5
            allowed[random.choice(np.flatnonzero(probs))] = True
            self.table[text] = allowed

    def start(self) -> "TableMatcher":
        return TableMatcher(self)

    def masked(self, p: Contextual) -> Contextual:
        """The law of masked decoding, token by token."""
        masked = object.__new__(Contextual)
        cut = {text: probs * self.table[text] for text, probs in p.table.items()}
        masked.table = {text: probs / probs.sum() for text, probs in cut.items()}
        return masked


class TableMatcher:
    def __init__(self, table: Table) -> None:
        self.table, self.text = table, ()

    def _now(self) -> np.ndarray:
        return self.table.table.get(self.text[:2], np.ones(TOKENS, dtype=bool))

    def allowed(self) -> np.ndarray:
        return np.packbits(self._now(), bitorder="little")

    def advance(self, token: int) -> bool:
        if not self._now()[token]:
            return False
        self.text = (*self.text, token)
        return True

    def rollback(self, count: int) -> None:
        if self.table.rolls_back:
            self.text = self.text[: len(self.text) - count]

    def forced(self) -> list[int]:
        return []


@pytest.mark.parametrize(
    ("rule", "draft", "siblings"),
    [
        ("speculative", "chain", "independent"),
        ("block", "chain", "independent"),
        ("multi_round", "tree", "mixed"),
        ("traversal", "wide", "chosen"),
        ("spectr", "tree", "independent"),
    ],
)
def test_every_lossless_rule_has_the_law_of_masked_decoding(
    rule: str, draft: str, siblings: Siblings
) -> None:
    masked, found = enumerated(RULES[rule](), draft, siblings, 1, Table)
    np.testing.assert_allclose(found.joint, masked.joint(), atol=1e-6)


def exact(seed: int, rolls_back: bool = True) -> tuple[Exact, Contextual, Table]:
    """Exact match over a grid, the law of masked decoding and its constraint. Masks leave parts of
    four quarters: twelfths hold them all."""
    random = np.random.default_rng(seed)
    p = Contextual(random, parts=4)
    table = Table(random, p, rolls_back)
    return Exact.of(p, 12), table.masked(p), table


def test_exact_match_has_the_law_of_masked_decoding() -> None:
    for seed in range(3):
        found, masked, table = exact(seed)
        joint, _ = found.joint(masked, table)
        np.testing.assert_allclose(joint, masked.joint(), atol=1e-12)


def test_coupled_draws_its_text_from_masked_logits() -> None:
    """Each row has the text that it has without drafts, from the law of masked decoding with the
    noise of its places."""
    found, masked, table = exact(2)
    rng = CounterRNG(0, torch.arange(len(found.grid)))
    keys, texts = rng.text_keys(torch.tensor([[0, 1, 2]])), []
    verdict = found.verdict("coupled", rng, table)
    for row, text in enumerate(found.texts(verdict)):
        drawn: tuple[int, ...] = ()
        while len(drawn) < len(text):
            law = logits_of(masked(*drawn))
            drawn += (int(PLAIN.race(law, keys[row, len(drawn)])),)
        assert drawn == text
        texts.append(text)
    assert len({*texts}) > 3
    assert verdict.accepted.max() > 0


def mask_of_the_row(on_path: Tensor) -> Tensor:
    return torch.zeros_like(on_path)


def one_token_late(on_path: Tensor) -> Tensor:
    late = on_path.clone()
    nodes = torch.arange(on_path.shape[2])
    late[:, nodes + 1, nodes] = False
    return late


ERRORS: dict[str, Callable[[Tensor], Tensor]] = {
    "mask of the row": mask_of_the_row,
    "one token late": one_token_late,
}


@pytest.mark.parametrize(
    ("error", "draft"),
    [
        ("mask of the row", "chain"),
        ("mask of the row", "tree"),
        ("one token late", "chain"),
        ("one token late", "tree"),
        ("no mask on the bonus", "chain"),
        ("no mask on the bonus", "tree"),
        ("not rolled back", "tree"),  # within a chain nothing is
        ("mask of the row", "exact match"),
        ("one token late", "exact match"),
        ("no mask on the bonus", "exact match"),
        ("not rolled back", "exact match"),
    ],
)
def test_an_error_in_the_masks_is_found(
    error: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(guides: Any, logits: Tensor, *text: Any) -> Any:
        *before, nodes, on_path = text
        if error in ERRORS:
            on_path = ERRORS[error](on_path)
        masked, failed = constrain(guides, logits, *before, nodes, on_path)
        if error.startswith("no mask"):
            masked[:, 2:] = logits[:, 2:]
        return masked, failed

    monkeypatch.setattr(logits_of_text, "constrain", broken)
    rolls_back, apart = error != "not rolled back", 0.0
    for seed in range(3):
        if draft == "exact match":
            exactly, law, table = exact(seed, rolls_back)
            joint = exactly.joint(law, table)[0]
        else:
            rule = RULES["speculative" if draft in CHAINS else "multi_round"]()
            masks = functools.partial(Table, rolls_back=rolls_back)
            law, found = enumerated(rule, draft, "independent", seed, masks)
            joint = found.joint
        apart = max(apart, total_variation(law.joint(), joint))
        if apart > 0.01:
            break
    assert apart > 0.01


# --- a guide, and what it masks -------------------------------------------------------------------


def test_a_guide_follows_any_text_in_any_order() -> None:
    guide, random = Guide(Sums(), 0), np.random.default_rng(0)
    for _ in range(300):
        text = random.integers(0, 4, random.integers(0, 5))
        matcher = Sums().start()
        passes = all(matcher.advance(token) for token in text.tolist())
        found = guide.allowed(text)
        assert (found is not None) == passes
        if found is not None:
            assert (found == matcher.allowed()).all()
    assert guide.allowed(np.array([0, 4])) is None  # an end
    assert guide.allowed(np.array([1])) is not None


def test_positions_out_of_reach_and_rows_without_a_grammar_stay_as_they_are() -> None:
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    draft = Draft(torch.tensor([[1, 1, 2]] * 2), np.array([3, 3]))
    contexts = Contexts.of([(3, 3), (3, 3)], 2)
    contexts.guides = [Guide(Sums(), 2), None]
    found = Scores(logits, Sampling(), draft, contexts).logits
    assert torch.equal(found[1], logits[1])
    assert torch.equal(found[0, 2:], logits[0, 2:])  # 1 does not follow 1
    assert found[0, 0].isfinite().tolist() == [False, True, True, True, False]
    assert found[0, 1].isfinite().tolist() == [True, False, True, True, False]


def test_a_masked_drafter_that_is_the_target_is_always_right() -> None:
    case = CONSTRAINED
    decoder = case.decoder(SmallLMDrafter(case.model(0.0)), gamma=3)
    counts = decoder.decode(list(case.prompts) * 20, 6).counts
    assert counts.acceptance_rate == 1
    assert counts.accepted.sum() > 50


@pytest.mark.parametrize("rule", ["top_k", "threshold", "typical"])
def test_lossy_rules_never_accept_a_masked_token(rule: str) -> None:
    case = CONSTRAINED
    options = {"top_k": {"k": 5, "min_accepted": 3}, "threshold": {"threshold": 0.0}}.get(rule, {})
    made: Any = RULES[rule]
    drafter = small_lm(case=LONGER)
    decoder = case.decoder(drafter, made(**options), draft_sampling=Sampling(3.0))
    outputs = decoder.decode(list(case.prompts) * 30, 6).outputs
    for text in outputs:
        guide = Guide(Sums(), 0)
        assert guide.allowed(np.array(text[:-1])) is not None
    assert any(text[-1] == 4 for text in outputs)


def test_rows_with_and_without_a_grammar_join_and_leave() -> None:
    """Each row has the text that it has alone."""
    case = CONSTRAINED
    decoder = Decoder(case.model(0.0), small_lm(case=case), eos_token_ids=case.eos, gamma=3)
    settings = [
        RowSettings(sampling, seed=seed)
        for seed, sampling in enumerate([case.sampling, LONGER.sampling, case.sampling] * 3)
    ]

    def texts(groups: list[range]) -> dict[int, list[int]]:
        outputs: dict[int, list[int]] = {}
        decoding = Decoding(decoder, on_end=outputs.__setitem__)
        for group in groups:
            prompts = [case.prompts[row % 2] for row in group]
            decoding.admit(prompts, 12, row_ids=[*group], settings=[settings[row] for row in group])
            if not decoding.finished:
                decoding.step()
        finish(decoding)
        return outputs

    together = texts([range(4), range(4, 6), range(6, 9)])
    assert len(together) == 9
    for row in range(9):
        assert texts([range(row, row + 1)])[0] == together[row]


class Fails(Sums):
    """Raises after two tokens, and forces nothing."""

    def start(self) -> Any:
        matcher = super().start()
        say = matcher.allowed

        def forced() -> list[int]:
            raise RuntimeError("too complex")

        def allowed() -> np.ndarray:
            if len(matcher.text) >= 2:
                raise RuntimeError("too complex")
            return say()

        matcher.allowed, matcher.forced = allowed, forced  # type: ignore[method-assign]
        return matcher


@pytest.mark.parametrize("drafter", [small_lm(case=CONSTRAINED), GrammarDrafter()])
def test_a_grammar_that_fails_ends_its_row_only(drafter: Drafter) -> None:
    case, errors, outputs = CONSTRAINED, {}, {}
    decoder = Decoder(case.model(0.0), drafter, eos_token_ids=case.eos, gamma=3)
    decoding = Decoding(decoder, on_error=errors.__setitem__, on_end=outputs.__setitem__)
    decoding.admit(
        [case.prompts[0]] * 2,
        6,
        settings=[RowSettings(Sampling(grammar=Fails())), RowSettings(LONGER.sampling)],
    )
    finish(decoding)
    assert "the grammar fails in step" in str(errors[0])
    assert "too complex" in str(errors[0])
    assert list(outputs) == [1]


@pytest.mark.parametrize(("eos", "ignores"), [((), False), ((3,), False), ((4,), True)])
def test_a_grammar_needs_its_ends(eos: tuple[int, ...], ignores: bool) -> None:
    decoder = Decoder(LONGER.model(0.0), small_lm(case=LONGER), eos_token_ids=eos)
    settings = RowSettings(Sampling(grammar=Sums()), ignore_eos=ignores)
    with pytest.raises(UserError, match=r"EOS|eos_token_ids"):
        Decoding(decoder).admit([(1,)], 4, settings=settings)
