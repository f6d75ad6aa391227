"""Prompt to text, as users of transformers know it; and our drafters in transformers' own loop."""

import copy
import functools
import io
import itertools
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, TextStreamer

from decode.base.errors import UserError
from decode.drafters import NoDrafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.lookup.suffix import SuffixDrafter
from decode.drafters.several.combined import CompositeDrafter, SeveralDrafters
from decode.drafters.small_lm import SmallLMDrafter
from decode.loop.decoding import Decoder
from decode.opening.directory import save_drafter
from decode.text import SpeculativeGenerator, TextPieces
from decode.text_stream import decode
from tests.tiny import EOS_ID, generated, save_tiny, tiny_model, tiny_target, tiny_tokenizer

model = functools.cache(tiny_model)
tokenizer = functools.cache(tiny_tokenizer)

TEXTS = ["The quick brown fox", "sea shells", "She sells sea shells by the sea"]
MESSAGES = [{"role": "user", "content": "What is the sum of 12 and 30?"}]
NEW = 20


def said(ids: list[int], call: Mapping[str, Any] = {}, **settings: Any) -> list[int]:
    """What transformers' generate() answers."""
    return generated(model("llama"), ids, NEW, call, eos_token_id=EOS_ID, **settings)


def generator(drafter: Any = "ngram", **options: Any) -> SpeculativeGenerator:
    return SpeculativeGenerator(model("llama"), tokenizer(), drafter, **options)


def test_text_in_text_out_as_generate() -> None:
    ours = generator(model("llama", seed=7, layers=1), gamma=3)
    wanted = [decode(tokenizer(), said(tokenizer()(text).input_ids)) for text in TEXTS]
    assert ours.generate(TEXTS, max_new_tokens=NEW) == wanted
    assert ours.decoded is not None
    assert ours.decoded.counts.steps > 0
    # One prompt gives one text; as text, as ids, and as a tensor of ids.
    ids = tokenizer()(TEXTS[0]).input_ids
    for prompt in (TEXTS[0], ids, torch.tensor(ids)):
        assert ours.generate(prompt, max_new_tokens=NEW) == wanted[0]
    assert ours.generate(torch.tensor([ids]), max_new_tokens=NEW) == wanted[:1]
    for given in (ids, np.array(ids), torch.tensor(ids)):
        assert ours.generate([given, TEXTS[1]], max_new_tokens=NEW) == wanted[:2]
    # A list of token ids of any kind is one prompt.
    for some in (np.array(ids), torch.tensor(ids)):
        assert ours.generate(list(some), max_new_tokens=NEW) == wanted[0]


def test_threads_take_turns_on_one_generator() -> None:
    ours = generator(model("llama", seed=7, layers=1), gamma=3)
    wanted = [ours.generate(text, max_new_tokens=NEW) for text in TEXTS]
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        said = pool.map(lambda text: ours.generate(text, max_new_tokens=NEW), TEXTS)
        assert list(said) == wanted
        decoder = Decoder(ours.model, ours.drafter)
        ids = [ours.tokens(text) for text in TEXTS]
        alone = [decoder.decode([one], NEW).outputs for one in ids]
        assert list(pool.map(lambda one: decoder.decode([one], NEW).outputs, ids)) == alone
        # So do decoders that share a drafter, which has the state of one decode.
        own = [Decoder(ours.model, ours.drafter) for _ in ids]
        at_once = pool.map(lambda at: own[at].decode([ids[at]], NEW).outputs, range(len(ids)))
        assert list(at_once) == alone

    def inside(row: int, tokens: list[int]) -> None:
        own[1].decode([ids[1]], NEW)

    with pytest.raises(UserError, match="this drafter is called while it decodes"):
        own[0].decode([ids[0]], NEW, on_tokens=inside)
    assert copy.deepcopy(ours.drafter.turn) is not ours.drafter.turn
    # While a stream is read, it may still decode.
    pieces = ours.stream(TEXTS[0], max_new_tokens=NEW)
    begin = next(pieces)
    assert ours.generate(TEXTS[1], max_new_tokens=NEW) == wanted[1]
    assert begin + "".join(pieces) == wanted[0]

    def again(_: str) -> None:
        ours.generate(TEXTS[1])

    with pytest.raises(UserError, match="this generator is called while it decodes"):
        ours.generate(TEXTS[0], streamer=TextPieces(tokenizer(), again))
    assert ours.generate(TEXTS[0], max_new_tokens=NEW) == wanted[0]


