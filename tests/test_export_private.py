"""What an export says of this machine, and what it takes of it: names, disk, threads, time."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decode.base.errors import UserError
from decode.model import loading
from draftsmith.cli.main import app
from draftsmith.export import ExportOptions
from draftsmith.export.export_directory import export_drafter
from draftsmith.export.import_directory import import_drafter
from draftsmith.export.trained_drafter import without_directories
from tests.export import EAGLE1, make_heads, save_target
from tests.published import safeailab_eagle3
from tests.tiny import tiny_target
from train.engines.child_process import model_directory


def test_an_export_of_ours_names_no_directory_of_this_machine(tmp_path: Path) -> None:
    """Of an import, whose source and target are local. Other layouts: test_export_contract.py."""
    target = save_target(tmp_path / "target", layers=7)
    source = safeailab_eagle3(target).save(tmp_path / "published")
    import_drafter(str(source), target, tmp_path / "drafter")
    options = ExportOptions(target=target.name)
    export_drafter(tmp_path / "drafter", "draftsmith", tmp_path / "out", options)
    files = [file for file in (tmp_path / "out").iterdir() if file.suffix != ".safetensors"]
    assert len(files) >= 3
    for file in files:
        assert str(tmp_path) not in file.read_text(encoding="utf-8"), file


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("/home/me/my models/target", "target"),
        ("~/models/target.gguf", "target.gguf"),
        ("data=/scratch/a/b.jsonl,x", "data=b.jsonl,x"),
        ("started from C:\\runs\\new\\drafter", "started from drafter"),
        ("org/name at https://host/a/b", "org/name at https://host/a/b"),
        ("http://host:80/a/b and s3://bucket/a/b", "http://host:80/a/b and s3://bucket/a/b"),
        ("of store:/home/me/drafter", "of store:drafter"),
        ("file:///home/me/target", "target"),
        ("read ~me/x.json", "read x.json"),
        ("at \\\\host\\share\\x", "at x"),
        ("half of 1 / 2 and/or 3", "half of 1 / 2 and/or 3"),
        ("runs/me/secret/drafter", "drafter"),
        ("output_dir=runs/me/x of org/name", "output_dir=x of org/name"),
        ("see ../my dir/x.json, ./y", "see x.json, y"),
        ("../../private/a b.json", "a b.json"),
        ("read '/home/J Smith/My Docs/a.json' now", "read 'a.json' now"),
        ("data.train=/home/J Smith/x y/train.jsonl", "data.train=train.jsonl"),
        ("C:\\Users\\J Smith\\x.json", "x.json"),
        ("file:///home/J Smith/target", "target"),
        ("my models/a target", "a target"),
        ("1/2 of 3/4 tokens/s", "1/2 of 3/4 tokens/s"),
        ("${HOME}/x/y", "y"),
        ("read ${XDG_CACHE_HOME:-$HOME/.cache}/y.json", "read y.json"),
        ("data=$DATA/a b/c.json, $XDG_CACHE_HOME/d", "data=c.json, d"),
        ("from %APPDATA%\\J Smith\\x.json", "from x.json"),
        ("$env:HOME\\x\\y.json", "y.json"),
        ("~j.smith-2/x, ~-/y", "x, y"),
        ("file://localhost/home/me/x", "x"),
        ("see /data/alice,bob/c/x", "see x"),
        ("see /data/a b,c/x; ../a=b/c:d/e;f/it's/[me] {old}/x", "see x; x"),
        ("x=/a/b,y=/c/d;/e/f:/g/h,['/i/j','/k/l'] {z: /m/n}", "x=b,y=d;f:h,['j','l'] {z: n}"),
        ("C:\\runs\\lr=0.1,me\\x, runs/lr=0.1/me/x", "x, x"),
        ("org/name,org/other and org/name=3", "org/name,org/other and org/name=3"),
        ("at FILE:///home/me/x, git+file:///a/b/y", "at x, y"),
        ("vfs:///mnt/me/x and sqlite:////home/me/x.db", "x and x.db"),
        ("for $5/day and 5% of w/o", "for $5/day and 5% of w/o"),
    ],
)
def test_directories_are_cut(
    text: str, public: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my models" / "a target").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert without_directories({"x": [text]}) == {"x": [public]}
    assert without_directories({text: 1}) == {public: 1}


def test_what_an_engine_does_not_read_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    target = save_target(tmp_path / "target")
    make_heads(tmp_path / "drafter", target, EAGLE1)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
    words = ["export", str(tmp_path / "drafter"), "--format", "eagle1-sglang", "--verify", "vllm"]
    words += ["--out", str(tmp_path / "out"), "--prompts", str(tmp_path / "prompts.jsonl")]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 2
    assert "but this export is eagle1-sglang" in said.stderr
    assert not (tmp_path / "out").exists()
    for name in ("a/b/c", "bad name/x", "", "org/" + 99 * "x"):
        said = CliRunner().invoke(app, [*words[:4], *words[6:], "--push-to-hub", name])
        assert said.exit_code == 2
        assert "expected org/name" in " ".join(said.stderr.split())
        assert not (tmp_path / "out").exists()


def test_a_target_of_the_hub_is_read_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one of a GGUF file is written only where there is room."""
    target = replace(tiny_target(), name="org/model", revision="abc")
    (tmp_path / "snapshot").mkdir()

    def cached(name: str, file: str, revision: str | None) -> str | None:
        return (
            str(tmp_path / "snapshot" / file) if (name, revision) == ("org/model", "abc") else None
        )

    monkeypatch.setattr(loading, "try_to_load_from_cache", cached)
    assert model_directory(target, tmp_path / "written") == tmp_path / "snapshot"
    assert not (tmp_path / "written").exists()
    other = replace(target, name="embedded:tiny")
    assert model_directory(other, tmp_path / "written") == tmp_path / "written"
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(UserError, match=r"its weights are written.*TMPDIR"):
        model_directory(other, tmp_path / "more")
    assert not (tmp_path / "more").exists()
