"""What a compiler that `accelerate launch --dynamo_backend` names could not do."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from decode.base.errors import UserError
from decode.model.pretrained import in_one_line


@contextmanager
def compiling() -> Iterator[None]:
    """Raises UserError where the compiler fails. Some of them fail only at a batch of another shape
    than the first."""
    try:
        yield
    except Exception as error:
        if type(error).__module__ != "torch._dynamo.exc":  # importing it takes a second
            raise
        raise UserError(
            f"PyTorch {torch.__version__} cannot compile this training ({in_one_line(error)}). "
            "Launch without dynamo_backend; the stage's last checkpoint is kept"
        ) from error
