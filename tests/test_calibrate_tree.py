"""Trees that are calibrated by a command, stored with the drafter, and drafted in from then on."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from decode.base.artifact import CorruptArtifact, verify_directory
from decode.base.errors import UserError
from decode.costs import Costs
from decode.drafters.small_lm import SmallLMDrafter
from decode.model.loading import Target, load_target
from decode.opening.directory import describe_drafter, open_drafter
from decode.settings import DecodeSettings
from decode.shapes.calibrated import grow_greedily
from decode.shapes.sequoia import TreePlan
from decode.shapes.static import TREE, store_tree, stored_shape
from decode.shapes.structure import Structure
from draftsmith.cli.main import app
from heads.heads_directory import new_heads, save_heads
from heads.options import HeadOptions
from tests.export import teach, texts_of
from tests.tiny import moved, plain_texts, save_small_lm, save_tiny, tiny_target, write_rows
from train.data.chat_tokens import prompt_tokens
from train.data.read import read_examples
from train.measure.calibrate_tree import TreeCalibration, _plan, calibrate_tree, cheapest

WORDS = ("the dog", "a fox and the sea", "two", "it sells a shell", "one token", "the drafter")
NEW = 12
TREE_OF_SEVEN = Structure([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
WHOLE = "tree of 7 nodes, 3 deep"
FOR_OTHERS = "does not apply, because the drafter sets the depth"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, dev prompts, and two drafters that are sometimes right: a small LM, which is the
    target with noise, and heads that were shown its answers."""
    base = tmp_path_factory.mktemp("trees")
    write_rows(base / "dev.jsonl", [{"prompt": words} for words in WORDS])
    save_tiny(base / "target")
    target = load_target(str(base / "target"), dtype="float32", device="cpu")
    noisy = copy.deepcopy(target.model)
    moved(noisy.model.layers, 0.05)

    save_small_lm(base / "small", noisy, target, provenance={"steps": 3})
    examples, _ = read_examples(str(base / "dev.jsonl"))
    prompts = [prompt_tokens(e, target.tokenizer) for e in examples]
    heads = new_heads(HeadOptions.of({"type": "medusa", "heads": 3}), target, None)
    teach(heads, target, *texts_of(target, prompts, NEW), steps=50)
    save_heads(base / "heads", heads, target=target, provenance={})
    return base


@pytest.fixture
def drafters(base: Path, tmp_path: Path) -> Path:
    """Copies that a test may change."""
    for name in ("small", "heads"):
        shutil.copytree(base / name, tmp_path / name)
    return tmp_path


def loaded(base: Path, drafter: Path) -> tuple[Target, Any, list[list[int]]]:
    """The target, the drafter and the dev prompts."""
    target = load_target(str(base / "target"), dtype="float32", device="cpu")
    examples, _ = read_examples(str(base / "dev.jsonl"))
    prompts = [prompt_tokens(e, target.tokenizer) for e in examples]
    return target, open_drafter(str(drafter), target), prompts


def command(name: str, base: Path, drafter: Path | str, *more: str) -> Result:
    words = [name, "--target", str(base / "target"), "--drafter", str(drafter)]
    return CliRunner().invoke(app, [*words, "--dtype", "float32", "--device", "cpu", *more])


def calibrate(base: Path, drafter: Path | str, *more: str) -> Result:
    few = ("--prompts", str(base / "dev.jsonl"), "--max-new-tokens", str(NEW))
    return command("calibrate-tree", base, drafter, *few, "--depth", "4", "--width", "4", *more)


def evaluate(base: Path, drafter: Path | str, file: Path, *more: str) -> tuple[str, Any]:
    few = ("--prompts", str(base / "dev.jsonl"), "--max-new-tokens", str(NEW))
    found = command(
        "evaluate", base, drafter, *few, "--timed-prompts", "2", "--json", str(file), *more
    )
    assert found.exit_code == 0, found.output
    return " ".join(found.output.split()), json.loads(file.read_text(encoding="utf-8"))["rows"][0][
        "evaluation"
    ]


