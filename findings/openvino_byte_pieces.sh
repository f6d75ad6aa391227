#!/usr/bin/env bash
# Versions: openvino-tokenizers 2026.4.1.0, transformers 5.5.4
# Behaviour: a converted tokenizer with byte fallback reads the characters `<0x0A>` of a text as the piece of the byte 10, so
#   the model reads a line break there. With transformers they stay six characters.
# Guess: the converted tokenizer gives the ids of the one that it was made from.
# Seen:
#   transformers: ▁a < 0 x 0 A > b, read back as 'a<0x0A>b'
#   OpenVINO: ▁a <0x0A> b, read back as 'a\nb'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet transformers==5.5.4 openvino==2026.4.1 openvino-tokenizers==2026.4.1.0 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

import numpy as np
import openvino
from openvino_tokenizers import convert_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEXT = "a<0x0A>b"
pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ab<0xA>", "▁a"]
numbers = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
fallback = Tokenizer(
    models.BPE(numbers, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
)
fallback.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
fallback.decoder = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=fallback, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
)
encoder, decoder = (
    openvino.Core().compile_model(part, "CPU")
    for part in convert_tokenizer(tokenizer, with_detokenizer=True)
)
ids = {
    "transformers": tokenizer(TEXT)["input_ids"],
    "OpenVINO": encoder([TEXT])["input_ids"][0].tolist(),
}
texts = {
    "transformers": tokenizer.decode(ids["transformers"]),
    "OpenVINO": str(decoder([np.array([ids["OpenVINO"]])])["string_output"][0]),
}
for name in ids:
    print(f"{name}: {' '.join(tokenizer.convert_ids_to_tokens(ids[name]))}, read back as {texts[name]!r}")
sys.exit(0 if list(texts.values()) == [TEXT, "a\nb"] else 1)
END
