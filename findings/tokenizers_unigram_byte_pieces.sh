#!/usr/bin/env bash
# Versions: tokenizers 0.23.3, sentencepiece 0.2.3
# Behaviour: a Unigram model with byte fallback reads the six characters `<0x0A>` of a text as the piece of the byte 10, so
#   they come back as a line break. The same vocabulary in sentencepiece, and BPE with byte fallback in tokenizers, keep the
#   text: there the pieces of bytes stand only for characters that have no piece.
# Guess: what is encoded is decoded to the same text, and both libraries have the same tokens.
# Seen:
#   tokenizers, Unigram: 'a<0x0A>b' is read back as 'a\nb'
#   tokenizers, BPE: 'a<0x0A>b' is read back as 'a<0x0A>b'
#   sentencepiece, Unigram: 'a<0x0A>b' is read back as 'a<0x0A>b'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet tokenizers==0.23.3 sentencepiece==0.2.3 || exit 2
"$folder/venv/bin/python" - <<'END'
import io
import sys

import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEXT = "a<0x0A>b"
made = io.BytesIO()
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["a b <0> xA <a> Ab x0"] * 20),
    model_writer=made,
    model_type="unigram",
    byte_fallback=True,
    vocab_size=280,
    hard_vocab_limit=False,
    minloglevel=2,
)
theirs = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
pieces = [(theirs.id_to_piece(i), theirs.get_score(i)) for i in range(len(theirs))]
numbers = {piece: number for number, (piece, _) in enumerate(pieces)}
readers = {
    "tokenizers, Unigram": Tokenizer(models.Unigram(pieces, theirs.unk_id(), byte_fallback=True)),
    "tokenizers, BPE": Tokenizer(models.BPE(numbers, [], unk_token="<unk>", byte_fallback=True)),
}
found = {}
for name, reader in readers.items():
    reader.pre_tokenizer = pre_tokenizers.Metaspace()
    reader.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    found[name] = reader.decode(reader.encode(TEXT).ids)
found["sentencepiece, Unigram"] = theirs.decode(theirs.encode(TEXT))
for name, text in found.items():
    print(f"{name}: {TEXT!r} is read back as {text!r}")
sys.exit(0 if list(found.values()) == ["a\nb", TEXT, TEXT] else 1)
END
