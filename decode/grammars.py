"""Grammars of a target's texts: JSON Schema, regular expressions, choices and Lark grammars.

llguidance (the extra `structured`) computes the masks. Each is a function of the
text so far: a token may follow if the text with it is the beginning of a text of the grammar.
"""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from decode.base.errors import UserError
from decode.base.install_command import install_command
from decode.drafters.tokenizers.token_texts import TokenTexts
from decode.draw.constraint import Matcher
from decode.model.loading import Target

# In characters. The library follows references by recursion: a longer chain of them ends the
# process.
LONGEST = 32 * 1024
JSON_OBJECT = {"type": "object"}  # the schema of any JSON object
# How much of the library's message a user sees.
SHOWN = 400
BLANK = "▁"  # the space of SentencePiece


class Grammar:
    """A compiled grammar, a `decode.draw.constraint.Constraint`. Any number of rows share it.

    name: what it was made from, for messages.
    """

    def __init__(self, name: str, matcher: Any, tokenizer: Any, ends: frozenset[int]) -> None:
        self.name, self._matcher, self._ends = name, matcher, ends
        self._tokenizer = tokenizer

    def __repr__(self) -> str:
        return f"Grammar({self.name})"

    @property
    def ends(self) -> frozenset[int]:
        return self._ends

    def start(self) -> Matcher:
        return _Matcher(self._matcher.deep_copy(), self._tokenizer, self._ends)


class _Matcher:
    """A matcher of the library, whose methods do not raise."""

    def __init__(self, matcher: Any, tokenizer: Any, ends: frozenset[int]) -> None:
        self._matcher, self._tokenizer, self._ends = matcher, tokenizer, sorted(ends)

    def allowed(self) -> np.ndarray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        if not self._matcher.is_accepting():
            # Where no token may follow, the library lets an EOS follow, complete or not.
            bits = bits.copy()
            for token in self._ends:
                bits[token // 8] &= ~(1 << token % 8) & 0xFF
        return bits

    def advance(self, token: int) -> bool:
        passed: bool = self._matcher.try_consume_tokens([token]) == 1
        self._check()
        return passed

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)
        self._check()

    def forced(self) -> list[int]:
        text = self._matcher.compute_ff_bytes()
        tokens: list[int] = self._tokenizer.tokenize_bytes(text)
        passed = self._matcher.try_consume_tokens(tokens)
        if len(self._ends) == 1 and self._matcher.is_stopped() and self._matcher.is_accepting():
            tokens = [*tokens, *self._ends]
        self.rollback(passed)
        return tokens

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(_shown(self._matcher.get_error()))


