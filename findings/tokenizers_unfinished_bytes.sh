#!/usr/bin/env bash
# Versions: tokenizers 0.23.3
# Behaviour: the decoder of a tokenizer with byte fallback replaces every byte of a run of byte tokens where the run
#   ends inside of a character: whole characters before it are lost, too. A stream has shown them by then.
# Guess: whole characters stay and only the unfinished one is replaced, as byte level does and `bytes.decode`. An answer
#   that is cut at its number of tokens then ends with one sign for what is missing.
# Seen:
#   byte fallback: 5 of 6 bytes, decode '\ufffd\ufffd\ufffd\ufffd\ufffd', stream '\u5b57'
#   byte level: 5 of 6 bytes, decode '\u5b57\ufffd', stream '\u5b57'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet tokenizers==0.23.3 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

pieces = ["<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)]
fallback = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
fallback.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
level = Tokenizer(models.BPE({piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
level.decoder = decoders.ByteLevel()

found = {}
for name, tokenizer in (("byte fallback", fallback), ("byte level", level)):
    ids = tokenizer.encode("字字").ids
    stream = decoders.DecodeStream()
    whole = tokenizer.decode(ids[:5])
    parts = "".join(stream.step(tokenizer, token) or "" for token in ids[:5])
    found[name] = (ascii(whole), ascii(parts))
    print(f"{name}: 5 of 6 bytes, decode {ascii(whole)}, stream {ascii(parts)}")
lost, kept = ascii("\ufffd" * 5), ascii("字\ufffd")
sys.exit(0 if found == {"byte fallback": (lost, ascii("字")), "byte level": (kept, ascii("字"))} else 1)
END
