"""The benchmarks' settings and helpers; what they measure is not a test's business."""

import contextlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import (
    common,
    device,
    drafters,
    heads,
    mtp,
    structured,
)
from benchmarks.common import PROMPTS, end_benchmark, in_fresh_process, require, run_config
from benchmarks.decode import (
    contest_table,
    cost_table,
    drafter_config,
    first_layers,
    profile_table,
    ratios,
)
from benchmarks.drafters import compare, table_row, with_random_layers
from benchmarks.serve import __main__ as serve_main
from benchmarks.serve import contestants as serve
from benchmarks.shared import (
    decode_measurements,
    device_parts,
    distill_contestants,
    llama_contestants,
    structured_engine,
)
from benchmarks.shared.decode_contestants import JobResult, Models, Passes
from benchmarks.shared.decode_measurements import (
    Setting,
    hold_contest,
    long_answers,
    profile_loop,
    step_costs,
)
from benchmarks.shared.distill_contestants import measure_training, train_ours
from benchmarks.shared.distill_settings import Settings
from benchmarks.shared.drafter_contestants import (
    Contestant,
    cascades_of,
    named,
    of_depth,
    omitted,
    shortly_named,
    trained_drafters,
    untrained,
)
from benchmarks.shared.notes import behind_notes
from benchmarks.shared.small_vocabulary import write_student
from benchmarks.shared.structured_prompts import KINDS, prompts_of
from decode.base.errors import UserError
from decode.drafters import DRAFTERS
from decode.grammars import Grammars
from decode.loop.decoding import Decoder
from decode.model.loading import load_target
from decode.opening.combinations import COMBINATIONS
from decode.opening.directory import open_drafter
from decode.opening.shipped import SHIPPED
from decode.settings import DecodeSettings, EvaluationProtocol
from decode.text import prompt_ids
from heads.heads_directory import new_heads, save_heads, stored_options
from heads.kinds import HEADS
from heads.options import HeadOptions, MtpOptions
from tests.export import needs
from tests.service import MODEL, serving
from tests.test_target import write_gguf
from tests.tiny import save_small_lm, save_tiny, tiny_llama, tiny_target
from train.base.console import Reporter
from train.data.read import Example, spread
from train.run.config_checks import validate_config
from train.settings.server_config import EngineServer


def test_a_row_is_named_after_its_run_only_if_its_kind_does_not_tell_it_apart():
    names = {
        "a (r/1-s)": "a",
        "ngram+a (r/1-s)": "ngram+a",
        "b (r/1-s)": "b (1-s)",
        "b (r/2-s)": "b (2-s)",
        "c (r/1-s)": "c (r/1-s)",
        "c (q/1-s)": "c (q/1-s)",
        "ngram": "ngram",
    }
    rows = shortly_named([Contestant(name, name, "x") for name in (*names, "ngram")])
    assert [row.name for row in rows] == [*names.values(), "ngram"]


def test_each_drafter_is_compared_or_left_out_with_a_reason(tmp_path):
    """One that fails, or whose stage was killed, costs no other row."""
    target, small = tiny_target(layers=4), str(save_tiny(tmp_path / "small", layers=1))
    stage = tmp_path / "run" / "stages" / "00-x"
    save_small_lm(stage / "drafter", tiny_llama(layers=1), target)
    trained = trained_drafters(stage.parents[1])
    assert trained[0].seconds is None  # no done.json
    assert trained[0].size > 0
    assert {row.kind for row in trained} >= {"vertical", "horizontal", "measured", "A++B"}
    rows = [*untrained(), *trained]
    reasons = omitted(rows)
    assert {row.kind for row in rows} | set(reasons) >= {*DRAFTERS, *COMBINATIONS, *HEADS}
    assert "rest" in reasons
    assert "vertical" not in reasons

    random = with_random_layers(target, 4, 256)
    protocol = EvaluationProtocol(
        gamma=2, max_new_tokens=6, timed_tokens=6, timed_prompts=1, generate=False
    )
    broken = [Contestant("gone", str(tmp_path), "x"), Contestant("bug", None, "x")]
    names = ["ngram", small, f"vertical:model={small},inner=ngram"]
    weightless = drafters.random_small_model(random, tmp_path)
    rows = [*map(named, names), weightless, *cascades_of(weightless), *of_depth(4)]
    asked = [*broken, *rows]
    figures, failed = compare(asked, random, TEXTS[:2], protocol, Reporter(silent=True))
    assert list(figures) == list(dict.fromkeys(row.name for row in rows))
    assert figures[f"TriForce {weightless.name}"]["c"] > 0
    assert figures["ngram"]["memory_bytes"] < 2**16
    weights = sum(p.nbytes for p in load_target(small).model.parameters())
    assert weights < figures[small]["memory_bytes"] < 4 * weights
    assert failed["gone"].startswith(f"{tmp_path} is neither")
    assert failed["bug"].startswith("TypeError: ")
    for name, row in figures.items():
        assert set(table_row(name, row, True)) < set(table_row(name, row, False))


