"""The conversation of `draftsmith chat` on a tiny target: its text, colours, commands, Ctrl-C."""

import copy
import io
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from decode.base.errors import UserError
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from decode.settings import DecodeSettings
from decode.text import prompt_ids
from decode.text_stream import decode
from decode.verification import Verification
from draftsmith.chat.conversation import OFTEN, ChatReply, Conversation, Write, _Pieces
from draftsmith.chat.live_answer import LiveAnswer
from draftsmith.chat.terminal import Terminal, figures_line, write_svg
from draftsmith.cli.chat import ChatTarget, default_drafter
from draftsmith.cli.main import app
from tests.tiny import moved, plain_texts, save_small_lm, save_tiny, tiny_target

GREEN = "\x1b[32m"
TOKENS = 40
WIDTH, HEIGHT = 60, 6
QUESTION = "The dog ran."


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(max_positions=512)


def near_target(target: Target) -> Drafter:
    """A drafter that is often right: the target with noise in its weights."""
    return SmallLMDrafter.of_target(moved(copy.deepcopy(target.model), 0.03), target)


def talk(target: Target) -> Conversation:
    settings = DecodeSettings(gamma=3)
    return Conversation(target, near_target(target), settings, max_new_tokens=TOKENS)


def plain_answer(target: Target, messages: list[dict[str, str]]) -> list[int]:
    prompt = prompt_ids(messages, target.tokenizer)
    return plain_texts(target.model, [prompt], TOKENS, eos_token_ids=target.eos_token_ids)[0]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def terminal_of(conversation: Conversation, *lines: str) -> Terminal:
    script = iter(lines)
    console = Console(
        file=io.StringIO(),
        force_terminal=True,
        color_system="standard",
        highlight=False,
        width=WIDTH,
        height=HEIGHT,
        _environ={"TERM": "xterm"},
    )
    return Terminal(
        conversation,
        console,
        console,
        lambda _: next(script, None),
        lambda spec: open_drafter(spec, conversation.target),
    )


def printed(console: Console) -> str:
    file: Any = console.file
    return str(file.getvalue())


