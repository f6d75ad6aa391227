#!/usr/bin/env bash
# Versions: transformers 5.24.0, torch 2.13.0
# Behaviour: generate_batch drops repetition_penalty and says so in one line of the log. Its texts are those without the
#   penalty, bit by bit. suppress_tokens works.
# Guess: generate_batch gives the texts of generate, only faster; a setting that it cannot follow ends it.
# Seen:
#   repetition_penalty: as generate with it False, as generate without it True
#   suppress_tokens: as generate with it True, as generate without it False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
    bos_token_id=1, eos_token_id=None, pad_token_id=0,
)
model = LlamaForCausalLM(config).eval()
prompts = [[2 + (5 * i + j) % 60 for j in range(6 + i)] for i in range(4)]


def settings(**options) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=20, do_sample=False, eos_token_id=-1, pad_token_id=0, **options
    )


def one_by_one(**options) -> list[list[int]]:
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings(**options))
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def together(**options) -> list[list[int]]:
    out = model.generate_batch(inputs=prompts, generation_config=settings(**options), progress_bar=False)
    return [out[f"req_{i}"].generated_tokens for i in range(len(prompts))]


no_option = one_by_one()
followed = {}
for name, value in (("repetition_penalty", 1.8), ("suppress_tokens", list(range(30)))):
    texts, batch = one_by_one(**{name: value}), together(**{name: value})
    followed[name] = batch == texts, batch == no_option
    print(f"{name}: as generate with it {followed[name][0]}, as generate without it {followed[name][1]}")
expected = {"repetition_penalty": (False, True), "suppress_tokens": (True, False)}
sys.exit(0 if followed == expected else 1)
END