def test_a_combination_and_a_drafter_that_it_holds_take_turns() -> None:
    """In one thread, where the second is refused; in several, each text is as if it was alone."""
    shared, other = NgramDrafter(), SuffixDrafter()
    inner = CompositeDrafter([shared, other])
    drafters = [shared, inner, CompositeDrafter([other, inner]), SeveralDrafters([other, shared])]
    decoders = [Decoder(model("llama"), drafter) for drafter in drafters]
    ids = tokenizer()(TEXTS[2]).input_ids
    for outer, within in itertools.product(decoders, decoders[1:]):

        def inside(row: int, tokens: list[int], within: Decoder = within) -> None:
            within.decode([ids], NEW)

        with pytest.raises(UserError, match=r"this (drafter|decoder) is called while it decodes"):
            outer.decode([ids], NEW, on_tokens=inside)
    wanted = said(ids)
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda at: decoders[at % 4].decode([ids], NEW).outputs[0], range(16))
        assert list(answers) == [wanted] * 16


def test_no_drafter_is_plain_decoding() -> None:
    ids = tokenizer()(TEXTS[0]).input_ids
    ours = generator(None)
    assert ours.generate(ids, max_new_tokens=NEW) == decode(tokenizer(), said(ids))
    assert ours.decoded is not None
    assert not ours.decoded.counts.drafted.any()
    assert Decoder(model("llama"), None).decode([ids], 4).outputs[0] == said(ids)[:4]


def test_messages_are_written_by_the_chat_template() -> None:
    ids = tokenizer().apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    wanted = decode(tokenizer(), said(ids))
    assert generator().generate(MESSAGES, max_new_tokens=NEW) == wanted
    assert generator().generate([MESSAGES, MESSAGES], max_new_tokens=NEW) == [wanted] * 2
    bare = tiny_tokenizer()
    bare.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        SpeculativeGenerator(model("llama"), bare).generate(MESSAGES)


def test_options_reach_the_decoder() -> None:
    ours = generator()
    ids = tokenizer()(TEXTS[0]).input_ids
    penalised = decode(tokenizer(), said(ids, repetition_penalty=1.5))
    assert ours.generate(TEXTS[0], max_new_tokens=NEW, repetition_penalty=1.5) == penalised
    sampled: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 1.2, "min_p": 0.01}
    texts = ours.generate(TEXTS, **sampled, seed=5)
    assert texts == ours.generate(TEXTS, **sampled, seed=5)
    assert texts != ours.generate(TEXTS, **sampled, seed=6)
    assert ours.generate(TEXTS[0], **sampled, seed=5) == texts[0]
    assert ours.generate(TEXTS, **sampled, seed=5, batch_size=1) == texts
    # Nothing but the likeliest token stays.
    assert ours.generate(TEXTS[0], max_new_tokens=NEW, temperature=1.0, top_k=1) == ours.generate(
        TEXTS[0], max_new_tokens=NEW
    )
    whole = ours.generate(TEXTS[0], max_new_tokens=NEW)
    assert isinstance(whole, str)
    stop = whole[5:7]
    cut = ours.generate(TEXTS[0], max_new_tokens=NEW, stop=stop)
    assert isinstance(cut, str)
    assert whole.startswith(cut)
    assert stop in cut
    assert len(cut) < len(whole)


