#!/usr/bin/env bash
# Versions: peft 0.21.2, torch 2.13.0, transformers 5.24.0 and, beside it, 5.23.0
# Behaviour: with transformers 5.24.0 `generate` of a model with prompt tuning puts the virtual tokens before every new
#   token, behind what the cache has: another text, without an error. peft looks for the cache under its old name.
#   Without a cache, and with 5.23.0, the text is right.
# Guess: the virtual tokens stand once, at the beginning; a release of transformers that peft cannot follow is refused.
# Seen:
#   transformers 5.23.0: with a cache 6 of 6 greedy texts right, without 6 of 6
#   transformers 5.24.0: with a cache 0 of 6 greedy texts right, without 6 of 6
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet peft==0.21.2 transformers==5.23.0 torch==2.13.0 numpy==2.4.6 || exit 2
cat > "$folder/texts.py" <<'END'
import sys

import torch
import transformers
from peft import PromptTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
base = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, initializer_range=0.3,
    bos_token_id=1, eos_token_id=None, pad_token_id=0,
))
settings = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
model = get_peft_model(base, settings).eval()


def by_passes(text: torch.Tensor) -> torch.Tensor:
    """The greedy text, with a pass over all of it for each token."""
    for _ in range(20):
        logits = model(input_ids=text, attention_mask=torch.ones_like(text)).logits
        text = torch.cat([text, logits[:, -1:].argmax(-1)], dim=1)
    return text


right = {True: 0, False: 0}
for index in range(6):
    ids = torch.tensor([[1 + (7 * index + place**2) % 60 for place in range(16)]])
    with torch.no_grad():
        wanted = by_passes(ids)
    for cached in right:
        text = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
            max_new_tokens=20, use_cache=cached,
        )
        right[cached] += torch.equal(text, wanted)
print(
    f"transformers {transformers.__version__}: with a cache {right[True]} of 6 greedy texts "
    f"right, without {right[False]} of 6"
)
sys.exit(0 if right == {True: int(sys.argv[1]), False: 6} else 1)
END
"$folder/venv/bin/python" -W ignore "$folder/texts.py" 6
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 || exit 2
"$folder/venv/bin/python" -W ignore "$folder/texts.py" 0
