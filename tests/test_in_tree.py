"""PaSS with its look-ahead tokens behind the nodes of a draft: one pass of the target a step."""

from pathlib import Path
from typing import Any

import pytest
import torch

from decode.base.errors import UserError
from decode.draft import Contexts, Draft, Limits
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.several.combined import CompositeDrafter
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.loop.parts import room
from decode.model.cache.cached_model import CachedLM
from decode.model.cache.requirements import require_trees
from decode.opening.directory import open_drafter
from decode.shapes import SHAPES
from heads.heads_directory import save_heads
from heads.in_tree import InTreeDrafter
from heads.pass_heads import PassDrafter
from tests.test_drafters import drafted
from tests.test_pass import FAMILIES, PROMPTS, TOKENS, make, plain_logits, target
from tests.tiny import VOCAB, tiny_target

REPEATED = [*PROMPTS, [11, 12, 13, 14] * 3]
NEW = 16


class Checked(InTreeDrafter):
    """Checks the q of each draft against a plain pass over the text without its last token, whose
    place the first look-ahead token takes."""

    in_tree, two_passes = 0, 0

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        assert self.lm is not None
        ready = self._ready(contexts)
        draft = super().draft(contexts, limits, sampling, rng)
        for row, tokens in enumerate(drafted(draft)):
            if tokens:
                text = torch.as_tensor(contexts.tokens[row, : contexts.lengths[row]])
                seen, first = (text[:-1], 1) if ready[row] else (text, 0)
                logits = plain_logits(self.heads, self.lm.model, seen, len(tokens) + first)
                assert draft.q is not None
                expected = sampling.probs(logits[first:])
                q = draft.q[row, : len(tokens)]
                torch.testing.assert_close(q, expected, rtol=1e-3, atol=1e-5)
                self.in_tree += int(ready[row])
                self.two_passes += int(not ready[row])
        return draft


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each row in each pass of the target."""
    widths: list[int] = []
    forward = CachedLM.forward

    def counted(self: CachedLM, ids: Any, *others: Any, **more: Any) -> Any:
        widths.append(ids.shape[1])
        return forward(self, ids, *others, **more)

    monkeypatch.setattr(CachedLM, "forward", counted)
    return widths


@pytest.mark.parametrize(
    ("family", "places"), [("llama", None), ("llama", 2), ("gemma", 2), ("gpt2", None)]
)
def test_q_is_that_of_a_plain_pass(family: str, places: int | None) -> None:
    """In ragged batches, after any verdict, in both forms and where rows use different ones."""
    drafter = Checked(make(family), VOCAB, places=places)
    Decoder(target(family).model, drafter, gamma=TOKENS, sampling=Sampling(1.0)).decode(
        PROMPTS, NEW
    )
    assert drafter.in_tree > 10
    # A row drafts with a pass when it starts, and then only where it accepts more than two places.
    assert drafter.two_passes >= len(PROMPTS)
    assert places or drafter.two_passes == len(PROMPTS)


@pytest.mark.parametrize(
    ("family", "name"),
    list(zip(FAMILIES, ["chain", "static:widths=[2,1,2]", "dynamic:width=2,nodes=6"], strict=True)),
)
def test_greedy_text_is_plain_decodings_with_one_pass_a_step(
    family: str, name: str, passes: list[int]
) -> None:
    model = target(family).model
    plain = Decoder(model, DRAFTERS["none"]()).decode(PROMPTS, NEW)
    require_trees(model)  # its passes are those of a trial
    passes.clear()
    drafter = InTreeDrafter(make(family), VOCAB, SHAPES.make(name))
    decoder = Decoder(model, drafter, gamma=TOKENS)
    done = decoder.decode(PROMPTS, NEW)
    assert done.outputs == plain.outputs
    # The prompts, the first draft, and nothing but the verifications.
    assert len(passes) == 2 + len(done.steps)
    assert passes[2:] == [step.width for step in done.steps]
    # The text's last token and at least a chain, with look-ahead tokens behind each.
    full = [step.width for step in done.steps if (step.depths == TOKENS).any()]
    assert len(full) > 5
    assert min(full) >= (1 + TOKENS) ** 2
    # Two passes a step, as the paper has it.
    passes.clear()
    two = Decoder(model, PassDrafter(make(family), VOCAB, SHAPES.make(name)), gamma=TOKENS)
    assert len(passes) == 0
    steps = len(two.decode(PROMPTS, NEW).steps)
    assert len(passes) >= 2 * steps


def combined(in_tree: InTreeDrafter) -> Drafter:
    return CompositeDrafter([NgramDrafter(), in_tree])


def test_what_lookup_drafted_is_followed_by_a_draft_without_a_pass(passes: list[int]) -> None:
    model = target().model
    in_tree = InTreeDrafter(make(), VOCAB)
    done = Decoder(model, combined(in_tree), gamma=TOKENS).decode(REPEATED[3:], 24)
    assert len(passes) <= 2 + len(done.steps)
    assert done.outputs == Decoder(model, DRAFTERS["none"]()).decode(REPEATED[3:], 24).outputs


def test_drafts_are_as_long_as_the_text_and_the_context_allow() -> None:
    """Near the end of the context, probes have no place of their own, and nothing is lost."""
    model = target("gpt2").model
    room = model.config.n_positions
    prompts = [[5, 17, 250] * ((room - 12) // 3), [7]]
    drafter = InTreeDrafter(make("gpt2"), VOCAB)
    done = Decoder(model, drafter, gamma=TOKENS).decode(prompts, 30)
    assert done.outputs == Decoder(model, DRAFTERS["none"]()).decode(prompts, 30).outputs
    assert len(done.outputs[0]) + len(prompts[0]) == room


def test_it_is_opened_by_name_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "drafter"
    save_heads(path, make(), target=target(), provenance={})
    opened = open_drafter(f"in_tree:drafter={path},places=2", target())
    assert isinstance(opened, InTreeDrafter)
    assert opened.places == 2
    assert torch.equal(opened.heads.lookahead, make().lookahead)
    shaped = opened.with_shape(SHAPES.make("dynamic:width=2,nodes=6"))
    assert isinstance(shaped, InTreeDrafter)
    assert (shaped.places, shaped.branches) == (2, True)
    assert room(shaped, 3) == shaped.max_nodes(3) + 2 * TOKENS
    with pytest.raises(UserError, match=r"target of the heads .*drafter"):
        open_drafter(f"in_tree:drafter={path}", tiny_target(seed=1))
    for spec, message in (
        ("in_tree:drafter=ngram", "a NgramDrafter; expected the directory of heads of the type"),
        (f"in_tree:drafter={path},places=1", "places is 1; expected a whole number ≥ 2"),
        (f"in_tree:drafter={path},place=1", "no option 'place'"),
    ):
        with pytest.raises(UserError, match=message):
            open_drafter(spec, target())
