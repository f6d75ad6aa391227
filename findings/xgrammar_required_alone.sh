#!/usr/bin/env bash
# Versions: xgrammar 0.2.8 (torch 2.13.0)
# Behaviour: a JSON schema of an object that has "required" and no "properties" becomes a grammar of
#   one text, {}. That is the text that the schema forbids.
# Guess: any object with the key "a". Both keywords are independent in JSON schema; one that is not
#   known would at worst be ignored.
# Seen:
#   {"type": "object", "required": ["a"]}: {} True, {"a": 1} False
#   {"type": "object", "required": ["a"], "properties": {"a": {}}}: {} False, {"a": 1} True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet torch==2.13.0 xgrammar==0.2.8 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import json
import sys

import xgrammar

vocabulary = [bytes([byte]) for byte in range(256)] + [b"</s>"]
compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[256]))


def accepts(schema: dict, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    return matcher.accept_string(text) and matcher.accept_token(256)


alone = {"type": "object", "required": ["a"]}
found = []
for schema in (alone, alone | {"properties": {"a": {}}}):
    texts = ["{}", '{"a": 1}']
    found.append([accepts(schema, text) for text in texts])
    answers = ", ".join(f"{text} {answer}" for text, answer in zip(texts, found[-1]))
    print(f"{json.dumps(schema)}: {answers}")
sys.exit(0 if found == [[True, False], [False, True]] else 1)
END
