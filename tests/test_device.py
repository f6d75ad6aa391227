"""On a GPU, a step of the decode loop waits for the device as rarely as it can: counted on a
simulated device, where it must give the same text as on the CPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.base.clock import Clock
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.pard import ParallelLMDrafter, mark_parallel
from decode.drafters.several.cascade import HorizontalCascade, VerticalCascade
from decode.drafters.several.combined import CompositeDrafter, SeveralDrafters
from decode.drafters.small_lm import SmallLMDrafter
from decode.drafters.tokenizers.retokenised import RetokenisedDrafter
from decode.drafters.tokenizers.shared_tokens import SharedVocabularyDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder, Decoding
from decode.shapes import SHAPES, Shape
from decode.trace import drafted_tokens, rejected_tokens
from decode.verification import Verification
from distill.distillation_loss import Distillation
from distill.early_exit import EarlyExitTraining
from distill.losses import WeightedLoss
from distill.teacher.live_teacher import LiveTeacher
from heads.head_training import HeadTraining
from heads.joint_training import JointTraining
from heads.kinds import HEADS
from heads.options import HeadOptions
from tests.contract import HEAD_OPTIONS, RoutedByFirst
from tests.device import SimulatedDevice, Wait, simulated_device
from tests.other_tokenizers import shuffled, with_rows
from tests.tiny import VOCAB, as_target, moved, shortened, tiny_model

PROMPTS = [[5, 17, 250, 9, 42], [7, 8, 9], [11, 12, 13, 11, 12, 13, 11]]
NEW, LONGER = 9, 14
LAYERS = 3
# By default they read layers that only a deeper target has.
TAPPED = {kind: {"captured_layers": [0, 1, 2]} for kind in ("eagle3", "p_eagle")}
SAMPLED = Sampling(temperature=1.0)
# Makes a drafter on the device of the target that it gets. move: puts a module there.
Build = Callable[[Any, Callable[[Any], Any]], Drafter]


def shaped(name: str, options: dict[str, Any]) -> Shape:
    return SHAPES[name](**options)


def small(shape: Shape | None = None) -> Build:
    def build(target: Any, move: Callable[[Any], Any]) -> Drafter:
        return SmallLMDrafter(move(tiny_model("llama", seed=7, layers=1)), shape=shape)

    return build


def headed(kind: str, shape: Shape | None = None) -> Build:
    def build(target: Any, move: Callable[[Any], Any]) -> Drafter:
        model = tiny_model("llama", layers=LAYERS)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            options = HeadOptions.of(HEAD_OPTIONS[kind] | TAPPED.get(kind, {}))
            heads: Any = HEADS[options.type](options, model)  # type: ignore[call-arg]
            torch.manual_seed(5)  # what a constructor draws depends on the device
            heads.init_weights(model)
        moved(heads, 0.1, seed=5)
        move(heads).borrow(target)
        drafter: Any = DRAFTERS[kind]
        built: Drafter = drafter(heads, VOCAB, shape)
        return built

    return build


def combined(group: Any, *builds: Build) -> Build:
    def build(target: Any, move: Callable[[Any], Any]) -> Drafter:
        return group([build(target, move) for build in builds])

    return build


def decoder(build: Build, move: Callable[[Any], Any], **options: Any) -> Decoder:
    target = move(tiny_model("llama", layers=LAYERS))
    return Decoder(target, build(target, move), **({"gamma": 3, "sampling": SAMPLED} | options))


def waits_by_step(device: SimulatedDevice, decoding: Decoding) -> list[list[Wait]]:
    """The waits of each step in which no text ended, without the first two, which prepare."""
    steps = []
    while not decoding.finished:
        before, rows = len(device.waits), len(decoding.rows)
        decoding.step()
        if len(decoding.rows) == rows:
            steps.append(device.waits[before:])
    assert len(steps) > 3
    return steps[2:]


def require_waits(build: Build, reads: int, new: int = NEW, **options: Any) -> None:
    """Decoding on the device gives the text of the CPU, reads so often in a step (the most of any
    step) and waits for nothing else."""
    expected = decoder(build, lambda module: module, **options).decode(PROMPTS, new).outputs
    with simulated_device() as device:
        decoding = Decoding(decoder(build, device.move, **options), PROMPTS, new)
        steps = waits_by_step(device, decoding)
    assert decoding.result().outputs == expected
    waits = [wait for step in steps for wait in step]
    others = [w for w in waits if w.kind != "read"]
    assert others == []
    counts = [sum(wait.kind == "read" for wait in step) for step in steps]
    assert max(counts) == reads, waits


# The others are these with another threshold, or on a chain what one of these is.
@pytest.mark.parametrize(
    "rule",
    shortened(["speculative", "exact", "coupled", "block", "typical"], ["speculative", "block"]),
)
def test_a_step_with_a_chain_reads_once(rule: str) -> None:
    require_waits(small(), 1, rule=rule)


# Others have the draft of one of these.
@pytest.mark.parametrize(
    "kind",
    shortened(
        ["medusa", "eagle1", "p_eagle", "pass", "dspark", "dflash2", "kangaroo"],
        ["medusa", "eagle1", "dspark", "kangaroo"],
    ),
)
def test_heads_that_draft_a_chain_read_nothing(kind: str) -> None:
    require_waits(headed(kind), 1, LONGER)


@pytest.mark.parametrize(
    ("sampling", "reads"),
    [
        (Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01), 1),
        (Sampling(temperature=1.0, repetition_penalty=1.2), 1),
    ],
)
def test_every_setting_of_sampling_stays_on_the_device(sampling: Sampling, reads: int) -> None:
    require_waits(small(), reads, sampling=sampling)


def test_processors_read_the_texts_once_more() -> None:
    require_waits(small(), 2, processors=[lambda ids, scores: scores - 0.1 * ids[:, -1:]])


def made(name: str, **options: Any) -> Build:
    """A drafter that needs nothing but its options."""
    return lambda target, move: DRAFTERS[name](**options)


def pard(target: Any, move: Callable[[Any], Any]) -> Drafter:
    model = tiny_model("llama", seed=7, layers=1)
    mark_parallel(model.config, 3)
    return ParallelLMDrafter(move(model))


def with_other_tokenizer(kind: Any) -> Build:
    def build(target: Any, move: Callable[[Any], Any]) -> Drafter:
        tokenizer, order = shuffled()
        model = move(with_rows(tiny_model("llama", seed=7, layers=1), order))
        built: Drafter = kind.of_models(model, tokenizer, as_target(target))
        return built

    return build


def routed(drafters: list[Drafter]) -> Drafter:
    return RoutedByFirst(drafters, "ab")


# The most reads of a step, as the table in docs/results/devices.md has them.
OTHERS = {
    "ngram": (made("ngram"), 1),
    "suffix": (made("suffix"), 1),
    "suffix, trees": (made("suffix", tree_nodes=6), 1),
    "skip": (made("skip", mlp=[1, 2]), 1),
    "first layers": (made("skip", exit=2), 1),
    "sparse": (made("sparse", sinks=1, recent=2, chunk=2, budget=6, every=4), 1),
    "pard": (pard, 1),
    "another tokenizer, tokens": (with_other_tokenizer(SharedVocabularyDrafter), 1),
    "ngram+small": (combined(CompositeDrafter, made("ngram"), small()), 1),
    "routed": (combined(routed, made("ngram"), small()), 1),
    "store": (made("store"), 2),
    "max_gram": (made("max_gram"), 2),
    "lookahead": (made("lookahead", window=3, ngram=3, guesses=2), 2),
    "another tokenizer, text": (with_other_tokenizer(RetokenisedDrafter), 2),
    # With the passes that try a set of layers.
    "swift": (made("swift", window=8), 3),
}


# One for each way to draft: lookup, the target's own layers, another model, another tokenizer.
@pytest.mark.parametrize(
    "name",
    shortened(
        OTHERS,
        (
            *("suffix, trees", "first layers", "pard", "ngram+small", "lookahead", "swift"),
            "another tokenizer, text",
        ),
    ),
)
def test_the_other_drafters(name: str) -> None:
    build, reads = OTHERS[name]
    require_waits(build, reads, LONGER, sampling=Sampling())


def in_rounds(drafters: list[Drafter]) -> Drafter:
    model, inner = drafters
    assert isinstance(model, SmallLMDrafter)
    return VerticalCascade(model, inner, gamma=2, rounds=1)


def in_depths(drafters: list[Drafter]) -> Drafter:
    return HorizontalCascade(*drafters)


def test_a_cascade_reads_once_for_each_pass_of_its_parts() -> None:
    require_waits(combined(in_rounds, small(), small()), 2)
    require_waits(combined(in_depths, small(), made("ngram")), 2)


@pytest.mark.parametrize(
    ("policy", "reads"),
    [
        ("confidence:threshold=0.2", 2),
        ("draft_exit:threshold=0.2", 2),
        ("heuristic", 1),
    ],
)
def test_a_policy_that_watches_reads_once_at_the_end_of_the_draft(policy: str, reads: int) -> None:
    require_waits(small(), reads, policy=policy)


STATIC = {"paths": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]}
TREES: dict[str, tuple[dict[str, Any], str, int]] = {
    "top": (STATIC, "static", 1),
    "independent": (STATIC | {"draw": "independent"}, "static", 1),
    "distinct": (STATIC | {"draw": "distinct"}, "static", 2),
    "calibrated": ({"table": [[0.6, 0.2], [0.5, 0.2]], "nodes": 5}, "calibrated", 1),
    "dynamic": ({"width": 2, "nodes": 5}, "dynamic", 2),
    "chains": ({"chains": 2, "budget": 5}, "chains", 2),
}


@pytest.mark.parametrize(
    ("shape", "rule"),
    shortened(
        [
            *((shape, "multi_round") for shape in ("top", "distinct", "calibrated", "chains")),
            ("dynamic", "traversal"),
            ("independent", "typical"),
            ("independent", "spectr"),
        ],
        [("distinct", "multi_round"), ("dynamic", "traversal"), ("independent", "spectr")],
    ),
)
def test_a_step_with_a_tree_reads_once_if_its_shape_is_known_and_else_twice(
    shape: str, rule: str
) -> None:
    options, name, reads = TREES[shape]
    require_waits(small(shaped(name, options)), reads, rule=rule)


def test_what_was_drafted_comes_with_the_verdict_and_its_probabilities_in_one_copy() -> None:
    build = small(shaped("static", STATIC))
    seen: list[Any] = []

    def rejected(done: Verification) -> None:
        seen.extend(rejected_tokens(done, row) for row in range(len(done.rows)))

    require_waits(build, 1, observers=[rejected])
    require_waits(build, 2, observers=[lambda done: seen.extend(drafted_tokens(done))])
    assert any(seen)


@pytest.mark.parametrize("kind", ["kangaroo"])
def test_heads_that_draft_a_tree_read_nothing_themselves(kind: str) -> None:
    options, name, reads = TREES["dynamic"]
    require_waits(headed(kind, shaped(name, options)), reads)


def test_greedy_chains_as_a_tree() -> None:
    require_waits(small(shaped("chains", TREES["chains"][0])), 2, sampling=Sampling())


def test_merged_drafters_read_the_structure_of_the_tree() -> None:
    require_waits(combined(SeveralDrafters, made("ngram"), small()), 2)


class Curious(NgramDrafter):
    """Looks at the target's logits, which costs one more read."""

    def observe(self, verification: Any) -> None:
        float(verification.scores.logits[0, 0, 0])


