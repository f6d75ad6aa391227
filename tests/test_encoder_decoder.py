"""Targets with an encoder: T5, BART and Marian in the loop, their positions, drafters and heads."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decode.base.errors import UserError
from decode.draft import Contexts, Draft, Limits
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.lookup.ngram import NgramDrafter, StoreDrafter
from decode.drafters.skip import SkipDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder, Decoding
from decode.model.cache.cached_model import CachedLM
from decode.model.cache.requirements import require_trees
from decode.model.generation_config import padded_prompts
from decode.model.hidden_states import FINAL
from decode.model.loading import Target, load_target
from decode.opening.directory import open_drafter
from decode.settings import EvaluationProtocol
from decode.text import SpeculativeGenerator
from decode.verification import Verification
from distill.teacher.feature_sources import LiveFeatures
from tests import tiny
from tests.stages import make_stage, plan_stage, stage_context
from tests.tiny import EOS_ID, PAD_ID, finish, tiny_encoder_decoder, tiny_model, tiny_tokenizer
from train.measure.evaluation import evaluate

FAMILIES = ("t5", "bart", "marian")
# Of different lengths, with tokens that come again.
SOURCES = [
    [5, 6, 7, 8, 9, 10, 5, 6, 2],
    [20, 21, 2],
    [30, 5, 6, 7, 40, 2],
    [9],
    [77, 78, 79, 80, 81, 82, 83, 84, 85, 86, 87, 88, 2],
]
NEW = 20


model = functools.cache(tiny_encoder_decoder)


def generated(lm: Any, source: list[int], new: int = NEW, **settings: Any) -> list[int]:
    """The greedy text of transformers, of one row alone."""
    stated = {"eos_token_id": EOS_ID, "decoder_start_token_id": PAD_ID, "num_beams": 1}
    return tiny.generated(lm, source, new, **(stated | settings))


class Guesses(Drafter):
    """Trees of chosen tokens: the right one at a changing place among wrong siblings, and wrong
    ones everywhere after a while."""

    branches = True

    def __init__(self, texts: dict[tuple[int, ...], list[int]]) -> None:
        self.texts = texts

    def max_depth(self, gamma: int) -> int:
        return 3

    def max_nodes(self, gamma: int) -> int:
        return 6

    def start(self, contexts: Contexts) -> None:
        return None

    def draft(self, contexts: Contexts, *rest: Any) -> Draft:
        assert contexts.sources is not None
        rows = []
        for source, length in zip(contexts.sources, contexts.lengths.tolist(), strict=True):
            text = [*self.texts[tuple(source)], *[3] * 9]
            one, two, three = text[length - 1 : length + 2]
            wrong = 4 + length % 7
            # Roots: two wrong ones around the right one; the second level hangs on the right one.
            rows.append([wrong, one, wrong + 1, wrong, two, three if length % 3 else wrong])
        parents = torch.tensor([[-1, -1, -1, 1, 1, 4]]).expand(len(rows), -1)
        return Draft(torch.tensor(rows), np.full(len(rows), 6), parents=parents)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("marian", "ngram"),
        ("bart", "tree"),
        ("t5", "lookahead"),
    ],
)
def test_greedy_texts_are_those_of_generate(family: str, kind: str) -> None:
    lm = model(family)
    expected = [generated(lm, source) for source in SOURCES]
    assert len({token for text in expected for token in text}) >= 8  # not one token over and over
    texts = dict(zip(map(tuple, SOURCES), expected, strict=True))
    drafter = Guesses(texts) if kind == "tree" else DRAFTERS.make(kind)
    # Rows of different lengths, which leave and are followed by others.
    for size in (2, len(SOURCES)):
        decoder = Decoder(lm, drafter, eos_token_ids=[EOS_ID], gamma=3)
        decoded = decoder.decode(SOURCES, NEW, batch_size=size)
        assert decoded.outputs == expected
    if kind == "tree":
        assert decoded.counts.tokens_per_step > 1.5
        assert decoded.counts.acceptance_rate < 1


def test_rows_join_a_running_decode() -> None:
    lm = model("t5")
    decoding = Decoding(Decoder(lm, NgramDrafter(), eos_token_ids=[EOS_ID], gamma=3), seed=0)
    decoding.admit(SOURCES[1:3], NEW)
    for _ in range(4):
        decoding.step()
    decoding.begin([SOURCES[4], SOURCES[0], SOURCES[4]], NEW)  # the longest source so far
    decoding.step()
    decoding.read(2)
    decoding.drop(0)
    finish(decoding)
    for row, source in ((1, SOURCES[2]), (2, SOURCES[4]), (3, SOURCES[0]), (4, SOURCES[4])):
        assert decoding.outputs[row] == generated(lm, source)


@pytest.mark.parametrize(
    ("family", "attention"), [("t5", "eager"), ("bart", "sdpa"), ("marian", "sdpa")]
)
def test_positions_are_those_of_one_row_without_padding(family: str, attention: str) -> None:
    """Each node of ragged trees has the logits and hidden states of its path alone."""
    lm = tiny_encoder_decoder(family)
    lm.set_attn_implementation(attention)
    require_trees(lm)
    cached = CachedLM(lm, captured_layers=(0, FINAL))
    sources, texts = SOURCES[:2], [[PAD_ID, 11, 12, 13, 14], [PAD_ID, 15]]
    cached.reset(2, 12)
    cached.encode(sources, 0)
    padded = torch.tensor([texts[0], texts[1] + [0] * 3])
    cached.forward(padded, np.zeros(2, dtype=np.int64))
    parents, nodes = [-1, -1, 1, 1, 3], [50, 51, 52, 53, 54]
    draft = Draft(
        torch.tensor([nodes, nodes[::-1]]), np.full(2, 5), parents=torch.tensor([parents] * 2)
    )
    contexts = Contexts.of(texts, 12, sources)
    logits = cached.verify(contexts, draft)
    states = cached.features[FINAL]
    output = lm.get_output_embeddings()
    for row, (source, text) in enumerate(zip(sources, texts, strict=True)):
        for node in range(-1, len(nodes)):
            path, at = [], node
            while at >= 0:
                path.insert(0, int(draft.tokens[row, at]))
                at = parents[at]
            with torch.no_grad():
                alone = lm(
                    input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([text + path])
                ).logits[0, -1]
                head = output(states[row, 1 + node])
            torch.testing.assert_close(logits[row, 1 + node], alone, atol=2e-4, rtol=1e-4)
            # What heads read is the input of the output layer, also where the states are scaled.
            torch.testing.assert_close(head, alone, atol=2e-4, rtol=1e-4)


def test_lookup_reads_the_source() -> None:
    sources = [[5, 6, 7, 8, 9], [30, 31]]
    drafter, store = NgramDrafter(1, 2), StoreDrafter(1, 2)
    contexts = Contexts.of([[PAD_ID, 6, 7], [PAD_ID, 40]], 9, sources)
    limits = Limits(np.array([2, 2]))
    drafts = []
    for each in (drafter, store):
        each.start(contexts)
        rng = CounterRNG(0, torch.arange(2))
        drafts.append(each.draft(contexts, limits, Sampling(), rng))
    assert drafts[0].tokens[0].tolist() == [8, 9]
    assert drafts[0].sizes.tolist() == [2, 0]
    assert drafts[1].tokens[0].tolist() == [8, 9]
    joined = Contexts.of([[PAD_ID, 6, 7], [PAD_ID, 40], [PAD_ID, 5]], 9, [*sources, [5, 41]])
    rng = CounterRNG(0, torch.arange(3))
    drafter.add_rows(joined, Verification.of_nothing(np.array([2]), joined, rng.device))
    draft = drafter.draft(joined, Limits(np.ones(3, dtype=np.int64)), Sampling(), rng)
    assert draft.tokens[2].tolist() == [41]


# --- generate, evaluate ---------------------------------------------------------------------------


def target(family: str = "bart", **shape: Any) -> Target:
    lm = tiny_encoder_decoder(family, **shape).requires_grad_(False)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    return tiny.as_target(lm, tokenizer, f"tiny-{family}")


@pytest.mark.parametrize(
    "settings",
    [
        {"forced_bos_token_id": 33, "forced_eos_token_id": EOS_ID},
        {"suppress_tokens": [275, 48], "begin_suppress_tokens": [100, 249], "min_length": 9},
        {"no_repeat_ngram_size": 2, "bad_words_ids": [[45], [59, 270]], "min_new_tokens": 5},
    ],
)
def test_what_a_checkpoint_forces_and_forbids(settings: dict[str, Any]) -> None:
    made = target()
    plain = [generated(made.model, source, 12) for source in SOURCES]
    for key, value in settings.items():
        setattr(made.model.generation_config, key, value)
    expected = [generated(made.model, source, 12) for source in SOURCES]
    assert expected != plain
    generator = SpeculativeGenerator(
        made.model, made.tokenizer, "ngram", eos_token_ids=made.eos_token_ids
    )
    generator.generate(SOURCES, max_new_tokens=12)
    assert generator.decoded is not None
    assert generator.decoded.outputs == expected


def test_an_evaluation_of_a_target_with_an_encoder() -> None:
    protocol = EvaluationProtocol(
        gamma=3, max_new_tokens=12, timed_prompts=2, timed_batch_size=2, timed_tokens=8
    )
    made = target("bart")
    measured = evaluate(made, NgramDrafter(), SOURCES, protocol)
    assert measured.outputs == [generated(made.model, source, 12) for source in SOURCES]
    assert measured.identical == 1
    assert measured.generated is not None
    ((_, tokens),) = measured.generated.values()
    assert tokens == sum(len(generated(made.model, SOURCES[i], 8)) for i in (0, 4))


# --- loading, refusals ----------------------------------------------------------------------------


def saved(directory: Path, family: str) -> Path:
    made = target(family)
    made.model.save_pretrained(directory)
    made.tokenizer.save_pretrained(directory)
    return directory


def test_a_checkpoint_loads_where_an_encoder_is_allowed(tmp_path: Path) -> None:
    family = "marian"
    path = saved(tmp_path / family, family)
    loaded = load_target(str(path), dtype="float32", device="cpu", encoder=True)
    assert loaded.has_encoder
    decoded = Decoder(loaded.model, NgramDrafter(), eos_token_ids=[EOS_ID]).decode(SOURCES, 8)
    assert decoded.outputs == [generated(loaded.model, source, 8) for source in SOURCES]
    with pytest.raises(UserError, match=r"encoder-decoder model .* decoder-only model is needed"):
        load_target(str(path), dtype="float32", device="cpu")


def test_drafters_that_do_not_read_sources_are_refused(tmp_path: Path) -> None:
    made, small = target(), tiny_model("llama")
    with pytest.raises(UserError, match="SkipDrafter needs a decoder-only target"):
        Decoder(tiny_encoder_decoder("t5"), SkipDrafter("1", "1"))
    with pytest.raises(UserError, match="SmallLMDrafter needs a decoder-only target"):
        Decoder(made.model, SmallLMDrafter(small))
    for spec, name in (
        ("skip:attention=0,mlp=0", "SkipDrafter"),
        ("swift", "SwiftDrafter"),
        ("sparse", "SparseDrafter"),
    ):
        with pytest.raises(UserError, match=f"{name} needs a decoder-only target"):
            Decoder(made.model, DRAFTERS.make(spec))
    trained = [DRAFTERS[name] for name in ("eagle1", "kangaroo", "pass", "pard", "dflash")]
    assert all(drafter.decoder_only for drafter in trained)
    small.save_pretrained(tmp_path / "small")
    made.tokenizer.save_pretrained(tmp_path / "small")
    with pytest.raises(UserError, match=r"small language model .* needs a decoder-only target"):
        open_drafter(str(tmp_path / "small"), made)
    with pytest.raises(UserError, match="prompt 0 has 65 tokens"):
        Decoder(made.model, NgramDrafter()).decode([[5] * 65], 3)
    made.model.get_decoder().embed_positions = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match="makes the positions of its decoder's tokens"):
        CachedLM(made.model)


# --- heads ----------------------------------------------------------------------------------------


def test_features_are_those_that_a_drafter_sees() -> None:
    lm = model("t5")
    text = [PAD_ID, 11, 12, 13]
    ids, mask = padded_prompts([text, text[:2]], PAD_ID, torch.device("cpu"), right=True)
    sources = {"one": SOURCES[0], "two": SOURCES[1]}
    features = LiveFeatures(lm, (FINAL,), sources=sources).features(ids, mask, ["one", "two"])
    cached = CachedLM(lm, captured_layers=(FINAL,))
    for row, source in enumerate(sources.values()):
        count = int(mask[row].sum())
        cached.reset(1, 4)
        cached.encode([source], 0)
        with torch.no_grad():
            cached.forward(ids[row : row + 1, :count], np.zeros(1, dtype=np.int64))
        torch.testing.assert_close(
            features[FINAL][row, :count], cached.features[FINAL][0], atol=1e-4, rtol=1e-4
        )


def with_start(context: Any) -> Any:
    context.corpus.start = PAD_ID
    return context


def test_parts_of_stages_that_need_a_decoder_only_target_are_refused(tmp_path: Path) -> None:
    context = with_start(stage_context(tmp_path, target()))
    refuse: list[tuple[Callable[[], Any], str]] = [
        (lambda: make_stage("generate", "a", self_prompts=3), "no chat template|self_prompts"),
        (lambda: make_stage("heads", "h", heads={"type": "eagle1"}), "eagle1 heads needs"),
        (lambda: make_stage("heads", "h", heads={"type": "medusa"}, backbone={}), "backbone needs"),
        (
            lambda: make_stage("heads", "h", heads={"type": "medusa"}, losses={"forward_kl": 1.0}),
            "a loss that reads the teacher needs",
        ),
    ]
    for make, message in refuse:
        with pytest.raises(UserError, match=message):
            plan_stage(context, make())
