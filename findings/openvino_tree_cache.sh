#!/usr/bin/env bash
# Versions: openvino-genai 2026.4.1.0, optimum-intel 2.2.0, transformers 5.5.4
# Behaviour: with INFERENCE_PRECISION_HINT=f32 on a CPU and the cache as it is by default, EAGLE-3 with a tree writes other
#   greedy texts than the target; with chains, or with KV_CACHE_PRECISION=f32 too, the same ones.
# Guess: drafts change no greedy text, in all shapes, or not more than the cache's precision does in chains.
# Seen:
#   LINE1
#   LINE2
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.5.4 optimum==2.3.0 nncf==3.4.0 openvino==2026.4.1 \
    openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 || exit 2
"$folder/venv/bin/pip" install --quiet --no-deps optimum-intel==2.2.0 || exit 2
cd "$folder"
"$folder/venv/bin/python" - 2> errors <<'END' || { code=$?; [ $code = 1 ] && tail -n 5 errors >&2; exit $code; }
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
import torch
from openvino_tokenizers import convert_tokenizer
from optimum.exporters.openvino import export_from_model, model_patcher
from optimum.intel import OVModelForCausalLM
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 24
shape = dict(
    hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=2,
    vocab_size=VOCAB, max_position_embeddings=128, tie_word_embeddings=False,
)
torch.manual_seed(0)
target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=12, initializer_range=0.2, **shape)).eval()
target.save_pretrained("target")
tokens = {"<e>": 0} | {f"t{i}": i for i in range(1, VOCAB)}
PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(tokens, unk_token="<e>")), eos_token="<e>", pad_token="<e>"
).save_pretrained("target")


class Heads(model_patcher.LlamaEagle3ForCausalLM):
    """The converter's own class."""


# Random, so that a draft of 24 tokens is right by chance, on any branch.
drafter = Heads(LlamaConfig(num_hidden_layers=1, draft_vocab_size=VOCAB, initializer_range=0.2, **shape)).eval()
drafter.config.architectures = ["LlamaForCausalLMEagle3"]
export_from_model(drafter, output=Path("drafter-ov"), task="text-generation-with-past")
OVModelForCausalLM.from_pretrained(
    "target", export=True, compile=False, load_in_8bit=False, dtype="float32"
).save_pretrained("target-ov")
parts = convert_tokenizer(PreTrainedTokenizerFast.from_pretrained("target"), with_detokenizer=True)
for folder in ("target-ov", "drafter-ov"):
    for part, name in zip(parts, ("tokenizer", "detokenizer")):
        openvino.save_model(part, f"{folder}/openvino_{name}.xml")


def texts(precision, **drafts):
    draft = {"draft_model": openvino_genai.draft_model("drafter-ov", "CPU", **precision)} if drafts else {}
    pipeline = openvino_genai.LLMPipeline(
        "target-ov", "CPU", scheduler_config=openvino_genai.SchedulerConfig(), **draft, **precision
    )
    settings = openvino_genai.GenerationConfig(max_new_tokens=40, ignore_eos=True)
    for name, value in drafts.items():
        setattr(settings, name, value)
    found = []
    for first in range(1, 21):
        ids = np.array([[first, 3, 5, 2]], dtype=np.int64)
        given = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        found.append(list(pipeline.generate(given, settings).tokens[0]))
    return found


tree = {"num_assistant_tokens": 8, "branching_factor": 4, "tree_depth": 3}
counts = {}
for label, cache in (("the cache as it is", {}), ("KV_CACHE_PRECISION f32", {"KV_CACHE_PRECISION": "f32"})):
    precision = {"INFERENCE_PRECISION_HINT": "f32"} | cache
    plain, chains, trees = texts(precision), texts(precision, num_assistant_tokens=3), texts(precision, **tree)
    counts[label] = [sum(a == b for a, b in zip(plain, other)) for other in (chains, trees)]
    print(f"{label}: of 20 texts {counts[label][0]} are the plain ones with chains, {counts[label][1]} with trees")
as_it_is, in_f32 = counts.values()
sys.exit(not (as_it_is[1] < 15 < as_it_is[0] and in_f32 == [20, 20]))
END
