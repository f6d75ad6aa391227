"""CONTRIBUTING shows how data goes through the files; a trace of the code keeps that true."""

import re

from tests.structure import (
    ROOT,
    walk_of_a_decode_step,
    walk_of_a_distillation_step,
    walk_of_a_heads_step,
)


def listed(heading: str) -> list[str]:
    """The files of the numbered list after the paragraph that begins so."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    after = text[text.index(heading) :]
    first = after.index("\n1. ")
    body = re.split(r"\n\n", after[first:].lstrip())[0]
    return re.findall(r"^\d+\. `([^`]+)`", body, re.MULTILINE)


def test_the_walk_of_a_speculative_step_is_the_one_in_contributing() -> None:
    files = walk_of_a_decode_step()
    assert listed("One speculative step") == files
    assert len(files) <= 13


def test_the_walk_of_a_distillation_step_is_the_one_in_contributing() -> None:
    files = walk_of_a_distillation_step()
    assert listed("One distillation step") == files
    assert len(files) <= 10


def test_the_walk_of_a_heads_step_is_the_one_in_contributing() -> None:
    files = walk_of_a_heads_step()
    assert listed("One step of a heads training") == files
    assert len(files) <= 21
