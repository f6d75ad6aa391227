"""The benchmarks' settings and helpers; what they measure is not a test's business."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import (
    heads,
)
from benchmarks.common import PROMPTS, end_benchmark
from benchmarks.decode import (
    contest_table,
    drafter_config,
    first_layers,
    ratios,
)
from benchmarks.serve import __main__ as serve_main
from benchmarks.serve import contestants as serve
from benchmarks.shared import decode_measurements, device_parts
from benchmarks.shared.decode_contestants import JobResult, Models, Passes
from benchmarks.shared.decode_measurements import (
    Setting,
    hold_contest,
)
from benchmarks.shared.drafter_contestants import (
    omitted,
    untrained,
)
from benchmarks.shared.never_slower import KINDS as TEXT_KINDS
from benchmarks.shared.never_slower import Cell, Grid, summaries
from benchmarks.shared.never_slower import prompts_of as cell_prompts
from decode.base.errors import UserError
from decode.drafters import DRAFTERS
from decode.loop.decoding import Decoder
from decode.model.loading import load_target
from decode.opening.combinations import COMBINATIONS
from decode.settings import DecodeSettings
from heads.heads_directory import new_heads, save_heads
from heads.kinds import HEADS
from heads.options import HeadOptions
from tests.export import needs
from tests.test_target import write_gguf
from tests.tiny import moved, save_tiny, tiny_llama, tiny_target
from train.base.console import Reporter
from train.run.config_checks import validate_config


def test_a_cell_of_the_grid_has_the_same_prompts_and_texts_for_all():
    """Greedy texts in float32 are those of plain decoding, so all contestants write as much."""
    target = tiny_target()
    for kind in TEXT_KINDS:
        rows = cell_prompts(target, Cell(kind, 40, 0.0, 2), 2, 6)
        assert len({*map(tuple, rows)}) == 2
        assert min(map(len, rows)) > 40
    grid = Grid(target, "ngram", 4)
    figures = grid.measure(Cell("chat", 0, 0.0, 2), 8, 1)
    assert list(figures) == ["plain", "plain again", "worth", "1 deep", "4 deep"]
    assert all(one["tokens_per_second"] > 0 for one in figures.values())
    assert figures["plain"]["tokens_per_step"] == 1
    assert {one["fed_over_needed"] for one in figures.values()} == {1.0}


def test_ratios_of_the_grid_are_means_of_cells_over_paired_rounds():
    """Rounds differ by a factor of four, and in each of them `worth` has the same speed over plain
    decoding's. A cell of long steps weighs as much as one of short ones."""
    slow = np.array([1.0, 4.0, 2.0, 1.0])
    cells = []
    for temperature, step, gain in ((0.0, 0.01, 1.5), (0.0, 1.0, 1.5), (1.0, 1.0, 0.9)):
        times = {
            "plain": slow,
            "plain again": slow * 1.25,
            "worth": slow / gain,
            "4 deep": slow * 2,
        }
        rounds = {name: {"seconds_per_token": [*(step * x)]} for name, x in times.items()}
        cell = {"kind": "chat", "behind": 0, "temperature": temperature, "batch": 8}
        cells.append(cell | {"contestants": rounds, "vs_plain": gain})
    both, greedy, drawn = summaries(cells)
    assert (both["temperature"], greedy["temperature"], drawn["temperature"]) == (None, 0.0, 1.0)
    assert list(greedy["vs_plain"].values()) == pytest.approx([1.5] * 3)
    assert greedy["vs_best"] == greedy["vs_plain"]
    assert greedy["again_vs_plain"]["high"] == pytest.approx(0.8)
    assert both["vs_plain"]["value"] == pytest.approx(1.3)
    assert 0.9 < both["vs_plain"]["low"] < 1.3 < both["vs_plain"]["high"] < 1.9
    assert both["worst"] == {**{name: cells[2][name] for name in both["worst"]}, "vs_plain": 0.9}
    assert "low" not in drawn["vs_plain"]  # four rounds are too few


def test_each_drafter_is_compared_or_left_out_with_a_reason():
    rows = untrained()
    reasons = omitted(rows)
    assert {row.kind for row in rows} | set(reasons) >= {*DRAFTERS, *COMBINATIONS, *HEADS}


@pytest.mark.parametrize(
    "arms",
    [heads.KNOWN, ("eagle1",)],
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


@pytest.fixture
def tiny_models(tmp_path):
    """A target, and as drafter what is left of it after some noise: it is right now and then."""
    drafter = save_tiny(tmp_path / "drafter")
    moved(tiny_llama(), 0.1).save_pretrained(drafter)
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
    return Models(target, models.assistant, models.heads)


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
    # Weights in fewer bits make another model.
    same = {equal for name, equal in contest.equal.items() if name not in ("llama_q8", "llama_q4")}
    assert same == {(1.0, 1.0)}
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

    monkeypatch.setattr("benchmarks.shared.decode_contestants.program", broken)
    names = ["plain", "generate", "llama"]
    for setting, found in (
        (Setting(1, 8), {"llama": "IsADirectoryError: a folder"}),
        (Setting(1, 8, batch=2), {}),  # it does not have this setting
    ):
        contest = hold_contest(tiny_models, setting, TEXTS, 3, Reporter(silent=True), names)
        assert contest.broken == found
    with pytest.raises(UserError, match="contestants broke: llama"):
        end_benchmark({"llama": "a folder"})
    end_benchmark({})


@pytest.mark.engine
def test_llama_cpp_takes_part_where_it_is_installed(tmp_path, tiny_models):
    needs("llama-server")
    models = of_gguf(tmp_path, tiny_models)
    same = ["llama", "llama_drafter", "llama_lookup"]
    names = ["plain", "generate", *same, "llama_q8"]
    with models.closing:
        contest = hold_contest(models, Setting(2, 16), TEXTS, 3, Reporter(silent=True), names)
    assert not contest.unable
    assert [contest.equal[one][1] for one in same] == [1] * 3
    assert contest.figures("llama")["tokens_per_step"] == 1
    assert contest.passes["llama_drafter"].accepted > 0
    assert {"plain_vs_llama", "plain_vs_llama_q8"} <= set(ratios([contest]))


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


@pytest.mark.parametrize("quick", [True, False])
def test_the_benchmarks_drafter_is_a_sound_run(quick: bool, tmp_path):
    layers = first_layers(tiny_target(layers=2).model)
    assert layers == [0]
    config = drafter_config("org/model", layers, "cpu", quick, tmp_path)
    assert validate_config(config, base_dir=PROMPTS).stages[-1].name == "distill"


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
    prompts = [serve.Prompt([], ids) for ids in TEXTS[:3]]
    contestants = {
        "served": serve.one_after_the_other(target, "ngram", DecodeSettings()),
        "alone": serve.one_after_the_other(target, "none", DecodeSettings()),
        "llama_server": serve.one_after_the_other(target, "none", DecodeSettings()),
    }
    turns = {
        count: {name: [run(prompts, count, 9)] for name, run in contestants.items()}
        for count in (1, 2)
    }
    for by_name in turns.values():
        assert {turn.tokens for (turn,) in by_name.values()} == {3 * 9}
        assert {len(turn.firsts) for (turn,) in by_name.values()} == {3}
        assert all(
            0 < first < turn.seconds for (turn,) in by_name.values() for first in turn.firsts
        )
    values = serve_main.ratios(turns)
    assert {"serve_2_vs_1", "serve_1_vs_one_after_the_other"} < set(values)
    assert {"serve_vs_llama_server_1", "serve_vs_llama_server_2"} < set(values)
    assert all(value > 0 for value in values.values())