def test_a_drafter_of_each_kind_is_trained_unless_a_run_is_named(tmp_path, monkeypatch):
    asked = []

    def execute(config: dict[str, Any], reporter: Reporter) -> None:
        asked.extend(validate_config(config, base_dir=PROMPTS).stages)
        raise KeyboardInterrupt

    monkeypatch.setattr(drafters, "execute_run", execute)
    assert drafters.trained_here(tmp_path, True, 0.0, Reporter(silent=True)) == []
    with pytest.raises(KeyboardInterrupt):
        drafters.trained_here(tmp_path, True, None, Reporter(silent=True))
    kinds = {stage.heads.type for stage in asked if stage.kind == "heads"}
    assert kinds == set(HEADS)
    assert {"small_lm", "pard"} < {stage.name for stage in asked}
    trainings = [stage for stage in asked if stage.name in {*kinds, "small_lm", "pard"}]
    assert {stage.loop.max_minutes for stage in trainings} == {0.5}


def test_a_small_model_with_another_tokenizer_is_made_of_the_target(tmp_path):
    target, other = tiny_target(layers=2), tmp_path / "other"
    write_student(other, target, ["the quick brown fox", "the quick dog proposes a token"])
    plain = DecodeSettings().decoder(target, open_drafter("none", target))[0].decode(TEXTS[:2], 8)
    for vocabulary in ("shared", "text"):
        drafter = open_drafter(f"{other}:vocabulary={vocabulary}", target)
        drafted = DecodeSettings().decoder(target, drafter)[0].decode(TEXTS[:2], 8)
        assert drafted.outputs == plain.outputs
        assert drafted.tally.drafted.sum() > 0


@pytest.mark.thorough
def test_a_fresh_process_returns_what_the_function_does(monkeypatch):
    assert in_fresh_process("json:dumps", obj={"number": [21]}) == '{"number": [21]}'

    def here(command, **_):
        """A second process would do the same as this one."""
        monkeypatch.setattr(sys, "argv", command[2:])
        common._run_in_fresh_process()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(common.subprocess, "run", here)
    with pytest.raises(UserError, match="needs no-such-package"):
        in_fresh_process(
            "benchmarks.common:require",
            package="no-such-package",
            requirement="no-such-package>=1",
            what="this benchmark",
        )


def test_a_missing_contestant_is_named_with_what_installs_it():
    with pytest.raises(UserError, match="pip install"):
        require("no-such-package", "no-such-package>=1", "this benchmark")


def run_config_of(starts, runs):
    stages = mtp.restore_stages(starts, quick=True)
    return validate_config(run_config("mtp", runs, stages), base_dir=PROMPTS)


def test_modules_are_restored_and_trained_anew_by_the_recipe(tmp_path):
    starts = {"restored": "runs/no-module", "anew": None}
    with pytest.raises(UserError, match="start is runs/no-module, which is not a directory"):
        run_config_of(starts, tmp_path)
    restored, anew = run_config_of(dict.fromkeys(starts), tmp_path).stages[1:]
    assert restored.heads == anew.heads == MtpOptions(depth=mtp.DEPTH)
    plain = {"name", "start"}
    assert restored.model_dump(exclude=plain) == anew.model_dump(exclude=plain)


