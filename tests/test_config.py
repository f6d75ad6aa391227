"""Configs: what is refused, in which words, and before anything expensive."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from decode.base.errors import UserError
from decode.base.registry import registered_names
from decode.base.strict import kinds_of
from decode.drafters import DRAFTERS
from decode.draw.sampling import Sampling
from decode.draw.sampling_config import SamplingConfig
from decode.lengths import POLICIES
from decode.loop.parts import make_rule
from decode.rules import RULES
from decode.shapes import SHAPES
from distill.losses import LOSSES
from heads.kinds import HEADS
from heads.options import HeadOptions
from train.base.config_file import REMOVED, read_config
from train.run.config import UNTRAINED, differences, dump_config
from train.run.config_checks import build_config, load_config, validate_config
from train.settings.schema import StageConfig, need_teacher
from train.settings.training import OnPolicyConfig
from train.stages import STAGES

CONFIGS = Path(__file__).parent.parent / "configs"

GOOD = """
name: run
target: {model: some/where}
data: {train: a.jsonl, test: b.jsonl}
stages:
  - {name: answers, kind: generate}
  - name: distill
    kind: distill
    text: answers
    drafter: {layers: [0, 1]}
    optimizer: {lr: 1e-3, clip: .inf}
"""


def load(tmp_path: Path, text: str, *overrides: str):
    path = tmp_path / "run.yaml"
    path.write_text(text, "utf-8")
    return load_config(path, overrides)


def test_a_good_config_is_read_whole(tmp_path):
    config = load(tmp_path, GOOD)
    assert config.stages[1].drafter.layers == [0, 1]
    assert config.stages[1].optimizer.lr == 1e-3  # YAML 1.1 alone would read a text
    assert config.stages[1].optimizer.clip == math.inf
    assert validate_config(dump_config(config), base_dir=tmp_path) == config


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: run", "nmae: run", "config key 'nmae' is unknown.*Did you mean \"name\""),
        ("{model: some/where}", "{modle: x}", "config key 'target.modle' is unknown.*\"model\""),
        ("{lr: 1e-3, clip: .inf}", "{lr: 0}", "'stages.distill.optimizer.lr'"),
        ("[0, 1]", "two", "'stages.distill.drafter.layers' is 'two'"),
        ("{layers: [0, 1]}", "{}", "exactly one of layers, model, config, stage"),
        ("name: run", "name: run\nevaluation: {stages: [distil]}", 'Did you mean "distill"'),
        (
            "kind: generate",
            "kind: generate, split: test",
            "would train on the answers of answers to the test split",
        ),
        *(
            (
                "{name: answers, kind: generate",
                f"{{name: {name}, kind: {kind}",
                "has the name .*, which means the",
            )
            for name, kind in (
                ("data", "generate"),
                ("live", "feature_cache"),
                ("before", "datastore"),
            )
        ),
        ("text: answers", "text: answers\n    text: data", "yaml:10: .*'text' appears twice"),
        ("name: run", "name: ../run", "'name'"),
        ("name: run", "name: run\nevaluation: {gamma: 0}", "'evaluation.gamma'"),
        ("name: run", "name: run\nevaluation: {rule: 3}", "'evaluation.rule"),
        (
            "name: run",
            "name: run\nevaluation: {rule: {nam: exact}}",
            "'evaluation.rule.name' is missing",
        ),
        (
            "name: run",
            "name: run\nevaluation: {policy: {name: heuristic, max_dept: 8}}",
            "no option 'max_dept'.*Did you mean \"max_depth\"",
        ),
        ("name: run", "name: run\nevaluation: {policy: hueristic}", 'Did you mean "heuristic"'),
        ("name: run", "name: run\nevaluation: {shape: chan}", 'Did you mean "chain"'),
        (
            "name: run",
            "name: run\nevaluation: {sampling: {min_p: 2.0}}",
            "'evaluation.sampling.min_p'",
        ),
        ("name: run", "name: run\nevaluation: {in_turn: [ngrm]}", 'Did you mean "ngram"'),
        (
            "name: run",
            "name: 2024-05-01",
            r"'name' is datetime.date\(2024, 5, 1\); expected a name",
        ),
        ("name: run", "name: {a: b}", "'name' is a mapping; expected a name"),
        ("kind: generate", "kind: generate, seed: true", "'stages.answers.seed' is True; expected"),
        ("{lr: 1e-3, clip: .inf}", "{clip: .nan}", "optimizer.clip' is nan; expected a number > 0"),
        ("name: run", "name: [", "not valid YAML"),
        ("lr: 1e-3", "lr: {{ lr }}", "yaml:11: not valid YAML: a key is a mapping.*placeholder"),
        *(("name: run", f"name: run\nseed: {seed}", "'seed' is") for seed in (-1, 2**32)),
    ],
)
def test_what_is_wrong_is_named(tmp_path, old: str, new: str, message: str):
    with pytest.raises(UserError, match=f"(?s){message}"):
        load(tmp_path, GOOD.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "{lr: 1e-3, clip: .inf}",
            "{lr: fast}",
            "run.yaml:11: config key 'stages.distill.optimizer.lr' is 'fast'",
        ),
        (
            "{lr: 1e-3, clip: .inf}",
            "\n      lr: 1.0\n      ema: 2",
            "run.yaml:13: .*optimizer.ema' is 2; ",
        ),
        (
            "{lr: 1e-3, clip: .inf}",
            "{lrr: 1.0}",
            "run.yaml:11: config key 'stages.distill.optimizer.lrr' is unknown.*\"lr\"",
        ),
        (", kind: generate", "", "run.yaml:6: config key 'stages.answers.kind' is missing"),
        ("- {name: answers, kind: generate}", "- 3", "run.yaml:6: config key 'stages.0' is 3"),
        ("- {name: answers, kind: generate}", "- [3]", "run.yaml:6: .*'stages.0' is a list; exp"),
        ("name: run", "# nothing", "run.yaml:3: config key 'name' is missing"),
        # Settings that do not fit together: the line of what holds them.
        ("[0, 1]", "[0], model: x", "run.yaml:10: .*'stages.distill.drafter' does not fit: found"),
        (
            "name: run",
            "name: run\nevaluation:\n  policy: heuristic:max_depth=8.5",
            "run.yaml:4: .*'evaluation.policy' does not fit: .*max_depth is 8.5; expected a valid",
        ),
        (
            "generate}",
            "generate, samples: 2}",
            "run.yaml:6: .*answers' does not fit: sam.*temperature > 0",
        ),
        ("text: answers", "text: answer", "run.yaml:7: no earlier stage 'answer'.*\"answers\""),
        ("name: distill", "name: answers", "run.yaml:7: two stages have the name 'answers'"),
        (
            "name: run",
            "name: run\nevaluation:\n  split: dev",
            "run.yaml:3: evaluation.split is dev",
        ),
        ("name: run", "name: run\n  seed: 3", "run.yaml:3: not valid YAML: mapping values"),
    ],
)
def test_a_message_begins_with_the_line(tmp_path, old: str, new: str, message: str):
    text = GOOD.replace(old, new, 1)
    with pytest.raises(UserError, match=f"(?s)^{tmp_path}/{message}") as raised:
        load(tmp_path, text)
    assert "value error" not in str(raised.value).lower()


def test_every_problem_is_listed(tmp_path):
    text = GOOD.replace("name: run", "nmae: run").replace("1e-3", "0")
    with pytest.raises(UserError) as raised:
        load(tmp_path, text, "stages.answers.samples=0")
    lines = str(raised.value).splitlines()
    assert [line.partition(": config key ")[0] for line in lines] == [
        f"{tmp_path}/run.yaml:2",  # nmae is unknown
        "override 'stages.answers.samples=0'",
        f"{tmp_path}/run.yaml:11",
        f"{tmp_path}/run.yaml:2",  # name is missing
    ]


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ("some/where", "some/where, dtype: bf16", '"bfloat16"'),
        ("some/where", "some/where, dtype: half", '"float16"'),
        ("name: run", "name: run\nprecision: bfloat16", '"bf16"'),
        ("name: run", "name: run\nprecision: fp32", '"no"'),
        ("name: run", "name: run\nprecision: no", '"no"'),
        ("name: run", "name: run\ntrackers: wandb", "[wandb]"),
        ("name: run", "name: run\ntrackers: [wandbb]", '"wandb"'),
        ("name: run", "name: run\ntrackers: wandbb", '"wandb"'),
        ("name: run", "name: run\nevaluation: {baselines: [prompt_lookup]}", '"ngram"'),
        ("name: run", "name: run\nevaluation: {rule: lenienec:lenience=0.7}", '"lenience"'),
        ("kind: generate", "kind: genrate", '"generate"'),
        (
            "kind: generate",
            "kind: generate, temperature: 1.0",
            '"prompt_sampling.temperature" or "sampling.temperature"',
        ),
        ("text: answers", "epochs: 2", '"loop.epochs"'),
        ("text: answers", "losses: {kl: 1.0}", '"forward_kl"'),
        ("text: answers", "on_long: truncated", '"truncate"'),
        ("{lr: 1e-3, clip: .inf}", "{learning_rate: 1e-3}", '"lr"'),
        ("text: answers", "on_policy: {drafter: ngrm}", '"ngram"'),
    ],
)
def test_what_was_probably_meant_is_offered(tmp_path, old: str, new: str, hint: str):
    with pytest.raises(UserError, match=re.escape(f"Did you mean {hint}?")):
        load(tmp_path, GOOD.replace(old, new, 1))


def test_heads_and_rules_of_a_stage_are_offered_too(tmp_path):
    for old, new, hint in (
        ("type: medusa", "type: hydra++", "hydra_plus"),
        ("nodes: 4", "node: 4", "nodes"),
        ("split: train}", "split: train, rule: exactly}", "exact"),
    ):
        with pytest.raises(UserError, match=f'Did you mean "{hint}"'):
            load(tmp_path, JUDGED.replace(old, new, 1))


ALL_WRONG = """
name: run
target: {model: ./no/target, device: cpu, device_map: auto}
data: {train: [here.jsonl, gone.jsonl], test: here.tab}
evaluation: {split: dev, stages: [smal]}
stages:
  - {name: data, kind: generate}
  - {name: cache, kind: teacher_cache, k: 9, draft_vocabulary: 4, text: answers}
  - {name: small, kind: distill, drafter: {model: ./no/drafter}, teacher: states}
  - {name: small, kind: heads, heads: {type: medusa}, teacher_temperature: 2, start: small}
  - {name: more, kind: heads, heads: {type: medusa}, start: 'embedded:quickstrat'}
  - {name: served, kind: online, drafter: {stage: nothing}, split: train}