class _Vocabulary:
    """A tokenizer as the library's `TokenizerWrapper` shows it.

    The library's own reader takes every added token for a special one. Its mask then forces that
    token where a grammar has its text, and its matcher refuses it. Here a token is special only if
    the tokenizer leaves it out of a text, or if it ends one. Each other token is its text. A text
    is cut into tokens that spell exactly this text: so what the mask forces is never refused.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Any, ends: frozenset[int], vocab_size: int) -> None:
        # A copy: other threads use the tokenizer meanwhile.
        self._texts = texts = TokenTexts(copy.deepcopy(tokenizer), vocab_size)
        if not texts.spells_bytes:
            raise ValueError("its tokens do not spell all bytes")
        rows = range(len(texts.texts))
        for end in ends & {*rows}:
            texts.mark_special(end)
        self.special_token_ids = [i for i in rows if texts.is_special(i)]
        self.eos_token_id = min(ends)
        missing = max(vocab_size, max(ends) + 1) - len(rows)
        self.tokens = [*map(texts.shown, rows), *[b""] * missing]
        self._fast = getattr(texts.tokenizer, "backend_tokenizer", None)  # spells most texts itself
        # Else a tokenizer that begins each text with a space would begin the part with one.
        self._before = b"\n" if texts.spelling == "sentencepiece" else b""

    def __call__(self, text: str) -> list[int]:
        """Tokens that spell this text."""
        if self._fast is not None:
            ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
            known = self._texts.texts
            if b"".join(known[i] for i in ids if i < len(known)) == text.encode():
                return ids
        return self._texts.encode(text.encode(), self._before)


class Grammars:
    """Makes the grammars of a target's texts. It reads the tokenizer once, which takes a second.

    A special token is no part of a text: where a grammar has its name, other tokens spell it. A
    Lark grammar asks for a special token with `<[id]>`. Any other added token is its text.

    Some tokenizers write a space for each ▁, also for one that bytes spell. For them a grammar that
    names this sign is refused, because no text has it.

    tokenizer: one of transformers. eos_token_ids: the ids that end a text; the others are the
    arguments' names. vocab_size: rows of the target's output layer. All methods may be called from
    any thread. Raises UserError without llguidance, without EOS ids and for a tokenizer whose
    tokens cannot spell every text.

    >>> grammars = Grammars.of(target)                               # doctest: +SKIP
    >>> grammar = grammars.json_schema({"type": "object"})           # doctest: +SKIP
    >>> decoder = Decoder(..., sampling=Sampling(grammar=grammar))   # doctest: +SKIP
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError as error:
            raise UserError(
                f"a grammar needs llguidance; run {install_command('structured')}"
            ) from error
        self.ends = frozenset(eos_token_ids)
        if not self.ends:
            raise UserError("a grammar needs an id that ends a text, but there are no EOS ids")
        self._library = LLMatcher
        try:
            vocabulary = _Vocabulary(tokenizer, self.ends, vocab_size)
        except ValueError as error:
            raise UserError(
                "a grammar needs a tokenizer of bytes, as those of language models are, and "
                f"{type(tokenizer).__name__} is none: {error}"
            ) from error
        self._tokenizer = LLTokenizer(vocabulary, eos_token=sorted(self.ends))
        self._loses_blank = BLANK not in tokenizer.decode(vocabulary(f"a{BLANK}a"))

    @classmethod
    def of(cls, target: Target) -> "Grammars":
        return cls(target.tokenizer, target.eos_token_ids, target.vocab_size)

    def json_schema(self, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON texts that this schema describes, without spaces between their parts. The schema's
        own `x-guidance` can allow them (`{"whitespace_flexible": true}`). Raises UserError for a
        schema that is malformed, admits nothing, is too large, or has a keyword that cannot be
        enforced."""
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise UserError(f"the schema is not JSON: {error}") from error
        if not isinstance(schema, Mapping):
            raise UserError(f"the schema is {schema!r:.80}; expected a JSON object")
        try:
            text = json.dumps(schema)
            _require_short("the schema", text)
            grammar = self._library.grammar_from_json_schema(
                text, defaults={"whitespace_flexible": False}
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"the schema is not JSON that can be read: {error}") from error
        return self._compiled("the JSON schema", grammar)

    def json_object(self) -> Grammar:
        """Any JSON object."""
        return self.json_schema(JSON_OBJECT)

    def regex(self, pattern: str) -> Grammar:
        """Texts that match all of a regular expression (the syntax of Rust's regex crate). Raises
        UserError for a pattern that is malformed, matches nothing or is too large."""
        _require_short("the regular expression", pattern)
        grammar = self._library.grammar_from_regex(pattern)
        return self._compiled("the regular expression", grammar)

    def choice(self, texts: Sequence[str]) -> Grammar:
        """One of these texts. Raises UserError unless they are strings, at least one."""
        if isinstance(texts, str) or not texts or not all(isinstance(x, str) for x in texts):
            raise UserError(f"the choices are {texts!r:.80}; expected a list of strings")
        grammar = "start: " + " | ".join(json.dumps(text) for text in texts)
        _require_short("the choices", grammar)
        return self._compiled("the choices", self._library.grammar_from_lark(grammar))

    def lark(self, grammar: str) -> Grammar:
        """Texts of a Lark grammar, as llguidance reads it, whose first rule is `start`. Raises
        UserError for a grammar that is malformed, admits nothing or is too large."""
        _require_short("the Lark grammar", grammar)
        return self._compiled("the Lark grammar", self._library.grammar_from_lark(grammar))

    def _compiled(self, name: str, grammar: str) -> Grammar:
        if self._loses_blank and (BLANK in grammar or re.search(r"\\[ux]{?0*2581", grammar)):
            raise UserError(f"{name} cannot be used: the tokenizer writes a space for each {BLANK}")
        # The library lets other threads run meanwhile, and bounds its own work.
        matcher = self._library(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise UserError(f"{name} cannot be used: {_shown(matcher.get_error())}")
        matcher.compute_bitmask()
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            raise UserError(f"{name} admits no text; let it admit at least one")
        return Grammar(name, matcher, self._tokenizer, self.ends)


def _shown(message: str) -> str:
    """The library's message without the state of its parser and the whole grammar."""
    return message.split("\n<state>")[0][:SHOWN]


def _require_short(name: str, text: str) -> None:
    if not isinstance(text, str):
        raise UserError(f"{name} is {text!r:.80}; expected a text")
    if len(text) > LONGEST:
        raise UserError(f"{name} has {len(text)} characters; expected at most {LONGEST}")