@pytest.mark.parametrize(
    "arms",
    [heads.ARMS, heads.KNOWN, ("eagle1",), ("eagle3_lk",), (heads.SMALL_LM,), (heads.PARD,)],
)
def test_the_heads_are_one_sound_run_with_any_arms_and_more_text(arms, tmp_path):
    more = tmp_path / "more.jsonl"
    more.write_text('{"prompt": "Why?"}\n', "utf-8")
    plain, with_more = (
        validate_config(
            heads.heads_config(heads.Settings(False, arms, minutes, file, 1, tmp_path)),
            base_dir=PROMPTS,
        )
        for minutes, file in ((None, None), (5, more))
    )
    limits = {s.name: s.loop.max_minutes for s in with_more.stages if s.name in arms}
    assert limits == dict.fromkeys(arms, 5)
    assert len({stage.name for stage in plain.stages}) == len(plain.stages)
    assert set(arms) <= {stage.name for stage in plain.stages}
    assert plain.name != with_more.name
    (states,) = [stage for stage in plain.stages if stage.name == "states"]
    assert (len(states.captured_layers) > 1) == any(
        name.startswith(("eagle3", "p_eagle")) for name in arms
    )
    # The shipped prompts, and one more.
    assert (
        with_more.data.limit == len((PROMPTS / "train.jsonl").read_text("utf-8").splitlines()) + 1
    )


def test_arms_change_one_thing_of_the_training_and_draft_alike_without_times(tmp_path):
    arms = ("eagle1", "eagle1_hass", "eagle1_large_batch")
    settings = heads.Settings(False, arms, 2, None, 0, tmp_path, prompts=10, timed=0)
    stages = validate_config(heads.heads_config(settings), base_dir=PROMPTS).stages
    plain, *changed = (stage for stage in stages if stage.name in arms)
    assert {stage.tree for stage in (plain, *changed)} == {None}
    differences = [
        {
            key
            for key, value in stage.model_dump().items()
            if value != plain.model_dump()[key] and key != "name"
        }
        for stage in changed
    ]
    assert differences == [{"heads"}, {"loop"}]
    assert changed[0].heads.depth == plain.heads.depth
    assert changed[1].loop.max_minutes == plain.loop.max_minutes


def test_arms_that_go_on_from_a_drafter_keep_its_options(tmp_path):
    start, name = str(SHIPPED / "eagle1-smollm2-135m"), "embedded:eagle1-smollm2-135m"
    arms = ("eagle1", "eagle1_large_batch")
    settings = heads.Settings(False, arms, 2, None, 0, tmp_path, start=start, lr=1e-4)
    values = heads.heads_config(settings)
    plain, other = validate_config(values, base_dir=PROMPTS).stages[-2:]
    assert plain.start == other.start == start
    assert plain.heads == other.heads == stored_options(Path(start))
    assert plain.optimizer.lr == 1e-4
    heads.require_same_heads(arms, start)
    with pytest.raises(UserError, match=r"arm medusa cannot go on .* expected some of eagle1, "):
        heads.require_same_heads(("eagle1", "medusa"), start)
    # A stage knows the drafters that come along by name too.
    values["stages"][-1]["start"] = name
    assert validate_config(values, base_dir=PROMPTS).stages[-1].start == name
    values["stages"][-1]["start"] = name[:-1]
    with pytest.raises(UserError, match=f"there is no {name[:-1]}; .*{name}"):
        validate_config(values, base_dir=PROMPTS)


def test_the_gain_over_the_first_arm_is_that_of_the_same_prompts():
    figures = {
        name: {
            **dict.fromkeys(("trained_parameters", "seconds", "top1", "top5", "c", "v")),
            **{"speedup": None, "bigram_top1": None, "drafts": "chain", "tokens_per_step": 1.5},
        }
        for name in ("eagle1", "eagle1_hass")
    }
    texts = {
        "eagle1": {"identical": 1.0, "gain": {"value": 1.0}},
        "eagle1_hass": {"identical": 0.5, "gain": {"value": 1.25, "low": 1.1, "high": 1.4}},
    }
    table = heads.arms_table(figures, texts)
    (gains,) = [[*column.cells] for column in table.columns if column.header == "over eagle1"]
    assert gains == ["–", "1.25 [1.10, 1.40]"]


def test_notes_before_a_prompt_have_the_length_that_is_asked_for():
    target = tiny_target()
    asked = Example("1", ({"role": "user", "content": "Why?"},), "Why?", None, None, "here")
    notes = target.tokenizer("one two three ", add_special_tokens=False).input_ids
    alone, behind = (behind_notes(target, asked, notes, count) for count in (0, 60))
    assert abs(len(behind) - len(alone) - 60) < 12  # "My notes:" is text too
    assert "Why?" in target.tokenizer.decode(behind)
    most = behind_notes(target, asked, notes, 9000, answer=48)
    assert target.max_positions - 48 - 12 <= len(most) <= target.max_positions - 48


