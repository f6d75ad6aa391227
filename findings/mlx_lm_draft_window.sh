#!/usr/bin/env bash
# Versions: mlx-lm 0.32.2, mlx 0.32.4 (on Linux, with mlx-cpu)
# Behaviour: a model with sliding windows (Gemma 3 here) writes another greedy text with a draft model once the text is as
#   long as the window: its cache then takes nothing back, so refused draft tokens stay in it. No error comes: that the
#   cache can be trimmed is asked before the first token only, and trim_prompt_cache says with a 0 that it did nothing.
# Guess: the same text as without drafts, or the ValueError that models with a running state get at the start.
# Seen:
#   window of 128: 12 of 12 texts of 70 tokens are those without drafts
#   window of 32: 0 of 12 texts of 70 tokens are those without drafts
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet mlx-lm==0.32.2 mlx==0.32.4 mlx-cpu==0.32.4 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.gemma3_text import Model, ModelArgs


def gemma(seed: int, window: int) -> Model:
    mx.random.seed(seed)
    model = Model(ModelArgs(
        model_type="gemma3_text", vocab_size=64, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        query_pre_attn_scalar=16, sliding_window=window, sliding_window_pattern=2,
    ))
    mx.eval(model.parameters())
    return model


prompts = [mx.array([(7 * i + 3 * j * j) % 64 for j in range(10)]) for i in range(12)]
same = {}
for window in (128, 32):
    target, drafter = gemma(0, window), gemma(1, window)
    same[window] = 0
    for prompt in prompts:
        plain = [token for token, _ in generate_step(prompt, target, max_tokens=60)]
        drafted = speculative_generate_step(
            prompt, target, drafter, num_draft_tokens=3, max_tokens=60
        )
        same[window] += plain == [token for token, _, _ in drafted]
    print(
        f"window of {window}: {same[window]} of {len(prompts)} texts of 70 tokens "
        "are those without drafts"
    )
sys.exit(0 if same[128] == len(prompts) and same[32] < len(prompts) else 1)
END
