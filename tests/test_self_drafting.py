"""A target that drafts for itself: the view without sublayers, its slots, the search for sets."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from decode.base.errors import UserError
from decode.costs import Costs
from decode.drafters import DRAFTERS
from decode.drafters.skip import SelfDrafter, SkipDrafter
from decode.drafters.sparse import SparseDrafter
from decode.drafters.swift import VARY_EVERY, LayerSearch, SwiftDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder, Decoding
from decode.model.cache.cached_model import CachedLM
from decode.model.forward.lean_forward import LeanForward
from decode.model.forward.prepare_model import prepare
from decode.model.forward.sublayers import Sublayers
from decode.opening.directory import open_drafter
from decode.shapes import SHAPES
from draftsmith.cli.main import app
from draftsmith.edge.remote_target import RemoteLM
from tests.test_sparse import sparse as few_tokens
from tests.tiny import as_target, finish, forbid_packing, save_tiny, tiny_model, tiny_target
from train.measure.calibrate_layers import LayerCosts, ReadAnswers, calibrate_layers

LAYERS = 4
PROMPTS = [[5, 17, 250, 9, 42], [7], [30] * 9]
SOME = Sublayers.of("1/3", "2-3")  # layer 3 is left out, layers 1 and 2 in part
# Lean, transformers' with our attention, and windows that differ between layers.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "gemma3_text": {"head_dim": 8, "sliding_window": 5, "layers": 6},
}
SHAPE_NAMES = ["chain", "static:widths=[3,2,1]", "dynamic"]


def model(family: str = "llama", *, lean: bool | None = None, **fields: Any) -> Any:
    made = tiny_model(family, **({"layers": LAYERS} | FAMILIES.get(family, {}) | fields))
    if lean is not None:
        prepare(made, lean=lean)
    return made


def weak_model(quiet: Sublayers, scale: float = 0.02) -> Any:
    """One of which these sublayers add little."""
    made = model(layers=6)
    with torch.no_grad():
        for number, layer in enumerate(made.model.layers):
            layer.self_attn.o_proj.weight *= scale if number in quiet.attention else 1.0
            layer.mlp.down_proj.weight *= scale if number in quiet.mlp else 1.0
    return made


def plain_texts(lm: Any, new: int = 32) -> list[list[int]]:
    return Decoder(lm, DRAFTERS["none"]()).decode(PROMPTS, new).outputs


# --- the view -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "lean"), [("llama", True), ("gemma3_text", False)])
def test_a_view_is_the_model_with_silent_sublayers(family: str, lean: bool) -> None:
    """Over empty slots, all keys and values are the view's, as in such a model."""
    lm = CachedLM(model(family, lean=lean))
    assert isinstance(lm.forward_pass, LeanForward) == lean
    lm.reset(2, 16)
    ids = torch.tensor([[5, 6, 7, 250, 9, 11, 3], [30, 2, 2, 8, 9, 1, 100]])
    silent = model(family)
    with torch.inference_mode():
        for number, layer in enumerate(silent.model.layers):
            if number in SOME.attention:
                layer.self_attn.o_proj.weight.zero_()
            if number in SOME.mlp:
                layer.mlp.down_proj.weight.zero_()
        expected = silent(input_ids=ids).logits
        found = lm.view(SOME).forward(ids, np.zeros(2, dtype=np.int64))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        # And the model itself is as before.
        complete = lm.forward(ids, np.zeros(2, dtype=np.int64))
        expected = model(family)(input_ids=ids).logits
        torch.testing.assert_close(complete, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "shape"), [*zip(FAMILIES, SHAPE_NAMES, strict=True), ("raw", "dynamic")]
)
def test_greedy_text_is_the_targets(
    family: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ragged rows, with texts of one token and texts longer than a window: through the lean
    forward, transformers' with our attention, and with its own. With sublayers left out, and over a
    part of the keys and values."""
    if family == "raw":  # as on a GPU
        forbid_packing(monkeypatch)
    lm, made = model("llama" if family == "raw" else family), SHAPES.make(shape, depth=4)
    whole: list[Any] = [SelfDrafter(Sublayers(), made)]
    parts: list[Any] = [SelfDrafter(SOME, made), SelfDrafter(Sublayers.of("0-2", "0-2"), made)]
    if family != "gemma3_text":  # it has a window
        whole.append(few_tokens(budget=200).with_shape(made))
        parts.append(few_tokens().with_shape(made))
    plain = plain_texts(lm)
    for drafter in (*whole, *parts):
        run = Decoder(lm, drafter).decode(PROMPTS, 32)
        assert run.outputs == plain
        if isinstance(drafter, SparseDrafter) and drafter not in whole:
            assert run.counts.acceptance_rate < 1
        # The complete target accepts all that it would say itself. The deepest path of a dynamic
        # tree can be another one.
        if drafter in whole and shape != "dynamic":
            for step in run.steps:
                assert (step.accepted == np.minimum(step.longest(), step.depths)).all()
            assert run.counts.tokens_per_step > 3


@pytest.mark.parametrize("name", ["skip:attention=1", "sparse:sinks=1,recent=2,chunk=2,budget=6"])
def test_one_drafter_of_two_decoders_drafts_for_the_one_that_runs(name: str) -> None:
    drafter, lms = DRAFTERS.make(name), [model(), model(seed=3)]
    decoders = [Decoder(lm, drafter) for lm in lms]
    for lm, decoder in zip(lms, decoders, strict=True):
        assert decoder.decode(PROMPTS, 12).outputs == plain_texts(lm, 12)


# --- sets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("skip", "skip needs layers to skip"),
        ("skip:attention=0-3,mlp=[0,1,2,3]", "skips all 4 layers"),
        ("skip:attention=2-4", "has layer 4, but the target has 4 layers; expected 0 to 3"),
        ("skip:mlp=3-1", "a range without layers"),
        ("skip:attention=one", "attention is 'one'; expected layer numbers"),
        ("skip:file=missing.json", "is not a set of sublayers.*calibrate-layers"),
        ("skip:file=missing.json,mlp=1", "either layers, or a file, or an exit"),
        ("skip:exit=4", "runs the first 4 layers, but the target has 4"),
        ("skip:exit=two", "exit is 'two'"),
        ("skip:atention=1", 'Did you mean "attention"'),
        ("swift:ratio=0", "ratio is 0"),
    ],
)
def test_bad_sets_are_refused_before_decoding(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Decoder(model(), open_drafter(spec, tiny_target()))


def test_targets_that_cannot_skip_are_refused() -> None:
    with pytest.raises(UserError, match="has 2 layers; expected at least 3"):
        Decoder(model(layers=2), SwiftDrafter())
    with pytest.raises(UserError, match="no single module of a class …MLP"):
        Decoder(model("opt", ffn_dim=64, word_embed_proj_dim=32), SkipDrafter(mlp=1))
    Decoder(model("opt", ffn_dim=64, word_embed_proj_dim=32), SkipDrafter(1, 1))
    with pytest.raises(UserError, match="the target, which is on another machine"):
        RemoteLM.view(object.__new__(RemoteLM), SOME)


def test_a_set_survives_its_file_and_its_name(tmp_path: Path) -> None:
    SOME.save(tmp_path / "set.json", {"target": "tiny"})
    stored = SkipDrafter(file=str(tmp_path / "set.json"))
    named: Any = DRAFTERS.make(f"skip:{SOME}")
    assert stored.skipped == named.skipped == SOME
    (tmp_path / "set.json").write_text(
        json.dumps({"format": 9, "attention": [], "mlp": []}), "utf-8"
    )
    with pytest.raises(UserError, match="has format 9"):
        SkipDrafter(file=str(tmp_path / "set.json"))


# --- the search before serving --------------------------------------------------------------------

QUIET = Sublayers.of("1/4", "2/4")
COSTS = LayerCosts(1.0, 0.05, 0.08, Costs(0.01, 1, 1.0, (1, 2, 9), (1.0, 1.0, 1.1)))


@pytest.mark.parametrize("sampling", [Sampling(0.8, top_p=0.95)])
def test_acceptance_is_that_of_drafts(sampling: Sampling) -> None:
    """As if each block was drafted after a text that the complete target alone has read."""
    lm, depth = CachedLM(model()), 3
    outputs = Decoder(lm, DRAFTERS["none"](), sampling=sampling).decode(PROMPTS, 10).outputs
    with torch.inference_mode():
        answers = ReadAnswers(lm, PROMPTS, outputs, depth=depth, sampling=sampling)
        found = [answers.acceptance(skipped) for skipped in (SOME, Sublayers(), SOME)]
    assert (found[0] == found[2]).all()
    assert found[1] == pytest.approx([1.0] * depth, abs=1e-4)
    assert 0 < found[0].mean() < 0.9

    shares: list[list[float]] = [[] for _ in range(depth)]
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        for begin in range(0, len(output), depth):
            text = [*prompt, *output]
            last = len(prompt) + begin - 1
            ids = torch.tensor([text])
            fresh = CachedLM(lm.model)
            fresh.reset(1, 64)
            fed = ids[:, last : last + depth]
            fed = fed[:, : len(text) - 1 - last]
            with torch.inference_mode():
                p = fresh.forward(ids, np.zeros(1, dtype=np.int64))[0, last:]
                q = fresh.view(SOME).forward(fed, np.array([last]))[0]
            for place, token in enumerate(text[last + 1 : last + 1 + depth]):
                if sampling.greedy:
                    shares[place].append(float(q[place].argmax() == token))
                else:
                    both = [sampling.probs(x[place])[token] for x in (q, p)]
                    shares[place].append(min(1.0, float(both[0] / both[1])))
    assert found[0] == pytest.approx([np.mean(x) for x in shares], abs=1e-3)


def test_the_search_finds_sublayers_that_add_little() -> None:
    target = as_target(weak_model(QUIET).requires_grad_(False))
    tried: list[int] = []
    done = calibrate_layers(target, PROMPTS, costs=COSTS, progress=tried.append)
    assert done.chosen.skipped >= QUIET
    assert done.chosen.speed == max(trial.speed for trial in done.trials)
    assert tried == list(range(1, len(done.trials) + 1))
    assert done.chosen.c == pytest.approx(
        1 - 0.05 * len(done.chosen.skipped.attention) - 0.08 * len(done.chosen.skipped.mlp)
    )
    few = calibrate_layers(target, PROMPTS, costs=COSTS, max_trials=14)
    assert len(few.trials) == 14
    with pytest.raises(UserError, match="no prompts"):
        calibrate_layers(target, [], costs=COSTS)


def test_the_command_writes_a_set_that_the_drafter_reads(tmp_path: Path) -> None:
    save_tiny(tmp_path / "target", layers=3)
    prompts, out, figures = (tmp_path / name for name in ("dev.jsonl", "set.json", "all.json"))
    prompts.write_text('{"prompt": "the dog"}\n{"prompt": "a fox and the sea"}\n', "utf-8")
    arguments = ["--target", tmp_path / "target", "--dtype", "float32", "--prompts", prompts]
    options = ["--out", out, "--json", figures, "--max-new-tokens", "8", "--depth", "2"]
    command = ["calibrate-layers", *arguments, *options, "--max-trials", "9"]
    done = CliRunner().invoke(app, [str(x) for x in command])
    assert done.exit_code == 0, done.output
    assert "--drafter skip:file=" in done.output
    written = json.loads(figures.read_text("utf-8"))
    assert len(written["trials"]) == 9
    stored = SkipDrafter(file=str(out))
    assert stored.skipped.to_dict() == {k: written[k] for k in ("attention", "mlp")}


# --- the search while serving ---------------------------------------------------------------------


def test_swift_searches_while_it_serves() -> None:
    """The same way each time, to a set that is better than the first one, and the text stays."""
    lm = weak_model(QUIET, 0.1)
    plain = plain_texts(lm, 120)
    runs = []
    for _ in range(2):
        drafter = SwiftDrafter(ratio=0.5, window=16, goal=1.0, max_trials=60)
        decoder = Decoder(lm, drafter)
        first = drafter.skipped
        decoding = Decoding(decoder)
        for prompt in PROMPTS:
            decoding.admit([prompt], 120)
            decoding.step()
        finish(decoding)
        assert decoding.result().outputs == plain
        assert drafter.search is not None
        runs.append((drafter.skipped, drafter.search.score, drafter.search.trials))
        assert drafter.skipped == drafter.search.best != first
        score = drafter.search.score
        assert decoder.decode(PROMPTS, 30).outputs == [text[:30] for text in plain]
        assert drafter.search.score >= score  # kept for the next requests
        drafter.forget()
        assert decoder.decode(PROMPTS, 2).outputs == [text[:2] for text in plain]
        assert (drafter.skipped, drafter.search.trials) == (first, 0)
    assert runs[0] == runs[1]
    assert runs[0][2] > VARY_EVERY


def test_the_search_has_ends_and_keeps_to_its_size() -> None:
    def search(**options: Any) -> LayerSearch:
        settings: Any = {"ratio": 0.5, "goal": 0.9, "max_failures": 40, "max_trials": 90}
        return LayerSearch(8, np.random.default_rng(0), **(settings | options))

    one = search()
    proposed = []
    while not one.done:
        proposed.append(one.propose())
        one.learn(proposed[-1], 0.5 if len(proposed) == 1 else 0.4)
    assert one.trials == 41
    assert one.best == proposed[0] == Sublayers.of("1/3/5", "1/3/5")
    assert all(len(tried) == 6 for tried in proposed)
    inner = Sublayers.of("1-6", "1-6")
    assert all(tried <= inner for tried in proposed)
    exchanged = proposed[VARY_EVERY] ^ proposed[0]
    assert len(exchanged) == 2
    reached = search()
    assert reached.learn(reached.propose(), 0.9)
    assert reached.done
    assert search(ratio=1.0).propose()
