#!/usr/bin/env bash
# Versions: xgrammar 0.2.9, torch 2.13.0
# Behaviour: beside `$ref`, `anyOf` or `enum`, other keywords of the same schema are left out without a warning:
#   a bound beside a reference, and the type beside the values.
# Guess: all keywords of a schema hold at once, or what is left out is said, as it is for `multipleOf`.
# Seen:
#   minimum beside type: 3 False
#   minimum beside $ref: 3 True
#   minimum beside anyOf: 3 True
#   type beside enum: 3 True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet torch==2.13.0 xgrammar==0.2.9 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import json
import sys

import xgrammar

vocabulary = [bytes([byte]) for byte in range(256)] + [b"</s>"]
compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[256]))


def accepts(schema: dict, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    return matcher.accept_string(text) and matcher.accept_token(256)


number = {"type": "integer"}
schemas = {
    "minimum beside type": number | {"minimum": 5},
    "minimum beside $ref": {"$ref": "#/$defs/n", "minimum": 5, "$defs": {"n": number}},
    "minimum beside anyOf": {"anyOf": [number, {"type": "null"}], "minimum": 5},
    "type beside enum": {"enum": ["3", 3], "type": "string"},
}
found = {}
for name, schema in schemas.items():
    found[name] = accepts(schema, "3")
    print(f"{name}: 3 {found[name]}")
sys.exit(0 if list(found.values()) == [False, True, True, True] else 1)
END