class Uploading(NgramDrafter):
    """Sends its tokens with an ordinary copy."""

    def draft(self, contexts: Any, limits: Any, sampling: Any, rng: Any) -> Any:
        draft = super().draft(contexts, limits, sampling, rng)
        draft.tokens = draft.tokens.to("cuda" if rng._keys.is_meta else "cpu")
        return draft


def test_the_count_finds_one_more_read_and_one_ordinary_copy() -> None:
    with pytest.raises(AssertionError):
        require_waits(lambda target, move: Curious(), 1, sampling=Sampling())
    with pytest.raises(AssertionError, match="a blocking copy"):
        require_waits(lambda target, move: Uploading(), 1, sampling=Sampling())


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(combined(CompositeDrafter, made("ngram"), small()), id="ngram+small"),
        pytest.param(with_other_tokenizer(SharedVocabularyDrafter), id="another tokenizer"),
        pytest.param(headed("eagle1"), id="eagle1"),
    ],
)
def test_a_row_that_leaves_reads_nothing_and_one_that_joins_its_verdict(build: Build) -> None:
    """The host knows which rows stay."""
    with simulated_device() as device:
        decoding = Decoding(decoder(build, device.move, sampling=Sampling()), PROMPTS, 40)
        for _ in range(3):
            decoding.step()
        before = len(device.waits)
        decoding.drop(1)
        assert device.waits[before:] == []
        decoding.admit([PROMPTS[1]], 40)
    assert [wait.kind for wait in device.waits[before:]] == ["read"]


