#!/usr/bin/env bash
# Versions: transformers 5.23.0, torch 2.13.0
# Behaviour: generate(prompt_lookup_num_tokens=5, do_sample=True, top_p=0.5) never drafts about half
#   of the vocabulary. A token found in the prompt is kept only if it passes top_p on made-up
#   logits that are equal for all tokens, so neither the text nor the model decides which are left out.
# Guess: what is drafted depends on the text, and top_p only on the model's own probabilities. Here the
#   model is sure of the token that it repeats, and half of the tokens take one pass for each token
#   of text.
# Seen: (49 tokens, each repeated by a model that is sure of it; 18 new tokens)
#   top_p 1.0: 49 tokens take 3 passes
#   top_p 0.5: 24 tokens take 3 passes, 25 tokens take 18 passes
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys
from collections import Counter

import torch
from transformers import LlamaConfig, LlamaForCausalLM


class Sure(LlamaForCausalLM):
    """Gives one token all of the probability, and counts its passes."""

    token = passes = 0

    def forward(self, *args, **settings):
        out = super().forward(*args, **settings)
        out.logits = torch.zeros_like(out.logits)
        out.logits[..., self.token] = 100.0
        self.passes += 1
        return out


model = Sure(
    LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
).eval()
found = {}
for top_p in (1.0, 0.5):
    counts = Counter()
    for token in range(1, 50):
        model.token, model.passes = token, 0
        prompt = torch.full((1, 8), token)
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            prompt_lookup_num_tokens=5,
            max_new_tokens=18,
            do_sample=True,
            top_p=top_p,
            top_k=0,
        )
        counts[model.passes] += 1
    found[top_p] = dict(counts)
    words = ", ".join(f"{n} tokens take {passes} passes" for passes, n in sorted(counts.items()))
    print(f"top_p {top_p}: {words}")
# The order of equal logits is free, so one token more or less may be left out.
same = found[1.0] == {3: 49} and set(found[0.5]) == {3, 18} and 24 <= found[0.5][18] <= 25
sys.exit(0 if same else 1)
END
