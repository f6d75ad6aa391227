"""Corrects the tokenizer that transformers builds from a GGUF file.

Texts are split into words before words become tokens. A file names the rules of splitting
(`tokenizer.ggml.pre`), and has no rules itself. transformers knows some names, and takes GPT-2's
rules for all others without a word. Here are the rules of llama.cpp's names.
"""

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from decode.base.errors import UserError
from decode.model.gguf_file import Header

TOKENIZER = "tokenizer.ggml."

_SHORT = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"  # I'm, we'll
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_BLANKS}"
_QWEN2 = rf"{_SHORT}|{_WORD}|\p{{N}}|{_SIGNS}|{_BLANKS}"
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"  # letters with the marks that follow them
# A word of capitals and then small letters; letters without case are both.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_CASED = rf"{_BEFORE}(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*)"
_GPT4O = rf"{_CASED}(?:{_SHORT})?|\p{{N}}{{1,3}}|{_SLASHED}|{_BLANKS}"
_DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_CHINESE = "[一-龥ࠀ-一가-\ud7ff]+"
_KANA = "[一-龥\u3040-ゟ゠-ヿ]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
# Lengths of blanks that are one token each in JAIS 2.
_HALVES = "|".join(rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1))

# The rules by the names of `tokenizer.ggml.pre`. Each splits what the ones before left whole, and a
# match and what lies between two matches are words.
_RULES: dict[tuple[str, ...], tuple[str, ...]] = {
    (
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "jina-v5-nano",
        "dbrx",
        "smaug-bpe",
        "chatglm-bpe",
        "glm4",
        "glm5",
    ): (_LLAMA3,),
    (
        "qwen2",
        "deepseek-r1-qwen",
        "kormo",
        "f2llmv2",
        "megrez",
        "stablelm2",
        "hunyuan",
        "solar-open",
        "grok-2",
    ): (_QWEN2,),
    ("qwen35",): (rf"{_SHORT}|{_MARKED}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}",),
    ("seed-coder",): (rf"{_SHORT}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",),
    ("bailingmoe", "bailingmoe2", "llada-moe"): (
        rf"{_SHORT}|{_WORD}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    ("exaone-moe",): (
        rf"{_SHORT}|{_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    ("ufakzeka",): (rf"{_WORD}|\p{{N}}|{_SIGNS}|{_BLANKS}",),
    ("laguna",): (r"[^\n]+|\n+", _QWEN2),
    ("minicpm5",): (r"\p{N}{1,3}", rf"{_SHORT}|{_WORD}|\p{{N}}+|{_SIGNS}|{_BLANKS}"),
    ("jais-2",): (
        rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|{_HALVES}|\s{{1,2}}(?!\S)|\s",
    ),
    ("tekken",): (rf"{_CASED}|\p{{N}}|{_SLASHED}|{_BLANKS}",),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): (_GPT4O,),
    ("deepseek-llm",): (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^𝐀-𝟋]]+",
        r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+$",
        _CHINESE,
        r"\p{N}+",
    ),
    ("deepseek-coder",): (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}"),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): (
        r"\p{N}{1,3}",
        _KANA,
        rf"{_DEEPSEEK}[\r\n]*|{_BLANKS}",
    ),
    ("spark2_5",): (
        r"\p{N}{1,3}",
        _KANA,
        rf"{_DEEPSEEK}|[\r\n]|\s+(?!\S)|\s+",
        r"\p{N}",
    ),
    ("falcon",): (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    (
        "starcoder",
        "refact",
        "command-r",
        "smollm",
        "codeshell",
        "exaone",
        "minerva-7b",
        "mellum2",
    ): (r"\p{N}", _GPT2),
    (
        "gpt-2",
        "phi-2",
        "jina-es",
        "jina-de",
        "jina-v1-en",
        "jina-v2-code",
        "jina-v2-es",
        "jina-v2-de",
        "roberta-bpe",
        "gigachat",
        "a.x-4.0",
        "mellum",
        "modern-bert",
        "mpt",
        "olmo",
        "jais",
        "trillion",
        "granite-docling",
        "exaone4",
    ): (_GPT2,),
    ("bloom", "gpt3-finnish", "poro-chat"): (_BLOOM,),
    ("viking",): (_BLOOM, r"\p{N}"),
    ("chameleon",): (
        r"<sentinel:[0-9]+>",
        r"(?:IMGIMG)[A-I]{1,4}Z",
        r"[\t\n]|    |  ",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
    ),
    ("superbpe",): (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    ("default",): (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
RULES = {name: rules for names, rules in _RULES.items() for name in names}

_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0")
# A word that is a token is that token, whether or not merges lead there.
_WHOLE_WORDS = {*_LLAMA3_NAMES, "lfm2", "jina-v5-nano", "tekken", "glm4", "glm5", "minicpm5"}
# Texts begin with the token for it, unless the file says otherwise.
_BEGUN = {*_LLAMA3_NAMES, "lfm2", "jina-v5-nano", "tekken", "chameleon"}

# Keys behind `tokenizer.ggml.` that are read, here or by transformers.
_READ = {
    "model",
    "pre",
    "tokens",
    "token_type",
    "scores",
    "merges",
    "add_bos_token",
    "add_eos_token",
    "add_space_prefix",
    "precompiled_charsmap",
}
# Keys that change no token of a text: ids that only a caller uses, counts, and a rule of tokenizers
# that transformers does not read at all (`remove_extra_whitespaces`, of T5's kind).
_WITHOUT_EFFECT = {"token_type_count", "remove_extra_whitespaces"}
# What is neutral only if it is off.
_OFF = {"add_sep_token", "normalizer.lowercase", "normalizer.strip_accents"}


def correct_tokenizer(tokenizer: Any, header: Header) -> None:
    """Corrects, in place, what transformers reads wrongly from a GGUF file's tokenizer.

    Corrects how texts are split, begun and prefixed, and the special tokens, from the ids in the
    file. Raises UserError for keys, and for names of rules, that are not known.
    """
    metadata = header.metadata
    for key, value in metadata.items():
        rest = key.removeprefix(TOKENIZER)
        known = rest in _READ | _WITHOUT_EFFECT or rest.endswith("_token_id")
        if rest != key and not known and not (rest in _OFF and not value):
            raise UserError(
                f"{header.path} says {key} = {value!r}, which is not read here, nor by "
                "transformers. Without it texts can have other tokens. Name the directory that the "
                "file was made from, in transformers' format"
            )
    if metadata.get(f"{TOKENIZER}model") == "gpt2":
        _set_rules(tokenizer, header)
    elif metadata.get(f"{TOKENIZER}model") == "llama" and not _is_gemma(metadata):
        _set_spaces(tokenizer.backend_tokenizer, metadata.get(f"{TOKENIZER}add_space_prefix", True))
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = metadata.get(f"{TOKENIZER}{key}_token_id")
        if token_id is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token_id))


def _set_rules(tokenizer: Any, header: Header) -> None:
    name = header.metadata.get(f"{TOKENIZER}pre", "default")
    if name not in RULES:
        raise UserError(
            f"{header.path} splits texts by the rules named {name!r} (tokenizer.ggml.pre), which "
            "are not known here. With other rules texts would have other tokens. Name the "
            "directory that the file was made from, in transformers' format"
        )
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(rule), behavior="isolated") for rule in RULES[name]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.model.ignore_merges = name in _WHOLE_WORDS
    if name in _BEGUN and f"{TOKENIZER}add_bos_token" not in header.metadata:
        tokenizer.add_bos_token = True


def _is_gemma(metadata: dict[str, Any]) -> bool:
    """Whether transformers knows how to read the spaces."""
    return str(metadata.get("general.architecture")).startswith("gemma")


def _set_spaces(backend: Tokenizer, prefix: bool) -> None:
    """SentencePiece puts a space before a text, also before one that begins with a space."""
    marked = normalizers.Replace(" ", "▁")
    first = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*first, marked])
    backend.pre_tokenizer = None
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1)] if prefix else []),
        ]
    )
