#!/usr/bin/env bash
# Versions: transformers 5.23.0, gguf 0.19.0, torch 2.13.0
# Behaviour: the rotary scaling of a GGUF file (`llama.rope.scaling.*`) is not read. The config has the default
#   rotary positions, without a warning, so the model computes other numbers than the one that was converted.
# Guess: what llama.cpp's converter writes of the positions is read, or the file is refused.
# Seen:
#   the file says: linear, factor 8.0
#   the config says: default, factor None
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
from transformers import AutoConfig

writer = gguf.GGUFWriter("model.gguf", "llama")
writer.add_name("tiny")
writer.add_block_count(1)
writer.add_context_length(64)
writer.add_embedding_length(32)
writer.add_feed_forward_length(32)
writer.add_head_count(4)
writer.add_head_count_kv(4)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_dimension_count(8)
writer.add_rope_freq_base(10000.0)
writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
writer.add_rope_scaling_factor(8.0)
writer.add_vocab_size(4)
writer.add_tokenizer_model("gpt2")
writer.add_token_list(["a", "b", "c", "d"])
writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

rotary = AutoConfig.from_pretrained(".", gguf_file="model.gguf").rope_parameters
print("the file says: linear, factor 8.0")
print(f"the config says: {rotary['rope_type']}, factor {rotary.get('factor')}")
sys.exit((rotary["rope_type"], rotary.get("factor")) != ("default", None))
END
