"""Targets and drafters whose layers keep a running state: whatever is taken back, the text and the
hidden states are those of transformers' forward."""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from decode.base.errors import UserError
from decode.draft import Contexts, Draft, Limits
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.lookup.lookahead import LookaheadDrafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.lookup.suffix import SuffixDrafter
from decode.drafters.pard import ParallelLMDrafter, mark_parallel
from decode.drafters.several.cascade import VerticalCascade
from decode.drafters.skip import SkipDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.loop.decoding import Decoder, Decoding
from decode.model.cache.cached_model import CachedLM
from decode.model.cache.prefix_cache import PrefixCache, prefix_cache
from decode.model.cache.requirements import require_trees
from decode.model.kinds import recurrent_states
from decode.model.kinds.recurrent_states import LONGEST_LOG, RecurrentStates
from decode.model.memory import slot_bytes
from decode.rules import RULES
from decode.shapes.dynamic import Dynamic
from decode.shapes.static import Static
from decode.tree_structure import ancestors_of
from tests.contract import check_law, heads_drafter
from tests.lossless import LONGER, decode_runs, small_lm
from tests.tiny import finish, generated, is_matrix, moved, shortened, tiny_model

LAYERS: dict[str, Any] = {
    "layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
DELTA: dict[str, Any] = {
    **LAYERS,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA | EXPERTS,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS,
    "olmo_hybrid": DELTA,
    "lfm2": {"layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "bamba": {"layers": 3, "attn_layer_indices": [1], **MAMBA},
    "granitemoehybrid": LAYERS | MAMBA | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "kimi_linear": LAYERS
    | {
        "kv_heads": 4,
        "linear_head_dim": 8,
        "linear_num_heads": 2,
        "linear_conv_kernel_dim": 3,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}
NEW, GAMMA = 16, 4
PROMPTS = [
    np.random.default_rng(length).integers(3, 40, length).tolist() for length in (5, 1, 19, 9, 3, 2)
]


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_a_target_without_weights_is_tried_as_it_will_run(family: str) -> None:
    """As when a run is planned: the states are those of the forward that the trial feeds."""
    shapes = tiny_model(family, **FAMILIES[family]).to("meta")
    shapes.config.hidden_act = "gelu"  # a kind that no other test has tried
    assert CachedLM(shapes).states is not None


@functools.cache
def model(family: str, seed: int = 3, **fields: Any) -> Any:
    lm = tiny_model(family, vocab=40, seed=seed, **(FAMILIES[family] | fields))
    lm.generation_config.eos_token_id = None
    return lm


@functools.cache
def expected(family: str) -> list[list[int]]:
    """What `generate()` continues each prompt with, alone."""
    return [generated(model(family), prompt, NEW) for prompt in PROMPTS]


class OftenWrong(Drafter):
    """Drafts the right texts, with wrong tokens at places that differ between rows and rounds."""

    def __init__(self, family: str) -> None:
        texts = zip(PROMPTS, expected(family), strict=True)
        self.texts = [[*prompt, *answer] for prompt, answer in texts]

    def start(self, contexts: Contexts) -> None:
        return None

    def draft(self, contexts: Contexts, limits: Limits, *rest: Any) -> Draft:
        tokens = np.zeros((len(contexts.lengths), limits.max_depth), dtype=np.int64)
        for row, length in enumerate(contexts.lengths.tolist()):
            begun = contexts.tokens[row, :length].tolist()
            text = next((text for text in self.texts if text[:length] == begun), begun)
            right = text[length : length + limits.max_depth]
            tokens[row, : len(right)] = right
            tokens[row, (length * 7) % (limits.max_depth + 2) :] += 1
        return Draft(torch.as_tensor(tokens % 40), limits.depths.copy())


class OftenWrongTrees(OftenWrong):
    """The same as trees that differ between rows: each token has an elder sibling, which is right
    where the token is one too many."""

    branches = True

    def max_nodes(self, gamma: int) -> int:
        return 2 * gamma

    def draft(self, contexts: Contexts, limits: Limits, *rest: Any) -> Draft:
        chain = super().draft(contexts, limits).tokens
        tokens = torch.stack([(chain - 1) % 40, chain], 2).flatten(1)
        parents = torch.arange(tokens.shape[1]) // 2 * 2 - 1
        sizes = np.maximum(2 * limits.depths - contexts.lengths % 3, 0)
        return Draft(tokens, sizes, parents=parents.expand(len(sizes), -1))


def another(family: str, **options: Any) -> SmallLMDrafter:
    return SmallLMDrafter(model(family, seed=4), **options)


def tree(family: str) -> SmallLMDrafter:
    """Drawn by a model of the same kind, which branches its own states."""
    near = moved(copy.deepcopy(model(family)), 0.03)
    return SmallLMDrafter(near, shape=Dynamic(width=3, nodes=8))


KINDS: dict[str, Callable[[str], Drafter]] = {
    "none": lambda family: DRAFTERS["none"](),
    "often wrong": OftenWrong,
    "ngram": lambda family: NgramDrafter(1, 2),
    "the same": lambda family: SmallLMDrafter(model(family)),
    "another": another,
    "often wrong trees": OftenWrongTrees,
    "tree": tree,
    "suffix tree": lambda family: SuffixDrafter(tree_nodes=4),
    "lookahead": lambda family: LookaheadDrafter(3, 3, 2),
}
TREES = ("often wrong trees", "tree", "suffix tree", "lookahead")


@pytest.mark.parametrize(
    ("family", "kind"),
    # One for each kind of running state.
    shortened(
        [
            *(("qwen3_next", kind) for kind in KINDS if kind != "another"),
            ("qwen3_5_text", "often wrong"),
            ("bamba", "often wrong"),
            ("lfm2", "another"),
            ("olmo_hybrid", "often wrong"),
            ("granitemoehybrid", "another"),
            *(
                (family, kind)
                for family in FAMILIES
                for kind in TREES[:2]
                if family != "qwen3_next"
            ),
        ],
        [
            ("qwen3_next", "often wrong"),
            ("bamba", "often wrong"),
            ("lfm2", "another"),
            *((family, "often wrong trees") for family in ("qwen3_next", "bamba", "kimi_linear")),
            *((family, "tree") for family in ("qwen3_5_text", "lfm2", "olmo_hybrid")),
        ],
    ),
)
def test_greedy_text_equals_generate(family: str, kind: str) -> None:
    """All rows at once; then rows that take the places of others, with prompts read in parts."""
    for options, gamma in (({}, GAMMA), ({"batch_size": 3}, 1), ({"batch_size": 2}, 2)):
        parts = 7 if gamma == 2 else 4096
        decoder = Decoder(model(family), KINDS[kind](family), gamma=gamma, prefill_tokens=parts)
        run = decoder.decode(PROMPTS, NEW, **options)
        assert run.outputs == expected(family)
        if kind.startswith("often wrong") and gamma == GAMMA:
            assert all(run.counts.by_accepted[: GAMMA + 1])
            assert any(len(set(step.accepted.tolist())) > 2 for step in run.steps)
        if kind in TREES[:2] and gamma > 1:
            assert any((step.drafted > step.longest()).any() for step in run.steps)


def test_a_drafter_reads_nothing_again_in_a_ragged_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[int] = []
    lost = RecurrentStates.lost

    def counted(states: RecurrentStates, *start: Any) -> np.ndarray:
        rows = lost(states, *start)
        again.extend(rows.tolist())
        return rows

    monkeypatch.setattr(RecurrentStates, "lost", counted)
    for kind in ("the same", "another"):
        decoder = Decoder(model("lfm2"), KINDS[kind]("lfm2"), gamma=GAMMA)
        decoder.decode(PROMPTS, NEW, batch_size=3)
    assert not again


@pytest.mark.parametrize("drafter", [OftenWrong, OftenWrongTrees])
def test_rows_that_join_sit_out_and_leave(drafter: type[OftenWrong]) -> None:
    decoding = Decoding(Decoder(model("qwen3_next"), drafter("qwen3_next"), gamma=3))
    decoding.admit(PROMPTS[:1], NEW)
    for row, prompt in enumerate(PROMPTS[1:], 1):
        (first, *_) = decoding.begin([prompt, prompt] if row == 4 else [prompt], NEW)
        while first in decoding.waiting:  # prompts are read in parts, with passes in between
            decoding.step(np.where(np.arange(len(decoding.rows)) % 2 == row % 2, 8, -1))
            decoding.read(first, 4)
        decoding.step()
    decoding.drop(3)
    finish(decoding)
    texts = expected("qwen3_next")
    rows = (0, 1, 2, 4, 5, 6)  # the fifth prompt has two rows
    assert [decoding.outputs[row] for row in rows] == [*texts[:3], texts[4], *texts[4:]]
    assert max(len(step.rows) for step in decoding.steps) > 3


@pytest.mark.parametrize("kind", ["medusa", "eagle1"])
@pytest.mark.parametrize("shape", [None, Static(widths=[2, 2, 1])])
def test_heads_read_the_hidden_states(kind: str, shape: Static | None) -> None:
    case = replace(LONGER, model=few_tokens("qwen3_5_text"))
    prompts = [list(prompt) for prompt in case.prompts]
    texts = [
        Decoder(case.model(0.0), drafter, gamma=3).decode(prompts, NEW).outputs
        for drafter in (heads_drafter(kind, shape, case), DRAFTERS["none"]())
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "rule", "siblings"),
    shortened(
        [
            ("lfm2", "traversal", "independent"),
            ("qwen3_5_text", "multi_round", "distinct"),
            ("olmo_hybrid", "multi_round", "independent"),
        ],
        [("lfm2", "traversal", "independent")],
    ),
)
def test_texts_of_trees_have_the_targets_law(family: str, rule: str, siblings: Any) -> None:
    """Target and drafter have states. Both branch them."""
    case = replace(LONGER, model=few_tokens(family))
    check_law(small_lm(siblings, case), rule, case)


def test_states_that_do_not_branch_change_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what is read as a chain has the states of other texts."""
    case = replace(LONGER, model=few_tokens("lfm2"))
    rule, drafter = RULES["multi_round"](), small_lm("distinct", case)
    for lm in (case.model(0.0), case.model(0.2)):
        require_trees(lm)
    monkeypatch.setattr(RecurrentStates, "_branch", lambda *tree: None)
    assert not decode_runs(drafter, rule, rows=4_000, case=case)[0].passes


def few_tokens(family: str) -> Callable[[float], Any]:
    """A tiny model of five tokens. `apart` moves its weights randomly."""

    @functools.cache
    def make(apart: float) -> Any:
        fields = FAMILIES[family] | {"layers": 2, "hidden": 8, "heads": 1, "kv_heads": 1}
        fields |= {"layer_types": fields["layer_types"][:2], "tie": False}
        if family != "lfm2":
            fields |= {"linear_num_key_heads": 1, "linear_num_value_heads": 1}
        lm = tiny_model(family, vocab=5, seed=4, **fields)
        return moved(lm, apart, seed=2, which=is_matrix)

    return make


@torch.no_grad()
def test_any_slot_can_be_the_next() -> None:
    """Passes that begin anywhere in the text, over any rows, padded or not, with rows that come and
    go: logits and hidden states are those of one forward over the text."""
    rng = np.random.default_rng(0)
    lm = CachedLM(model("lfm2"), captured_layers=[0, 1, 2], pass_tokens=30)
    lm.reset(0, 0)
    texts: list[list[int]] = []
    again = 0
    for _ in range(120):
        if len(texts) < 4 and rng.random() < 0.3:
            lm.add_rows(2, 160)
            texts += [[], []]
        if len(texts) > 1 and rng.random() < 0.1:
            kept = rng.permutation(len(texts))[1:]
            lm.keep_rows(kept)
            texts = [texts[row] for row in kept]
        if not texts:
            continue
        first = int(rng.integers(len(texts)))
        end = int(rng.integers(first + 1, len(texts) + 1))
        rows, n = texts[first:end], int(rng.choice([1, 1, 3, 5, 40], p=[0.3, 0.2, 0.2, 0.2, 0.1]))
        lengths = np.array([len(text) for text in rows])
        # Most rows go back a little, and few of them far.
        far = rng.random(len(rows)) < 0.05
        start = np.where(far, rng.integers(lengths + 1), lengths - rng.integers(0, 4, len(rows)))
        start = np.maximum(np.minimum(start, 100), 0)
        ids = torch.as_tensor(rng.integers(3, 40, (len(rows), n)))
        counts = np.full(len(rows), n)
        assert lm.states is not None
        again += len(lm.states.lost(start, first))
        if rng.random() < 0.5:
            counts = rng.integers(1, n + 1, len(rows))
            logits = lm.read(ids, start, counts, first)
        else:
            logits = lm.forward(ids, start, first=first)[:, -1:]
        for row, (at, count) in enumerate(zip(start.tolist(), counts.tolist(), strict=True)):
            text = texts[first + row] = rows[row][:at] + ids[row, :count].tolist()
            one = lm.model(torch.tensor([text]), output_hidden_states=True)
            torch.testing.assert_close(logits[row, -1], one.logits[0, -1], atol=1e-4, rtol=1e-3)
            for layer in (0, 1):  # transformers' last one comes after the norm
                states = lm.features[layer][row, :count]
                here = one.hidden_states[layer + 1][0, at:]
                torch.testing.assert_close(states, here, atol=1e-4, rtol=1e-3)
    assert again > 5


@torch.no_grad()
def test_each_node_of_a_tree_follows_its_path() -> None:
    """Random trees of different sizes, read at once or in two passes, of which a random path stays:
    the logits of each node are those of one forward over the text down to it."""
    rng = np.random.default_rng(0)
    lm = CachedLM(model("qwen3_5_text"))
    lm.reset(3, 160)
    texts = [list(prompt) for prompt in PROMPTS[:3]]
    widest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (widest - len(text)) for text in texts])
    lm.read(ids, np.zeros(3, dtype=np.int64), np.array([len(text) for text in texts]))
    for turn in range(12):
        start = np.array([len(text) for text in texts])
        nodes, counts = 7, rng.integers(1, 8, 3)
        parents = np.stack([[-1, *(rng.integers(0, i) for i in range(1, nodes))] for _ in texts])
        seen = torch.as_tensor(ancestors_of(parents))
        ids = torch.as_tensor(rng.integers(3, 40, (3, nodes)))
        logits = []
        for first, end in ((0, nodes),) if turn % 2 else ((0, 3), (3, nodes)):
            part = {"depth_BN": seen.sum(2)[:, first:end] - 1}
            part["ancestors_BNM"] = seen[:, first:end, :end]
            fed = None if first or end < nodes else counts
            logits.append(lm.forward(ids[:, first:end], start + first, counts=fed, **part))
        columns = np.zeros((3, nodes), dtype=np.int64)
        kept = np.zeros(3, dtype=np.int64)
        for row, text in enumerate(texts):
            for node in range(counts[row]):
                path = np.flatnonzero(seen[row, node])
                one = lm.model(torch.tensor([text + ids[row, path].tolist()])).logits[0, -1]
                found = torch.cat(logits, 1)[row, node]
                torch.testing.assert_close(found, one, atol=1e-4, rtol=1e-3)
            path = np.flatnonzero(seen[row, rng.integers(counts[row])])
            columns[row, : len(path)], kept[row] = path, len(path)
            text += ids[row, path].tolist()
        lm.commit(start, columns, kept)


def test_a_long_chain_of_passes_keeps_a_short_log() -> None:
    lm = CachedLM(model("lfm2"))
    lm.reset(1, 300)
    assert lm.states is not None
    ids = torch.full((1, 2), 5)
    with torch.inference_mode():
        for begin in range(0, 280, 2):
            lm.forward(ids, np.array([begin]))
            assert lm.states._logged.max() <= LONGEST_LOG + 2
            assert all(sum(map(len, log)) <= LONGEST_LOG + 2 for log in lm.states._log.values())


def one_token_less(states: RecurrentStates, rows: np.ndarray, tokens: int) -> None:
    REPLAY(states, rows, max(tokens - 1, 0))


def without_copy(states: RecurrentStates, rows: np.ndarray, at: np.ndarray) -> None:
    states._base[rows], states._logged[rows] = at, 0


REPLAY = RecurrentStates._replay


def first_path(states: RecurrentStates, start: np.ndarray, *path: np.ndarray) -> None:
    rows = slice(len(start))
    states._logged[rows] = start - states._base[rows] + path[1]


@pytest.mark.parametrize(
    ("drafter", "step", "broken"),
    [
        (OftenWrong, "_replay", one_token_less),
        (OftenWrong, "_replay", lambda states, rows, tokens: None),
        (OftenWrong, "_take_snapshots", without_copy),
        (OftenWrongTrees, "_branch", lambda *tree: None),
        (OftenWrongTrees, "commit", first_path),
    ],
)
def test_errors_in_the_states_change_the_text(
    monkeypatch: pytest.MonkeyPatch,
    drafter: type[OftenWrong],
    step: str,
    broken: Callable[..., None],
) -> None:
    """The controls: the texts of this file show these errors."""
    require_trees(model("qwen3_next"))
    decoder = Decoder(model("qwen3_next"), drafter("qwen3_next"), gamma=GAMMA)
    monkeypatch.setattr(RecurrentStates, step, broken)
    assert decoder.decode(PROMPTS, NEW).outputs != expected("qwen3_next")


def test_what_would_need_other_passes_is_refused() -> None:
    lm = model("qwen3_next")
    with pytest.raises(UserError, match="runs no layers of the target"):
        Decoder(lm, SkipDrafter(attention=1))
    with pytest.raises(UserError, match="SmallLMDrafter"):
        VerticalCascade(SmallLMDrafter(lm), NgramDrafter())
    parallel = tiny_model("lfm2", vocab=40, **FAMILIES["lfm2"])
    mark_parallel(parallel.config, 39)
    with pytest.raises(UserError, match="Lfm2ForCausalLM keeps a running state and has a mask"):
        ParallelLMDrafter(parallel)
    assert prefix_cache(lm, 1 << 20) is None
    with pytest.raises(UserError, match="decode without a prefix cache"):
        Decoder(lm, NgramDrafter(), prefixes=PrefixCache()).decode(PROMPTS, NEW)


def test_states_in_another_form_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = model("qwen3_next")
    monkeypatch.setattr(recurrent_states, "STATES", ("conv_states", "renamed"))
    with pytest.raises(UserError, match=r"in a form that is not known with transformers \d"):
        RecurrentStates(lm, [0])


def test_only_layers_with_attention_have_slots() -> None:
    lm = CachedLM(model("qwen3_next"))
    lm.reset(1, 8)
    with torch.inference_mode():
        lm.forward(torch.tensor([[4, 5]]), np.zeros(1, dtype=np.int64))
    assert lm.slots.token_bytes == slot_bytes(lm.model)
