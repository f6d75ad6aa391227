"""The commands of `draftsmith`. Each file registers the commands of one kind."""

from train.cli import train, decode, calibrate, look, export  # isort: skip  (as help lists them)
from train.cli.shared import app

__all__ = ["app", "calibrate", "decode", "export", "look", "train"]