@pytest.fixture
def tiny_models(tmp_path):
    """A target, and as drafter what is left of it after some noise: it is right now and then."""
    drafter = save_tiny(tmp_path / "drafter")
    model = tiny_llama()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(drafter)
    target = tiny_target()
    eagle = new_heads(HeadOptions.of({"type": "eagle1", "depth": 3}), target, None)
    save_heads(tmp_path / "eagle", eagle, target=target, provenance={})
    models = Models.load(target, str(drafter), f"ngram+{tmp_path / 'eagle'}")
    with models.closing:
        yield models


TEXTS = [[5 + i, 17, 90, 17, 4 + i, 60, 17, 90][: 5 + i % 3] for i in range(6)]


def of_gguf(place: Path, models: Models) -> Models:
    """These models with a target that is a GGUF file, which llama.cpp needs."""
    write_gguf(place / "target.gguf")
    target = load_target(str(place / "target.gguf"))
    return Models(target, models.assistant, models.drafter_path, models.heads)


def test_all_greedy_contestants_say_the_same_and_count_alike(tiny_models, tmp_path):
    models = of_gguf(tmp_path, tiny_models)
    # What a checkpoint may ask for reaches none of them.
    models.target.model.generation_config.repetition_penalty = 1.5
    with models.closing:
        contest = hold_contest(models, Setting(3, 20), TEXTS, 3, Reporter(silent=True))
    # Packages that are not installed here are named; nobody else fails.
    assert not contest.broken
    assert all("not installed" in reason for reason in contest.unable.values())
    assert {"plain", "lookup", "heads", "generate", "assisted", "transformers_lookup"} <= set(
        contest.equal
    )
    assert set(contest.equal.values()) == {(1.0, 1.0)}
    ours, theirs = (contest.passes[name] for name in ("speculative", "assisted"))
    # Of the first token, which theirs drafts and ours takes from the prompt's pass, they differ.
    assert theirs.emitted == 3 * 20
    assert ours.emitted == 3 * 19
    assert 0 <= theirs.steps - ours.steps <= 3
    assert theirs.accepted == theirs.emitted - theirs.steps
    assert theirs.drafted >= theirs.reached >= theirs.accepted > 0
    assert contest.figures("generate")["tokens_per_step"] == 1
    found = ratios([contest])
    assert {"plain_vs_generate", "speculative_vs_assisted", "lookup_vs_transformers"} <= set(found)
    assert contest_table(contest, 3).row_count == len(contest.seconds)


def test_a_contestant_that_is_installed_and_fails_breaks_the_benchmark(tiny_models, monkeypatch):
    def broken(*_: Any) -> None:
        raise IsADirectoryError("a folder")

    monkeypatch.setattr("benchmarks.shared.llama_contestants._program", broken)
    names = ["plain", "generate", "llama", "openvino"]
    for setting, found in (
        (Setting(1, 8), {"llama": "IsADirectoryError: a folder"}),
        (Setting(1, 8, batch=2), {}),  # it does not have this setting
    ):
        contest = hold_contest(tiny_models, setting, TEXTS, 3, Reporter(silent=True), names)
        assert contest.broken == found
    with pytest.raises(UserError, match="contestants broke: llama"):
        end_benchmark({"llama": "a folder"})
    end_benchmark({})


def test_llama_cpp_gets_a_file_of_the_target(tmp_path, tiny_models):
    target = of_gguf(tmp_path, tiny_models).target
    llama_contestants._write(tmp_path, target.model, target.name)
    written = load_target(str(tmp_path / llama_contestants.FILE))
    ids = torch.tensor([TEXTS[0]])
    assert torch.equal(written.model(ids).logits, target.model(ids).logits)
    assert written.tokenizer.get_vocab() == target.tokenizer.get_vocab()


@pytest.mark.thorough
@pytest.mark.parametrize("contestant", distill_contestants.OURS)
def test_our_contestants_of_the_distill_benchmark_take_their_steps(contestant):
    target, settings = tiny_target(), Settings(layers=(0,), rows=2, steps=2)
    student = settings.make_student(target)
    figures = measure_training(contestant, train_ours, target, student, settings)
    assert figures["steps"] == len(figures["losses"]) == 2
    assert figures["predicted_tokens"] > 0


