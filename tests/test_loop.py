"""Promise 19: greedy decoding in float32 is token-identical to `generate()`, whatever is drafted.

And around it: batches, limits, what is refused, streaming and traces.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from decode.base.errors import UserError
from decode.draft import Contexts, Draft, Limits
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoded import Decoded
from decode.loop.decoding import Decoder
from decode.trace import DraftedToken, drafted_tokens, format_trace
from decode.verdict import Decision, Scores
from decode.verification import Observer, Verification
from tests.tiny import FAMILIES, VOCAB, generated, judged, tiny_model, tiny_tokenizer

# Ragged; the last one repeats itself, so that prompt lookup finds something at once.
PROMPTS = ((5, 17, 250, 9, 42), (7,), (30,) * 9, (11, 12, 13, 14) * 3 + (11, 12))
NEW = 24
GAMMAS = (1, 3, 7)

model = functools.cache(tiny_model)


@functools.cache
def whole_answer(family: str, prompt: tuple[int, ...]) -> list[int]:
    """What `generate()` continues the prompt with."""
    return generated(model(family), prompt, 2 * NEW)


def expected(
    family: str, prompt: tuple[int, ...], new: int = NEW, eos: tuple[int, ...] = ()
) -> list[int]:
    """The first tokens of it, up to an EOS."""
    text = whole_answer(family, prompt)[:new]
    return text[: next((i + 1 for i, token in enumerate(text) if token in eos), new)]


def answers(family: str, eos: tuple[int, ...] = ()) -> list[list[int]]:
    return [expected(family, prompt, NEW, eos) for prompt in PROMPTS]


Answers = Callable[[tuple[int, ...]], list[int]]


class ChainDrafter(Drafter):
    """Knows the right continuation of each prompt and drafts it, wrong from the given place on.

    wrong(b, i): whether the i-th token of row b's answer is drafted wrongly. answers: of each
    prompt; None: those of `generate()`.
    """

    def __init__(
        self, family: str, wrong: Callable[[int, int], bool], answers: Answers | None = None
    ) -> None:
        self.wrong = wrong
        self.answers = answers or functools.partial(whole_answer, family)

    def start(self, contexts: Contexts) -> None:
        self.rows = np.arange(len(contexts.lengths))
        # The first token of each answer is there already.
        self.prompts = [
            tuple(tokens[: length - 1].tolist())
            for tokens, length in zip(contexts.tokens, contexts.lengths, strict=True)
        ]

    def keep_rows(self, rows: np.ndarray) -> None:
        self.rows = self.rows[rows]

    def right(self, contexts: Contexts, place: int, count: int) -> list[int]:
        """The next `count` tokens of the answer; past its end, token 1."""
        prompt = self.prompts[self.rows[place]]
        said = int(contexts.lengths[place]) - len(prompt)
        return (self.answers(prompt)[said:] + [1] * count)[:count]

    def draft(self, contexts: Contexts, limits: Limits, *rest: Any) -> Draft:
        gamma = limits.max_depth
        tokens = np.zeros((len(self.rows), gamma), dtype=np.int64)
        for place, row in enumerate(self.rows):
            said = int(contexts.lengths[place]) - len(self.prompts[row])
            for i, token in enumerate(self.right(contexts, place, gamma)):
                tokens[place, i] = (token + self.wrong(int(row), said + i)) % VOCAB
        return Draft(torch.as_tensor(tokens), np.full(len(self.rows), gamma))


class RandomTrees(ChainDrafter):
    """Random trees, breadth-first, that hold the right continuation down to a random depth.

    The right node stands anywhere among its siblings, and wrong nodes have children too. Each row
    has a tree of its own, some of them empty.
    """

    WIDTH = 4
    branches = True

    def __init__(self, family: str, seed: int = 0, answers: Answers | None = None) -> None:
        super().__init__(family, lambda row, place: False, answers)
        self.random = np.random.default_rng(seed)

    def max_nodes(self, gamma: int) -> int:
        return self.WIDTH * gamma

    def _tree(self, right: list[int], gamma: int) -> tuple[list[int], list[int]]:
        random = self.random
        tokens: list[int] = []
        parents: list[int] = []
        follows, layer = -1, [-1]  # the node the right token hangs on, and the nodes of its depth
        for depth in range(int(random.integers(0, gamma + 1))):
            hung = [int(random.choice(layer)) for _ in range(random.integers(1, self.WIDTH))]
            if follows is not None and random.random() < 0.85:
                hung.append(follows)
            begin = len(tokens)
            after = None
            right_at = max((i for i, node in enumerate(hung) if node == follows), default=None)
            order = random.permutation(len(hung))
            for i in order:
                if i == right_at and i == len(hung) - 1:
                    after = len(tokens)
                    tokens.append(right[depth])
                else:
                    # Another token for each wrong sibling, as drafters do.
                    tokens.append((right[depth] + 1 + int(i)) % VOCAB)
                parents.append(hung[i])
            follows, layer = after, list(range(begin, len(tokens)))
        return tokens, parents

    def draft(self, contexts: Contexts, limits: Limits, *rest: Any) -> Draft:
        gamma = limits.max_depth
        trees = [
            self._tree(self.right(contexts, place, gamma), gamma)
            for place in range(len(contexts.lengths))
        ]
        sizes = np.array([len(tokens) for tokens, _ in trees])
        padded = torch.zeros(2, len(trees), int(sizes.max()), dtype=torch.int64)
        for row, tree in enumerate(trees):
            padded[:, row, : sizes[row]] = torch.tensor(tree)
        return Draft(padded[0], sizes, parents=padded[1])


def drafter(name: str, family: str) -> Drafter:
    if name == "same":
        return SmallLMDrafter(model(family))
    if name == "other":
        return SmallLMDrafter(model("llama", seed=7, layers=1))
    if name == "trees":
        return RandomTrees(family)
    return DRAFTERS[name]()


def decode(
    family: str,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    *,
    new: int = NEW,
    eos: Sequence[int] = (),
    gamma: int = 3,
    rule: str = "exact",
    **options: Any,
) -> Decoded:
    decoder = Decoder(model(family), drafter, eos_token_ids=eos, gamma=gamma, rule=rule)
    return decoder.decode(prompts, new, **options)


# --- token-identical to generate() ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "name", "gamma"),
    [
        ("llama", "same", 3),
        ("gpt2", "same", 7),
        *((family, "other", GAMMAS[(i + 1) % 3]) for i, family in enumerate(FAMILIES)),
        ("llama", "ngram", 7),
        ("gpt2", "ngram", 3),
        ("llama", "none", 1),
    ],
)
def test_greedy_text_equals_generate(family: str, name: str, gamma: int) -> None:
    # `speculative` is exact match when greedy.
    run = decode(family, drafter(name, family), gamma=gamma, rule="speculative")
    assert run.outputs == answers(family)
    if name == "none":
        assert run.counts.steps == run.counts.emitted == (NEW - 1) * len(PROMPTS)
    if name == "ngram":
        assert run.counts.accepted.sum() > 0
    if name == "same":
        # All is accepted, or rolling back and the hand-over after full acceptance go untested.
        assert run.counts.acceptance_rate == 1
        assert run.counts.by_accepted[gamma] > 0


@pytest.mark.parametrize(
    ("family", "gamma", "attention"),
    [
        *((family, (3, 7)[i % 2], "sdpa") for i, family in enumerate(FAMILIES)),
        ("llama", 1, "sdpa"),
        ("llama", 7, "eager"),
        ("gpt2", 3, "eager"),
    ],
)
def test_trees_equal_generate(family: str, gamma: int, attention: str) -> None:
    """Tree mask, positions and the commit of a path: an error in any changes later tokens."""
    whole = model(family)
    if attention == "eager":
        whole = tiny_model(family)
        whole.set_attn_implementation("eager")
    steps, watch = traced()
    trees = RandomTrees(family, seed=gamma)
    decoder = Decoder(whole, trees, gamma=gamma, rule="exact", observers=[watch])
    run = decoder.decode(PROMPTS, NEW)
    assert run.outputs == answers(family)

    deep = 0  # accepted nodes at depth ≥ 2 that are not their parent's first child
    for _, nodes, _ in steps:
        first = {node.parent: node.node for node in reversed(nodes)}
        deep += sum(
            node.verdict == "accepted" and node.parent >= 0 and first[node.parent] != node.node
            for node in nodes
        )
    assert deep >= 5 or gamma == 1
    assert run.counts.nodes_per_step > 1


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "same"),
        ("gpt2", "trees"),
    ],
)
def test_eos_anywhere_in_a_block(family: str, name: str) -> None:
    """Blocks are 8 long here, so these texts end at each place in one."""
    for place in range(1, 11):
        eos = (answers(family)[0][place],)
        which = drafter(name, family)
        run = decode(family, which, eos=eos, gamma=7)
        assert run.outputs == answers(family, eos)
        assert run.outputs[0][-1:] == list(eos)


@pytest.mark.parametrize("name", ["none", "same"])
def test_eos_as_the_first_token(name: str) -> None:
    eos = (answers("llama")[1][0],)
    run = decode("llama", drafter(name, "llama"), eos=eos)
    assert run.outputs == answers("llama", eos)
    assert run.outputs[1] == list(eos)

    alone = decode("llama", drafter(name, "llama"), [PROMPTS[1]], eos=eos)
    assert (alone.outputs, alone.counts.steps) == ([list(eos)], 0)


@pytest.mark.parametrize("name", ["none", "trees"])
def test_length_limit_anywhere_in_a_block(name: str) -> None:
    for limit in range(1, 12):
        which = drafter(name, "llama")
        run = decode("llama", which, new=limit, gamma=7)
        assert run.outputs == [answer[:limit] for answer in answers("llama")]
        assert run.counts.emitted == (limit - 1) * len(PROMPTS)


# --- length limits and the context ----------------------------------------------------------------


def small_context(positions: int = 20) -> Any:
    """`model("llama")` with fewer positions: rotary embeddings leave its texts as they are."""
    return tiny_model("llama", max_positions=positions)


@pytest.mark.parametrize("name", ["none", "same"])
def test_an_answer_is_clipped_to_the_context(name: str) -> None:
    decoder = Decoder(small_context(), drafter(name, "llama"), gamma=7)
    run = decoder.decode(PROMPTS, NEW)
    for prompt, output in zip(PROMPTS, run.outputs, strict=True):
        # Each row has its own room: beside a longer prompt it may say what it says alone.
        assert output == expected("llama", prompt)[: 20 - len(prompt)]


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    decoder = Decoder(small_context(), DRAFTERS["none"]())
    assert len(decoder.decode([[5] * 19], NEW).outputs[0]) == 1
    with pytest.raises(UserError, match=r"prompt 1 has 20 tokens .* context holds 20"):
        decoder.decode([[5], [5] * 20], NEW)


# --- what is refused ------------------------------------------------------------------------------


def test_bad_input_is_refused() -> None:
    none = DRAFTERS["none"]()
    decoder = Decoder(model("llama"), none)
    with pytest.raises(UserError, match="no prompts"):
        decoder.decode([], NEW)
    with pytest.raises(UserError, match="prompt 1 is empty"):
        decoder.decode([[5], []], NEW)
    wrong: list[Any] = [0, -1, 2.5, "8", None, True]
    for limit in wrong:
        with pytest.raises(UserError, match=f"max_new_tokens is {limit!r}; expected a whole"):
            decoder.decode([[5]], limit)
    with pytest.raises(UserError, match=r"gamma is 0.*drafter none"):
        Decoder(model("llama"), none, gamma=0)


# --- streaming and traces -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "trees"])
def test_streamed_tokens_add_up_to_the_outputs(name: str) -> None:
    streamed: list[list[int]] = [[] for _ in PROMPTS]
    calls = []

    def on_tokens(row: int, tokens: list[int]) -> None:
        assert tokens
        calls.append(row)
        streamed[row] += tokens

    eos = (answers("llama")[0][6],)
    which = drafter(name, "llama")
    run = decode("llama", which, eos=eos, gamma=7, on_tokens=on_tokens)
    assert streamed == run.outputs == answers("llama", eos)
    # One call a row and step, and one for the prefill.
    assert len(calls) == run.counts.steps + len(PROMPTS)


def traced() -> tuple[list[tuple[int, list[DraftedToken], int]], Observer]:
    """An observer, and the list that it fills: (row, draft tokens, next token) of each row."""
    steps: list[tuple[int, list[DraftedToken], int]] = []

    def watch(done: Verification) -> None:
        rows, added = done.rows.tolist(), done.next_token.tolist()
        steps.extend(zip(rows, drafted_tokens(done), added, strict=True))

    return steps, watch


def check_trace(nodes: list[DraftedToken], next_token: int, follows: list[int]) -> int:
    """A row's trace against the text that follows; the number of tokens accepted."""
    path = [node for node in nodes if node.verdict == "accepted"]
    assert [node.parent for node in path] == [-1, *(node.node for node in path)][: len(path)]
    kept = {-1, *(node.node for node in path)}
    for node in nodes:
        assert (node.parent in kept) or node.verdict == "not reached"
        assert 0 <= node.p <= 1
        assert node.q == 1
    block = [node.token for node in path] + [next_token]
    assert block[: len(follows)] == follows[: len(block)]
    return len(path)


