"""Tokenizers of GGUF files give llama.cpp's tokens, whatever rules of splitting a file names."""

import ast
import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from decode.base.errors import UserError
from decode.model.gguf_tokenizer import RULES
from decode.model.loading import load_target
from decode.model.without_weights import load_tokenizer
from tests.export import needs, require_environment
from tests.gguf_models import small_gguf_model, write_model
from train.engines.programs import llama_server_program

# What splits differ in.
HARD = """I'm sure THEY'LL say we've, it's 'd and DON'T 'S 'x ‘re
1 12 123 1234 12345 1234567 1,234.56 3.14e-10 v2 x86_64 2nd ½ ² ٣٤٥٦ ⅷ 第12345号
\tdef  f(x):\n\t\treturn   x  # note\n\n\n    if a[0]!=b and not(c):  \r\n\r\n  end\t \n \n
a  b   c    d     e      f  trailing   \n   leading
... --- !!! ?!?! ,,, ;; :: /// \\\\ __init__ $x +y <=> ^_^ ~|~ `code` {}[]() %d & @a #b "q" «q» “r”
https://example.com/a/b?c=d&e=f#g user@example.org C:\\dir\\file
camelCase HTTPServer XMLHttpRequest iPhone ALLCAPS lower Title
été naïve Straße àéîõü mañana
привет как дела 你好，世界。这是中文！ こんにちは カタカナ 안녕하세요
สวัสดีครับ नमस्ते दुनिया العربية עברית
e\u0301a\u0308 n\u0303o\u0302 \u0301x 👍🏽 👩‍👩‍👧 😀😀
™ © € £5 ¥100 → ∑ ≠ ▁ \u00a0nbsp\u00a0\u00a0x \u3000wide \u2003em
<sentinel:12> IMGIMGABCZ <tag attr="v">text</tag> a-b a_b a/b a.b a|b (a) . b , c
"""
# What llama.cpp's rules leave out of those that the models were trained with, which are ours: marks
# behind letters, blanks of other scripts between letters, and digits of other scripts in threes.
MARKS = r"[\u0300-\u036f\u0900-\u0e7f]"
APART = dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "tekken"), MARKS)
APART |= {"deepseek-coder": r"[\u2003\u3000]", "deepseek-llm": r"[\u2003\u3000]", "superbpe": "٣"}
NEAR = [line for line in HARD.split("\n") if line]
TEXTS = [HARD, *NEAR, *(f"{line}\n" for line in NEAR[:3]), " ", "\n", "  \n\n"]


@functools.cache
def vocabulary(longest: int) -> Tokenizer:
    """Merges that were learnt without splits, so that a token ends where a rule ends it. longest:
    bytes of a token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        max_token_length=longest,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def write_vocabulary(path: Path, rules: str, longest: int = 8, **options: bool) -> None:
    """A GGUF file of a small llama with the vocabulary above and the name of some rules."""
    backend = vocabulary(longest)
    tokens = backend.get_vocab()
    model = small_gguf_model("llama", vocab_size=len(tokens) + 1)

    def keys(writer: Any) -> None:
        merges = json.loads(backend.to_str())["model"]["merges"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(rules)
        writer.add_token_list([*sorted(tokens, key=tokens.__getitem__), "<|end|>"])
        kinds = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL]
        writer.add_token_types(kinds)
        writer.add_token_merges([" ".join(pair) for pair in merges])
        writer.add_bos_token_id(len(tokens))
        writer.add_eos_token_id(len(tokens))
        for name, value in options.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)

    write_model(path, "llama", model, keys, vocabulary=False)


def llama_tokenize() -> Path:
    """llama.cpp's own tokenizer, beside its server."""
    needs("llama-server")
    program = Path(str(llama_server_program())).resolve().with_name("llama-tokenize")
    require_environment(None if program.is_file() else f"{program} is missing", "make engine-llama")
    return program


def their_ids(program: Path, file: Path, text: str) -> Any:
    """llama.cpp's tokens of a text."""
    said = file.with_name("text")
    said.write_bytes(text.encode())
    options = ["--ids", "--no-escape", "--log-disable"]
    run: list[str | Path] = [program, "-m", file, "-f", said, *options]
    return ast.literal_eval(
        subprocess.run(run, check=True, capture_output=True, encoding="utf-8").stdout
    )


