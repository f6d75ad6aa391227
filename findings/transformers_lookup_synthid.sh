#!/usr/bin/env bash
# Versions: transformers 5.24.0, torch 2.13.0
# Behaviour: with the watermark of SynthID, prompt lookup writes another greedy text than `generate` without drafts, without
#   an error or a warning. The watermark keeps a state that each call moves on by a token, and it is also called for drafts
#   that are refused. With the watermark by green lists, whose numbers follow from the text alone, the texts are equal.
# Guess: the same text in both, or a refusal.
# Seen:
#   no watermark: 12 of 12 texts are the same with prompt lookup
#   green lists: 12 of 12 texts are the same with prompt lookup
#   SynthID: 0 of 12 texts are the same with prompt lookup
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import logging
import sys
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch
from transformers import LlamaConfig, LlamaForCausalLM, SynthIDTextWatermarkingConfig, WatermarkingConfig

torch.manual_seed(1)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    initializer_range=0.15,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
model = LlamaForCausalLM(config).eval()
prompts = []
for seed in range(12):
    first = torch.randint(1, 64, (1, 12), generator=torch.Generator().manual_seed(seed))
    prompts.append(torch.cat([first, first[:, :6]], 1))

same = {}
for name, watermark in (
    ("no watermark", lambda: None),
    ("green lists", lambda: WatermarkingConfig(bias=2.5, seeding_scheme="lefthash")),
    ("SynthID", lambda: SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123], ngram_len=5)),
):
    same[name] = 0
    for prompt in prompts:
        plain, drafted, again = (
            model.generate(
                prompt, max_new_tokens=40, do_sample=False, watermarking_config=watermark(), **drafts
            )
            for drafts in ({}, {"prompt_lookup_num_tokens": 4}, {})
        )
        assert torch.equal(plain, again)
        same[name] += torch.equal(plain, drafted)
    print(f"{name}: {same[name]} of 12 texts are the same with prompt lookup")
sys.exit(0 if same["no watermark"] == same["green lists"] == 12 > same["SynthID"] else 1)
END
