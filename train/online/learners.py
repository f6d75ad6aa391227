"""The two parts of a drafter that learns while it serves: the decoding drafter, on the target's
device and in its dtype, and the learning copy, in float32 on any device."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from distill.students.student_start import DRAFTER_STAGES, choose_trained
from heads.heads_directory import read_heads
from heads.heads_module import HEADS
from heads.online_heads import HeadStudent
from train.base.schema import StageConfig, closest_stage

# Kinds of stages whose drafters can continue to learn.
STARTS = ("heads", *DRAFTER_STAGES)
# Why a drafter with another tokenizer does not learn while it serves.
OTHER_TOKENIZER = (
    "has another tokenizer than the target, and rejected tokens are stored in the target's tokens; "
    "use a drafter with the target's tokenizer"
)
# Why a parallel drafter does not learn while it serves.
PARALLEL = (
    "drafts all tokens in one pass, and learning from rejected tokens would train it to draft one "
    "token after the other; train a drafter without `parallel`"
)


def heads_stage(name: str, earlier: Sequence[StageConfig]) -> StageConfig | None:
    """The `heads` stage that the drafter of stage `name` comes from, directly or through other
    stages. None if the drafter is a small language model. Raises UserError if there is no such
    stage."""
    closest_stage(name, earlier, *STARTS)
    by_name = {stage.name: stage for stage in earlier}
    while name in by_name:
        stage: Any = by_name[name]
        if stage.kind == "heads":
            return by_name[name]
        name = stage.drafter.stage or ""
    return None


def drafts_in_parallel(name: str, earlier: Sequence[StageConfig]) -> bool:
    """Whether the drafter of stage `name`, a small language model, drafts all tokens in one pass:
    this stage, or one that it continues, has `parallel`."""
    by_name: dict[str, Any] = {stage.name: stage for stage in earlier}
    while name in by_name:
        if getattr(by_name[name], "parallel", None) is not None:
            return True
        name = by_name[name].drafter.stage or ""
    return False


def has_other_tokenizer(name: str, earlier: Sequence[StageConfig]) -> bool:
    """Whether the drafter of stage `name`, a small language model, has another tokenizer than the
    target. A stage that continues such a drafter says so too."""
    stage: Any = next((stage for stage in earlier if stage.name == name), None)
    return stage is not None and stage.drafter.vocabulary is not None


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
