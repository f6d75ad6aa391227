"""The settings of a `heads` stage."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from decode.base.strict import kinds_of
from distill.settings import DrafterLora
from heads.options import HeadOptions
from train.settings.optimizer_config import OptimizerConfig
from train.settings.schema import Losses, one_of
from train.settings.server_config import ServedFeatures
from train.settings.text_settings import LossConfig
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