"""
EXPECTED = [
    "run.yaml:7: a generate stage has the name 'data', which means the data's own responses",
    "run.yaml:8: no earlier stage 'answers' of kind generate; expected one of data.",
    "run.yaml:8: stage cache: k is 9, but draft_vocabulary is only 4; lower k",
    "run.yaml:9: no earlier stage 'states' of kind teacher_cache or feature_cache; expected one",
    "run.yaml:10: two stages have the name 'small'; give each stage a different name",
    "run.yaml:10: stage small: no loss reads the teacher, so teacher_temperature would do nothing",
    "run.yaml:10: no earlier stage 'small' of kind heads; there are none.",
    "run.yaml:11: there is no embedded:quickstrat; expected one of embedded:",
    "run.yaml:12: no earlier stage 'nothing' of kind heads or distill or online; expected one of",
    "run.yaml:5: evaluation.stages names 'smal', but no stage has that name; expected one of",
    "run.yaml:3: device 'cpu' and a device_map were given; a device_map says where each layer",
    "run.yaml:8: stage cache (kind: teacher_cache) needs the target on one device, but",
    "run.yaml:9: stage small (kind: distill) needs the target on one device, but",
    "run.yaml:10: stage small (kind: heads) needs the target on one device, but",
    "run.yaml:11: stage more (kind: heads) needs the target on one device, but",
    "run.yaml:12: stage served (kind: online) needs the target on one device, but",
    "run.yaml:5: evaluation.split is dev, but data has no such split; set data.dev",
    "run.yaml:3: ./no/target does not exist. Name a model directory, a .gguf file, a hub id",
    "run.yaml:9: ./no/drafter does not exist. Name a model directory, a .gguf file, a hub id",
    "run.yaml:4: gone.jsonl: no such file (looked at ",
    'run.yaml:4: here.tab: cannot read files ending in ".tab"',
]


@pytest.mark.parametrize(
    ("text", "expected", "imported"),
    [
        (
            GOOD.replace("text: answers", "losses: {forward_lk: 1}"),
            ["run.yaml:9: config key 'stages.distill.losses.forward_lk' is unknown. Did you mean"],
            [],
        ),
        (ALL_WRONG, EXPECTED, []),
        (
            GOOD.replace("text: answers", "losses: {jsd: {bta: 0.1}}").replace(
                "name: run", "name: run\nseed: {}", 1
            ),
            [
                "run.yaml:3: config key 'seed' is a mapping; expected",
                "run.yaml:10: config key 'stages.distill.losses' does not fit: loss jsd has no "
                "option 'bta'; it has weight, beta. Did you mean \"beta\"?",
            ],
            ["torch"],
        ),
        (
            GOOD + "evaluation:\n  rule: lenience:lenience=2\n  policy: {name: heuristic, frst: 2}"
            "\n  shape: sequoia\n  gamma: 12",
            [
                "run.yaml:13: config key 'evaluation.rule' does not fit: lenience is 2.0; expected",
                "run.yaml:14: config key 'evaluation.policy' does not fit: draft-length policy "
                "heuristic has no option 'frst'; its options are max_depth, first. Did you mean",
                "run.yaml:15: config key 'evaluation.shape' does not fit: shape sequoia needs the "
                "option acceptance",
                "run.yaml:4: a.jsonl: no such file",
                "run.yaml:4: b.jsonl: no such file",
            ],
            ["torch"],
        ),
    ],
    ids=["values", "what does not fit, and missing files", "options of losses", "of parts"],
)
def test_all_mistakes_are_told_before_what_takes_long_is_imported(
    tmp_path: Path, text: str, expected: list[str], imported: list[str]
) -> None:
    """Only the code of parts knows their options, and it needs torch. The rest takes longer."""
    (tmp_path / "run.yaml").write_text(text, "utf-8")
    (tmp_path / "here.jsonl").write_text("{}", "utf-8")
    (tmp_path / "here.tab").write_text("a", "utf-8")
    code = (
        "import sys\n"
        "from draftsmith.cli.main import app\n"
        "try:\n"
        "    app(['train', 'run.yaml'])\n"
        "except SystemExit as stop:\n"
        "    assert stop.code == 2\n"
        "import train.run.config, heads.options, distill.student_settings\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'datasets', 'pyarrow'}\n"
        "print(*sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        encoding="utf-8",
        check=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(CONFIGS.parent), "COLUMNS": "1000"},
    )
    assert done.stdout.split() == imported
    lines = done.stderr.splitlines()
    for line, words in zip(lines, expected, strict=True):
        assert words in line, done.stderr


def test_names_that_are_read_from_files_are_those_of_the_registries():
    for registry, package in (
        (RULES, "decode.rules"),
        (POLICIES, "decode.lengths"),
        (SHAPES, "decode.shapes"),
        (LOSSES, "distill.losses"),
    ):
        assert registered_names(package) == (*registry,)
    assert [name for name in LOSSES if need_teacher([name])] == [
        name for name in LOSSES if LOSSES[name].needs_teacher
    ]
    assert (*UNTRAINED,) == (*(name for name in DRAFTERS if not DRAFTERS[name].trained),)
    assert [*kinds_of(HeadOptions, "type")] == [*HEADS]
    assert [*kinds_of(StageConfig, "kind")] == [*STAGES]


JUDGED = """
name: run
target: {model: some/where}
data: {train: a.jsonl, test: b.jsonl}
stages:
  - {name: medusa, kind: heads, heads: {type: medusa}, tree: {nodes: 4}}
  - {name: live, kind: online, drafter: {stage: medusa}, split: train}
