"""Training of heads on hidden states that a server hands out, and the server's faults."""

import contextlib
import runpy
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from starlette.responses import Response

from decode.base.errors import UserError
from decode.model.hidden_states import FINAL
from decode.model.loading import Target
from distill.teacher.feature_sources import LiveFeatures
from tests.export import needs, save_target
from tests.stages import (
    drafter_weights,
    examples,
    make_stage,
    plan_stage,
    run_killed,
    run_stage,
    stage_context,
    with_examples,
)
from tests.state_server import StatesEngine, Tensors
from tests.training import assert_equal
from tests.upstream import served
from train.base.stage import StageInputs
from train.engines import ask_servers
from train.engines.states import ask_states, open_states
from train.settings.server_config import ServedFeatures

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

HEADS: dict[str, Any] = {
    "heads": {"type": "eagle3", "steps": 2, "captured_layers": [0, 1]},
    # Reads the last hidden states too. To vLLM these are those of layer 1, before the norm.
    "losses": {"forward_kl": 1.0},
    "loop": {"epochs": 2, "tokens_per_batch": 150, "log_every": 1, "save_every": 1},
    "optimizer": {"lr": 1e-2, "warmup_steps": 2},
}


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ask_servers, ask_states):
        monkeypatch.setattr(module, "LONGEST_WAIT", 0.0)


def engine_of(
    context: StageInputs, name: str = "files", layers: Sequence[int] = (1, 2), **settings: Any
) -> StatesEngine:
    directory = context.directory / name
    directory.mkdir()
    return StatesEngine(directory, list(layers), **settings)


def train_with(context: StageInputs, url: Any, name: str = "served", **server: Any) -> Any:
    server = {"directory": str(context.directory / "files"), "retries": 2} | server
    return run_stage(context, stage_with(url, name, server))