@pytest.mark.parametrize(
    ("which", "method", "max_depth"),
    [
        ("heads", "calibrated", 3),
        pytest.param("small", "sequoia", 4, marks=pytest.mark.thorough),
        pytest.param("small", "calibrated", 4, marks=pytest.mark.thorough),
    ],
)
def test_a_tree_is_measured_stored_and_then_the_default(
    base: Path, drafters: Path, which: str, method: str, max_depth: int
) -> None:
    path = drafters / which
    before = {f.name: f.read_bytes() for f in path.iterdir()}
    figures = drafters / "figures.json"
    more = ("--method", method, "--nodes", "9", "--json", str(figures))
    found = calibrate(base, path, *more)
    assert found.exit_code == 0, found.output
    told = json.loads(figures.read_text("utf-8"))

    # Everything else is as it was, and the manifest knows the new file.
    verify_directory(path)
    after = {f.name: f.read_bytes() for f in path.iterdir()}
    assert {k: v for k, v in after.items() if k not in (TREE, "manifest.json")} == {
        k: v for k, v in before.items() if k != "manifest.json"
    }
    assert json.loads(after["manifest.json"])["files"][TREE]
    shape = stored_shape(path)
    assert shape is not None
    assert [list(p) for p in shape.structure.paths] == told["paths"]
    assert 1 <= len(told["paths"]) <= 9
    assert shape.structure.depth <= max_depth
    if method == "calibrated":
        assert len(told["paths"]) == 9
    assert json.loads(after[TREE])["about"]["method"] == method
    assert json.loads(after[TREE])["about"]["prompts"] == len(WORDS)

    # What was promised is what the loop emits where the tree is a chain's worth of acceptance;
    # with siblings the ranks' independence is an approximation.
    assert told["promised_tokens_per_step"] == pytest.approx(told["tokens_per_step"], rel=0.35)
    target, drafter, prompts = loaded(base, path)
    assert drafter.shape.structure == shape.structure
    counts = DecodeSettings(gamma=shape.structure.depth).decoder(target, drafter)[0]
    done = counts.decode(prompts, NEW)
    assert done.counts.tokens_per_step == pytest.approx(told["tokens_per_step"])
    assert done.outputs == plain_texts(target.model, prompts, NEW)
    assert told["tokens_per_step"] > 1.2

    # A second calibration puts another tree in its place.
    assert calibrate(base, path, "--nodes", "2").exit_code == 0
    again = stored_shape(path)
    assert again is not None
    assert len(again.structure) == 2
    verify_directory(path)


def test_evaluate_and_generate_use_and_name_the_stored_tree(base: Path, drafters: Path) -> None:
    path, file = drafters / "small", drafters / "evaluation.json"
    said, figures = evaluate(base, path, file)
    assert figures["drafts"] == "chain"
    assert figures["rule"] == "speculative"
    assert "shape" not in said

    store_tree(path, TREE_OF_SEVEN, {})
    said, figures = evaluate(base, path, file, "--timed-batch-size", "2")
    assert (figures["timed_batch_size"], figures["timed_prompts"]) == (2, 2)
    assert "2 of them timed in batches of 2" in said
    assert figures["drafts"] == "tree of 7 nodes, 3 deep"
    assert figures["gamma"] == 3  # as deep as the tree
    assert "drafts: tree of 7 nodes, 3 deep" in said
    assert figures["nodes_per_step"] > 4
    assert figures["identical_to_plain"] == 1.0

    # Sampled: the default is a rule that judges trees, and it is lossless.
    said, figures = evaluate(base, path, file, "--temperature", "0.8")
    assert (figures["rule"], figures["lossless"]) == ("multi_round", True)
    assert "rule multi_round (lossless)" in said
    for temperature in ("0", "0.8"):
        _, figures = evaluate(base, path, file, "--rule", "typical", "--temperature", temperature)
        assert figures["rule"] == "typical"
        # At temperature 0 typical acceptance comes to exact match.
        assert figures["lossless"] == (temperature == "0")
        assert figures["nodes_per_step"] > 4
    _, figures = evaluate(base, path, file, "--rule", "exact", "--temperature", "0.8")
    assert (figures["rule"], figures["lossless"]) == ("exact", True)

    # Another shape takes its place, and a rule for chains is refused with the way out.
    said, figures = evaluate(base, path, file, "--shape", "chain", "--temperature", "0.8")
    assert (figures["rule"], figures["drafts"], figures["gamma"]) == ("speculative", "chain", 4)
    chains = command(
        "evaluate",
        base,
        path,
        "--prompts",
        str(base / "dev.jsonl"),
        "--rule",
        "speculative",
        "--temperature",
        "0.8",
    )
    assert chains.exit_code == 2
    assert "or use the shape chain" in " ".join(chains.stderr.split())
    stops = command("generate", base, path, "the dog", "--policy", "confidence")
    assert stops.exit_code == 2
    assert "works only with chains" in " ".join(stops.stderr.split())

    few = ("the dog", "--max-new-tokens", "8")
    answer = command("generate", base, path, *few)
    assert f"drafts: {WHOLE}; rule multi_round" in answer.stderr
    shallow = command("generate", base, path, *few, "--gamma", "2")
    assert f"{WHOLE} (γ 2 {FOR_OTHERS}); rule" in " ".join(shallow.stderr.split())
    assert answer.stdout == command("generate", base, "none", *few).stdout
    sampled = command("generate", base, path, *few, "--temperature", "0.7")
    assert sampled.exit_code == 0, sampled.stderr
    figures = base / "answer.json"
    command("generate", base, path, *few, "--json", str(figures))
    stored = json.loads(figures.read_text("utf-8"))
    assert stored["text"] == answer.stdout.removesuffix("\n")
    assert stored["tokens_per_step"] >= 1
    assert len(stored["outputs"][0]) > 1
    shown = CliRunner().invoke(app, ["inspect", str(path), "--json", str(figures)])
    assert json.loads(figures.read_text("utf-8"))["bytes"] > 0
    assert "drafts in a tree of 7 nodes, 3 deep by default" in shown.output