def on_screen(written: str) -> list[str]:
    """The lines that a terminal shows after these characters and sequences of control, up to the
    last one that is not empty."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|.", written, re.DOTALL):
        if part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part == "\x1b[1A":
            row -= 1
        elif part[0] != "\x1b":
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + 1 :]
            column += 1
    return lines[: max(n for n, line in enumerate(lines, 1) if line)]


def spaced(lines: list[str]) -> list[str]:
    """The lines with one space for each stretch of spaces, because tabs are expanded."""
    return [re.sub(r"\s+", " ", line) for line in lines]


def test_a_target_with_running_states_talks() -> None:
    """It has no prefix cache."""
    kinds = ["conv", "full_attention", "conv"]
    target = tiny_target("lfm2", layers=3, layer_types=kinds, max_positions=512)
    conversation = Conversation(
        target, DRAFTERS["ngram"](), DecodeSettings(gamma=3), max_new_tokens=8
    )
    said: list[str] = []
    for question in (QUESTION, "And the cat?"):
        conversation.ask(question, lambda text, done: said.append(text))
    assert "".join(said)


def test_figures_run_along_below_the_answer_and_go_away(target: Target) -> None:
    terminal = terminal_of(talk(target), QUESTION)
    drawn: list[list[str]] = []
    console, conversation = terminal.console, terminal.conversation
    ask = conversation.ask

    def follow_too(text: str, write: Write, stopped: Any, follow: Any) -> ChatReply:
        def both(answer: ChatReply) -> None:
            follow(answer)
            drawn.append(on_screen(printed(console)))

        # Longer than a row, than the screen, and than a line.
        write("x" * (WIDTH * HEIGHT + 3) + "\nnext\n" + "y" * (WIDTH * HEIGHT), True)
        return ask(text, write, stopped, both)

    conversation.ask = follow_too  # type: ignore[method-assign]
    terminal.run()
    answer, figures = terminal.transcript[1:3]
    assert len(drawn) > 10
    for lines in drawn:
        (place,) = (n for n, line in enumerate(lines) if line.startswith("["))
        assert not any(lines[place + 1 :])
        assert lines[0] == "x" * (WIDTH * HEIGHT + 3)
    assert "tokens per step" in " ".join(drawn[-1])
    assert spaced(on_screen(printed(console))) == spaced([*answer.plain.split("\n"), figures.plain])


def test_answers_are_those_of_plain_decoding_over_several_turns(target: Target) -> None:
    conversation = talk(target)
    messages: list[dict[str, str]] = []
    for text in (QUESTION, "And the cat?", "é 漢字"):
        messages.append(user(text))
        pieces: list[str] = []
        answer = conversation.ask(text, lambda piece, _, to=pieces: to.append(piece))
        assert answer.tokens == plain_answer(target, messages)
        assert "".join(pieces) == answer.text == decode(target.tokenizer, answer.tokens)
        assert answer.counts.accepted.sum() > 0
        messages.append({"role": "assistant", "content": answer.text})
    assert conversation.messages == messages
    assert conversation._prefixes.reused > 0
    conversation.reset()
    assert conversation.ask(QUESTION, lambda *_: None).tokens == plain_answer(target, messages[:1])


def test_plain_steps_are_timed_and_are_not_among_the_figures(target: Target) -> None:
    conversation = talk(target)
    depths: list[int] = []
    first = conversation.ask(QUESTION, lambda *_: None)
    assert first.plain_seconds is not None or "too few" in figures_line(first)
    assert conversation._decoder is not None
    conversation._decoder.observers.append(lambda v: depths.append(int(v.depths[0])))
    answer = conversation.ask("And the cat?", lambda *_: None)
    forced = len(depths) - answer.counts.steps
    assert len(depths) // OFTEN <= forced < len(depths) // 2
    assert depths.count(0) - forced in (0, 1)  # the last step may have no room for a draft
    assert answer.plain_seconds is not None
    assert answer.speedup is not None
    assert "× plain decoding" in figures_line(answer)
    conversation.plain = True
    depths.clear()
    answer = conversation.ask(QUESTION, lambda *_: None)
    assert not any(depths)
    assert answer.tokens_per_second is None
    assert answer.counts.steps == 0


def test_colours_mark_exactly_the_accepted_draft_tokens(target: Target, tmp_path: Path) -> None:
    conversation = talk(target)
    terminal = terminal_of(conversation, QUESTION)
    drafted = [False]  # by token; the first one comes from reading the prompt
    observe = conversation._observe

    def record(verification: Verification) -> None:
        observe(verification)
        kept, emitted = int(verification.accepted[0]), int(verification.emitted[0])
        drafted.extend(place < kept for place in range(emitted))

    conversation._observe = record  # type: ignore[method-assign]
    terminal.run()
    tokens = plain_answer(target, [user(QUESTION)])
    assert len(drafted) == len(tokens)
    assert 5 < sum(drafted) < len(drafted) - 5
    expected: list[tuple[str, bool]] = []
    pieces = _Pieces(target.tokenizer, lambda piece, kept: expected.append((piece, kept)))
    for token, kept in zip(tokens, drafted, strict=True):
        pieces.add([token], int(kept))
    pieces.end()
    answer = terminal.transcript[1]
    green = [answer.plain[span.start : span.end] for span in answer.spans if span.style == "green"]
    assert list(map(len, green)) == [len(piece) for piece, kept in expected if kept]
    shown = printed(terminal.console)
    assert shown.count(GREEN) >= len(green)  # a line break inside a piece repeats the colour
    assert not set("\x07\x08\x7f") & set(shown)
    lines = answer.plain.split("\n")
    assert spaced(on_screen(shown)[: len(lines)]) == spaced(lines)
    write_svg(tmp_path / "chat.svg", terminal.transcript, "a <title>")
    picture = (tmp_path / "chat.svg").read_text("utf-8")
    assert "url(" not in picture.replace("url(#", "")
    assert "&gt;&#160;The&#160;dog" in picture


def test_a_character_waits_for_its_last_token_and_has_its_colour(target: Target) -> None:
    text = "a é漢 😀b"
    tokens = target.tokenizer(text).input_ids
    assert len(tokens) > len(text)
    pieces: list[tuple[str, bool]] = []
    written = _Pieces(target.tokenizer, lambda piece, kept: pieces.append((piece, kept)))
    last = next(n for n in range(len(tokens)) if "é" in decode(target.tokenizer, tokens[: n + 1]))
    for place, token in enumerate(tokens):
        written.add([token], int(place == last))
    written.end()
    assert "".join(piece for piece, _ in pieces) == written.text == text
    assert [piece for piece, kept in pieces if kept] == ["é"]


def test_commands(target: Target, tmp_path: Path) -> None:
    conversation = talk(target)
    missing = str(tmp_path)
    terminal = terminal_of(
        conversation,
        "/trace",
        QUESTION,
        "/trace",
        "/plain",
        "/drafter ngram",
        f"/drafter {missing}",
        "/drafter",
        "/help",
        "/reset",
        "/nothing",
        "",
        "/quit",
        "never asked",
    )
    terminal.run()
    shown = printed(terminal.console)
    assert "nothing was drafted yet" in shown
    assert "row 0: the target adds" in shown
    assert any(verdict in shown for verdict in ("accepted", "rejected"))
    assert "plain decoding is on" in shown
    assert "the drafter is ngram" in shown
    assert "neither a drafter directory nor a model directory" in shown.replace("\n", " ")
    assert "name a drafter" in shown
    assert "/reset" in shown
    assert "no command /nothing" in shown
    assert conversation.messages == []
    assert conversation.plain
    assert len(terminal.transcript) == 4  # one turn


def test_ctrl_c_ends_the_answer_and_keeps_the_conversation(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = talk(target)
    terminal = terminal_of(conversation, QUESTION)
    written = 0
    draw = LiveAnswer.draw

    def interrupt(live: LiveAnswer, figures: Text) -> None:
        nonlocal written
        written += 1
        draw(live, figures)
        if written == 6:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(LiveAnswer, "draw", interrupt)
    before = signal.getsignal(signal.SIGINT)
    terminal.run()
    partial = conversation.messages[1]["content"]
    assert "[stopped, " in printed(terminal.console)
    tokens = plain_answer(target, [user(QUESTION)])
    complete = decode(target.tokenizer, tokens)
    assert 0 < len(partial) < len(complete)
    assert complete.startswith(partial.rstrip("�"))
    messages = [*conversation.messages, user("more")]
    assert conversation.ask("more", lambda *_: None).tokens == plain_answer(target, messages)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_full_context_forgets_the_oldest_turns(target: Target) -> None:
    small = tiny_target(max_positions=128)
    conversation = Conversation(
        small, open_drafter("ngram", small), DecodeSettings(), max_new_tokens=24, system="s"
    )
    forgotten = 0
    for number in range(4):
        answer = conversation.ask(f"{number} {QUESTION}", lambda *_: None)
        forgotten += answer.forgotten
    assert forgotten > 0
    assert conversation.messages[0] == {"role": "system", "content": "s"}
    assert len(conversation.messages) == 1 + 2 * (4 - forgotten)
    before = list(conversation.messages)
    terminal = terminal_of(conversation, "漢" * 200)
    terminal.run()
    assert "error: " in printed(terminal.console)
    assert conversation.messages == before


def test_a_target_without_a_chat_template_is_refused_at_the_start() -> None:
    bare = tiny_target()
    bare.tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        Conversation(bare, open_drafter("ngram", bare), DecodeSettings())


def test_sampled_turns_draw_other_numbers_and_repeat_with_the_seed(target: Target) -> None:
    def texts(seed: int) -> list[list[int]]:
        settings = DecodeSettings(gamma=3, sampling=Sampling(temperature=1.0))
        conversation = Conversation(
            target, near_target(target), settings, max_new_tokens=12, seed=seed
        )
        outputs = []
        for _ in range(2):
            outputs.append(conversation.ask(QUESTION, lambda *_: None).tokens)
            conversation.reset()
        return outputs

    first = texts(0)
    assert first == texts(0)
    assert first[0] != first[1]
    assert first != texts(1)


def test_through_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line per turn; the answers alone are on standard output."""
    path = save_tiny(tmp_path / "target", max_positions=512)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("decode.base.processor.CPU_FLAGS", tmp_path / "no flags")
    command = ["chat", "--target", str(path), "--max-new-tokens", str(TOKENS), "--device", "cpu"]
    lines = f"{QUESTION}\n\n".encode() + b"caf\xe9\n" + b"And the cat?\n/quit\nnever asked\n"
    result = CliRunner().invoke(
        app, [*command, "--svg", "chat.svg", "--json", "chat.json"], input=lines
    )
    assert result.exit_code == 0, result.output
    loaded = tiny_target(max_positions=512)
    messages = [user(QUESTION)]
    texts = [decode(loaded.tokenizer, plain_answer(loaded, messages))]
    messages += [{"role": "assistant", "content": texts[0]}, user("And the cat?")]
    texts.append(decode(loaded.tokenizer, plain_answer(loaded, messages)))
    assert result.stdout_bytes.decode() == "".join(f"{text}\n" for text in texts)
    assert "in float32 with the drafter ngram (runs/quickstart has no trained" in result.stderr
    assert "error: a line has the byte 0xe9, which is not utf-8" in result.stderr
    assert result.stderr.count("tokens per step") == 2
    assert "\x1b" not in result.stderr
    assert (tmp_path / "chat.svg").read_text("utf-8").startswith("<svg")
    stored = json.loads((tmp_path / "chat.json").read_text("utf-8"))
    assert [answer["text"] for answer in stored] == texts
    assert stored[1]["steps"] > 0


