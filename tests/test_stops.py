"""Stop strings: exact inside a block, as `generate(stop_strings=…)` ends a text."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

from decode import text_stream
from decode.base.errors import UserError
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.loop.decoding import Decoder
from decode.text_stream import AnswerText, StopStrings, TextStream, decode, text_of
from tests.test_loop import NEW, PROMPTS
from tests.tiny import VOCAB, generated, tiny_model, tiny_tokenizer

tokenizer = functools.cache(tiny_tokenizer)


@functools.cache
def model() -> Any:
    """Writes readable text: what is special or no ASCII it never finds likely."""
    lm = tiny_model("llama", tie=False)
    texts = [decode(tokenizer(), [token]) for token in range(VOCAB)]
    strange = [i for i, text in enumerate(texts) if not (text.isascii() and text.isprintable())]
    with torch.no_grad():
        lm.get_output_embeddings().weight[[0, 1, 2, *strange]] = 0
    return lm


@functools.cache
def answer(prompt: tuple[int, ...], *stop: str) -> list[int]:
    """What `generate()` says, up to a stop string."""
    call = {"tokenizer": tokenizer()}
    return generated(model(), prompt, NEW, call, stop_strings=list(stop) or None)


def plain(prompt: tuple[int, ...], stop: list[str]) -> list[int]:
    """The whole answer's shortest beginning whose text holds a stop string."""
    tokens = answer(prompt)
    for count in range(1, len(tokens) + 1):
        text = decode(tokenizer(), tokens[:count], skip_special_tokens=False)
        if any(string in text for string in stop):
            return tokens[:count]
    return tokens


def drafter(name: str) -> Drafter:
    if name == "same":
        return SmallLMDrafter(model())
    return DRAFTERS[name]()


def decoded(name: str, stop: list[str], gamma: int = 7, prompts: Any = PROMPTS) -> Any:
    decoder = Decoder(model(), drafter(name), gamma=gamma, stop=StopStrings(tokenizer(), stop))
    return decoder.decode(prompts, NEW)


def stops_of(prompt: tuple[int, ...]) -> list[str]:
    """Strings that span the tokens of the prompt's answer: the i-th ends inside its token i+1."""
    pieces = [decode(tokenizer(), [token]) for token in answer(prompt)]
    return [a[-1] + b[: (len(b) + 1) // 2] for a, b in itertools.pairwise(pieces)]


@pytest.mark.parametrize("name", ["none", "same"])
def test_texts_end_where_generate_ends_them(name: str) -> None:
    """Blocks are 8 long here, so these texts end at each place in one."""
    ends = set()
    for stop in stops_of(PROMPTS[1])[:8]:
        run = decoded(name, [stop])
        assert run.outputs == [plain(prompt, [stop]) for prompt in PROMPTS]
        assert run.outputs[1] == answer(PROMPTS[1], stop)
        ends.add(len(run.outputs[1]))
    assert len(ends) >= 4
    assert min(ends) < NEW


def test_several_strings_and_the_first_to_be_complete() -> None:
    stops = stops_of(PROMPTS[1])[2:8]
    run = decoded("same", stops)
    assert run.outputs == [plain(prompt, stops) for prompt in PROMPTS]
    assert run.outputs[1] == answer(PROMPTS[1], *stops)


def test_what_comes_after_the_end_is_not_counted() -> None:
    stop = stops_of(PROMPTS[1])[3]
    run = decoded("same", [stop], prompts=PROMPTS[1:2])
    emitted = len(run.outputs[0]) - 1  # all but the prefill's
    assert run.counts.emitted == emitted
    assert run.counts.reached.sum() == run.counts.accepted.sum() <= emitted
    assert stop in decode(tokenizer(), run.outputs[0])


# --- the strings themselves -----------------------------------------------------------------------


def cut(strings: list[str], blocks: list[list[int]]) -> tuple[int, int] | None:
    """(block, tokens kept of it) where a text that comes in blocks ends."""
    stop = StopStrings(tokenizer(), strings)
    stop.start()
    stop.cut(1, tokenizer()("stop").input_ids)  # another row's text is its own
    for place, block in enumerate(blocks):
        kept = stop.cut(0, block)
        if kept is not None:
            return place, kept
    return None


def blocks_of(text: str, size: int) -> list[list[int]]:
    ids: list[int] = tokenizer()(text).input_ids
    return [ids[i : i + size] for i in range(0, len(ids), size)]


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("The dog does not mind.\n\nAnd then", "\n\n"),
        ("a 句子。 b", "。"),  # three bytes, a token each
        ("x 🦊🦊 y", "🦊🦊"),
        ("e\u0301te\u0301 ici", "e\u0301 i"),
        ("one<|im_end|>two", "<|im_end|>"),
        ("aaab", "aab"),
        ("the quick brown fox jumps", "quick brown fox"),
    ],
)
def test_strings_across_tokens_blocks_and_bytes(text: str, stop: str, size: int) -> None:
    ids = tokenizer()(text).input_ids
    needed = next(
        count
        for count in range(1, len(ids) + 1)
        if stop in decode(tokenizer(), ids[:count], skip_special_tokens=False)
    )
    assert cut([stop], blocks_of(text, size)) == ((needed - 1) // size, (needed - 1) % size + 1)
    assert cut([stop + "§"], blocks_of(text, size)) is None


def test_the_prompt_is_no_part_of_the_answer() -> None:
    """The prompt ends with the string, or with its first half: neither ends the text."""
    prompt = tuple(tokenizer()("dog dog").input_ids)
    said = decode(tokenizer(), answer(prompt), skip_special_tokens=False)
    stop = "dog" + said[:1]
    assert stop not in said
    for string in ("dog", stop):
        run = decoded("none", [string], prompts=[prompt])
        assert len(run.outputs[0]) == NEW


@pytest.mark.parametrize("strings", [[], [""], ["a", ""], ""])
def test_empty_strings_are_refused(strings: Any) -> None:
    with pytest.raises(UserError, match="expected at least one, none of them empty"):
        StopStrings(tokenizer(), strings)


# --- pieces of text -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
def test_pieces_add_up_and_split_no_character(size: int) -> None:
    text = "Ein Fuchs 🦊 springt; 你好，世界 — naïve\n\n  end 🏳️‍🌈"
    stream = TextStream(tokenizer(), skip_special_tokens=True)
    pieces = [stream.add(block) for block in blocks_of(text + "<|im_end|>", size)]
    assert "".join(pieces) + stream.end() == text
    assert not any("�" in piece for piece in pieces)
    assert sum(map(bool, pieces)) > 5


def test_broken_bytes_come_out_in_the_end() -> None:
    stream = TextStream(tokenizer(), skip_special_tokens=True)
    half = tokenizer()("🦊").input_ids[:2]
    assert stream.add([*tokenizer()("a").input_ids, *half]) == "a"
    assert stream.held == "�"
    assert stream.end() == "�"
    assert stream.end() == ""


@functools.cache
def byte_fallback_tokenizer() -> Any:
    """As Llama 2's: characters that are no tokens are written as the tokens of their bytes."""
    vocab = {"<unk>": 0, "<s>": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}}
    for piece in ("▁", "a", "b", "▁the", "é"):
        vocab[piece] = len(vocab)
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
    )
    inner.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", unk_token="<unk>")


