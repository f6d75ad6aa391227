"""Text in, text out: a `generate` call as in `transformers`, over the speculative loop."""

import atexit
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from decode.base.errors import UserError
from decode.base.threads import OneAtATime
from decode.drafters import Drafter, NoDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.constraint import Constraint
from decode.draw.logits import LogitsProcessor
from decode.lengths import Policy
from decode.loop.decoded import Decoded
from decode.loop.decoding import Decoder
from decode.loop.parts import Part, make_policy, make_shape
from decode.loop.rows import token_ids
from decode.model.cache.prefix_cache import prefix_cache
from decode.model.chat_template import as_read
from decode.model.generation_config import decoder_processors, eos_ids, sampling_as_generate
from decode.model.identity import eos_token_ids, fingerprint
from decode.model.loading import Target
from decode.model.pretrained import has_encoder
from decode.opening.directory import open_drafter
from decode.rules import Rule
from decode.shapes import Shape
from decode.text_stream import StopStrings, TextStream, text_of
from decode.verification import Observer

# Text to continue without a template, messages to answer, or token ids.
Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]


class TextPieces(BaseStreamer):
    """A streamer for `generate()`, here or in transformers. It calls `write` with each piece of the
    answer's text as soon as its tokens are final. Pieces never split a character, leave out special
    tokens, and add up to the text. keep_blank: see `TextStream`; set it with a grammar."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        write: Callable[[str], None],
        *,
        keep_blank: bool = False,
    ) -> None:
        self._stream = TextStream(tokenizer, skip_special_tokens=True, keep_blank=keep_blank)
        self._write = write

    def put(self, value: torch.Tensor) -> None:
        """value: new tokens, int64 [n]. A prompt has shape [1, n] and is not written."""
        if value.ndim == 1:
            self._say(self._stream.add(value.tolist()))

    def end(self) -> None:
        self._say(self._stream.end())

    def _say(self, piece: str) -> None:
        if piece:
            self._write(piece)


class SpeculativeGenerator:
    """A target, its tokenizer and a drafter: prompt → text.

    drafter: a `Drafter`, a smaller model with the target's vocabulary, a name for `open_drafter`,
    or None: plain decoding. gamma, rule, policy: as for `Decoder`. shape: a shape, or
    its name with options in the format of `Choice`. Only some drafters take a shape. eos_token_ids:
    the ids that end a text. Default: the ids in the tokenizer and the model's configs.
    prefix_cache_bytes: a prompt that begins like an earlier one, such as the next turn of a chat,
    reuses the keys and values of that beginning (`decode.model.cache.prefix_cache`). 0: never.
    Default: 256 MiB for a model in float32, else 0, because in 16 bits reuse can change a text by
    rounding. decoded: tokens, counts and times of the last call.

    Calls from several threads take turns, also those of two generators that share a drafter.

    >>> generator = SpeculativeGenerator(model, tokenizer, "ngram")        # doctest: +SKIP
    >>> generator.generate("Once upon a time", max_new_tokens=40)          # doctest: +SKIP
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Drafter | PreTrainedModel | str | None = "ngram",
        *,
        gamma: int = 4,
        rule: Part | Rule | None = None,
        policy: Part | Policy | None = None,
        shape: Part | Shape | None = None,
        eos_token_ids: Sequence[int] | int | None = None,
        prefix_cache_bytes: int | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.eos_token_ids = _eos(model, tokenizer)
        if eos_token_ids is not None:
            self.eos_token_ids = tuple(eos_ids(eos_token_ids))
        if drafter is None:
            drafter = NoDrafter()
        elif isinstance(drafter, str):
            drafter = open_drafter(drafter, _target(model, tokenizer))
        elif not isinstance(drafter, Drafter):
            drafter = _of_model(drafter, _target(model, tokenizer))
        if shape is not None:
            drafter = drafter.with_shape(make_shape(shape, gamma))
        self.drafter = drafter
        # The policy stays over all calls, with what it has learnt.
        policy = make_policy(policy, drafter.max_depth(gamma))
        self.prefixes = prefix_cache(model, prefix_cache_bytes)
        self._parts: dict[str, Any] = {
            "gamma": gamma,
            "rule": rule,
            "policy": policy,
            "prefixes": self.prefixes,
        }
        self.decoded: Decoded | None = None
        self._turn = OneAtATime("this generator")

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 256,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: str | Sequence[str] = (),
        logits_processor: Sequence[LogitsProcessor] = (),
        grammar: Constraint | None = None,
        streamer: BaseStreamer | None = None,
        seed: int | None = 0,
        batch_size: int | None = None,
        num_beams: int | None = None,
        observers: Sequence[Observer] = (),
    ) -> str | list[str]:
        """The answer's text without special tokens. For a list of prompts, a list of texts.

        A prompt is text, which is continued without a template; messages ({"role", "content"}),
        which go through the tokenizer's chat template; or token ids. The encoder of a target that
        has one reads it, and the text begins with the decoder's start token. Tokens that the
        checkpoint of such a target forces or suppresses are forced or suppressed, as in
        `model.generate()`.

        Text is drawn as in `model.generate()`. If temperature, top_k, top_p, min_p,
        repetition_penalty or num_beams is None, its value comes from the checkpoint
        (`model.generation_config`). If the checkpoint has none, it is the default of `generate()`:
        for sampled text that is top_k 50. temperature None is greedy unless the checkpoint sets
        `do_sample`. temperature 0 is always greedy. top_k 0 and top_p 1 switch those filters off.
        Lengths are not taken from the checkpoint.

        stop: strings that end a text. They stay in it, with the full token that completes one.
        logits_processor: a `LogitsProcessorList`. grammar: the texts that may be answered
        (`decode.grammars.Grammars`). streamer: as `TextStreamer`, for one prompt only.
        It gets the prompt, then each block of new tokens. seed: a text depends on the seed and on
        the index of its prompt, not on the batch. None: a random seed. batch_size: how many prompts
        are decoded at once; when a text ends, the next prompt takes its place. None: all.
        observers: as for `Decoder`.

        For beam search use `model.generate()`. Raises UserError for num_beams other than 1, for a
        streamer with several prompts, for a call inside of another one, for messages without a chat
        template, and for a setting of the checkpoint that changes the text and that this loop does
        not have (such as no_repeat_ngram_size; the message says how to switch it off). Also raises
        as `Decoder.decode`.
        """
        config = self.model.generation_config
        beams = num_beams or config.num_beams or 1
        if beams != 1:
            raise UserError(
                f"num_beams is {beams}; expected 1, because drafts cannot be verified for several "
                "beams: use model.generate(num_beams=…), or set num_beams=1"
            )
        sampling = sampling_as_generate(
            config,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            encoder=has_encoder(self.model),
        )
        if isinstance(prompts, torch.Tensor | np.ndarray):
            prompts = prompts.tolist()
        elif isinstance(prompts, Mapping):
            prompts = token_ids(prompts)
        single = _is_one(prompts)
        ids = [self.tokens(prompt) for prompt in cast(Any, [prompts] if single else prompts)]
        if streamer is not None and len(ids) != 1:
            raise UserError(
                f"there are {len(ids)} prompts, but a streamer shows only one text; give one "
                "prompt, or leave the streamer out"
            )
        with self._turn:
            decoder = Decoder(
                self.model,
                self.drafter,
                eos_token_ids=self.eos_token_ids,
                sampling=replace(sampling, grammar=grammar),
                processors=[
                    *decoder_processors(self.model, self.eos_token_ids, max_new_tokens),
                    *logits_processor,
                ],
                stop=StopStrings(self.tokenizer, stop) if stop else None,
                observers=observers,
                **self._parts,
            )

            def on_tokens(_: int, tokens: list[int]) -> None:
                if streamer is not None:
                    streamer.put(torch.tensor(tokens))

            if streamer is not None:
                streamer.put(torch.tensor(decoder.lm.texts_and_sources(ids)[0]))
            seed = secrets.randbits(62) if seed is None else seed
            decoded = self.decoded = decoder.decode(
                ids, max_new_tokens, seed=seed, batch_size=batch_size, on_tokens=on_tokens
            )
            if streamer is not None:
                streamer.end()
        ruled = grammar is not None
        texts = [text_of(self.tokenizer, x, keep_blank=ruled) for x in decoded.outputs]
        return texts[0] if single else texts

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[str]:
        """The pieces of one answer's text, as they become final. Options are as for `generate`.

        Decoding runs ahead in a separate thread, and ends when the iterator is closed or the
        program ends.
        """
        pieces: SimpleQueue[str | BaseException | None] = SimpleQueue()
        closed = threading.Event()

        def write(piece: str) -> None:
            if closed.is_set():
                raise _Closed
            pieces.put(piece)

        def work() -> None:
            try:
                ruled = options.get("grammar") is not None
                streamer = TextPieces(self.tokenizer, write, keep_blank=ruled)
                self.generate(prompt, streamer=streamer, **options)
                pieces.put(None)
            except BaseException as error:  # raised again in the reader
                pieces.put(error)

        def end() -> None:
            closed.set()
            thread.join()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        # A thread that computes while Python ends would abort the process.
        atexit.register(end)
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            end()
            atexit.unregister(end)

    def tokens(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, as `prompt_ids` makes them."""
        return prompt_ids(prompt, self.tokenizer)


def prompt_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[int]:
    """The token ids of a prompt. Messages get the chat template, and the beginning of an answer.
    options: more of the tokenizer for text, of `apply_chat_template` for messages. Raises UserError
    if the tokenizer has no template, or if the template refuses the messages."""
    if isinstance(prompt, str):
        ids: list[int] = tokenizer(prompt, **options).input_ids
        return ids
    if not len(prompt) or not isinstance(prompt[0], Mapping):
        return token_ids([prompt])[0]
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "the tokenizer has no chat template to format messages; give the prompt as text"
        )
    try:
        written: list[int] = tokenizer.apply_chat_template(
            as_read(cast("Sequence[Mapping[str, str]]", prompt), tokenizer, options.get("tools")),
            **{"add_generation_prompt": True, "tokenize": True, "return_dict": False, **options},
        )
    except Exception as error:  # a template is a program of others
        raise UserError(f"the chat template refuses these messages: {error}") from error
    return written


class _Closed(Exception):
    """The reader closed the stream."""


def _is_one(prompts: Any) -> bool:
    """Whether this is one prompt, not a sequence of prompts."""
    if not hasattr(prompts, "__len__"):
        raise UserError(
            f"the prompts are {prompts!r}; expected a text, messages, token ids or a list of them"
        )
    if isinstance(prompts, str) or not len(prompts):
        return isinstance(prompts, str)
    # A message, or a token: a number or an array without dimensions.
    return not isinstance(prompts[0], str | Sequence) and not getattr(prompts[0], "ndim", 0)


def _of_model(model: PreTrainedModel, target: Target) -> SmallLMDrafter:
    """A drafter on a model. Raises UserError for another vocabulary size: there is no tokenizer to
    compare."""
    vocab_size: int = model.config.get_text_config().vocab_size
    if vocab_size != target.vocab_size:
        raise UserError(
            f"the drafter {type(model).__name__} has a vocabulary of {vocab_size} tokens, but the "
            f"target's has {target.vocab_size}. If the tokenizers are the same and only the "
            "padding differs, give the drafter by its name or directory: then they are compared"
        )
    return SmallLMDrafter.of_target(model, target)


def _eos(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    config = model.config.get_text_config()
    return eos_token_ids(tokenizer, config, model.generation_config, rows=config.vocab_size)


def _target(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Target:
    identity = fingerprint(tokenizer, model.config, model.generation_config)
    return Target(model, tokenizer, model.name_or_path, None, identity, identity.eos_token_ids)
