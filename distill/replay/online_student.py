"""Online learning of a drafter: the trained copy, and the handover of its weights.

A float32 copy of the drafter's weights is trained, optionally on a separate device. Each kind of
drafter implements here the loss on records and the handover of new weights.
`train.online.learning` does the rest.

Shapes: B texts, T tokens of the longest, n recorded tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.drafters.draft_vocabulary import ReducedVocabulary, save_with_vocabulary
from decode.drafters.small_lm import SmallLMDrafter
from decode.drafters.trained import require_weights
from distill.distillation_loss import Distillation
from distill.losses import WeightedLoss
from distill.replay.replay_buffer import Record, padded_tokens, padded_values, recorded_signal


class OnlineStudent(ABC):
    """The copy of a drafter that is trained.

    kind: the name of the drafter in `decode.drafters.DRAFTERS`. module: holds the weights; those
    that require a gradient are trained. longest_text: the max number of tokens of a text. ids:
    int64 [V'], ascending, a reduced draft vocabulary; None means all tokens.

    For heads on the target only: heads is the number of heads, captured_layers are the layers whose
    hidden states are captured for them. whole_text: whether records hold the states that the heads
    make of these for all tokens of a text, else those of the tokens that drafts were made from.
    features is how many numbers a record has of such a token.
    """

    kind: str
    module: nn.Module
    weighted_loss: WeightedLoss
    longest_text: int
    ids: Tensor | None
    heads: int = 0
    captured_layers: tuple[int, ...] = ()
    features: int = 0
    whole_text: bool = False

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def parameter_count(self) -> int:
        """The number of parameters, trained or not."""
        return sum(p.numel() for p in self.module.parameters())

    @abstractmethod
    def loss(self, records: Sequence[Record]) -> tuple[Tensor, Tensor]:
        """Return the weighted loss summed over the recorded tokens, and each term's sum.

        The loss is differentiable. The sums are float64 [terms]. Texts are at most
        `longest_text` long.
        """

    @abstractmethod
    def expected_rejections(self, records: Sequence[Record]) -> Tensor:
        """Σ TV(p, q) over the recorded tokens, float64 []: the expected rejections at T = 1."""

    @abstractmethod
    def require_fits(self, drafter: Drafter) -> None:
        """Raise UserError unless `drafter` can take these weights."""

    def text_states(self, drafter: Drafter) -> Callable[[int], Tensor] | None:
        """What `Collector` gets the input states of a text from. None: from nowhere."""
        return None

    @abstractmethod
    def hand_over(self, weights: Mapping[str, Tensor], drafter: Drafter) -> None:
        """Give a drafter these values of the trained weights (names as in `module`).

        Call it only between two drafts.
        """

    @abstractmethod
    def write(self, directory: Path) -> None:
        """Write the files that the drafter's `load` reads."""

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}


def require_same_ids(student_ids: Tensor | None, drafter_ids: Tensor | None) -> None:
    """Raise UserError unless the learning copy and its drafter have the same draft vocabulary."""
    if student_ids is None or drafter_ids is None:
        same = student_ids is drafter_ids
    else:
        same = torch.equal(student_ids.cpu(), drafter_ids.cpu())
    if not same:
        raise UserError(
            "the drafter and its learning copy have different draft vocabularies; create both from "
            "the same drafter directory"
        )


class SmallLMStudent(OnlineStudent):
    """A small language model in float32. `model` itself is trained.

    It is in eval mode, so there is no dropout and training is reproducible.

    vocabulary: the reduced draft vocabulary of its output layer. max_length: the max length of a
    text in tokens; None uses the model's limit. tokenizer: stored with the model; it also gives the
    padding id, 0 without it. tokens: as for `Distillation`; it must equal the
    number of tokens in the records' distributions. Raises UserError for a model that
    `distill.teacher.linear_logits.linear_logits` refuses.
    """

    kind = "small_lm"

    def __init__(
        self,
        model: PreTrainedModel,
        weighted_loss: WeightedLoss,
        vocabulary: ReducedVocabulary | None = None,
        *,
        max_length: int | None = None,
        tokenizer: Any = None,
        tokens: int | None = None,
        chunk: int = 256,
    ) -> None:
        self.model, self.weighted_loss = model.eval(), weighted_loss
        self.vocabulary = vocabulary
        ids = None if vocabulary is None else vocabulary.ids.to(model.device)
        self.ids, self.tokenizer = ids, tokenizer
        self.pad_id = 0 if tokenizer is None else tokenizer.pad_token_id or 0
        sizes: Any = {"chunk": chunk, "vocabulary": ids, "tokens": tokens}
        self.module = Distillation(model, weighted_loss, **sizes)
        rejections = WeightedLoss({"total_variation": 1.0})
        self._total_variation = Distillation(model, rejections, **sizes)
        config = model.config.get_text_config()
        limits = [getattr(config, "max_position_embeddings", None), max_length]
        self.longest_text = min((limit for limit in limits if limit), default=1 << 30)

    def loss(self, records: Sequence[Record]) -> tuple[Tensor, Tensor]:
        return self._loss_of(self.module, records)

    @torch.no_grad()
    def expected_rejections(self, records: Sequence[Record]) -> Tensor:
        return self._loss_of(self._total_variation, records)[1][0]

    def _loss_of(self, module: nn.Module, records: Sequence[Record]) -> tuple[Tensor, Tensor]:
        input_ids, attention_mask = padded_tokens(records, self.pad_id)
        loss_mask = padded_values(
            records,
            [record.positions for record in records],
            [torch.ones(len(record.positions), dtype=torch.bool) for record in records],
        )
        batch = (x.to(self.device) for x in (input_ids, attention_mask, loss_mask))
        signal = recorded_signal(records, self.device)
        loss_and_sums: tuple[Tensor, Tensor] = module(*batch, teacher=signal.__getitem__)
        return loss_and_sums

    def require_fits(self, drafter: Drafter) -> None:
        if not isinstance(drafter, SmallLMDrafter):
            raise UserError(
                f"{type(drafter).__name__} cannot take the weights of a small language model; "
                "expected the small_lm drafter that was copied"
            )
        require_same_ids(self.ids, drafter.vocabulary)
        require_weights(drafter.lm.model, _lm_names(self.trained()))

    def hand_over(self, weights: Mapping[str, Tensor], drafter: Drafter) -> None:
        assert isinstance(drafter, SmallLMDrafter)
        drafter.take_weights(_lm_names(weights))

    def write(self, directory: Path) -> None:
        save_with_vocabulary(self.model, self.vocabulary, directory)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(directory)


def _lm_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a `Distillation`, by their names in its student."""
    return {name.removeprefix("student."): tensor for name, tensor in weights.items()}
