#!/usr/bin/env bash
# Versions: openvino-genai 2026.4.1.0, optimum-intel 2.2.0, transformers 5.5.4
# Behaviour: for EAGLE-3 the pipeline captures the outputs of the target's layers 2, n // 2 and n - 3, counted from 0, whatever
#   the drafter's config says. `hidden_layers_list`, which an error of it asks for, cannot be given from Python; in the
#   `rt_info` of the drafter's model it is read.
# Guess: the inputs of these layers, as EAGLE's code (which a comment there cites), vLLM, SGLang and llama.cpp take. A drafter
#   that was trained on those drafts worse there, without a message.
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
import json
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
import torch
from optimum.exporters.openvino import export_from_model, model_patcher
from optimum.intel import OVModelForCausalLM
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from openvino_tokenizers import convert_tokenizer

LAYERS, HIDDEN, VOCAB = 12, 32, 64
shape = dict(
    hidden_size=HIDDEN, intermediate_size=HIDDEN, num_attention_heads=1, num_key_value_heads=1,
    vocab_size=VOCAB, max_position_embeddings=128, tie_word_embeddings=False,
)
# All tokens have the embedding (1, 0, …), of which token 1 is the likeliest. Layer 9, of 12, alone changes
# the state, to one of which token 2 is: so the target writes token 2 always.
target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **shape)).eval()
with torch.no_grad():
    for name, weight in target.named_parameters():
        weight.fill_(1.0 if "norm" in name else 0.0)
    target.model.embed_tokens.weight[:, 0] = 1.0
    mlp = target.model.layers[9].mlp
    mlp.gate_proj.weight[0, 0] = mlp.up_proj.weight[0, 0] = 1.0
    mlp.down_proj.weight[1, 0] = 1.0
    target.lm_head.weight[1, 0] = target.lm_head.weight[2, 1] = 1.0
target.save_pretrained("target")
tokens = {"<e>": 0} | {f"t{i}": i for i in range(1, VOCAB)}
PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(tokens, unk_token="<e>")), eos_token="<e>", pad_token="<e>"
).save_pretrained("target")


class Heads(model_patcher.LlamaEagle3ForCausalLM):
    """The converter's own class."""


# The drafter says what the third of the captured states says: its layer adds nothing.
config = LlamaConfig(num_hidden_layers=1, draft_vocab_size=VOCAB, **shape)
config.architectures = ["LlamaForCausalLMEagle3"]
drafter = Heads(config).eval()
with torch.no_grad():
    for name, weight in drafter.named_parameters():
        weight.fill_(1.0 if "norm" in name else 0.0)
    drafter.model.fc.weight[:, 2 * HIDDEN :] = torch.eye(HIDDEN)
    drafter.model.lm_head.weight.copy_(target.lm_head.weight)
drafter.config.architectures = ["LlamaForCausalLMEagle3"]
export_from_model(drafter, output=Path("drafter-ov"), task="text-generation-with-past")
OVModelForCausalLM.from_pretrained(
    "target", export=True, compile=False, load_in_8bit=False, dtype="float32"
).save_pretrained("target-ov")
parts = convert_tokenizer(PreTrainedTokenizerFast.from_pretrained("target"), with_detokenizer=True)
for folder in ("target-ov", "drafter-ov"):
    for part, name in zip(parts, ("tokenizer", "detokenizer")):
        openvino.save_model(part, f"{folder}/openvino_{name}.xml")


def accepted(folder):
    pipeline = openvino_genai.LLMPipeline(
        "target-ov", "CPU", scheduler_config=openvino_genai.SchedulerConfig(),
        draft_model=openvino_genai.draft_model(folder, "CPU"),
    )
    settings = openvino_genai.GenerationConfig(max_new_tokens=16, num_assistant_tokens=3, ignore_eos=True)
    ids = np.array([[5, 6, 7, 8]], dtype=np.int64)
    given = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    found = pipeline.generate(given, settings)
    assert set(found.tokens[0]) == {2}
    return found.extended_perf_metrics.get_num_accepted_tokens()


core = openvino.Core()
model = core.read_model("drafter-ov/openvino_model.xml")
model.set_rt_info([1, 5, 8], "hidden_layers_list")
Path("named").mkdir()
openvino.save_model(model, "named/openvino_model.xml", compress_to_fp16=False)
for file in Path("drafter-ov").iterdir():
    if "openvino_model" not in file.name:
        (Path("named") / file.name).write_bytes(file.read_bytes())
by_default, named = accepted("drafter-ov"), accepted("named")
print(f"accepted of a drafter that reads layer 9's output: {by_default} tokens by default, {named} with layers 1, 5 and 8 named")
try:
    openvino_genai.LLMPipeline(
        "target-ov", "CPU", scheduler_config=openvino_genai.SchedulerConfig(),
        draft_model=openvino_genai.draft_model("drafter-ov", "CPU", hidden_layers_list=[1, 5, 8]),
    )
    said = "taken"
except RuntimeError as error:
    said = str(error).strip().splitlines()[-1]
print(f"hidden_layers_list=[1, 5, 8]: {said}")
sys.exit(not (by_default > 0 == named))
END
