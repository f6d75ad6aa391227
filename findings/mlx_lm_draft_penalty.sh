#!/usr/bin/env bash
# Versions: mlx-lm 0.32.2, mlx 0.32.4 (on Linux, with mlx-cpu)
# Behaviour: with a draft model the penalties (repetition, presence, frequency) count from the prompt's last token on.
#   Without one they count the whole prompt. So a draft model changes a greedy text.
# Guess: drafts change the speed only: what is penalised is the same text.
# Seen:
#   repetition penalty None: 12 of 12 texts are those without drafts, 12 those without drafts where the prompt is not counted
#   repetition penalty 2.0: 9 of 12 texts are those without drafts, 12 those without drafts where the prompt is not counted
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet mlx-lm==0.32.2 mlx==0.32.4 mlx-cpu==0.32.4 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.sample_utils import make_logits_processors


def llama(seed: int, layers: int) -> Model:
    mx.random.seed(seed)
    model = Model(ModelArgs(
        model_type="llama", vocab_size=64, hidden_size=32, intermediate_size=64,
        num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=2, rms_norm_eps=1e-6,
    ))
    mx.eval(model.parameters())
    return model


target, drafter = llama(0, 2), llama(1, 1)
prompts = [mx.array([(7 * i + 3 * j * j) % 64 for j in range(10)]) for i in range(12)]
same = {}
for penalty in (None, 2.0):
    processors = make_logits_processors(repetition_penalty=penalty, repetition_context_size=20)
    # The same penalty, which sees the text from the prompt's last token on.
    behind = [lambda text, logits, one=one: one(text[9:], logits) for one in processors]
    same[penalty] = [0, 0]
    for prompt in prompts:
        drafted = speculative_generate_step(
            prompt, target, drafter, num_draft_tokens=3, max_tokens=40,
            logits_processors=processors,
        )
        drafted = [token for token, _, _ in drafted]
        for index, used in enumerate((processors, behind)):
            plain = generate_step(prompt, target, max_tokens=40, logits_processors=used)
            same[penalty][index] += drafted == [token for token, _ in plain]
    print(
        f"repetition penalty {penalty}: {same[penalty][0]} of {len(prompts)} texts are those without "
        f"drafts, {same[penalty][1]} those without drafts where the prompt is not counted"
    )
sys.exit(0 if same == {None: [12, 12], 2.0: [same[2.0][0], 12]} and same[2.0][0] < 12 else 1)
END
