#!/usr/bin/env bash
# Versions: llguidance 1.9.1, transformers 5.23.0
# Behaviour: once the text can go no further, the matcher has stopped by itself. The end token is taken in one
#   call with the tokens before it; alone, behind them, it is refused, and `rollback` does not undo the error.
# Guess: tokens may be given in one call or in several. So the drafts that were accepted are given first, and then the
#   target's own token, which ends the text.
# Seen:
#   a b c end in one call: taken True, rollback of 2 True
#   a b c, then end: taken False, rollback of 2 False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1 transformers==5.23.0 || exit 2
"$folder/venv/bin/python" - 2>/dev/null <<'END'
import sys

import llguidance.hf
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
plain = Tokenizer(models.BPE({c: i for i, c in enumerate([*letters, "<end>"])}, []))
plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
plain.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>")
ids = llguidance.hf.from_tokenizer(tokenizer)
grammar = LLMatcher.grammar_from_regex("(ab)*c")
text, end = tokenizer.convert_tokens_to_ids(list("abc")), tokenizer.eos_token_id

once = LLMatcher(ids, grammar)
one = once.consume_tokens([*text, end]), once.rollback(2)
twice = LLMatcher(ids, grammar)
twice.consume_tokens(text)
two = twice.consume_tokens([end]), twice.rollback(2)
print(f"a b c end in one call: taken {one[0]}, rollback of 2 {one[1]}")
print(f"a b c, then end: taken {two[0]}, rollback of 2 {two[1]}")
sys.exit(0 if one == (True, True) and two == (False, False) else 1)
END
