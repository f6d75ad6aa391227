#!/usr/bin/env bash
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.13.0
# Behaviour: with `init_lora_weights` "pissa" or "olora" the model's own weights are changed when the adapter is made.
#   `disable_adapter()` then gives neither the model nor a warning: other logits, and other likeliest tokens.
# Guess: with the adapter switched off the model computes what it did before, as with the default, "gaussian"
#   and "orthogonal". So the teacher of a distillation into an adapter costs no second copy.
# Seen:
#   True: adapter on 0.0, off 0.0, likeliest token changed at 0 of 10 places
#   gaussian: adapter on 0.0, off 0.0, likeliest token changed at 0 of 10 places
#   orthogonal: adapter on 0.0, off 0.0, likeliest token changed at 0 of 10 places
#   pissa: adapter on 0.0, off 5.7, likeliest token changed at 9 of 10 places
#   olora: adapter on 0.0, off 7.1, likeliest token changed at 10 of 10 places
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet peft==0.21.2 transformers==5.23.0 torch==2.13.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    initializer_range=0.3,
)
tokens = torch.arange(10)[None]
off = {}
for start in (True, "gaussian", "orthogonal", "pissa", "olora"):
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        before = model(tokens).logits
        lora = LoraConfig(r=4, init_lora_weights=start, target_modules=["q_proj", "v_proj"])
        adapted = get_peft_model(model, lora).eval()
        on = (adapted(tokens).logits - before).abs().max()
        with adapted.disable_adapter():
            after = adapted(tokens).logits
    off[start] = (after - before).abs().max().item()
    changed = int((after.argmax(-1) != before.argmax(-1)).sum())
    print(f"{start}: adapter on {on:.1f}, off {off[start]:.1f}, likeliest token changed at {changed} of 10 places")
same = all(off[start] < 1e-3 for start in (True, "gaussian", "orthogonal"))
sys.exit(0 if same and min(off["pissa"], off["olora"]) > 1 else 1)
END