def test_a_chat_without_drafts_says_so(tmp_path: Path) -> None:
    target = str(save_tiny(tmp_path / "target"))
    # Long enough that plain steps were timed.
    options = ["--target", target, "--drafter", "none", "--max-new-tokens", "40"]
    result = CliRunner().invoke(app, ["chat", *options], input="a b\n")
    assert result.exit_code == 0, result.output
    assert "1.00 tokens per step" in result.output
    assert "acceptance rate –" in result.output
    assert "no drafts to compare with plain decoding" in result.output


def test_bfloat16_is_taken_where_the_processor_multiplies_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(save_tiny(tmp_path / "target", max_positions=512))
    for computes, named, dtype in (
        (True, {}, torch.bfloat16),
        (False, {}, torch.float32),
        (True, {"dtype": "auto"}, torch.float32),
    ):
        flags = tmp_path / "cpuinfo"
        flags.write_text("flags : amx_bf16" if computes else "flags : avx2", "utf-8")
        monkeypatch.setattr("decode.base.processor.CPU_FLAGS", flags)
        assert ChatTarget(target=path, device="cpu", **named).load().dtype == dtype


def test_the_default_drafter_is_the_newest_that_fits(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, _, why = default_drafter(target, tmp_path)
    assert spec == "ngram"
    assert "no trained drafter" in why

    saved = {}
    for age, name in enumerate(("05-small", "06-newest")):
        saved[name] = tmp_path / "stages" / name / "drafter"
        save_small_lm(saved[name], target.model, target)
        os.utime(saved[name] / "drafter.json", (100 - age, 100 - age))
    spec, drafter, _ = default_drafter(target, tmp_path)
    assert spec == f"ngram+{saved['05-small']}"
    assert drafter.vocab_size == target.vocab_size
    (saved["05-small"] / "config.json").unlink()
    spec, _, why = default_drafter(target, tmp_path)
    assert spec == "ngram"
    assert "config.json" in why
    # One that comes along for this target goes before the newest of a run, which is named.
    shipped = tmp_path / "shipped"
    save_small_lm(shipped / "mine", target.model, target)
    monkeypatch.setattr("decode.opening.shipped.SHIPPED", shipped)
    spec, _, why = default_drafter(target, tmp_path)
    assert spec == "ngram+embedded:mine"
    assert f"/drafter ngram+{saved['05-small']} takes the newest drafter of" in why


def test_each_answer_fits_a_schema(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "target", max_positions=512)
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3}
    (tmp_path / "schema.json").write_text(json.dumps(schema), "utf-8")
    command = ["chat", "--target", str(path), "--device", "cpu", "--drafter", "ngram"]
    command += ["--schema", str(tmp_path / "schema.json"), "--max-new-tokens", "40"]
    command += ["--policy", "cost_model"]  # what it times first has no end, so no grammar either
    result = CliRunner().invoke(app, command, input="hello\nagain\n")
    assert result.exit_code == 0, result.output
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [len(answer) in (2, 3) for answer in answers] == [True, True]
