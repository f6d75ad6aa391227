#!/usr/bin/env bash
# Versions: xgrammar 0.2.9, torch 2.13.0
# Behaviour: the `pattern` of a string has to cover the whole string, with `^` and `$` or without.
# Guess: as in JSON schema, a pattern is looked for anywhere in the string, and only `^` and `$` bind it to the ends.
# Seen:
#   [0-9]+: "7" True, "a7" False, "7a" False
#   ^[0-9]+: "7" True, "a7" False, "7a" False
#   [0-9]+$: "7" True, "a7" False, "7a" False
#   .*[0-9]+.*: "7" True, "a7" True, "7a" True
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


found = []
for pattern in ("[0-9]+", "^[0-9]+", "[0-9]+$", ".*[0-9]+.*"):
    texts = ['"7"', '"a7"', '"7a"']
    found.append([accepts({"type": "string", "pattern": pattern}, text) for text in texts])
    print(f"{pattern}: " + ", ".join(f"{text} {answer}" for text, answer in zip(texts, found[-1])))
sys.exit(0 if found == [[True, False, False]] * 3 + [[True] * 3] else 1)
END