@pytest.mark.engine
@pytest.mark.parametrize(
    ("engine", "name", "more"),
    [("llama-server", "llama", ["llama_q8"]), ("openvino", "openvino", [])],
    ids=["llama-server", "openvino"],
)
def test_an_engine_takes_part_where_it_is_installed(engine, name, more, tmp_path, tiny_models):
    needs(engine)
    models = of_gguf(tmp_path, tiny_models)
    same = [name, f"{name}_drafter", f"{name}_lookup"]
    names = ["plain", "generate", *same, *more]
    with models.closing:
        contest = hold_contest(models, Setting(2, 16), TEXTS, 3, Reporter(silent=True), names)
    assert not contest.unable
    assert [contest.equal[one][1] for one in same] == [1] * 3
    assert contest.figures(name)["tokens_per_step"] == 1
    assert contest.passes[f"{name}_drafter"].accepted > 0
    assert {f"plain_vs_{one}" for one in (name, *more)} <= set(ratios([contest]))


def test_a_batch_is_compared_with_those_who_take_one(tiny_models):
    setting = Setting(1, 6, batch=4, sampled=True)
    contest = hold_contest(tiny_models, setting, TEXTS, 2, Reporter(silent=True))
    assert "batch" in contest.unable["assisted"]
    assert "batch" in contest.unable["transformers_lookup"]
    found = ratios([contest])
    assert "plain_vs_generate_sampled_batch4" in found
    assert not any("assisted" in name or "transformers" in name for name in found)
    assert [len(row) for row in contest.outputs["generate"][0]] == [6] * 4


def test_behind_notes_no_time_has_the_pass_over_the_prompt(tiny_models, monkeypatch):
    clock = [0.0]

    def contestant(prompts, tokens, seed):
        clock[0] += 100 + tokens  # the prompt takes 100
        return JobResult([[1] * tokens for _ in prompts], Passes)

    monkeypatch.setattr(
        decode_measurements, "makers", lambda *_, **__: {"plain": lambda: contestant}
    )
    monkeypatch.setattr(decode_measurements.time, "perf_counter", lambda: clock[0])
    setting = Setting(2, 20, sampled=True, context=1000)
    contest = hold_contest(tiny_models, setting, TEXTS, 2, Reporter(silent=True), ["plain"])
    assert contest.seconds == {"plain": [19, 19]}
    assert contest.figures("plain")["tokens_per_second"] == 1
    assert setting.ending == "_sampled_ctx1000"


def test_prompts_of_the_decode_benchmark_have_long_answers():
    target = tiny_target()
    ends = {output[3] for output in (_greedy(target, prompt, 4) for prompt in TEXTS[:3])}
    shortened = replace(target, eos_token_ids=tuple(ends))
    assert long_answers(target, TEXTS, count=4, tokens=5) == spread(TEXTS, 4)
    kept = long_answers(shortened, TEXTS, count=6, tokens=5)
    assert all(prompt not in kept for prompt in TEXTS[:3])
    with pytest.raises(UserError, match="longer"):
        long_answers(shortened, TEXTS[:3], count=6, tokens=5)


def _greedy(target, prompt, tokens):
    return Decoder(target.model, DRAFTERS["none"]()).decode([prompt], tokens).outputs[0]


def test_other_loops_take_no_reduced_vocabulary():
    with pytest.raises(UserError, match="full vocabulary"):
        Models.load(tiny_target(), "ngram")


@pytest.mark.parametrize("quick", [True, False])
def test_the_benchmarks_drafter_is_a_sound_run(quick: bool, tmp_path):
    layers = first_layers(tiny_target(layers=2).model)
    assert layers == [0]
    config = drafter_config("org/model", layers, "cpu", quick, tmp_path)
    assert validate_config(config, base_dir=PROMPTS).stages[-1].name == "distill"


def test_a_step_is_taken_apart(tiny_models):
    found = profile_loop(tiny_models, TEXTS[0], 8, 2)
    for row in found.values():
        assert row["rule_ms"] > 0
        assert row["operations"]
    assert found["plain"]["draft_ms"] < found["speculative"]["draft_ms"]
    assert profile_table(found).row_count > 5
    costs = step_costs(tiny_models, TEXTS[0], 2)
    assert cost_table(costs).row_count == len(costs) == 3
    assert all(0 < cost["outside_ms"] <= cost["ms"] for cost in costs.values())


