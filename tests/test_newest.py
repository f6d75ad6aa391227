"""What `make smoke-newest` runs on the newest libraries: all imports, a decode of each family of
kinds, and a training of each kind of stage."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.drafters import DRAFTERS
from decode.loop.decoding import Decoder
from tests.stages import DRAFTER, LOOP, examples, make_stage, run_stage, stage_context
from tests.test_encoder_decoder import FAMILIES as ENCODERS
from tests.test_encoder_decoder import test_greedy_texts_are_those_of_generate as reads_a_source
from tests.test_families import FAMILIES as SINGULAR
from tests.test_families import test_text_is_the_models_own as is_its_own
from tests.test_layers import CHILDREN
from tests.test_recurrent import test_greedy_text_equals_generate as has_a_state
from tests.tiny import generated, tiny_model, tiny_target
from tools.imports import PACKAGES, module_name, tracked
from train.stages import STAGES

pytestmark = [
    pytest.mark.thorough,  # the tests of each kind of model and stage prove more
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # peft's affair
]
PROMPT = [5, 9, 3, 7, 5, 9, 3]


def test_every_module_is_imported() -> None:
    for file in tracked(*PACKAGES):
        if file not in CHILDREN and not file.endswith("__main__.py"):
            import_module(module_name(file))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text", "phi3", "gpt2"])
def test_usual_families_decode(family: str) -> None:
    model = tiny_model(family, vocab=40)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        found = Decoder(model, DRAFTERS["ngram"](), gamma=3).decode([PROMPT], 8).outputs
    assert found == [generated(model, PROMPT, 8)]


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "bamba"])
def test_families_with_states_decode(family: str) -> None:
    has_a_state(family, "often wrong")


@pytest.mark.parametrize("family", ENCODERS)
def test_families_with_an_encoder_decode(family: str) -> None:
    reads_a_source(family, "ngram")


@pytest.mark.parametrize("family", SINGULAR)
def test_singular_families_decode(family: str) -> None:
    is_its_own(family)


HEADS: dict[str, Any] = {"loop": LOOP | {"epochs": 1}, "heads": {"type": "medusa", "heads": 2}}
LEARNING = {"every_requests": 4, "steps": 1, "tokens_per_batch": 250, "k": 16}
# One of each kind; later ones read earlier ones.
CHAIN: list[tuple[str, dict[str, Any]]] = [
    ("generate", {"max_new_tokens": 6}),
    ("datastore", {}),
    ("teacher_cache", {"k": 8}),
    ("feature_cache", {"max_length": 100}),
    ("distill", DRAFTER),
    ("heads", HEADS),
    ("layer_skip", {"exit_layer": 2, "loop": LOOP | {"epochs": 1}, "lora": {"r": 2}}),
    ("online", {"drafter": {"layers": [0]}, "max_new_tokens": 6, "learning": LEARNING}),
]


def test_every_kind_of_stage_runs(tmp_path: Path) -> None:
    assert {kind for kind, _ in CHAIN} == {*STAGES}
    context = stage_context(tmp_path, tiny_target(layers=4))
    context.corpus.examples["stream"] = examples("stream", 8)
    context.corpus.examples["test"] = examples("test", 2)
    for kind, settings in CHAIN:
        run_stage(context, make_stage(kind, kind, **settings))
