"""The two parts of a drafter that learns while it serves: the decoding drafter, on the target's
device and in its dtype, and the learning copy, in float32 on any device."""

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.drafters.draft_vocabulary import ReducedVocabulary, load_vocabulary
from decode.drafters.small_lm import SmallLMDrafter
from decode.model.loading import Target, load_model_and_tokenizer
from decode.opening.directory import describe_drafter, open_drafter
from decode.shapes.static import stored_shape
from distill.losses import WeightedLoss
from distill.replay.online_student import OnlineStudent, SmallLMStudent
from distill.students.student_start import choose_trained
from heads.heads_directory import read_heads
from heads.kinds import HEADS
from heads.online_heads import HeadStudent
from train.settings.online_config import PARALLEL


@dataclass
class Learning:
    """How the copy learns. max_length: the limit of a text in tokens; None: the copy's maximum.
    embeddings: whether to train a small language model's token embeddings and output layer too."""

    device: torch.device
    weighted_loss: WeightedLoss
    max_length: int | None
    chunk: int
    embeddings: bool

    def of_directory(self, path: Path, target: Target) -> tuple[OnlineStudent, Drafter]:
        """The copy and the drafter from a drafter directory, of any kind that can learn. Raises
        UserError if the directory is damaged or does not fit the target."""
        kind = describe_drafter(path)["kind"]
        if kind == "pard":
            raise UserError(f"the drafter {path} {PARALLEL}")
        if kind not in ("small_lm", *HEADS):
            raise UserError(
                f"the drafter {path} is of the kind {kind}, which does not learn while it serves; "
                "name heads or a small language model"
            )
        if kind not in HEADS:
            model = load_model_and_tokenizer(str(path), dtype="float32", device="cpu").model
            return self.of_model(model, load_vocabulary(path, model), target)
        drafter = open_drafter(str(path), target)
        heads, shape = read_heads(path, target), stored_shape(path)
        student = HeadStudent(
            heads,
            self.weighted_loss,
            target,
            tree=None if shape is None else shape.structure,
            device=self.device,
            max_length=self.max_length,
            chunk=self.chunk,
        )
        drafter.learning = True
        return student, drafter

    def of_model(
        self, model: PreTrainedModel, vocabulary: ReducedVocabulary | None, target: Target
    ) -> tuple[OnlineStudent, Drafter]:
        """The copy and the drafter from a float32 small language model. `model` itself is trained
        as the copy."""
        served = copy.deepcopy(model).requires_grad_(False).eval()
        served.to(target.device, target.dtype)
        ids = None if vocabulary is None else vocabulary.ids.to(target.device)
        choose_trained(model, embeddings=self.embeddings)
        student = SmallLMStudent(
            model.to(self.device),
            self.weighted_loss,
            vocabulary,
            max_length=self.max_length,
            tokenizer=target.tokenizer,
            tokens=target.token_count,
            chunk=self.chunk,
        )
        drafter = SmallLMDrafter.of_target(served, target, ids)
        drafter.learning = True
        return student, drafter