def stage_with(url: Any, name: str, server: dict[str, Any]) -> Any:
    return make_stage("heads", name, features={"server": {"url": url} | server}, **HEADS)


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, weights in theirs.items():
        torch.testing.assert_close(ours[name], weights, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("heads", "layers"),
    [
        (HEADS["heads"], [1, 2]),
        pytest.param({"type": "mtp", "depth": 2}, [2], marks=pytest.mark.thorough),
    ],
)
def test_training_from_servers_is_training_beside_the_target(
    heads: Any, layers: list[int], context: StageInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are few and small, none stays, and a kill changes no bit."""
    monkeypatch.setitem(HEADS, "heads", heads)
    live = drafter_weights(run_stage(context, make_stage("heads", "live", **HEADS)))
    engine, other = (engine_of(context, name, layers) for name in ("files", "unused"))
    other.directory = engine.directory
    texts = [tuple(sample.tokens) for sample in context.corpus.samples("data")]
    with served(engine.app()) as one, served(other.app()) as two:
        outcome = train_with(context, [one, two], concurrency=2)
        assert_close(drafter_weights(outcome), live)
        assert engine.asked + other.asked >= Counter(2 * texts)
        assert (engine.asked + other.asked).total() == 2 * len(texts) + 2 * 2  # and probes
        assert min(engine.asked.total(), other.asked.total()) > 4
        assert engine.left() == []
        assert engine.most <= 4
        # Room for one file at a time. That of a request that times out comes while the next waits.
        engine.most, engine.delays = 0, [0.0] * 4 + [1.6, 0.4]
        largest = 4096 + max(map(len, texts)) * (len(layers) * 32 * 4 + 8)
        server = {"directory": str(engine.directory), "max_gib": 1.5 * largest / 2**30}
        stage = stage_with(one, "killed", server | {"timeout_seconds": 1.2})
        again = drafter_weights(run_killed(context, stage, monkeypatch, 3))
    assert_equal(again, drafter_weights(outcome))
    assert engine.most == 1
    assert engine.left() == []
    assert outcome.summary["training"]["clock"]["teacher"] > 0


def test_faults_that_pass_lose_no_sample(context: StageInputs) -> None:
    def not_finite(tensors: Tensors) -> Tensors:
        tensors["hidden_states"][1, 1, 5] = float("inf")
        return tensors

    engine, other = engine_of(context), engine_of(context, "unused")
    other.directory = engine.directory
    with served(engine.app()) as one, served(other.app()) as two:
        plain = drafter_weights(train_with(context, one, "plain"))
        engine.faults = [lambda tensors: None, not_finite, Response(status_code=503)]
        (engine.directory / "cmpl-of-another-run.safetensors").touch()
        weights = drafter_weights(train_with(context, one, "faulty", concurrency=1))
        assert not engine.faults
        assert_equal(weights, plain)
        # One of two servers ends on the way.
        other.faults = [Response(status_code=500) for _ in range(99)]
        weights = drafter_weights(train_with(context, [one, two], "lost", probe_samples=0))
        assert_equal(weights, plain)
    assert str(context.reporter).count("The other servers take its samples") == 1
    assert f"{two} did not answer in 3 attempts" in str(context.reporter)
    assert engine.left() == ["cmpl-of-another-run.safetensors"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_sample_that_no_server_answers_is_run_here(context: StageInputs, count: int) -> None:
    engines = [engine_of(context, name) for name in ("files", "unused")[:count]]
    samples = [sample.tokens for sample in context.corpus.samples("data")]
    # The longest is as long as its batch.
    never = [max(samples, key=len), samples[0]]
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(served(engine.app())) for engine in engines]
        for engine in engines:
            engine.directory = engines[0].directory
        plain = drafter_weights(train_with(context, urls, "plain"))
        engines[0].never = never
        if count > 1:
            assert_equal(drafter_weights(train_with(context, urls, "other")), plain)
            assert "so the target runs" not in str(context.reporter)
        engines[-1].never = never
        for engine in engines:
            engine.asked.clear()
        weights = drafter_weights(train_with(context, urls, "never", retries=0, probe_samples=0))
    assert_close(weights, plain)
    for tokens in never:  # not in the second epoch
        assert [engine.asked[tuple(tokens)] for engine in engines] == [1] * count
    assert str(context.reporter).count("so the target runs sample") == 2
    assert engines[0].left() == []


def not_finite(tensors: Tensors) -> Tensors:
    return tensors | {"hidden_states": tensors["hidden_states"] * float("nan")}


def cut(tensors: Tensors) -> Tensors:
    return {name: x[:-3].clone() for name, x in tensors.items()}


def other_tokens(tensors: Tensors) -> Tensors:
    return tensors | {"token_ids": tensors["token_ids"] + 1}


def fewer_layers(tensors: Tensors) -> Tensors:
    return tensors | {"hidden_states": tensors["hidden_states"][:, :1].clone()}


def half(tensors: Tensors) -> Tensors:
    return tensors | {"hidden_states": tensors["hidden_states"].half()}


def next_layer(tensors: Tensors) -> Tensors:
    return tensors | {"hidden_states": tensors["hidden_states"].roll(1, 1)}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (not_finite, r"no usable hidden states of sample .* in 3 attempts: .*NaN"),
        (lambda tensors: None, r"in 3 attempts: .*safetensors is not complete"),
        (cut, r"are \d+ of \d+; switch its prefix caching off"),
        (other_tokens, "tokens of the server's hidden states are others"),
        (fewer_layers, r"are \[\d+, 1, 32\] .* expected \[\d+, 2, 32\].*_ids \[1, 2\]"),
        (half, r"in torch.float16, expected .* in torch.float32"),
        (next_layer, "does not give the hidden states of tiny-llama: those of layer 0 differ"),
        (Response(b'{"choices": [{}]}'), r"replied without hidden states.*extract_hidden_states"),
        (Response(b"too long", 400), r"refuses sample .* tokens: too long.*max-model-len"),
    ],
)
def test_faults_that_stay_end_the_stage(context: StageInputs, fault: Any, message: str) -> None:
    engine = engine_of(context)
    if isinstance(fault, Response):
        engine.faults = [fault] * 99
    else:
        engine.always = fault
    with served(engine.app()) as url, pytest.raises(UserError, match=message):
        train_with(context, url)
    assert engine.left() == []


def test_disks_and_directories(context: StageInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(context)
    (context.directory / "other").mkdir()
    with served(engine.app()) as url:
        with pytest.raises(
            UserError, match=r"a sample of \d+ tokens take .*raise features.server.max_gib"
        ):
            train_with(context, url, max_gib=1e-6)
        with pytest.raises(UserError, match="which is no directory here"):
            train_with(context, url, directory="/no/such")
        with monkeypatch.context() as patch:
            patch.setattr(ask_states, "SEEN_SECONDS", 0.0)
            with pytest.raises(UserError, match=r"does not have it; set server\.directory"):
                train_with(context, url, directory=str(context.directory / "other"))
        with monkeypatch.context() as patch:
            engine.always = lambda tensors: None
            patch.setattr(ask_states, "free_space", lambda _: 100)
            with pytest.raises(UserError, match=r"the disk of .*files is full"):
                train_with(context, url)
        with monkeypatch.context() as patch:
            patch.setattr("decode.base.artifact.free_space", lambda _: 100)
            with pytest.raises(UserError, match=r"on their way .features.server.max_gib"):
                train_with(context, url)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"url": "http://a"}, "a directory; give its path here"),
        ({"launch": "vllm", "options": {"kv-transfer-config": {}}}, "the stage sets itself"),
        ({"launch": "llama-server"}, "Input should be 'vllm'"),
    ],
)
def test_settings_that_do_not_fit(server: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServedFeatures.model_validate({"server": server})


def test_a_plan_names_the_layers_and_counts_the_window(context: StageInputs) -> None:
    live = plan_stage(context, make_stage("heads", "live", **HEADS))
    plan = plan_stage(context, stage_with("http://a", "served", {"directory": "/x"}))
    assert "eagle_aux_hidden_state_layer_ids [1, 2]" in plan.what
    assert plan.memory.states > live.memory.states == 0
    assert plan.disk_bytes == live.disk_bytes
    # The longest sample has as many tokens as the target's positions, less one, of 264 bytes each.
    few = {"server": {"url": "http://a", "directory": "/x", "max_gib": 0.0002}}
    narrow = make_stage("heads", "narrow", features=few, **HEADS)
    assert plan_stage(context, narrow).what == plan.what
    with pytest.raises(UserError, match=r"each of 4 processes .* raise features.server.max_gib"):
        plan_stage(replace(context, processes=4), narrow)
    server = {"server": {"url": "http://a", "directory": "/x"}}
    with pytest.raises(UserError, match="a server replaces the live target"):
        make_stage("heads", "both", features=server, tokens_per_pass=9, **HEADS)


@pytest.mark.engine
@pytest.mark.timeout(280)
def test_vllm_hands_out_the_states_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("vllm")
    target: Target = save_target(tmp_path / "target")
    context = with_examples(stage_context(tmp_path, target), train=examples("train", 6))
    stage = HEADS | {"loop": HEADS["loop"] | {"epochs": 1, "max_steps": 2}}
    off: list[float] = []

    def compared(servers: Any, chosen: Any, _: Any, layers: Any, *__: Any) -> None:
        # All of them are read in parts of 16 tokens.
        for sample in chosen:
            ids = torch.tensor([sample.tokens])
            expected = LiveFeatures(target.model, [0, 1, FINAL]).features(ids, ids > -1, [])
            ((_, states),) = servers.ask_each(sample)
            for layer, x in layers.joined([states], target.device).items():
                off.append(float((x - expected[layer]).norm() / expected[layer].norm()))

    monkeypatch.setattr("train.engines.states.open_states._check", compared)
    options = {"enforce_eager": True, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    server = {"launch": "vllm", "options": options, "concurrency": 2}
    outcome = run_stage(context, make_stage("heads", "s", features={"server": server}, **stage))
    live = run_stage(context, make_stage("heads", "live", **stage))
    assert len(off) == 2 * 3
    assert max(off) < 1e-5
    # AdamW's first steps have the size of the learning rate even where a gradient is nearly 0.
    ours, theirs = drafter_weights(outcome), drafter_weights(live)
    assert ours.keys() == theirs.keys()
    for name, weights in theirs.items():
        assert (ours[name] - weights).norm() < 1e-3 * weights.norm()
    history = [run.summary["training"]["history"] for run in (outcome, live)]
    for theirs, ours in zip(*history, strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-4)
    assert not [path for path in (tmp_path / "s").iterdir() if path.name.startswith(".tmp-")]


def connector_on(base: type, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our connector on a class in place of vLLM's."""
    package = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
    theirs = {"ExampleHiddenStatesConnector": base, "extract_from_kv_cache": None}
    for name, members in (("vllm", {"__version__": "9.1"}), (package, theirs)):
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return runpy.run_path(str(open_states.MODULES / "vllm_connector.py"))["StatesConnector"]()


def test_an_answer_ends_one_token_behind_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scheduling:
        def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None: ...

        def build_connector_meta(self, scheduler_output: str) -> str:
            return scheduler_output

        def request_finished(self, request: Any, block_ids: list[int]) -> bool:
            return True

    connector = connector_on(Scheduling, monkeypatch)
    ends = {"end_token_ids": [2, 3]}
    given = {"answer": ends, "states": None}
    requests = [
        SimpleNamespace(request_id=name, kv_transfer_params=x, max_tokens=90, output_token_ids=[])
        for name, x in given.items()
    ]
    lengths: list[tuple[int, ...]] = []
    for request in requests:
        connector.update_state_after_alloc(request, None, 0)
    for token in (7, 3, 8):
        for request in requests:
            request.output_token_ids.append(token)
            request.num_output_tokens = len(request.output_token_ids)
        assert connector.build_connector_meta("step") == "step"
        lengths.append(tuple(request.max_tokens for request in requests))
    assert lengths == [(90, 90), (3, 90), (4, 90)]  # vLLM ended it at 3
    assert connector.request_finished(requests[0], [])
    requests[0].max_tokens = 90
    connector.build_connector_meta("step")
    assert requests[0].max_tokens == 90


def test_names_that_vllm_renamed_end_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class Renamed:
        def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
            self._kv_cache = next(iter(kv_caches.values()))

        def _submit_async_write(self) -> None: ...

    states = connector_on(Renamed, monkeypatch)
    states.register_kv_caches({"layer": torch.zeros(1, device="meta")})
    with pytest.raises(RuntimeError, match=r"vLLM 9\.1 has no _write_tensors, .*_lock_fds"):
        states.register_kv_caches({"layer": torch.zeros(1)})
