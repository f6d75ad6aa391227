#!/usr/bin/env bash
# Versions: transformers 5.23.0, gguf 0.19.0, torch 2.13.0
# Behaviour: a GGUF file names the rules that split texts (`tokenizer.ggml.pre`). For a name that transformers does
#   not know, among them falcon, stablelm2 and deepseek-coder, it takes GPT-2's rules without a warning.
# Guess: the tokens are those of llama.cpp, or the name is refused.
# Seen:
#   falcon: 12345 is split into ['12345'], falcon's digits are in threes
#   llama-bpe: 12345 is split into ['123', '45']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 gguf==0.19.0 numpy==2.4.6 || exit 2
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import sys

import gguf
import numpy as np
from transformers import PreTrainedTokenizerFast


def words(rules: str) -> list[str]:
    writer = gguf.GGUFWriter("model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rules)
    writer.add_token_list([*"0123456789", "12"])
    writer.add_token_merges(["1 2"])
    writer.add_tensor("token_embd.weight", np.zeros((11, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(".", gguf_file="model.gguf")
    return [word for word, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("12345")]


falcon, llama = words("falcon"), words("llama-bpe")
print(f"falcon: 12345 is split into {falcon}, falcon's digits are in threes")
print(f"llama-bpe: 12345 is split into {llama}")
sys.exit((falcon, llama) != (["12345"], ["123", "45"]))
END
