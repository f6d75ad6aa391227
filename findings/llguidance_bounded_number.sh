#!/usr/bin/env bash
# Versions: llguidance 1.9.1
# Behaviour: a JSON schema of type "number" allows exponents. With "minimum" or "maximum" beside it, no
#   number with an exponent is allowed, also one that lies within the bounds.
# Guess: a bound leaves out the numbers beyond it, and nothing else. 1e-07 is how Python's json writes
#   0.0000001, so a text that json.dumps makes and the schema describes has no path in the grammar.
# Seen:
#   {"type": "number"}: 0.5 True, 1e-07 True, 1e+22 True
#   {"type": "number", "minimum": 0}: 0.5 True, 1e-07 False, 1e+22 False
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


def accepts(schema: dict, text: str) -> bool:
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema))
    tokens = tokenizer.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


found = []
for schema in ({"type": "number"}, {"type": "number", "minimum": 0}):
    texts = [json.dumps(number) for number in (0.5, 1e-7, 1e22)]
    found.append([accepts(schema, text) for text in texts])
    answers = ", ".join(f"{text} {answer}" for text, answer in zip(texts, found[-1]))
    print(f"{json.dumps(schema)}: {answers}")
sys.exit(0 if found == [[True, True, True], [True, False, False]] else 1)
END
