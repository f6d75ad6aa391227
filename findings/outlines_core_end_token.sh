#!/usr/bin/env bash
# Versions: outlines-core 0.2.14
# Behaviour: where a text is complete, `get_tokens` (and so the mask) allows the end token only. `advance` then refuses
#   that very token with a ValueError, and `accepts_tokens` says False of any block that ends with it.
# Guess: what the mask allows, the guide takes. A block of draft tokens that ends the text is accepted as a whole, as
#   `accepts_tokens` says of the block without its end.
# Seen:
#   after abc: allowed [0], the end token is 0
#   accepts_tokens: ab c True, ab c end False
#   advance by the end token: ValueError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet outlines-core==0.2.14 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

from outlines_core import Guide, Index, Vocabulary

END, AB, C = 0, 3, 4
index = Index("(ab)*c", Vocabulary(END, {"a": [1], "b": [2], "ab": [AB], "c": [C]}))
guide = Guide(index)
block = guide.accepts_tokens([AB, C]), guide.accepts_tokens([AB, C, END])
guide.advance(AB)
guide.advance(C)
allowed = guide.get_tokens()
try:
    guide.advance(END)
    taken = "taken"
except ValueError:
    taken = "ValueError"
print(f"after abc: allowed {allowed}, the end token is {END}")
print(f"accepts_tokens: ab c {block[0]}, ab c end {block[1]}")
print(f"advance by the end token: {taken}")
sys.exit(0 if (allowed, block, taken) == ([END], (True, False), "ValueError") else 1)
END