evaluation: {baselines: []}
"""
BLOCK = "{rule: block, sampling: {temperature: 1.0}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            BLOCK + "}",
            "drafter of stage medusa drafts trees .* chains only",
        ),
        (
            BLOCK + ", stages: [live]}",
            "drafter of stage live drafts trees",
        ),
        ("{policy: entropy}", "entropy works only on chains, but the drafter of stage medusa"),
        ("{split: dev}", "evaluation.split is dev, but data has no such split"),
    ],
)
def test_a_drafter_that_could_not_be_judged_is_refused(
    tmp_path, settings: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load(tmp_path, JUDGED.replace("{baselines: []}", settings))
    load(tmp_path, JUDGED)
    # In chains it is no tree, and what is not judged may be anything.
    load(tmp_path, JUDGED, "evaluation.shape=chain", "evaluation.policy=entropy")
    load(tmp_path, JUDGED, "evaluation.stages=[]", "evaluation.policy=entropy")


def test_missing_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read the config"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="expected keys"):
        load(tmp_path, "- 1")


def test_merge_keys_share_settings(tmp_path):
    """A setting of the stage itself counts, and an override of one stage is for that one only."""
    text = GOOD.replace("optimizer: {", "optimizer: &shared {")
    text += (
        "\n  - {name: two, kind: distill, drafter: {stage: distill}, optimizer: *shared}"
        "\n  - name: three\n    kind: distill\n    drafter: {stage: two}"
        "\n    optimizer: {<<: *shared, lr: 2e-3}\n"
    )
    path = tmp_path / "run.yaml"
    path.write_text(text, "utf-8")
    config = load_config(path, ["stages.two.optimizer.warmup_steps=7"])
    one, two, three = (stage.optimizer for stage in config.stages[1:])
    assert (one.lr, three.lr, three.clip) == (1e-3, 2e-3, one.clip)
    assert (one.warmup_steps, two.warmup_steps, three.warmup_steps) == (10, 7, 10)


def test_overrides_reach_every_level(tmp_path):
    config = load(
        tmp_path,
        GOOD,
        "seed=3",
        "evaluation.gamma=7",
        "stages.distill.loop.epochs=9",
        "stages.0.max_new_tokens=5",
        "stages.distill.drafter.layers=[1]",
    )
    assert config.seed == 3
    assert config.evaluation.gamma == 7
    assert config.stages[1].loop.epochs == 9
    assert config.stages[0].max_new_tokens == 5
    assert config.stages[1].drafter.layers == [1]


def test_other_train_data_bring_their_own_test_and_dev(tmp_path: Path):
    """A recipe's dev and test hold prompts of another kind than the user's rows."""
    path = tmp_path / "run.yaml"
    path.write_text(GOOD.replace("test: b.jsonl", "test: b.jsonl, dev: c.jsonl"), "utf-8")
    for overrides, expected in (
        (["data.train=mine.jsonl"], (None, None)),
        (["data.train=[mine.jsonl, a.jsonl]"], ("c.jsonl", "b.jsonl")),
        (["data.train=mine.jsonl", "data.test=d.jsonl"], ("c.jsonl", "d.jsonl")),
        (["data.dev=d.jsonl", "data.train=mine.jsonl"], ("d.jsonl", "b.jsonl")),
        (["data.limit=5"], ("c.jsonl", "b.jsonl")),
    ):
        source = read_config(path, overrides)
        data = build_config(source).data
        assert (data.dev, data.test) == expected, overrides
        assert len(source.notes) == (expected == (None, None))
    assert "data.dev and data.test" in read_config(path, ["data.train=mine.jsonl"]).notes[0]


def test_parts_take_options(tmp_path):
    text = GOOD + (
        "evaluation:\n"
        "  rule: {name: lenience, lenience: 0.7}\n"
        "  policy: {name: by_batch, table: {1: 8, 4: 2}}\n"
        "  shape: chain\n"
        "  sampling: {temperature: 0.8, min_p: 0.05, repetition_penalty: 1.2}\n"
        "  draft_temperature: 0.5\n"
    )
    config = load(tmp_path, text, "evaluation.gamma=7")
    protocol = config.evaluation.protocol()
    assert make_rule(protocol.rule, protocol.sampling, "", False, "chosen").lenience == 0.7
    assert protocol.make_policy().table == {1: 8, 4: 2}
    assert protocol.sampling == Sampling(0.8, min_p=0.05, repetition_penalty=1.2)
    assert protocol.draft_sampling.temperature == 0.5
    assert config.evaluation.protocol(trained=False).shape is None
    # What a run keeps is JSON, in which keys are texts.
    stored = json.loads(json.dumps(dump_config(config)))
    again = validate_config(stored, base_dir=tmp_path)
    assert again.evaluation.protocol().make_policy().table == {1: 8, 4: 2}
    short = load(tmp_path, GOOD, "evaluation.policy=heuristic:first=3", "evaluation.gamma=7")
    assert short.evaluation.protocol().make_policy().max_depth == 7
    assert short.evaluation.protocol(2 + 2).make_policy().max_depth == 4


def test_sampling_is_configured_as_the_loop_has_it():
    assert SamplingConfig().build() == Sampling()
    assert set(SamplingConfig.model_fields) == {*Sampling().numbers}
    # A part of the settings leaves the others as they are in that place.
    assert OnPolicyConfig(sampling={"top_k": 5}).sampling.build() == Sampling(1.0, top_k=5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "expected key.sub=value"),
        ("sed=3", "^override 'sed=3': config key 'sed' is unknown. Did you mean \"seed\""),
        ("seed=[", "^override 'seed=.': .* is not valid YAML"),
        ("stages.distil.seed=3", 'Did you mean "distill"'),
        ("name.first=3", "inside a plain value"),
    ],
)
def test_wrong_overrides_are_refused(tmp_path, override: str, message: str):
    with pytest.raises(UserError, match=message):
        load(tmp_path, GOOD, override)


def test_data_paths_start_at_the_config(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}", "utf-8")
    config = load(tmp_path, GOOD)
    assert config.data.train == str(tmp_path / "a.jsonl")
    assert config.data.test == "b.jsonl"  # not there: left for `datasets` or the error


def test_a_draft_vocabulary_is_not_changed_midway(tmp_path):
    text = GOOD + (
        "  - name: more\n    kind: distill\n    text: answers\n"
        "    drafter: {stage: distill}\n    draft_vocabulary: 5\n"
    )
    with pytest.raises(UserError, match="the drafter of distill keeps its draft vocabulary"):
        load(tmp_path, text)


def test_an_output_rank_needs_a_draft_vocabulary(tmp_path):
    text = GOOD.replace("    kind: distill\n", "    kind: distill\n    output_rank: 4\n", 1)
    assert text != GOOD
    with pytest.raises(UserError, match="output_rank cannot be set here: it is of an output layer"):
        load(tmp_path, text)


def test_differences_are_listed_by_key():
    old = {"a": 1, "b": {"c": [1, 2], "d": 4}}
    new = {"a": 1, "b": {"c": [1, 3], "d": 4}, "e": 5}
    assert differences(old, new) == ["b.c.1: 2 → 3", "e: None → 5"]


@pytest.mark.parametrize("key", sorted(REMOVED))
def test_a_setting_that_is_gone_says_what_to_write_instead(tmp_path, key):
    off, instead = REMOVED[key]
    text = GOOD.replace("    kind: distill\n", f"    kind: distill\n    {key}: true\n", 1)
    with pytest.raises(UserError) as caught:
        load(tmp_path, text)
    assert f"config key 'stages.distill.{key}' was removed: {instead}." in str(caught.value)
    # A run that did not use it goes on, and one that did is told.
    assert differences({"stages": [{"name": "a", key: off}]}, {"stages": [{"name": "a"}]}) == []
    used = differences({"stages": [{"name": "a", key: "on"}]}, {"stages": [{"name": "a"}]})
    assert used == [f"stages.a.{key}: 'on' → None"]


def test_differences_of_stages_are_listed_by_name():
    a, b, c = ({"name": name, "lr": 1} for name in "abc")
    assert differences({"stages": [a, b]}, {"stages": [a, c, b]}) == ["stages.c was added"]
    assert differences({"stages": [a, b]}, {"stages": [b | {"lr": 2}]}) == [
        "stages.a was removed",
        "stages.b.lr: 1 → 2",
    ]
    assert differences([a, b], [b, a], "stages") == ["stages: a, b → b, a"]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_config_is_valid(path: Path):
    config = load_config(path)
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["name"] == config.name