def test_times_need_no_wait_except_for_a_policy_that_reads_them() -> None:
    for policy, kinds in (
        ("fixed:max_depth=3", set()),
        ("cost_model:max_depth=3", {"synchronize"}),
    ):
        with simulated_device() as device:
            decoding = Decoding(decoder(small(), device.move, policy=policy), PROMPTS, NEW)
            waits = [wait for step in waits_by_step(device, decoding) for wait in step]
            before = len(device.waits)
            run = decoding.result()
        assert {wait.kind for wait in waits} - {"read", "upload"} == kinds
        assert [wait.kind for wait in device.waits[before:]] == ["synchronize"]
        assert all(step.verify_s > 0 and step.overhead_s > 0 for step in run.steps)
        assert sum(step.verify_s for step in run.steps) == pytest.approx(run.timing.verify)
        assert sum(step.draft_s for step in run.steps) == pytest.approx(run.timing.draft)
        assert run.timing.prefill > 0


def test_times_are_taken_on_the_device_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of another GPU's stream would be there at once."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any = "the current GPU's") -> None:
            recorded.append(stream)

    recorded: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"that of {device}")
    Clock(torch.device("cuda:1"), None).mark("draft")
    assert recorded == ["that of cuda:1"] * 2


# --- training -------------------------------------------------------------------------------------