def test_a_tree_is_drafted_whole_whatever_gamma_says(base: Path, drafters: Path) -> None:
    """One rule for a stored tree and a named one, and what was done is said."""
    file = drafters / "evaluation.json"
    TREE_OF_SEVEN.save(drafters / "tree.json", {})
    named = ("--shape", f"static:file={drafters / 'tree.json'}")
    found = [evaluate(base, base / "small", file, *named, "--gamma", "2")]
    store_tree(drafters / "small", TREE_OF_SEVEN, {})
    for gamma in ("2", "3"):
        found.append(evaluate(base, drafters / "small", file, "--gamma", gamma))
        assert (FOR_OTHERS in found[-1][0]) == (gamma != "3")
    for _, figures in found:
        assert (figures["drafts"], figures["gamma"]) == (WHOLE, 3)
        assert figures["nodes_per_step"] == found[0][1]["nodes_per_step"]
    assert f"drafts 3 deep ({WHOLE}): γ 2 {FOR_OTHERS}" in found[1][0]
    # Whoever wants less of it says so by a policy, and is told what is left.
    said, figures = evaluate(base, drafters / "small", file, "--policy", "fixed:max_depth=2")
    assert (figures["drafts"], figures["gamma"]) == (f"{WHOLE}, cut to 6 nodes, 2 deep", 2)
    assert f"drafts: {WHOLE}, cut to 6 nodes, 2 deep" in said
    assert figures["nodes_per_step"] < found[0][1]["nodes_per_step"]
    # Beside drafts that are as deep as γ says, the deeper of both.
    for gamma, most in (("2", 3), ("5", 5)):
        _, figures = evaluate(base, f"ngram+{drafters / 'small'}", file, "--gamma", gamma)
        assert (figures["drafts"], figures["gamma"]) == (f"chain or {WHOLE}", most)


def test_the_number_of_nodes_follows_the_costs() -> None:
    """Where wider passes cost nothing all nodes that add something pay; where they cost as much as
    a plain step, only those that bring more than that."""
    table = [[0.5, 0.25, 0.1], [0.4, 0.2, 0.0]]
    free = cheapest(table, Costs(0.05, 1, 0.0, (1, 64), (1.0, 1.0)), max_nodes=20)
    assert len(free.structure) == 9  # three first ones, and two that are ever right below each
    assert free.tokens_per_step == pytest.approx(1 + 0.85 + 0.85 * 0.6)
    assert free.cost_per_token == pytest.approx(1 / free.tokens_per_step)
    dear = cheapest(table, Costs(0.05, 1, 0.3, (1, 2, 3), (1.0, 1.2, 2.2)), max_nodes=20)
    assert dear.structure.paths == [(0,)]
    assert dear.cost_per_token == pytest.approx((0.3 + 1.2) / 1.5)
    with pytest.raises(UserError, match="0 for all first tokens"):
        cheapest([[0.0, 0.0]], Costs(0.05, 1, 0.3, (1, 2), (1.0, 1.2)))


def by_cost(plan: TreePlan) -> float:
    return plan.cost_per_token


