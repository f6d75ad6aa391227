"""The doors that people try first: every help fits a screen, and what is tried ends in a line."""

import runpy
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import typer
from typer.testing import CliRunner

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from draftsmith.cli.audit import AuditDrawing
from draftsmith.cli.command import CallerOptions, Drawing, Loading
from draftsmith.cli.main import COMMANDS, app
from draftsmith.cli.short_help import with_short_help
from draftsmith.net.limits import ServerLimits
from draftsmith.serve.batching.requests import RequestBounds
from tests.tiny import save_tiny
from tools.structure import count_options
from train.base.exit_status import ExitStatus

GROUP = typer.main.get_command(app)
NAMES: list[str] = sorted(GROUP.commands)  # type: ignore[attr-defined]
# A window of 80 columns; nearly all fit into 24 lines.
LINES = 36


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("command", [(), *((name,) for name in NAMES)])
def test_every_help_fits_a_screen(command: tuple[str, ...]) -> None:
    assert len(shown(*command, "--help").splitlines()) <= LINES


@pytest.mark.parametrize("command", ["serve", "audit", "export"])
def test_all_options_are_described_on_demand(command: str) -> None:
    options = [x for x in GROUP.commands[command].params if not x.hidden]  # type: ignore[attr-defined]
    brief, full = shown(command, "--help"), shown(command, "--help-all")
    names = [max(x.opts, key=len) for x in options if x.param_type_name == "option"]
    assert all(f" {name} " in full for name in names)
    panel = [line for line in brief.splitlines() if line.startswith("│")]
    left_out = [name for name in names if not any(f" {name} " in line for line in panel)]
    assert f"--help-all describes {len(left_out)} more options" in brief


def test_the_list_of_commands_names_all_and_describes_the_first() -> None:
    brief, full = shown("--help"), shown("--help-all")
    assert all(name in brief.replace(",", " ").split() for name in NAMES)
    assert {f"│ {name} " in full for name in NAMES} == {True}
    described = {name for name in NAMES if f"│ {name} " in brief}
    assert len(described) == len(COMMANDS[None])


def test_an_option_that_a_command_lacks_cannot_come_first() -> None:
    def command(port: int = 0) -> None: ...

    with pytest.raises(ValueError, match="command has no host; expected"):
        with_short_help(command, "port host", {})


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("module", ["draftsmith", "draftsmith.cli.main"])
def test_the_module_is_the_command(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--version"])
    with pytest.raises(SystemExit):
        runpy.run_module(module, run_name="__main__")
    assert capsys.readouterr().out == f"draftsmith {version('draftsmith')}\n"


def test_a_launched_training_refuses_a_config_as_the_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each process of `accelerate launch -m train`: one line and the same exit status, and no
    traceback but the launcher's own."""
    config = tmp_path / "config.yaml"
    config.write_text("name: one\ntarget: {model: m}\ntrane: 1\n", "utf-8")
    monkeypatch.setattr(sys, "argv", ["train", str(config)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("train", run_name="__main__")
    launched = capsys.readouterr()
    command = CliRunner().invoke(app, ["train", str(config)])
    assert (ended.value.code, launched.err) == (command.exit_code, command.stderr)
    assert ended.value.code == ExitStatus.BAD_INPUT
    assert launched.err.startswith("error: ")
    assert "trane" in launched.err


def test_the_commands_have_few_options() -> None:
    """Settings of one topic are one option, such as --limits and --sampling. They had 380."""
    assert count_options() <= 300


def test_settings_of_one_topic_are_one_option() -> None:
    limits, others = CallerOptions(limits="connections=9,max_wait=2").bounds(
        ServerLimits(), RequestBounds
    )
    assert (limits.connections, others) == (9, {"max_wait": 2})
    drawing = AuditDrawing(filters="top_k=4,presence_penalty=0.5")
    assert (drawing.sampling.top_k, drawing.sampling.presence_penalty) == (4, 0.5)
    spread = Loading(target="t", device_map='auto:max_memory={0:"9GiB"}')
    assert spread.placement == {"device_map": "auto", "max_memory": {0: "9GiB"}}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Drawing(filters="topk=4").sampling, 'topk; expected top_k.*mean "top_k'),
        (lambda: Drawing(filters="top_k=4.5").sampling, "4.5; expected a whole number"),
        (lambda: Drawing(filters="top_p").sampling, "'top_p' in"),
        (lambda: Drawing(filters="presence_penalty=1").sampling, "presence_penalty; expected"),
        (lambda: CallerOptions(limits="max_rows=4").bounds(ServerLimits()), "max_rows; expected"),
        (lambda: CallerOptions(limits="connections=no").bounds(ServerLimits()), "'no'; expected"),
        (lambda: Loading(target="t", device_map="auto:memory={}").placement, "expected NAME"),
    ],
)
def test_a_wrong_setting_of_a_topic_is_named(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        wrong()


@pytest.mark.parametrize("name", ["~no-such-user/x", 300 * "x", "loop", "file/x"])
@pytest.mark.parametrize("option", ["--target", "--drafter", "--prompts"])
def test_a_name_that_no_file_can_have_ends_in_a_line(
    option: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    save_tiny(tmp_path / "target", "llama")
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hello"}\n', encoding="utf-8")
    given = {"--target": "target", "--drafter": "ngram", "--prompts": "rows.jsonl"}
    arguments = [f"{key}={value}" for key, value in (given | {option: name}).items()]
    result = CliRunner().invoke(app, ["evaluate", *arguments])
    assert (result.exit_code, result.output.startswith("error: ")) == (2, True), result.output


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    """Before the target is looked for."""
    result = CliRunner().invoke(
        app, ["evaluate", "--target=x", "--drafter=x", "--prompts=x", f"--json={tmp_path}"]
    )
    assert (result.exit_code, "is a directory; expected a file" in result.output) == (2, True)


def test_a_drafter_is_named_in_more_letters_than_a_file(target: Target) -> None:
    layers = f"attention={[0] * 100},mlp=[0]".replace(" ", "")
    assert isinstance(open_drafter(f"skip:{layers}", target), Drafter)


def test_serve_and_chat_size_drafts_by_worth_and_evaluate_by_no_clock() -> None:
    commands: Any = GROUP.commands  # type: ignore[attr-defined]
    found = {
        name: next(option.default for option in commands[name].params if option.name == "policy")
        for name in ("serve", "chat", "evaluate")
    }
    assert found == {"serve": "worth", "chat": "worth", "evaluate": "fixed"}
