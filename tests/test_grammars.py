"""Grammars of a target: what they admit, what is refused, and answers that parse."""

import copy
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, decoders
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from decode.base.errors import UserError
from decode.draft import Contexts, Limits
from decode.drafters import Drafter
from decode.draw.constraint import Guide
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.grammars import LONGEST, Grammar, Grammars
from decode.loop.decoding import Decoder, Decoding
from decode.loop.rows import RowSettings
from decode.model.cache.prefix_cache import PrefixCache
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from decode.text import SpeculativeGenerator
from decode.text_stream import text_of
from draftsmith.cli.main import app
from tests.export import save_target
from tests.other_tokenizers import byte_level, sentencepiece, words
from tests.stages import examples, make_stage, plan_stage, run_stage, stage_context, with_examples
from tests.tiny import finish, tiny_target, tiny_tokenizer, write_rows
from train.data.answer_files import read_answers
from train.data.read import Example
from train.measure.structured import forced_tokens

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["person", "company"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars(target: Target) -> Grammars:
    return Grammars.of(target)


def some_schemas(count: int) -> Iterator[dict[str, Any]]:
    """Schemas of the usual kinds, made at random."""
    random = np.random.default_rng(0)

    def one(depth: int) -> dict[str, Any]:
        kinds = ["string", "pattern", "integer", "number", "boolean", "enum", "null", "format"]
        kind = random.choice(kinds if depth > 1 else [*kinds, *["object", "array", "anyOf"] * 3])
        match str(kind):
            case "string":
                return {"type": "string", "minLength": 1, "maxLength": int(random.integers(1, 6))}
            case "pattern":
                return {"type": "string", "pattern": "^[a-c]{1,3}-[0-9]{2}$"}
            case "format":
                return {"type": "string", "format": "date"}
            case "integer":
                low = int(random.integers(-50, 50))
                return {"type": "integer", "minimum": low, "maximum": low + 30}
            case "number":
                return {"type": "number", "minimum": 0, "maximum": 1}
            case "enum":
                return {"enum": ["red", 3, None, True][: random.integers(1, 5)]}
            case "object":
                names = [f"k{i}" for i in range(random.integers(1, 4))]
                return {
                    "type": "object",
                    "properties": {name: one(depth + 1) for name in names},
                    "required": names,
                    "additionalProperties": False,
                }
            case "array":
                return {"type": "array", "items": one(depth + 1), "maxItems": 2}
            case "anyOf":
                return {"anyOf": [one(depth + 1), one(depth + 1)]}
        return {"type": str(kind)}

    return (one(0) for _ in range(count))


@pytest.mark.parametrize("drafter", ["grammar++ngram", "suffix"])
def test_every_answer_parses_and_is_valid(drafter: str, target: Target, grammars: Grammars) -> None:
    """Each row has a schema of its own, in one batch with rows that come and go."""
    count = 24
    schemas = list(some_schemas(count))
    decoder = Decoder(
        target.model, open_drafter(drafter, target), eos_token_ids=target.eos_token_ids, gamma=4
    )
    decoding = Decoding(decoder)
    for begin in range(0, count, 10):
        settings = [
            RowSettings(
                Sampling(temperature=float(row % 2), grammar=grammars.json_schema(schemas[row])),
                seed=row,
            )
            for row in range(begin, min(begin + 10, count))
        ]
        decoding.admit([[5, 6, 7]] * len(settings), 60, settings=settings)
        finish(decoding)
    ended = 0
    for row, schema in enumerate(schemas):
        output = decoding.outputs[row]
        if output[-1] in target.eos_token_ids:
            ended += 1
            jsonschema.validate(json.loads(text_of(target.tokenizer, output)), schema)
        else:
            assert len(output) == 60
    assert ended > 0.7 * count


def test_the_mask_is_a_function_of_the_text(target: Target, grammars: Grammars) -> None:
    """Rolled back and gone on, it is that of a new matcher."""
    grammar, random = grammars.json_schema(PERSON), np.random.default_rng(0)
    guide, texts = Guide(grammar, 0), [np.zeros(0, dtype=np.int64)]
    for _ in range(60):
        text = texts[random.integers(len(texts))]
        found, fresh = guide.allowed(text), Guide(grammar, 0).allowed(text)
        assert found is not None
        assert (found == fresh).all()
        allowed = np.flatnonzero(np.unpackbits(found, bitorder="little"))
        inner = [token for token in allowed.tolist() if token not in grammar.ends]
        if inner:
            texts.append(np.append(text, random.choice(inner)))
    assert max(map(len, texts)) > 5


def drafted(drafter: Drafter, text: str, guides: list[Guide | None], target: Target) -> list[str]:
    """What follows this text, of prompts of one token, for rows with these guides."""
    ids = [5, *target.tokenizer(text, add_special_tokens=False)["input_ids"]]
    contexts = Contexts.of([ids] * len(guides), len(ids))
    contexts.guides = guides
    limits = Limits(np.full(len(guides), 99))
    draft = drafter.draft(contexts, limits, Sampling(), CounterRNG(0, torch.arange(len(guides))))
    return [
        target.tokenizer.decode(tokens[:size])
        for tokens, size in zip(draft.tokens, draft.sizes, strict=True)
    ]


def test_the_drafter_grammar_drafts_what_is_forced(target: Target, grammars: Grammars) -> None:
    """Up to where the text can go on in two ways, and the end of a complete text with it."""
    (end,) = target.tokenizer.convert_ids_to_tokens(list(target.eos_token_ids))
    guides: list[Guide | None] = [
        Guide(grammar, 1)
        for grammar in (grammars.json_schema(PERSON), grammars.choice(["red", "green", "grey"]))
    ]
    drafter = open_drafter("grammar", target)
    assert drafted(drafter, "", [*guides, None], target) == ['{"name":"', "", ""]
    assert drafted(drafter, "g", guides[1:], target) == ["re"]
    assert drafted(drafter, "gree", guides[1:], target) == [f"n{end}"]
    assert drafted(drafter, '{"name":"a"', guides[:1], target) == [',"age":']
    assert drafted(drafter, "not JSON", guides[:1], target) == [""]


def test_suffix_drafts_from_earlier_answers_of_the_schema(
    target: Target, grammars: Grammars
) -> None:
    decoder = Decoder(
        target.model,
        open_drafter("grammar+suffix", target),
        eos_token_ids=target.eos_token_ids,
        sampling=Sampling(grammar=grammars.json_schema(PERSON)),
        gamma=8,
    )
    first, again = (decoder.decode([[5, 6, 7]], 60) for _ in range(2))
    assert first.outputs == again.outputs
    assert again.counts.steps < 0.6 * first.counts.steps
    decoder.drafter.forget()
    assert decoder.decode([[5, 6, 7]], 60).counts.steps == first.counts.steps


def test_grammar_lookup_and_a_model_draft_one_tree(
    target: Target, grammars: Grammars, tmp_path: Path
) -> None:
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    held = Sampling(grammar=grammars.json_schema(PERSON))
    runs = [
        Decoder(
            target.model,
            open_drafter(drafter, target),
            eos_token_ids=target.eos_token_ids,
            sampling=held,
            gamma=4,
        ).decode([[5, 6, 7]], 40)
        for drafter in (f"grammar++ngram++{tmp_path}", "grammar++ngram", "none")
    ]
    assert runs[0].outputs == runs[1].outputs == runs[2].outputs
    assert runs[0].counts.steps < runs[1].counts.steps < runs[2].counts.steps


@pytest.mark.parametrize(
    ("kind", "given", "pattern"),
    [
        ("regex", "[a-c]{2,4}!", "[a-c]{2,4}!"),
        ("choice", ["yes", "no", 'a "quote"'], 'yes|no|a "quote"'),
        ("lark", 'start: "a" start "b" | "c"', "a*cb*"),
    ],
)
def test_other_grammars(
    kind: str, given: Any, pattern: str, target: Target, grammars: Grammars
) -> None:
    generator = SpeculativeGenerator(target.model, target.tokenizer, "ngram")
    grammar: Grammar = getattr(grammars, kind)(given)
    texts = generator.generate([[5, 6], [7]], grammar=grammar, temperature=1.0, max_new_tokens=40)
    assert generator.decoded is not None
    for text, tokens in zip(texts, generator.decoded.outputs, strict=True):
        if tokens[-1] in target.eos_token_ids:
            assert re.fullmatch(pattern, text)
        else:
            assert len(tokens) == 40


def test_an_expression_that_explodes_ends_its_row_in_words(
    target: Target, grammars: Grammars
) -> None:
    """The library bounds the work of a step. The row beside it goes on."""
    errors: dict[int, Exception] = {}
    decoder = Decoder(
        target.model, open_drafter("ngram", target), eos_token_ids=target.eos_token_ids
    )
    decoding = Decoding(decoder, on_error=errors.__setitem__)
    held = Sampling(grammar=grammars.regex("(a?){2000}a{2000}"))
    decoding.admit([[5, 6], [5, 6]], 60, settings=[RowSettings(held), RowSettings(Sampling())])
    finish(decoding)
    assert list(errors) == [0]
    assert "the grammar fails in step" in str(errors[0])
    assert "too many expressions" in str(errors[0])
    assert decoding.outputs[1] == decoder.decode([[5, 6]], 60).outputs[0]


def test_a_prompt_in_the_prefix_cache_changes_no_text_of_a_grammar(
    target: Target, grammars: Grammars
) -> None:
    """Each turn of a chat has another grammar; the answer of the turn before is in its prompt."""
    forms = [grammars.json_schema(PERSON), grammars.choice(["red", "green"])] * 2

    def answers(prefixes: PrefixCache | None) -> list[list[int]]:
        drafter = open_drafter("grammar++ngram", target)
        decoder = Decoder(target.model, drafter, eos_token_ids=target.eos_token_ids, gamma=4)
        decoder.prefixes = prefixes
        prompt, found = [5, 6, 7, 8] * 10, list[list[int]]()
        for seed, grammar in enumerate(forms):
            held = RowSettings(Sampling(1.0, grammar=grammar), seed)
            found += decoder.decode([prompt], 20, settings=[held]).outputs
            prompt = [*prompt, *found[-1], 9]
        return found

    known = PrefixCache()
    assert answers(known) == answers(None)
    assert known.reused > 3 * 39


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        ("json_schema", '{"type": ', "is not JSON"),
        ("json_schema", [1], "expected a JSON object"),
        ("json_schema", {"type": "thing"}, "Invalid type: thing"),
        ("json_schema", {"enum": []}, "Unsatisfiable"),
        ("json_schema", {"allOf": [{"type": "string"}, {"type": "null"}]}, "Unsatisfiable"),
        ("json_schema", {"not": {"type": "string"}}, "not"),
        ("json_schema", {"$ref": "#/nothing"}, "does not exist"),
        ("json_schema", {"enum": ["x" * LONGEST]}, "characters"),
        ("json_schema", '{"items":' * 500 + "{}" + "}" * 500, "recursion limit"),
        ("regex", "(", "unclosed"),
        ("regex", "(?=a)b", "look-around"),
        ("choice", [], "list of strings"),
        ("choice", "yes", "list of strings"),
        ("lark", "begin: A", "cannot be used"),
        ("lark", 'start: start "a"', "admits no text"),
    ],
)
def test_what_cannot_be_used_is_refused(
    kind: str, given: Any, said: str, grammars: Grammars
) -> None:
    with pytest.raises(UserError, match=said):
        getattr(grammars, kind)(given)