@pytest.mark.parametrize("name", ["chain", "trees"])
def test_traces_agree_with_the_text_and_the_counts(name: str) -> None:
    which = (
        RandomTrees("llama", seed=3)
        if name == "trees"
        else ChainDrafter("llama", lambda row, place: (place + row) % 5 == 0)
    )
    steps, watch = traced()
    run = Decoder(model("llama"), which, gamma=4, observers=[watch]).decode(PROMPTS, NEW)
    said = [1] * len(PROMPTS)
    accepted = []
    for row, nodes, next_token in steps:
        accepted.append(check_trace(nodes, next_token, run.outputs[row][said[row] :]))
        said[row] += accepted[-1] + 1
    assert said == [NEW] * len(PROMPTS)
    counted = np.bincount(accepted, minlength=len(run.counts.by_accepted))
    assert counted.tolist() == run.counts.by_accepted.tolist()
    assert sum(len(nodes) for _, nodes, _ in steps) == run.counts.drafted.sum()
    reached = 0  # depths with a node that was judged, all before it accepted
    for _, nodes, _ in steps:
        path = [node.node for node in nodes if node.verdict == "accepted"]
        parents = {node.parent for node in nodes}
        reached += sum(node in parents for node in [-1, *path])
    assert reached == run.counts.reached.sum()