@pytest.mark.engine
@pytest.mark.parametrize("rules", sorted(RULES))
def test_rules_of_splitting_are_those_of_llama_cpp(rules: str, tmp_path: Path) -> None:
    program = llama_tokenize()
    file = tmp_path / "model.gguf"
    for longest in (3, 8):
        write_vocabulary(file, rules, longest)
        tokenizer, _ = load_tokenizer(str(file))
        for text in TEXTS:
            if rules not in APART or not re.search(APART[rules], text):
                assert tokenizer(text).input_ids == their_ids(program, file, text), text


PIECES = ["▁", "▁a", "▁b", "ab", "▁ab", "▁▁", "▁▁▁▁", "a", "b", "c", ".", "ca"]


def write_pieces(path: Path, **options: bool) -> None:
    """A GGUF file of a small llama with a vocabulary of SentencePiece's kind."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]

    def keys(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * 259 + [-float(len(PIECES) - n) for n in range(len(PIECES))])
        writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * len(PIECES))
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        for name, value in options.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)

    write_model(
        path, "llama", small_gguf_model("llama", vocab_size=len(tokens)), keys, vocabulary=False
    )


OPTIONS: list[dict[str, bool]] = [{}, {"add_space_prefix": False}, {"add_bos_token": False}]
SPACED = ["ab", " ab", "  ab a", "ab  ab", "a\nb", "ca ca.", "é ab", "ab   ", "    ab"]


@pytest.mark.engine
@pytest.mark.parametrize("options", OPTIONS)
def test_spaces_of_sentencepiece_are_those_of_llama_cpp(
    options: dict[str, bool], tmp_path: Path
) -> None:
    program = llama_tokenize()
    file = tmp_path / "model.gguf"
    write_pieces(file, **options)
    tokenizer, _ = load_tokenizer(str(file))
    for text in SPACED:
        assert tokenizer(text).input_ids == their_ids(program, file, text), text


@pytest.mark.parametrize("options", OPTIONS)
def test_spaces_come_back(options: dict[str, bool], tmp_path: Path) -> None:
    write_pieces(tmp_path / "model.gguf", **options)
    tokenizer, _ = load_tokenizer(str(tmp_path / "model.gguf"))
    marker = options.get("add_space_prefix", True)
    begun = options.get("add_bos_token", True)
    assert tokenizer("ab").tokens() == ["<s>"] * begun + (["▁ab"] if marker else ["ab"])
    for text in SPACED:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("rules", "words", "begun"),
    [
        ("qwen2", ["1", "2", "3", "4", "5"], False),
        ("llama-bpe", ["123", "45"], True),
        ("gpt-2", ["12345"], False),
        ("falcon", ["123", "45"], False),
        ("smollm", ["1", "2", "3", "4", "5"], False),
    ],
)
def test_rules_split_as_the_model_was_trained(
    rules: str, words: list[str], begun: bool, tmp_path: Path
) -> None:
    write_vocabulary(tmp_path / "model.gguf", rules)
    tokenizer, _ = load_tokenizer(str(tmp_path / "model.gguf"))
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("12345")
    assert [word for word, _ in split] == words
    assert (tokenizer("a").input_ids[0] == tokenizer.bos_token_id) is begun
    assert tokenizer.decode(tokenizer(HARD, add_special_tokens=False).input_ids) == HARD


def test_rules_that_are_not_known_are_refused(tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "model.gguf", "rules-of-tomorrow")
    with pytest.raises(UserError, match=r"rules named 'rules-of-tomorrow' \(tokenizer\.ggml\.pre"):
        load_target(str(tmp_path / "model.gguf"))
    write_vocabulary(tmp_path / "model.gguf", "qwen2", **{"normalizer.lowercase": True})
    with pytest.raises(UserError, match=r"tokenizer\.ggml\.normalizer\.lowercase = True"):
        load_tokenizer(str(tmp_path / "model.gguf"))