def spelt(text: str) -> list[int]:
    """A text as the tokens of its bytes, with a few tokens of their own."""
    vocab = byte_fallback_tokenizer().get_vocab()
    known = {" ": vocab["▁"], "a": vocab["a"], "é": vocab["é"]}
    return [
        id_ for c in text for id_ in ([known[c]] if c in known else [x + 2 for x in c.encode()])
    ]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_text_of_bytes_is_the_same_for_any_number_of_tokens(size: int) -> None:
    """Cut at every place: complete characters stay, and the rest is one character."""
    text = " a中é🦙ü 語a𠮷"
    ids = spelt(text)
    for end in range(1, len(ids) + 1):
        stream = TextStream(byte_fallback_tokenizer(), skip_special_tokens=True)
        found = "".join(map(stream.add, blocks_of_ids(ids[:end], size))) + stream.end()
        kept = max(n for n in range(len(text) + 1) if len(spelt(text[:n])) <= end)
        rest = end - len(spelt(text[:kept]))
        assert found == text[:kept].removeprefix(" ") + "�" * rest
        assert text_of(byte_fallback_tokenizer(), ids[:end]) == found


def blocks_of_ids(ids: Sequence[int], size: int) -> list[Sequence[int]]:
    return [ids[begin : begin + size] for begin in range(0, len(ids), size)]


@pytest.mark.parametrize("stop", [False, True])
def test_bytes_that_are_no_character_cost_linear_time(
    stop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come out while the text grows, and a call decodes few tokens."""
    decoded: list[int] = []

    def counting(tokenizer: Any, ids: Sequence[int], **options: Any) -> str:
        decoded.append(len(ids))
        return decode(tokenizer, ids, **options)

    monkeypatch.setattr(text_stream, "decode", counting)
    stream = TextStream(byte_fallback_tokenizer(), skip_special_tokens=True)
    search = StopStrings(byte_fallback_tokenizer(), "the end")
    text = ""
    for _ in range(500):
        if stop:
            assert search.cut(0, [257, 257]) is None
        else:
            text += stream.add([257, 257])
    assert stop or len(text) > 990
    assert sum(decoded) < 60 * 1000


def test_a_stop_string_with_a_special_token_between_its_parts() -> None:
    """It is what the client sees. A string that has a special token is searched beside others."""
    a, b = (tokenizer()(letter).input_ids[0] for letter in "ab")
    (special,) = tokenizer()("<|im_end|>").input_ids
    assert StopStrings(tokenizer(), "ab").cut(0, [a, special, b, a]) == 3
    both = StopStrings(tokenizer(), ["ba", "a<|im_end|>b"])
    assert both.cut(0, [a, special]) is None
    assert both.cut(0, [b, a]) == 1
    assert both.cut(1, [b, special, a]) == 3
    text = AnswerText(tokenizer(), ["a<|im_end|>b"])
    assert text.add([b, a]) + text.add([special, b, a]) == "bab"
    assert text.stopped == "a<|im_end|>b"
