"""The settings of a `heads` stage."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from decode.base.errors import UserError
from decode.base.strict import kinds_of
from decode.model.model_names import EMBEDDED_PREFIX
from decode.opening.shipped import shipped_drafter
from distill.student_settings import DrafterLora, refuse
from heads.options import HeadOptions
from train.settings.drafter_stages import require_merged, require_own_weights
from train.settings.optimizer_config import OptimizerConfig
from train.settings.schema import Check, Losses, StageConfig, closest_stage, one_of
from train.settings.server_config import ServedFeatures
from train.settings.text_settings import LossConfig, complete_target_part
from train.settings.training import BackboneConfig, DevConfig, LoopConfig, TreeConfig

if TYPE_CHECKING:
    AnyHeads = HeadOptions
else:
    AnyHeads = one_of(kinds_of(HeadOptions, "type").values(), "type")


class HeadsConfig(LossConfig):
    """Small modules on the target learn to predict the tokens after its next token."""

    kind: Literal["heads"] = "heads"
    heads: AnyHeads
    """The type of heads and its options, as {type: medusa, heads: 5}; see `heads`."""
    start: str | None = None
    """An earlier heads stage on the same target, or the directory of a drafter, such as an imported
    one, or `embedded:NAME` of one that comes along; this stage continues to train its heads. None:
    new heads."""
    lora: DrafterLora | None = None
    """Train adapters on the heads of `start`. None: train the heads themselves."""
    backbone: BackboneConfig | None = None
    """Train the target too and write the new target to `target/`. None: the target does not
    change."""
    losses: Losses = {"cross_entropy": 1.0}
    """{name: weight}, between each head and the token it predicts. A loss that reads the teacher
    distils the target's distribution of that same token."""
    place_smoothing: float | None = Field(None, ge=0, le=1)
    """a of D-PACE (2605.18810; the paper's is 0.5): each place of a draft is weighted by how likely
    the drafter now gets all places before it right. None: the weights of the kind of heads."""
    draft_vocabulary: int | None = Field(None, ge=1)
    """Draft only this many of the text's most frequent tokens. None: all tokens, or the vocabulary
    of `start`."""
    features: str | ServedFeatures = "live"
    """The source of hidden states: live, the name or directory of a feature_cache stage, or a
    server, as {server: {launch: vllm}}."""
    dev: DevConfig | None = None
    """Figures on a dev slice during the training. None: no figures."""
    tree: TreeConfig | None = None
    """Calibrate a tree after the drafter is written, and store it with the drafter. A target that
    cannot verify trees is refused before the training. None: the drafter drafts chains."""
    weights: Literal["int8"] | None = None
    """int8: the drafter reads one byte a weight, on machines that can. Its files keep all bits.
    None: it reads its weights as they are."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, one step, layer or head at a time: less memory,
    more time. For heads that train several of them."""
    chunk_tokens: int = Field(256, ge=1)
    """The number of tokens whose logits are in memory at a time."""
    loop: LoopConfig = LoopConfig()
    """The length of the training and the size of its batches."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3)
    """AdamW and its learning rate."""

    def checks(self, earlier: Sequence[StageConfig]) -> Iterator[Check]:
        yield from super().checks(earlier)
        yield partial(self.loop.require_dev, self.name, self.dev, earlier)
        if self.start is not None:
            reason = f"the heads of {self.start} keep their draft vocabulary"
            yield partial(refuse, self, draft_vocabulary=reason)
            if self.starts_from_directory(earlier):
                yield partial(shipped_drafter, self.start)
            else:
                yield partial(self._check_start, self.start, earlier)
        if self.lora is not None:
            yield self._check_lora
        yield partial(require_own_weights, self)
        if self.backbone is not None:
            yield partial(self.backbone.check, self.name, earlier)
            reason = "the target is trained, so its hidden states change with every step"
            yield partial(refuse, self, tokens_per_pass=reason, features=reason)
        if self.features != "live":
            source = "a server"
            if isinstance(self.features, str):
                source = "a cache"
                if not Path(self.features).is_dir():
                    yield partial(closest_stage, self.features, earlier, "feature_cache")
            yield partial(refuse, self, tokens_per_pass=f"{source} replaces the live target")

    def needs_complete_target(self) -> str | None:
        used = {
            "backbone": self.backbone is not None,
            "tree": self.tree is not None,
            # Its embeddings learn through all layers of the target.
            "heads.type: pass": self.heads.type == "pass",
            "features.server.probe_samples above 0": isinstance(self.features, ServedFeatures)
            and self.features.server.probe_samples > 0,
        }
        return complete_target_part(self, used)

    def starts_from_directory(self, earlier: Sequence[StageConfig]) -> bool:
        """Whether `start` names a drafter directory, and no stage."""
        if self.start is None or self.start in {stage.name for stage in earlier}:
            return False
        return self.start.startswith(EMBEDDED_PREFIX) or Path(self.start).is_dir()

    def require_same_heads(self, heads: HeadOptions) -> None:
        """Raise UserError unless the heads of `start`, with these options, are those to train."""
        if heads != self.heads:
            settings = {"type": heads.type} | heads.model_dump(exclude_defaults=True)
            raise UserError(
                f"stage {self.name} continues to train the heads of {self.start}. Their settings "
                f"are {heads}, but this stage has {self.heads}; set the same type and options, "
                f"heads: {json.dumps(settings)}"
            )

    def _check_start(self, start: str, earlier: Sequence[StageConfig]) -> None:
        if len(Path(start).parts) > 1:  # stages have no such names
            raise UserError(
                f"stage {self.name}: start is {start}, which is not a directory; expected the "
                "directory of a drafter (draftsmith import writes one), the name of an earlier "
                "heads stage, or null for new heads"
            )
        first: Any = closest_stage(start, earlier, "heads")
        require_merged(self.name, start, earlier)
        if first.backbone is not None:
            raise UserError(
                f"stage {self.name} starts from the heads of {start}, but {start} also trained the "
                "target, and its heads belong to that new target; name a stage that does not train "
                "the target, or start a run with the new target"
            )
        self.require_same_heads(first.heads)

    def _check_lora(self) -> None:
        if self.start is None:
            raise UserError(
                f"stage {self.name}: lora trains adapters on heads that exist; set start to an "
                "earlier heads stage or to the directory of a drafter"
            )
        if self.backbone is not None:
            raise UserError(
                f"stage {self.name}: lora cannot be set with backbone: the heads then belong to a "
                "new target, and not to the one of their base; leave one of them out"
            )
