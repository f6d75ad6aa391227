"""A diagnosis of an honest service is that it is equal, and counts choose between mistakes."""

import copy

import numpy as np
import pytest

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.settings import DecodeSettings
from draftsmith.diagnosis.engine import parse_reading
from draftsmith.diagnosis.entry import Diagnosis, diagnose
from draftsmith.diagnosis.explain import EQUAL, NONE, explain
from draftsmith.diagnosis.mistakes import MISTAKES, with_heads
from heads.heads_drafter import HeadsDrafter
from tests.diagnosis_controls import GAMMA, prompts, target, taught
from tests.service import serving
from tests.tiny import moved
from train.engines.server_config import ServerConfig

PROMPTS = 40


def diagnosed(served: Drafter | None) -> Diagnosis:
    """The service drafts with `served`; the diagnosis is given the drafter as it is."""
    asked = prompts(PROMPTS, 0)
    with serving(target(), served, DecodeSettings(gamma=GAMMA)) as running:
        config = ServerConfig(url=[running.url], concurrency=1)
        return diagnose(running.url, target(), taught("eagle3"), asked, config, gamma=GAMMA)


def test_an_honest_service_is_equal() -> None:
    found = diagnosed(taught("eagle3"))
    assert found.explanation.verdict == EQUAL
    assert found.there == found.here
    assert sum(found.here) > GAMMA / 2  # else a mistake has little to spoil


@pytest.mark.parametrize("name", ["layers_below", "first_slot"])
def test_a_mistake_in_a_service_is_named(name: str) -> None:
    found = diagnosed(MISTAKES[name]().make(taught("eagle3"), target()))
    assert found.explanation.verdict == name
    assert found.headline.startswith(f"{name}: {MISTAKES[name].says}")
    assert sum(found.there) < sum(found.here)


def test_an_unknown_mistake_is_not_named() -> None:
    rng = np.random.default_rng(0)
    said = {name: rng.integers(0, 4, 200).tolist() for name in (EQUAL, "a", "b", "c")}
    for _ in range(100):
        assert explain(rng.integers(0, 4, 200).tolist(), said, {}).verdict == NONE


def test_rounding_of_some_prompts_hides_no_mistake_and_makes_none() -> None:
    rng = np.random.default_rng(0)
    said = {name: rng.integers(0, 4, 200) for name in (EQUAL, "a", "b")}
    values = {name: x.tolist() for name, x in said.items()}
    for name in said:
        for _ in range(100):
            counted = np.where(rng.random(200) < 0.05, rng.integers(0, 4, 200), said[name])
            assert explain(counted.tolist(), values, {}).verdict == name


def test_mistakes_that_say_the_same_are_not_told_apart() -> None:
    said = {EQUAL: [0, 1] * 20, "a": [1, 1] * 20, "b": [1, 1] * 20, "c": [0, 1] * 20}
    found = explain([1, 1] * 20, said, {})
    assert (found.verdict, found.like, found.unseen) == ("a", ("b",), ("c",))


def test_an_engine_that_accepts_nothing_has_one_of_the_mistakes_that_accept_nothing() -> None:
    def accepts(prompts: int) -> list[tuple[int, int]]:
        return [(1, 1)] * prompts + [(0, 0)] * (200 - prompts)

    said = {EQUAL: accepts(150), "a": accepts(3), "b": accepts(0), "c": accepts(90)}
    found = explain(accepts(0), said, {})
    assert found.little
    assert found.names == ("b", "a")
    # A drafter that accepts nothing in our own loop is no matter of the engine.
    assert explain(accepts(0), said | {EQUAL: accepts(2)}, {}).names == ()
    # No known mistake accepts so little.
    assert explain(accepts(0), said | {"a": accepts(80), "b": accepts(80)}, {}).verdict == NONE
    # The counts of prompts that accept something say which.
    assert explain(accepts(90), said, {}).names == ("c",)


def test_a_service_that_drafts_what_no_text_has() -> None:
    """Whatever it is that goes wrong: it accepts as little as some known mistakes do."""
    drafter = taught("eagle3")
    assert isinstance(drafter, HeadsDrafter)
    found = diagnosed(with_heads(drafter, moved(copy.deepcopy(drafter.heads), 3.0)))
    assert found.explanation.little
    assert {"d2t_dropped", "d2t_absolute"} <= {*found.explanation.names}
    assert "one of: " in found.headline


PAGE = """\
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 3.0
"""


def test_counters_are_read_by_place() -> None:
    found = parse_reading(PAGE, 3)
    assert found is not None
    assert (found.engine, found.by_place) == ("vllm", (6, 3, 0))
    with pytest.raises(UserError, match="--gamma is 1"):
        parse_reading(PAGE, 1)
    assert parse_reading("vllm:num_requests_running 0", 3) is None
