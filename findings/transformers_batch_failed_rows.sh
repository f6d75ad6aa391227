#!/usr/bin/env bash
# Versions: transformers 5.24.0, torch 2.13.0
# Behaviour: where a setting of generation cannot be followed, generate_batch raises nothing: it returns every request
#   with no tokens, and the error stands in each result and in the log.
# Guess: an error in the pass is raised, as generate does, or as generate_batch itself does for a wrong type. What
#   writes the answers of a teacher to a file then stops before it writes empty ones.
# Seen:
#   generate: 8 tokens
#   generate_batch, req_0: 0 tokens, error: too many indices for tensor of dimension 1
#   generate_batch, req_1: 0 tokens, error: too many indices for tensor of dimension 1
#   generate_batch, req_2: 0 tokens, error: too many indices for tensor of dimension 1
#   generate_batch, req_3: 0 tokens, error: too many indices for tensor of dimension 1
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
settings = GenerationConfig(
    max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0, no_repeat_ngram_size=2
)
ids = torch.tensor(prompts[:1])
text = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
print(f"generate: {text.shape[1] - ids.shape[1]} tokens")
out = model.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False)
for name, result in out.items():
    print(f"generate_batch, {name}: {len(result.generated_tokens)} tokens, error: {result.error}")
empty = [result for result in out.values() if result.error and not result.generated_tokens]
sys.exit(0 if len(empty) == len(prompts) else 1)
END
