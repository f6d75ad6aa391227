"""The benchmarks' settings and helpers; what they measure is not a test's business."""

import pytest

from benchmarks.common import in_fresh_process, require
from benchmarks.objectives import ARMS, BASE, PROMPTS, run_config
from decode.errors import UserError
from train.config import validate_config


def double(number: int) -> int:
    if number < 0:
        raise UserError("negative")
    return 2 * number


def test_a_fresh_process_returns_what_the_function_does():
    assert in_fresh_process("tests.test_benchmarks:double", number=21) == 42
    with pytest.raises(UserError, match="negative"):
        in_fresh_process("tests.test_benchmarks:double", number=-1)


def test_a_missing_contestant_is_named_with_what_installs_it():
    with pytest.raises(UserError, match="pip install"):
        require("no-such-package", "no-such-package>=1", "this benchmark")


@pytest.mark.parametrize("quick", [True, False])
def test_the_objectives_are_one_sound_run(quick: bool, tmp_path):
    arms = [(loss, text, seed) for seed in range(2) for loss, text in ARMS]
    config = validate_config(run_config(arms, quick=quick, runs=tmp_path), base_dir=PROMPTS)
    assert len({stage.name for stage in config.stages}) == len(config.stages)
    assert BASE in ARMS