def test_parts_by_name() -> None:
    small = model("llama", seed=7, layers=1)
    ours = generator(
        small, rule="exact", policy="heuristic:max_depth=6", shape="static:widths=[2,1]"
    )
    wanted = [decode(tokenizer(), said(tokenizer()(text).input_ids)) for text in TEXTS]
    assert ours.generate(TEXTS, max_new_tokens=NEW) == wanted
    assert ours.decoded is not None
    assert ours.decoded.counts.nodes_per_step > 2
    with pytest.raises(UserError, match="does not take a shape"):
        generator("ngram", shape="chain")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streamed_pieces_add_up_to_the_text(temperature: float) -> None:
    ours = generator(model("llama"))
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature}
    for text in TEXTS:
        whole = ours.generate(text, **options)
        pieces = list(ours.stream(text, **options))
        assert "".join(pieces) == whole
        assert all(pieces)
        assert len(pieces) > 1


def test_streamers_of_transformers_print_what_they_print_there() -> None:
    ids = tokenizer()(TEXTS[0]).input_ids
    printed = []
    for skip_prompt in (False, True):
        for ours in (True, False):
            streamer = TextStreamer(tokenizer(), skip_prompt=skip_prompt)
            with redirect_stdout(io.StringIO()) as out:
                if ours:
                    generator(model("llama")).generate(
                        TEXTS[0], max_new_tokens=NEW, streamer=streamer
                    )
                else:
                    said(ids, {"streamer": streamer})
            printed.append(out.getvalue())
    assert printed[0] == printed[1] != printed[2] == printed[3]


def test_our_streamer_in_transformers_loop() -> None:
    ids = tokenizer()(TEXTS[0]).input_ids
    pieces: list[str] = []
    whole = said(ids, {"streamer": TextPieces(tokenizer(), pieces.append)})
    assert "".join(pieces) == decode(tokenizer(), whole)


def test_a_stream_may_be_left_and_tells_of_errors() -> None:
    ours = generator(NoDrafter())
    stream = ours.stream(TEXTS[0], max_new_tokens=200)
    next(stream)
    stream.close()  # returns only when the thread has ended
    with pytest.raises(UserError, match="prompt 0 is empty"):
        list(ours.stream(""))
    with pytest.raises(TypeError, match="max_tokens"):
        list(ours.stream("a", max_tokens=3))


def test_a_program_may_end_while_a_stream_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that computes while Python ends would abort the process."""
    at_end: list[Any] = []
    monkeypatch.setattr("atexit.register", at_end.append)
    stream = generator(NoDrafter()).stream(TEXTS[0], max_new_tokens=200)
    next(stream)
    threads = threading.active_count()
    at_end[-1]()
    assert threading.active_count() == threads - 1
    stream.close()


def test_what_is_left_to_generate_or_makes_no_sense() -> None:
    ours = generator()
    with pytest.raises(UserError, match=r"num_beams is 4; expected 1, .* model\.generate"):
        ours.generate(TEXTS, num_beams=4)
    with pytest.raises(UserError, match="there are 3 prompts, but a streamer"):
        ours.generate(TEXTS, streamer=TextStreamer(tokenizer()))
    with pytest.raises(UserError, match="no prompts"):
        ours.generate([])
    wrong: list[Any] = [None, 5]
    for prompts in wrong:
        with pytest.raises(UserError, match=f"the prompts are {prompts}; expected a text"):
            ours.generate(prompts)
    with pytest.raises(UserError, match="a vocabulary of 280 tokens, but the target's has 300"):
        generator(model("llama", vocab=280)).generate(TEXTS)


# --- drafters here and there ----------------------------------------------------------------------


def test_a_saved_drafter_is_an_assistant_model(tmp_path: Path) -> None:
    """As training writes it."""
    saved = tmp_path / "drafter"
    options: dict[str, Any] = {"target": tiny_target(), "provenance": {}}
    save_drafter(saved, "small_lm", lambda path: save_tiny(path, layers=1, seed=7), **options)
    assistant = AutoModelForCausalLM.from_pretrained(saved)
    for text in TEXTS:
        ids = tokenizer()(text).input_ids
        wanted = said(ids)
        assert said(ids, {"assistant_model": assistant}) == wanted
        # And ours with the same drafter says the same.
        ours = generator(str(saved))
        assert ours.generate(text, max_new_tokens=NEW) == decode(tokenizer(), wanted)
        assert isinstance(ours.drafter, SmallLMDrafter)