def test_a_trace_follows_the_path_that_was_taken_among_equal_siblings() -> None:
    """Draws of several drafters may be equal; what follows them hangs on one of the two."""
    draft = Draft(torch.tensor([[7, 7, 5]]), np.array([3]), parents=torch.tensor([[-1, -1, 1]]))
    contexts = Contexts(np.array([[1, 2]]), np.array([2]))
    scores = Scores(torch.zeros(1, 4, 16), Sampling(), draft, contexts)
    two, nine = torch.tensor([2]), torch.tensor([9])
    path = torch.tensor([[1, 2]])
    done = judged(draft, scores, Decision(path, two, two, nine))
    (nodes,) = drafted_tokens(done)
    assert [node.verdict for node in nodes] == ["rejected", "accepted", "accepted"]
    assert done.block.tolist() == [[7, 5, 9]]
    assert done.next_token == [9]


def test_a_trace_shows_the_probabilities_that_were_compared() -> None:
    sampling = Sampling(temperature=0.8, top_k=40)
    small = SmallLMDrafter(model("llama", seed=7, layers=1))
    steps, watch = traced()
    shown: list[str] = []
    observers = [watch, lambda done: shown.append(format_trace(done, tiny_tokenizer()))]
    settings: Any = {"rule": "speculative", "sampling": sampling, "observers": observers}
    decoder = Decoder(model("llama"), small, gamma=2, **settings)
    prompt = list(PROMPTS[0])
    run = decoder.decode([prompt], 12)
    text = prompt + run.outputs[0][:1]
    for _, nodes, next_token in steps:
        for node in nodes:
            before = [other.token for other in nodes[: node.node]]
            ids = torch.tensor([text + before])
            for name, lm in (("p", model("llama")), ("q", small.lm.model)):
                with torch.inference_mode():
                    probs = sampling.probs(lm(ids).logits[0, -1])
                # float32 sums in another order: a few units in the last place of the logits.
                assert getattr(node, name) == pytest.approx(float(probs[node.token]), abs=1e-5)
        kept = [node.token for node in nodes if node.verdict == "accepted"]
        text += [*kept, next_token]
    assert text == prompt + run.outputs[0]

    nodes, lines = steps[0][1], shown[0].splitlines()
    assert len(lines) == len(nodes) + 1
    assert nodes[0].verdict in lines[0]
    assert lines[0].startswith("  row 0: draft token 1 after the text ")
    assert lines[1].startswith("  row 0: draft token 2 after token 1 ")
    assert lines[-1].startswith("  row 0: the target adds '")