@pytest.mark.thorough
def test_the_device_benchmark_goes_on_after_a_part_that_fails(tmp_path, monkeypatch):
    shape = device_parts._shape(64, 32, 64, 2, 4, 2)
    tiny = replace(device_parts.SMALL, target=shape, drafter=shape, jobs=1, tokens=24, turns=1)
    monkeypatch.setattr(device, "SMALL", tiny)
    monkeypatch.setattr(device, "start_benchmark", lambda: Reporter(silent=True))
    monkeypatch.setattr(device_parts, "VOCABULARY", 64)
    monkeypatch.setattr(device_parts, "CONTEXTS", (10, 20))
    monkeypatch.setattr(device_parts.Bench, "tokenizer", tiny_target().tokenizer)

    def train(function: str, *, contestant: str, settings: dict[str, Any]) -> dict[str, Any]:
        assert callable(pkgutil.resolve_name(function))
        if contestant == "trl":
            raise torch.OutOfMemoryError("too much\nof it")
        speeds = ("predicted_tokens_per_second", "text_tokens_per_second", "padding_share")
        return dict.fromkeys((*speeds, "peak_bytes", "training_bytes"), 1.0)

    monkeypatch.setattr(device_parts, "in_fresh_process", train)
    monkeypatch.setattr(device_parts, "require", lambda *_: None)
    file = tmp_path / "device.json"
    device.main(quick=True, json_file=file, device="cpu")
    written = json.loads(file.read_text("utf-8"))
    assert written["errors"] == {"train_trl": "OutOfMemoryError: too much"}
    assert set(written["results"]) == {
        *("decode", "decode_batch", "texts", "passes", "draft_costs"),
        *("mixed_lengths", "train_ours", "train_eagle1"),
    }
    assert "throughput_vs_trl" not in written["ratios"]
    assert {
        *("plain_vs_generate", "speculative_vs_assisted", "pass_10_vs_1_ctx_20"),
        *("speculative_vs_plain_batch8", "mixed_lengths_1_vs_apart"),
        *("mixed_lengths_reading_vs_apart", "mixed_lengths_memory_vs_apart"),
        *("draft_cost_small_lm", "draft_cost_eagle"),
    } <= set(written["ratios"])
    assert all(isinstance(value, float) for value in written["ratios"].values())
    # The scripts decide what is accepted, in every loop alike.
    contestants = written["results"]["decode"]["contestants"]
    ours, theirs = (contestants[name] for name in ("speculative", "assisted"))
    assert 0.5 < ours["acceptance_rate"] < 1
    assert ours["acceptance_rate"] == pytest.approx(theirs["acceptance_rate"], abs=0.1)
    figures = written["results"] | {"train_trl": {"peak_bytes": 2, "training_bytes": 4}}
    figures["train_trl"]["predicted_tokens_per_second"] = 0.5
    ratios = device.ratios(figures)
    assert ratios["throughput_vs_trl"] == 2
    assert ratios["training_memory_vs_trl"] == 0.25


def test_a_scripted_llama_says_its_script_and_computes_all_the_same():
    shape = device_parts._shape(64, 32, 64, 2, 4, 2) | {"max_position_embeddings": 32}
    model = device_parts.random_llama(device_parts.ScriptedLlama, **shape)
    model.script.copy_(torch.arange(32))
    plain = device_parts.random_llama(**shape)
    ids = torch.tensor([[9, 9, 9, 9]])
    logits = model(ids).logits
    assert logits.argmax(-1).tolist() == [[1, 2, 3, 4]]
    others = logits.scatter(-1, torch.tensor([[1, 2, 3, 4]])[..., None], 0.0)
    expected = plain(ids).logits.scatter(-1, torch.tensor([[1, 2, 3, 4]])[..., None], 0.0)
    assert torch.equal(others, expected)
    for decode in (_decode, _generate):
        assert decode(model, [9, 9, 9]) == list(range(3, 9))


def _decode(model: Any, prompt: list[int]) -> list[int]:
    return Decoder(model, DRAFTERS["none"]()).decode([prompt], 6).outputs[0]


