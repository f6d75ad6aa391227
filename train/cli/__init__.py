"""The commands of `draftsmith`, a file for each kind of them, which registers itself."""

from train.cli import train, decode, calibrate, look, export  # isort: skip  (as help lists them)
from train.cli.shared import app

__all__ = ["app", "calibrate", "decode", "export", "look", "train"]