def test_a_target_without_an_end_has_no_grammars(target: Target) -> None:
    with pytest.raises(UserError, match="no EOS ids"):
        Grammars(target.tokenizer, (), target.vocab_size)


def test_the_command_generate_takes_a_schema(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    (tmp_path / "schema.json").write_text(json.dumps({"enum": ["red", "green"]}), "utf-8")
    words = ["generate", "--target", str(tmp_path / "target"), "--device", "cpu", "the dog"]
    found = CliRunner().invoke(app, [*words, "--schema", str(tmp_path / "schema.json")])
    assert found.exit_code == 0
    assert found.stdout.strip() in ('"red"', '"green"')
    (tmp_path / "schema.json").write_text("{", "utf-8")
    found = CliRunner().invoke(app, [*words, "--schema", str(tmp_path / "schema.json")])
    assert found.exit_code == 2
    assert "the schema is not JSON" in found.stderr


def test_the_command_evaluate_holds_answers_to_the_schemas_of_their_rows(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    schemas: list[Any] = [PERSON, json.dumps({"enum": ["red", "green"]}), None]
    rows = [{"prompt": f"the dog {i}", "json_schema": schema} for i, schema in enumerate(schemas)]
    prompts = tmp_path / "prompts.jsonl"
    write_rows(prompts, rows)
    words = ["evaluate", "--target", str(tmp_path / "target"), "--prompts", str(prompts)]
    words += ["--device", "cpu", "--timed-prompts", "2", "--max-new-tokens", "80"]
    words += ["--drafter", "grammar", "--json", str(tmp_path / "figures.json")]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    (row,) = json.loads((tmp_path / "figures.json").read_text("utf-8"))["rows"]
    figures = row["evaluation"]
    assert figures["structured"]["answers"] == 2
    assert figures["structured"]["complete"] == 1
    assert 0.1 < figures["structured"]["forced_share"] < 1
    assert figures["identical_within_rounding"] == 1
    assert "2 answers with a schema" in found.output
    prompts.write_text('{"prompt": "a", "json_schema": {"type": "thing"}}\n', "utf-8")
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 2
    assert f"{prompts}:1: the JSON schema cannot be used" in " ".join(found.stderr.split())


def test_a_generate_stage_holds_answers_to_the_schemas_of_their_rows(tmp_path: Path) -> None:
    """The other rows have the answers that they have without schemas; a schema that changes asks
    its row again, and no other. A later cache reads the texts whose last token was never fed, as a
    grammar ended them, and has the states of all others."""
    schemas = ({"enum": ["red", "green"]}, None, {"type": "boolean"}, {"type": "null"})
    settings: Any = {"max_new_tokens": 9, "sampling": {"temperature": 1.0}, "samples": 2}

    def rows(schemas: Sequence[Any]) -> list[Example]:
        texts = [None if schema is None else json.dumps(schema) for schema in schemas]
        return [replace(x, schema=y) for x, y in zip(examples("train", 4), texts, strict=True)]

    cache = make_stage("feature_cache", "c", make_stage("generate", "answers"), text="answers")

    def texts(schemas: Sequence[Any], name: str) -> list[str]:
        stage = make_stage("generate", name, **settings)
        run_stage(replace(with_examples(context, train=rows(schemas)), later=[cache]), stage)
        answers = read_answers(context.directory / name)
        return [text_of(context.target.tokenizer, answer["tokens"]) for answer in answers]

    context = stage_context(tmp_path, tiny_target())
    plain, found = texts([None] * 4, "plain"), texts(schemas, "answers")
    assert {*found[:2]} <= {'"red"', '"green"'}
    assert {*found[4:6]} <= {"true", "false"}
    assert found[6:] == ["null"] * 2
    assert found[2:4] == plain[2:4]
    samples, ends = context.corpus.samples("answers"), {*context.target.eos_token_ids}
    held = [x for number, x in enumerate(samples) if schemas[number // 2]]
    read = [x for x in held if x.tokens[-1] in ends]
    assert len(read) > 2
    summary = run_stage(context, cache).summary
    assert summary["tokens_scored"] == sum(len(x.tokens) for x in read) < summary["tokens"]
    again = texts(({"enum": ["blue"]}, *schemas[1:]), "answers")
    assert again == ['"blue"', '"blue"', *found[2:]]

    for more, said in (
        ({"server": {"url": "http://127.0.0.1:1"}}, "a server does not hold"),
        ({"num_beams": 2, "samples": 1, "sampling": {}}, "beam search does not hold"),
    ):
        stage = make_stage("generate", "no", **settings | more)
        with pytest.raises(UserError, match=said):
            plan_stage(with_examples(context, train=rows(schemas)), stage)
    wrong = with_examples(context, train=rows([None, {"type": "thing"}, None, None]))
    with pytest.raises(UserError, match=r"train\.jsonl:2: the JSON schema cannot be used"):
        plan_stage(wrong, make_stage("generate", "no"))


def test_forced_tokens_are_those_of_forced_runs(target: Target, grammars: Grammars) -> None:
    grammar = grammars.choice(["red", "grey", "green"])
    ids = [*target.tokenizer("grey", add_special_tokens=False)["input_ids"]]
    places = [len(target.tokenizer.decode(ids[:i])) for i in range(len(ids) + 1)]
    # "re" and the end are forced, "g" and "y" are not.
    inside = sum(1 <= begin < 3 for begin in places[:-1])
    assert forced_tokens(grammar, [*ids, *target.eos_token_ids]) == inside + 1


def _added(*, special: bool) -> Any:
    """The tiny tokenizer with marks of tools and reasoning as single tokens."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    # The decoder of bytes reads the last one as bytes that are no text.
    marks = ("<tool_call>", "</tool_call>", "<think>", "[CALL]", "naïf")
    tokens = [AddedToken(mark, special=special, normalized=False) for mark in marks]
    tokenizer.add_tokens(tokens, special_tokens=special)
    return tokenizer


MARKS = [
    "<tool_call>",
    "<think>",
    "</think>",
    "<",
    "im_start",
    ">",
    "<",
    "im_end",
    ">",
    "</s>",
    "[CALL]",
    "é the",
    "naïf",
]
TOKENIZERS: dict[str, Callable[[], Any]] = {
    "byte level": tiny_tokenizer,
    "added": lambda: _added(special=False),
    "added and special": lambda: _added(special=True),
    "other byte level": byte_level,
    "byte fallback": sentencepiece,
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_text_with_marks_is_written_with_any_tokenizer(kind: str) -> None:
    """What the mask allows may follow, and the text that clients see is one of the grammar. The
    tokenizer's own token of a mark is among those that may write it, unless it is special."""
    tokenizer = TOKENIZERS[kind]()
    ends = [tokenizer.eos_token_id]
    grammars = Grammars(tokenizer, ends, len(tokenizer) + 9)
    random = np.random.default_rng(0)
    for mark in MARKS:
        quoted = json.dumps(mark)
        for grammar, pattern in (
            (grammars.regex(f"{re.escape(mark)}[ab]{re.escape(mark)}?"), None),
            (grammars.choice([mark, f"{mark} {mark}"]), f"{re.escape(mark)}( {re.escape(mark)})?"),
            (
                grammars.json_schema({"const": mark}),
                re.escape(json.dumps(mark, ensure_ascii=False)),
            ),
            (grammars.json_schema({"enum": [mark, "b"]}), None),
            (grammars.lark(f'start: {quoted} "x"'), re.escape(f"{mark}x")),
        ):
            matcher, ids = grammar.start(), list[int]()
            while True:
                allowed = np.flatnonzero(np.unpackbits(matcher.allowed(), bitorder="little"))
                for token in random.choice(allowed, min(8, len(allowed)), replace=False).tolist():
                    if token not in ends:
                        assert matcher.advance(token), (mark, grammar, token)
                        matcher.rollback(1)
                token = int(random.choice(allowed))
                if token in ends:
                    break
                assert len(ids) < 99
                assert matcher.advance(token)
                ids.append(token)
            assert pattern is None or re.fullmatch(pattern, text_of(tokenizer, ids)), (mark, ids)
    first = grammars.choice(["<tool_call>x"]).start()
    may_begin = np.flatnonzero(np.unpackbits(first.allowed(), bitorder="little")).tolist()
    own = tokenizer.get_vocab().get("<tool_call>")
    assert (own in may_begin) == (kind == "added")
    assert first.forced()[0] in may_begin


def test_a_sign_that_the_tokenizer_writes_as_a_space() -> None:
    """It is refused; or written, if the tokenizer reads spaces before bytes, as Llama's does."""
    losing, backend = sentencepiece(), copy.deepcopy(sentencepiece().backend_tokenizer)
    order = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*order, decoders.Strip(" ", 1, 0)])
    keeping = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    for tokenizer in (losing, keeping, tiny_tokenizer()):
        grammars = Grammars(tokenizer, [tokenizer.eos_token_id], len(tokenizer))
        for make, given in (
            (grammars.choice, ["a", "▁a"]),
            (grammars.regex, "▁a|▁a▁"),
            (grammars.regex, r"\u{2581}a"),
            (grammars.json_schema, {"const": "▁a"}),
            (grammars.lark, 'start: "▁a"'),
        ):
            if tokenizer is losing:
                with pytest.raises(UserError, match="writes a space for each ▁"):
                    make(given)
                continue
            matcher, ids = make(given).start(), list[int]()
            while (token := np.unpackbits(matcher.allowed(), bitorder="little")[3:].argmax()) > 0:
                ids.append(int(token) + 3)
                assert matcher.advance(ids[-1])
            assert text_of(tokenizer, ids).strip('"') in ("▁a", "a", "▁a▁"), given


def test_a_lark_grammar_names_a_special_token() -> None:
    tokenizer = _added(special=True)
    token = tokenizer.convert_tokens_to_ids("[CALL]")
    grammars = Grammars(tokenizer, [tokenizer.eos_token_id], len(tokenizer))
    matcher = grammars.lark(f'start: <[{token}]> "x"').start()
    assert np.flatnonzero(np.unpackbits(matcher.allowed(), bitorder="little")).tolist() == [token]
    assert matcher.advance(token)
    assert tokenizer.decode(matcher.forced()[:1]) == "x"


@pytest.mark.parametrize("ends", [[2], [2, 1], [1, 0]])
def test_all_ids_that_end_a_text_may_follow_a_complete_one(ends: list[int]) -> None:
    tokenizer = tiny_tokenizer()
    matcher = Grammars(tokenizer, ends, len(tokenizer)).regex("a?").start()
    for complete in ("", "a"):
        if complete:
            assert matcher.advance(tokenizer(complete).input_ids[0])
        allowed = np.unpackbits(matcher.allowed(), bitorder="little")
        assert [i for i in range(3) if allowed[i]] == sorted(ends)


def test_a_tokenizer_of_words_has_no_grammars() -> None:
    with pytest.raises(UserError, match="tokenizer of bytes"):
        Grammars(words("a", "b"), [0], 2)
