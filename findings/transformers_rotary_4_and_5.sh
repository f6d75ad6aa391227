#!/usr/bin/env bash
# Versions: transformers 5.23.0 and 4.57.1
# Behaviour: a Llama config saved by 5.23.0 has its rotary base and scaling under rope_parameters only. 4.57.1
#   reads rope_theta and rope_scaling, so it falls to its defaults, without an error or a warning:
#   positions are turned by other angles, and the model's answers are other ones.
# Guess: a newer release writes a config that the last releases before it read, or the older one says
#   that it does not know the form. The file names the release that wrote it.
# Seen:
#   5.23.0 saves: base 500000.0, llama3
#   4.57.1 reads: base 10000.0, scaling None
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 5.23.0 4.57.1; do
    "${PYTHON:-python3}" -m venv "$folder/$version" || exit 2
    "$folder/$version/bin/pip" install --quiet "transformers==$version" || exit 2
done
"$folder/5.23.0/bin/python" - "$folder/model" <<'END'
import sys

from transformers import LlamaConfig

config = LlamaConfig(
    max_position_embeddings=131072,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)
config.save_pretrained(sys.argv[1])
rotary = config.rope_parameters
print(f"5.23.0 saves: base {rotary['rope_theta']}, {rotary['rope_type']}")
END
"$folder/4.57.1/bin/python" - "$folder/model" <<'END'
import sys

from transformers import LlamaConfig

config = LlamaConfig.from_pretrained(sys.argv[1])
print(f"4.57.1 reads: base {config.rope_theta}, scaling {config.rope_scaling}")
sys.exit(0 if (config.rope_theta, config.rope_scaling) == (10000.0, None) else 1)
END
