#!/usr/bin/env bash
# Versions: transformers 5.24.0, torch 2.13.0
# Behaviour: with prompt lookup, guidance_scale gives another greedy text than without. The second pass, without
#   the prompt, keeps keys and values of its own, and reads rejected draft tokens as if they were text.
# Guess: drafts change the speed only, as they do beside a repetition penalty; or the two are refused together.
# Seen:
#   guidance_scale 1.5: 0 of 12 texts equal
#   repetition_penalty 1.3: 12 of 12 texts equal
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, initializer_range=0.3,
    bos_token_id=1, eos_token_id=None, pad_token_id=0,
)
model = LlamaForCausalLM(config).eval()


def text(prompt: list[int], **options) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=60, **options
    )
    return out[0, len(prompt) :].tolist()


prompts = [2 * [1 + (7 * i + j * j) % 60 for j in range(8)] for i in range(12)]
equal = {}
for name, value in (("guidance_scale", 1.5), ("repetition_penalty", 1.3)):
    option = {name: value}
    equal[name] = sum(
        text(prompt, **option) == text(prompt, prompt_lookup_num_tokens=4, **option)
        for prompt in prompts
    )
    print(f"{name} {value}: {equal[name]} of {len(prompts)} texts equal")
sys.exit(0 if equal["guidance_scale"] < 6 and equal["repetition_penalty"] == 12 else 1)
END
