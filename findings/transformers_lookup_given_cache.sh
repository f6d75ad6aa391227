#!/usr/bin/env bash
# Versions: transformers 5.24.0, torch 2.13.0
# Behaviour: generate with prompt lookup that gets the cache of the turn before reads the whole text once more
#   behind what the cache has. No error or warning comes, and the answer is another one.
# Guess: only the new tokens are read, as without drafts, so the answers are the same.
# Seen:
#   without drafts: 6 of 6 second answers right, a cache of 59 tokens for 60
#   with prompt lookup: 0 of 6 second answers right, a cache of 94 tokens for 60
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


def answer(text: list[int], **options):
    ids = torch.tensor([text])
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20,
        return_dict_in_generate=True, **options,
    )


prompts = [2 * [1 + (7 * i + j * j) % 60 for j in range(8)] for i in range(6)]
right = {}
for name, drafts in (("without drafts", {}), ("with prompt lookup", {"prompt_lookup_num_tokens": 4})):
    right[name] = 0
    for prompt in prompts:
        first = answer(prompt, **drafts)
        text = [*first.sequences[0].tolist(), 5, 6, 7, 8]
        second = answer(text, cache=first.cache, **drafts)
        right[name] += torch.equal(second.sequences, answer(text).sequences)
    held, length = second.cache.get_seq_length(), second.sequences.shape[1]
    print(
        f"{name}: {right[name]} of {len(prompts)} second answers right, "
        f"a cache of {held} tokens for {length}"
    )
sys.exit(0 if list(right.values()) == [len(prompts), 0] else 1)
END
