#!/usr/bin/env bash
# Versions: llguidance 1.9.1
# Behaviour: in strings of a JSON schema, \n and \" are allowed, and \u followed by four digits of a
#   letter is not. The letter itself is.
# Guess: the grammar of a JSON schema takes every JSON text that the schema describes. json.dumps with
#   its default settings writes "café" as "caf\u00e9", which is refused: stored answers that were
#   written so are no texts of the grammar.
# Seen:
#   "cafe": True
#   "caf\u00e9": False
#   "café": True
#   "a\nb": True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1 || exit 2
"$folder/venv/bin/python" - <<'END'
import json
import sys

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")
grammar = LLMatcher.grammar_from_json_schema({"type": "string"})


def accepts(text: str) -> bool:
    matcher = LLMatcher(tokenizer, grammar)
    tokens = tokenizer.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


texts = [
    json.dumps("cafe"),
    json.dumps("caf\u00e9"),
    json.dumps("caf\u00e9", ensure_ascii=False),
    json.dumps("a\nb"),
]
found = [accepts(text) for text in texts]
for text, answer in zip(texts, found):
    print(f"{text}: {answer}")
sys.exit(0 if found == [True, False, True, True] else 1)
END
