#!/usr/bin/env bash
# Versions: speculators 0.9.0, transformers 5.19.0, torch 2.13.0
# Behaviour: `convert_model` of an EAGLE-3 drafter keeps `norm_output` of its config, and passes over `norm_before_residual`,
#   `eagle_aux_hidden_state_layer_ids` and the rotary base that transformers 5 writes (`rope_parameters`): each has its
#   default afterwards, without a warning, so the converted drafter computes other numbers. Only arguments set the first two.
# Guess: the converted config has what the config has, or the conversion says what it cannot keep.
# Seen:
#   norm_output: True is True
#   norm_before_residual: True is False
#   eagle_aux_hidden_state_layer_ids: [1, 5, 8] is None
#   rotary base: 500000.0 is 10000.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.19.0 datasets==5.1.0 numpy==2.4.6 loguru==0.7.3 pydantic-settings==2.16.3 openai==3.57.0 aiohttp==3.14.5 psutil typer || exit 2
"$folder/venv/bin/pip" install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0 || exit 2
"$folder/venv/bin/python" - "$folder" 2>/dev/null <<'END'
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.convert.entrypoints import convert_model
from transformers import LlamaConfig

place = Path(sys.argv[1])
target, drafter, made = place / "target", place / "drafter", place / "made"
rotary = {"rope_type": "default", "rope_theta": 500000.0}
sizes = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64, "rope_parameters": rotary,
}
LlamaConfig(num_hidden_layers=12, **sizes).save_pretrained(target)
shapes = {
    "fc": (32, 96), "norm": (32,), "lm_head": (16, 32), "midlayer.input_layernorm": (32,),
    "midlayer.hidden_norm": (32,), "midlayer.post_attention_layernorm": (32,),
    "midlayer.self_attn.q_proj": (32, 64), "midlayer.self_attn.k_proj": (32, 64),
    "midlayer.self_attn.v_proj": (32, 64), "midlayer.self_attn.o_proj": (32, 32),
    "midlayer.mlp.gate_proj": (64, 32), "midlayer.mlp.up_proj": (64, 32),
    "midlayer.mlp.down_proj": (32, 64),
}
weights = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
# The draft vocabulary is every fourth token.
weights |= {"d2t": 3 * torch.arange(16), "t2d": torch.arange(64) % 4 == 0}
drafter.mkdir()
save_file(weights, drafter / "model.safetensors")
settings = {
    "norm_output": True, "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": [1, 5, 8],
}
config = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 16,
    "num_hidden_layers": 1, **sizes, **settings,
}
(drafter / "config.json").write_text(json.dumps(config), encoding="utf-8")
convert_model(str(drafter), str(target), "eagle3", str(made))
after = json.loads((made / "config.json").read_text(encoding="utf-8"))
seen = {name: after[name] for name in settings}
base = after["transformer_layer_config"]["rope_parameters"]["rope_theta"]
for name, value in settings.items():
    print(f"{name}: {value} is {seen[name]}")
print(f"rotary base: {rotary['rope_theta']} is {base}")
sys.exit(0 if [*seen.values(), base] == [True, False, None, 10000.0] else 1)
END
