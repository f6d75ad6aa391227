#!/usr/bin/env bash
# Versions: transformers 5.23.0
# Behaviour: CONFIG_MAPPING.get(kind) is None for every kind, although CONFIG_MAPPING[kind] is a class and
#   kind in CONFIG_MAPPING is true. The mapping is an OrderedDict that makes its entries on access and
#   replaces the look-up by brackets only; the inherited get looks into the empty dictionary.
# Guess: get finds what the brackets find, and "if kind in mapping" may be written as get, as linters
#   propose.
# Seen:
#   "llama" in CONFIG_MAPPING: True
#   CONFIG_MAPPING["llama"]: LlamaConfig
#   CONFIG_MAPPING.get("llama"): None
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

from transformers import CONFIG_MAPPING

found = ["llama" in CONFIG_MAPPING, CONFIG_MAPPING["llama"].__name__, CONFIG_MAPPING.get("llama")]
print('"llama" in CONFIG_MAPPING:', found[0])
print('CONFIG_MAPPING["llama"]:', found[1])
print('CONFIG_MAPPING.get("llama"):', found[2])
sys.exit(0 if found == [True, "LlamaConfig", None] else 1)
END