def _generate(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    texts = model.generate(ids, attention_mask=mask, max_new_tokens=6, pad_token_id=0)
    return texts[0, len(prompt) :].tolist()


def test_all_contestants_of_the_service_answer_alike_and_their_ratios_have_names():
    target = tiny_target(max_positions=512)
    target.model.generation_config.eos_token_id = None
    prompts = [serve.Prompt([], ids) for ids in TEXTS[:3]]
    contestants = {
        "served": serve.one_after_the_other(target, "ngram", DecodeSettings()),
        "alone": serve.one_after_the_other(target, "none", DecodeSettings()),
        "generate_batch": serve.generate_batch(target.model),
        "generate": serve.generate(target.model),
    }
    turns = {
        count: {name: [run(prompts, count, 9)] for name, run in contestants.items()}
        for count in (1, 2)
    }
    for by_name in turns.values():
        assert {turn.tokens for (turn,) in by_name.values()} == {3 * 9}
        assert {len(turn.firsts) for (turn,) in by_name.values()} == {0, 3}
        assert all(
            0 < first < turn.seconds for (turn,) in by_name.values() for first in turn.firsts
        )
    values = serve_main.ratios(turns)
    assert {"serve_2_vs_1", "serve_1_vs_one_after_the_other"} < set(values)
    assert {"serve_vs_transformers_generate_batch_2", "serve_vs_transformers_generate_1"} < set(
        values
    )
    assert all(value > 0 for value in values.values())


WORKER = """
import pathlib, sys, time
run = pathlib.Path(sys.argv[1])
(run / "logs").mkdir(parents=True, exist_ok=True)
with open(run / "logs/log.txt", "a", buffering=1) as log:
    for number, stage in enumerate(("first", "second")):
        done = run / f"stages/{number:02d}-{stage}/done.json"
        if done.exists():
            continue
        log.write(f"2026 stage {stage} (kind)\\n")
        for part in range(10):
            manifest = done.parent / f"part-{part}/manifest.json"
            if not manifest.exists():
                time.sleep(0.1)
                manifest.parent.mkdir(parents=True)
                manifest.touch()
        done.touch()
"""


def test_structured_output_is_measured_here_and_by_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A service of ours stands in for vLLM: it takes the same requests."""
    target = tiny_target(max_positions=2048)
    asked = prompts_of(1)
    ids = [prompt_ids([{"role": "user", "content": x.prompt}], target.tokenizer) for x in asked]
    held = [structured._grammar(Grammars.of(target), x) for x in asked]
    monkeypatch.setattr(structured, "TOKENS", 50)
    drafter = open_drafter("grammar+ngram", target)
    rows = structured.measure(target, "both", drafter, asked, ids, held, 6)
    assert [row["kind"] for row in rows] == [*KINDS, "all"]
    assert all(row["same_text"] == 1 and row["speedup"]["value"] > 0 for row in rows)
    assert rows[3]["valid"] == 1  # the others are cut at their limit
    assert rows[4]["prompts"] == 4
    assert rows[4]["tokens_per_step"]["value"] > 1.3
    assert 0 < rows[4]["forced_share"] < 1
    assert 0 < rows[4]["mask_share"] < 1

    with serving(target) as running:
        monkeypatch.setattr(structured_engine, "NAME", MODEL)
        monkeypatch.setattr(structured_engine, "require_server", lambda *_: None)
        monkeypatch.setattr(structured_engine, "find_vllm", lambda _: "vLLM")
        started = []

        @contextlib.contextmanager
        def launched(config: EngineServer, *_: Any) -> Iterator[list[str]]:
            started.append(config)
            yield [running.url]

        monkeypatch.setattr(structured_engine, "launched", launched)
        rows = structured_engine.vllm_rows(target, asked, ids, "python", 6, 50)
    plain, drafted = (one.options.get("speculative_config") for one in started)
    assert plain is None
    assert drafted["num_speculative_tokens"] == 6
    assert [row["kind"] for row in rows] == [*KINDS, "all"]
    assert all(row["same_text"] == 1 and row["engine"] == "vLLM" for row in rows)
    assert rows[3]["valid"] == [1, 1]
    assert rows[4]["tokens"] == [sum(row["tokens"][0] for row in rows[:4])] * 2
    assert structured._engine_cells(rows[3])["valid"] == "100% → 100%"
