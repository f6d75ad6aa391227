"""Drafters whose tokenizer is not the target's, on shared tokens (TLI) and on text (SLEM)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from decode.base.errors import UserError
from decode.draft import Contexts, Draft
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.several.combined import CompositeDrafter
from decode.drafters.tokenizers.other_tokenizer import OtherTokenizerDrafter
from decode.drafters.tokenizers.retokenised import RetokenisedDrafter
from decode.drafters.tokenizers.shared_tokens import SharedVocabularyDrafter
from decode.drafters.tokenizers.token_texts import (
    TokenTexts,
    share_roles,
    shared_coverage,
    shared_tokens,
)
from decode.draw.sampling import Sampling
from decode.loop.decoded import Decoded
from decode.loop.decoding import Decoder, Decoding
from decode.opening.directory import open_drafter
from decode.shapes.static import Static
from tests.other_tokenizers import byte_level, sentencepiece, shuffled, with_rows, words
from tests.tiny import EOS_ID, as_target, finish, save_tiny, tiny_model, tiny_target, tiny_tokenizer

TEXTS = [
    "The quick brown fox, naïve and 日本語 🙂 too.\n\nA new  line",
    "42",
    "<|im_start|>user\nwhat is it?<|im_end|>\n<|im_start|>assistant\n",
    "🙂🙂 sea shells by the sea",
]
PROMPTS = [tiny_tokenizer().encode(text) for text in TEXTS] + [[EOS_ID], [200, 201]]
NEW = 16
OTHERS = {"byte level": byte_level, "sentencepiece": sentencepiece}
KINDS: dict[str, type[OtherTokenizerDrafter]] = {
    "shared": SharedVocabularyDrafter,
    "text": RetokenisedDrafter,
}


def decoded(drafter: Drafter, **options: Any) -> Decoded:
    return Decoder(tiny_target().model, drafter, **options).decode(PROMPTS, NEW, seed=2)


def plain(**options: Any) -> list[list[int]]:
    return decoded(DRAFTERS["none"](), **options).outputs


def made(
    kind: type[OtherTokenizerDrafter], other: Callable[[], Any], **shape: Any
) -> OtherTokenizerDrafter:
    tokenizer = other()
    model = tiny_model("llama", vocab=len(tokenizer) + 6, seed=7, **shape)
    return kind.of_models(model, tokenizer, tiny_target())


# --- the tokens as bytes --------------------------------------------------------------------------


@pytest.mark.parametrize("other", OTHERS)
def test_tokens_are_shared_by_their_bytes(other: str) -> None:
    ours, theirs = TokenTexts(tiny_tokenizer(), 300), TokenTexts(OTHERS[other](), 1000)
    share_roles(ours, theirs)
    shared = shared_tokens(ours, theirs)
    assert shared.target == sorted(set(shared.target))
    for i, j in zip(*shared, strict=True):
        assert ours.texts[i] == theirs.texts[j]
    pairs = dict(zip(*shared, strict=True))
    assert pairs[EOS_ID] == theirs.tokenizer.eos_token_id  # by its role: the names differ
    assert 0 not in pairs  # the padding has no like
    assert ours.ids[b" the"] not in tiny_tokenizer().encode("the")
    assert pairs[ours.ids[b" the"]] == theirs.ids[b" the"]
    covered = shared_coverage(PROMPTS, (ours.tokenizer, 300), (theirs.tokenizer, 1000))
    assert covered.tokens == len(pairs)
    assert 0.8 < covered.of_text < 1
    assert covered.of_target == len(pairs) / 300


@pytest.mark.parametrize("other", OTHERS)
def test_text_and_tokens_spell_the_same_bytes(other: str) -> None:
    texts = TokenTexts(OTHERS[other](), 1000)
    for text in (*TEXTS, "", " ", "\n"):
        spelled = text.encode()
        for cut in range(len(spelled) + 1):  # also inside characters
            tokens = texts.encode(spelled[cut:], spelled[:cut])
            assert b"".join(texts.texts[token] for token in tokens) == spelled[cut:]
    assert texts.encode(b"\xffnone\xfe") == texts.pieces(b"none")


def test_a_byte_that_no_token_has_is_one_unknown_token() -> None:
    texts = TokenTexts(words("?", "a", "bb"), 10)
    assert texts.pieces("abb日a".encode()) == [1, 2, texts.unknown, 1]


# --- what is read and drafted ---------------------------------------------------------------------


class Checked:
    """Every draft of a chain is compared with forwards of the same text without a cache."""

    checked = 0

    def check(self, drafter: OtherTokenizerDrafter, text: Contexts, drafted: Draft) -> None:
        for row, size in enumerate(drafted.sizes):
            ids = text.tokens[row, : text.lengths[row]].tolist()
            for token in drafter.to_read(drafted.tokens[row, :size]).tolist():
                with torch.inference_mode():
                    logits = drafter.lm.model(torch.tensor([ids])).logits[0, -1]
                rows = drafter.draft_logits(logits)
                best = torch.topk(rows, 2)
                place = int(best.indices[0])
                if isinstance(drafter, SharedVocabularyDrafter):
                    place = int(drafter.columns[place])
                if best.values[0] - best.values[1] > 1e-3:
                    assert place == token
                    type(self).checked += 1
                ids.append(token)


def watched(drafter: Any) -> Checked:
    """Compares the drafts of the small model inside."""
    check = Checked()
    grow = drafter.shape.grow

    def checked(growth: Any, *rest: Any) -> Draft:
        drafted: Draft = grow(growth, *rest)
        check.check(drafter, growth.text, drafted)
        return drafted

    drafter.shape.grow = checked
    return check


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_text_so_far(kind: str, other: str) -> None:
    """Rows of different lengths leave and join, and the text grows faster in the drafter's tokens
    than in the target's. Greedy text is the target's."""
    drafter = made(KINDS[kind], OTHERS[other])
    check = watched(drafter)
    Checked.checked = 0
    which = Decoder(tiny_target().model, drafter, gamma=3, eos_token_ids=(EOS_ID,))
    decoding = Decoding(which, seed=2)
    for count in (2, 1, 3):
        begin = len(decoding.outputs)
        decoding.admit(PROMPTS[begin : begin + count], NEW)
        decoding.step()
    finish(decoding)
    assert decoding.result().outputs == plain(eos_token_ids=(EOS_ID,))
    assert check.checked > 50


@pytest.mark.parametrize("kind", KINDS)
def test_the_target_itself_with_its_ids_in_another_order(kind: str) -> None:
    """All tokens are shared, so it agrees with the target wherever it reads the same tokens."""
    tokenizer, order = shuffled()
    target = tiny_target()
    drafter = KINDS[kind].of_models(with_rows(target.model, order), tokenizer, target)
    run = decoded(drafter, gamma=3)
    assert run.outputs == plain()
    assert run.counts.accepted.sum() > 10
    assert run.counts.acceptance_rate == 1 or kind == "text"


@pytest.mark.parametrize("kind", KINDS)
def test_beside_another_drafter_and_in_a_short_context(kind: str) -> None:
    """The other drafter's tokens are accepted in place of those that were fed, and the drafter's
    context is shorter than a text."""
    drafter = made(KINDS[kind], byte_level, max_positions=48)
    watched(drafter)
    Checked.checked = 0
    drafter.lm.max_positions = 1 << 20  # the check reads all of a text
    both = CompositeDrafter([NgramDrafter(1, 2), drafter])
    assert decoded(both, gamma=4).outputs == plain()
    assert Checked.checked > 20
    short = made(KINDS[kind], byte_level, max_positions=24)
    assert decoded(short, gamma=4).outputs == plain()


def test_text_is_split_again_as_the_drafters_tokenizer_would() -> None:
    """Whatever came in one step. Characters come a byte at a time."""
    drafter: Any = made(RetokenisedDrafter, byte_level)
    text = "The shells by the shore, naïve 日本語 and the quick brown dog verifies 42 tokens. " * 3
    tokens = tiny_tokenizer().encode(text)
    contexts = Contexts.of([tokens], len(tokens) + 4)
    rng = np.random.default_rng(0)
    end = 1
    while end < len(tokens):
        end = min(end + int(rng.integers(1, 4)), len(tokens))
        contexts.lengths = np.array([end])
        read = drafter.read(contexts)
        ids = read.tokens[0, : read.lengths[0]].tolist()
        spelled = b"".join(drafter.drafter_texts.texts[token] for token in ids)
        assert spelled == b"".join(drafter.target_texts.texts[token] for token in tokens[:end])
    assert ids == byte_level().encode(text)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, top_p=0.95)])
def test_trees_of_shared_tokens(sampling: Sampling) -> None:
    tokenizer, order = shuffled()
    target = tiny_target()
    model = with_rows(target.model, order)
    shape = Static(widths=[2, 2, 1], draw="distinct")
    drafter = SharedVocabularyDrafter.of_models(model, tokenizer, target).with_shape(shape)
    run = decoded(drafter, rule="exact", sampling=sampling)
    assert run.outputs == plain(rule="exact", sampling=sampling)
    assert run.counts.accepted.sum() > 20
    # The text grows faster in these tokens than in the target's.
    longer = made(SharedVocabularyDrafter, sentencepiece).with_shape(Static(widths=[3, 2]))
    assert decoded(longer, rule="exact", sampling=sampling).outputs == run.outputs
    with pytest.raises(UserError, match="chains only"):
        made(RetokenisedDrafter, byte_level).with_shape(shape)


# --- by name --------------------------------------------------------------------------------------


def test_by_name_and_refused(tmp_path: Any) -> None:
    target = tiny_target()
    model = tiny_model("llama", vocab=330, seed=7)
    path = tmp_path / "other"
    model.save_pretrained(path)
    byte_level().save_pretrained(path)
    shuffled()[0].save_pretrained(tmp_path / "shuffled")
    tiny_model("llama", seed=7).save_pretrained(tmp_path / "shuffled")
    for other in ("other", "shuffled"):  # of another size, and of the same
        for spec in ("{}", "ngram+{}", "vertical:model='{}',inner=ngram"):
            with pytest.raises(UserError, match=rf"another vocab.*{other}:vocabulary=shared"):
                open_drafter(spec.format(tmp_path / other), target)
    for name, kind in KINDS.items():
        drafter = open_drafter(f"ngram+{path}:vocabulary={name}", target)
        assert isinstance(drafter, CompositeDrafter)
        assert isinstance(drafter.drafters[1], kind)
        assert decoded(drafter).outputs == plain()
    for spec, problem in (
        (f"{path}:vocabulary=shred", "expected one of shared, text.*Did you mean .shared"),
        ("ngram:vocabulary=shared", "ngram has no option 'vocabulary'"),
        (f"{tmp_path / 'none'}:vocabulary=text", "does not exist"),
    ):
        with pytest.raises(UserError, match=problem):
            open_drafter(spec, target)
    # Its own tokenizer under another name of the option is no error.
    same = save_tiny(tmp_path / "same", seed=3)
    assert decoded(open_drafter(f"{same}:vocabulary=shared", target)).outputs == plain()


def test_without_shared_tokens_it_is_refused() -> None:
    of = as_target(tiny_model("llama", vocab=3), words("a", "b", "c"))
    other = tiny_model("llama", vocab=2)
    with pytest.raises(UserError, match="none of the 3 tokens"):
        SharedVocabularyDrafter.of_models(other, words("x", "y"), of)
    with pytest.raises(UserError, match="leaves out the spaces"):
        RetokenisedDrafter.of_models(other, words("a", "y"), of)
    with pytest.raises(UserError, match="spaces are left out"):
        SharedVocabularyDrafter.of_models(other, words("a", "y"), tiny_target())
