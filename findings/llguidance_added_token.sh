#!/usr/bin/env bash
# Versions: llguidance 1.9.1, transformers 5.23.0
# Behaviour: if a regular expression forces a text that is also an added token of the tokenizer, special
#   or not, the mask allows the id of that token only, and the matcher then refuses that very id.
#   No token is left, and no error is given.
# Guess: what the mask allows, the matcher takes: either the token, or the letters that spell it. Where
#   the text is one of two ways on, its letters are allowed and taken.
# Seen:
#   <think>[ab]: the mask allows <think> (the matcher takes 0 of 1)
#   (<think>|x)[ab]: the mask allows < (the matcher takes 1 of 1), x (the matcher takes 1 of 1)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1 transformers==5.23.0 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

import llguidance.hf
import numpy as np
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
bytewise = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
bytewise.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<end>")
tokenizer.add_tokens([AddedToken("<think>", special=False)])
wrapped = llguidance.hf.from_tokenizer(tokenizer)

found = []
for pattern in ("<think>[ab]", "(<think>|x)[ab]"):
    matcher = LLMatcher(wrapped, LLMatcher.grammar_from_regex(pattern))
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: len(tokenizer)]).tolist()
    names = tokenizer.convert_ids_to_tokens(allowed)
    taken = [matcher.deep_copy().try_consume_tokens([token]) for token in allowed]
    found.append(dict(zip(names, taken)))
    words = ", ".join(f"{name} (the matcher takes {n} of 1)" for name, n in found[-1].items())
    print(f"{pattern}: the mask allows {words}")
sys.exit(0 if found == [{"<think>": 0}, {"<": 1, "x": 1}] else 1)
END