def waits_of_training(steps: Callable[[Callable[[Any], Any]], Iterator[Tensor]]) -> list[Wait]:
    """The waits of the second step of a training; the first one uploads the frequencies of rotary
    positions. Its loss is that of the CPU. steps: the losses of a training whose modules a function
    moves to the device."""
    expected = next(steps(lambda module: module))
    with simulated_device() as device:
        on_device = steps(device.move)
        next(on_device)
        before = len(device.waits)
        loss: Any = next(on_device)
        waits = device.waits[before:]
    assert loss.held == pytest.approx(expected.item())
    return waits


@pytest.mark.parametrize(("kind", "depths"), [("eagle1", 1), ("eagle3", 3), ("mtp", 3)])
def test_a_training_step_waits_once_for_each_depth(kind: str, depths: int) -> None:
    """For the number of tokens that are predicted there, whatever is selected by it; and once for
    which of them several depths predict. The loss is that of the CPU."""
    torch.manual_seed(0)
    ids, answered = torch.arange(24).view(2, 12), torch.arange(12).expand(2, 12) > 3
    states = torch.randn(2, 12, tiny_model("llama", layers=LAYERS).config.hidden_size)

    def steps(move: Callable[[Any], Any]) -> Iterator[Tensor]:
        target = move(tiny_model("llama", layers=LAYERS))
        drafter: Any = headed(kind)(target, move)
        losses = WeightedLoss({"forward_kl": 1.0, "cross_entropy": 0.1})
        training = HeadTraining(drafter.heads.train(), losses, target)
        device = next(target.parameters()).device
        features = {layer: states.to(device) for layer in training.captured_layers}
        while True:
            torch.manual_seed(1)
            weights = training.heads.loss_weights(0.0)
            yield training(ids.to(device), answered.to(device), features, weights)[0]

    waits = waits_of_training(steps)
    moved = [wait for wait in waits if wait.kind == "upload"]
    assert len(moved) == 2, moved  # ids and mask, which a trainer copies from pinned memory
    selected = ["nonzero"] * depths + ["copy"] * (depths > 1)
    assert [w.operation for w in waits if w not in moved] == selected


@pytest.mark.parametrize("with_heads", [True, False])
def test_a_step_that_trains_the_target_waits_as_a_distillation_does(with_heads: bool) -> None:
    """Heads wait once more, for what they predict. Which rows leave out a layer is sent without a
    wait."""
    ids, answered = torch.arange(24).view(2, 12), torch.arange(12).expand(2, 12) > 3
    texts = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": answered}
    losses = WeightedLoss({"cross_entropy": 1.0})

    def steps(move: Callable[[Any], Any]) -> Iterator[Tensor]:
        target = move(tiny_model("llama", layers=LAYERS))
        batch = {name: x.to(next(target.parameters()).device) for name, x in texts.items()}
        exits = {"exits": {0: 0.5, 2: 0.5}, "left_out": torch.eye(LAYERS, 2) > 0}
        if with_heads:
            drafter: Any = headed("eagle1")(target, move)
            training = HeadTraining(drafter.heads.train(), losses, target)
            module: Any = JointTraining(target, training, losses)
            weighed = {"losses": {1: 1.0}, "weight": 0.5}
        else:
            module = EarlyExitTraining(target, losses)
        while True:
            torch.manual_seed(1)  # EAGLE-1 adds noise
            yield module(**batch, **(weighed if with_heads else exits))[0]

    selected = ["_local_scalar_dense", "nonzero"] + ["nonzero"] * with_heads
    assert [wait.operation for wait in waits_of_training(steps)] == selected


def test_a_distillation_step_waits_twice_for_each_model() -> None:
    """For the number of predicted tokens, whatever is selected by it; and transformers' forward
    reads whether there is padding."""
    ids, answered = torch.arange(24).view(2, 12), torch.arange(12).expand(2, 12) > 3
    texts = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": answered}

    def steps(move: Callable[[Any], Any]) -> Iterator[Tensor]:
        teacher = LiveTeacher(move(tiny_model("llama", layers=LAYERS)))
        student = move(tiny_model("llama", seed=7, layers=1))
        losses = WeightedLoss({"forward_kl": 1.0, "cross_entropy": 0.1})
        distillation = Distillation(student, losses)
        batch = {name: x.to(next(student.parameters()).device) for name, x in texts.items()}
        while True:
            yield distillation(**batch, teacher=teacher.signal(**batch, ids=[]))[0]

    waits = waits_of_training(steps)
    assert [wait.operation for wait in waits] == ["_local_scalar_dense", "nonzero"] * 2