def test_noisy_costs_choose_one_tree() -> None:
    """Costs that differ by half a per cent from run to run: of trees of any size another one would
    often be the cheapest; of those compared it is the same one in every run."""
    first = np.array([0.5, 0.16, 0.09, 0.05, 0.04, 0.03])
    table = [(first * 0.9**depth).tolist() for depth in range(5)]
    widths = (1, 2, 3, 5, 9, 17, 33, 65)
    chosen, of_any_size = set(), set()
    for seed in range(10):
        jitter = 1 + 0.005 * np.random.default_rng(seed).standard_normal(8)
        v = np.array([1 + 0.025 * (n - 1) for n in widths])
        costs = Costs(0.03, 1, 0.07, widths, tuple((v * jitter / jitter[0]).tolist()))
        chosen.add(len(cheapest(table, costs, tolerance=0.005).structure))
        trees = [grow_greedily(table, nodes) for nodes in range(1, 33)]
        of_any_size.add(
            len(min((_plan(table, tree, costs) for tree in trees), key=by_cost).structure)
        )
    assert chosen == {8}
    assert of_any_size == {8, 10, 11}
    # Within the noise the smaller tree is taken, never a larger one.
    flat = Costs(0.03, 1, 0.07, widths, (1.0, 1.0, 1.02, 1.065, 1.16, 1.4, 2.0, 3.0))
    exact, near = (cheapest(table, flat, tolerance=x) for x in (0.0, 0.07))
    assert len(near.structure) < len(exact.structure)
    assert exact.cost_per_token < near.cost_per_token <= 1.07 * exact.cost_per_token


@pytest.mark.parametrize("method", ["calibrated", "sequoia"])
def test_a_smaller_tree_within_the_noise_is_taken_and_told(
    base: Path, monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    target, drafter, prompts = loaded(base, base / "small")

    def found(noise: float, others: float | None = None) -> TreeCalibration:
        costs = Costs(0.03, 1, 0.02, (1, 2, 3, 5, 9), (1.0, 1.0, 1.0, 1.02, 1.04), noise, others)
        monkeypatch.setattr("train.measure.calibrate_tree.measure_costs", lambda *_, **__: costs)
        return calibrate_tree(
            target, drafter, prompts, method=method, depth=2, width=4, max_new_tokens=NEW
        )

    exact, noisy = found(0.0), found(0.5, 0.4)
    assert exact.plan == exact.best
    assert "noise" not in exact.verdict
    assert len(noisy.structure) < len(exact.structure)
    assert noisy.best.structure == exact.structure
    assert f"(the prediction for a tree of {len(exact.structure)} nodes is" in noisy.verdict
    assert "so the smaller tree is used" in noisy.verdict
    assert "Other processes took 40% of the processor" in noisy.verdict
    told = noisy.to_dict()
    assert told["nodes_at_least_cost"] == len(exact.structure)
    assert told["least_cost_per_token"] < told["promised_cost_per_token"]


def test_without_a_place_for_it_the_tree_goes_into_a_file(base: Path, drafters: Path) -> None:
    out = drafters / "trees" / "tree.json"
    refused = calibrate(base, base / "target")
    assert refused.exit_code == 2
    assert "cannot be stored with it" in refused.stderr
    found = calibrate(base, base / "target", "--nodes", "3", "--out", str(out))
    assert found.exit_code == 0, found.output
    _, figures = evaluate(
        base, base / "target", drafters / "e.json", "--shape", f"static:file={out}"
    )
    assert figures["drafts"] == "tree of 3 nodes, 3 deep"  # it is the target itself: a chain is all


def test_a_target_without_trees_is_refused_before_anything_is_measured() -> None:
    target, said = tiny_target("bloom"), []
    with pytest.raises(UserError, match="BloomForCausalLM cannot be decoded here"):
        calibrate_tree(target, SmallLMDrafter(target.model), [[5, 6]], progress=said.append)
    assert not said


def test_what_cannot_be_calibrated_is_refused(base: Path, drafters: Path) -> None:
    out = ("--out", str(drafters / "tree.json"))
    for words, message in (
        (("ngram", *out), "NgramDrafter does not take a shape"),
        ((f"ngram+{base / 'small'}", *out), "CompositeDrafter does not take a shape"),
        ((str(base / "small"), "--method", "medusa"), "expected one of calibrated, sequoia"),
        ((str(base / "heads"), "--width", "400"), "make the tree narrower"),
    ):
        found = calibrate(base, *words)
        assert found.exit_code == 2, found.output
        assert message in " ".join(found.stderr.split())
    # A damaged drafter is not calibrated, and stays as it is.
    file = drafters / "heads" / "heads.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    found = calibrate(base, drafters / "heads")
    assert found.exit_code == 2
    assert "heads.safetensors" in found.stderr
    assert not (drafters / "heads" / TREE).exists()
    with pytest.raises(CorruptArtifact):
        store_tree(drafters / "heads", Structure([(0,)]), {})


def test_a_kill_while_storing_leaves_the_drafter_as_it_was(
    base: Path, drafters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = drafters / "small"

    def dying(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("decode.base.artifact._seal", dying)
        with pytest.raises(KeyboardInterrupt):
            store_tree(path, Structure([(0,), (1,)]), {})
    assert stored_shape(path) is None
    assert describe_drafter(path)["provenance"] == {"steps": 3}
    assert sorted(p.name for p in drafters.iterdir()) == ["heads", "small"]
