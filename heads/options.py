"""The options of each kind of heads, as a config has them. Nothing here imports torch.

A kind is a file of this package that registers its module and its drafter, and its options here.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from decode.base.errors import UserError, nearest
from decode.base.strict import Strict, kinds_of

OutputKind = Literal["own", "shared", "target"]


class LayerSettings(Strict):
    """Settings of a drafter's decoder layer that differ from its target's, as published drafters
    have them. None: the target's."""

    intermediate_size: int | None = Field(None, ge=1)
    """The width of the feed-forward network."""
    num_attention_heads: int | None = Field(None, ge=1)
    """The number of query heads."""
    num_key_value_heads: int | None = Field(None, ge=1)
    """The number of key heads; it divides the number of query heads."""
    head_dim: int | None = Field(None, ge=2)
    """The size of a head."""
    rms_norm_eps: float | None = Field(None, gt=0)
    """ε of the norms."""
    rope_parameters: dict[str, Any] | None = None
    """The rotary positions, as in transformers' configs: `rope_type`, `rope_theta` and others."""

    @classmethod
    def difference(cls, config: Any, usual: Any) -> "LayerSettings | None":
        """Return the settings of a config of transformers that `usual` has not; None if there are
        none."""
        changed = {
            name: getattr(config, name)
            for name in cls.model_fields
            if getattr(config, name) != getattr(usual, name)
        }
        return cls(**changed) if changed else None


class HeadOptions(Strict):
    """Settings of a kind of heads."""

    type: str
    """The kind of heads."""
    output: OutputKind = "own"
    """The output layer. `own`: one per head. `shared`: one for all heads. Both start as a copy of
    the target's output layer and are trained. `target`: the target's output layer itself, frozen
    and not stored."""
    output_rank: int | None = Field(None, ge=1)
    """r; an output layer is then two trained factors, [r, H] and [V', r] (SlimSpec, 2605.10453),
    which start as near to the target's as that rank can be. With `output: target` all heads share
    them. None: full output layers."""

    @classmethod
    def of(cls, settings: Any) -> "HeadOptions":
        """Build options from a mapping with a `type` key. Raises UserError if it is not valid."""
        if isinstance(settings, HeadOptions):
            return settings
        known = kinds_of(HeadOptions, "type")
        if not isinstance(settings, Mapping) or not isinstance(settings.get("type"), str):
            raise UserError(
                f"heads are {settings!r}; expected their type and its options, such as "
                f"{{type: {next(iter(known))}}}; known types: {', '.join(known)}"
            )
        name = settings["type"]
        if name not in known:
            raise UserError(
                f"unknown type of heads {name!r}; known: {', '.join(known)}.{nearest(name, known)}"
            )
        kind = known[name]
        try:
            return kind.model_validate(dict(settings))
        except ValidationError as error:
            item = error.errors()[0]
            key = ".".join(str(part) for part in item["loc"])
            if item["type"] == "extra_forbidden":
                raise UserError(
                    f"heads of type {settings['type']} have no option {key!r}; they have "
                    f"{', '.join(kind.model_fields)}.{nearest(key, kind.model_fields)}"
                ) from None
            reason = item["msg"].replace("Input should be", "expected")
            raise UserError(f"heads: {key} is {item['input']!r}; {reason}") from None


class AttendingOptions(HeadOptions):
    """Options of heads with layers that attend to the text."""

    window: int | None = Field(None, ge=1)
    """The number of tokens that the heads' layers see, in training and in drafts: the last ones,
    the token itself included. At least the length of a draft. None: all of the text."""
    sinks: int = Field(0, ge=0)
    """With `window`, the first tokens of the text that they see besides (2309.17453)."""

    @property
    def longest_draft(self) -> int:
        """The max number of tokens of a draft. A window must hold them."""
        return 1

    def require_window(self) -> None:
        """Raise UserError for a window that does not hold a draft, or sinks without a window."""
        if self.window is None and self.sinks:
            raise UserError(f"sinks is {self.sinks}, but there is no window; set window")
        if self.window is not None and self.window < self.longest_draft:
            raise UserError(
                f"a window of {self.window} tokens is shorter than the longest draft of these "
                f"{self.type} heads; expected at least {self.longest_draft}"
            )


class EagleOptions(AttendingOptions):
    """Options of EAGLE-1 and EAGLE-3."""

    layer: LayerSettings | None = None
    """Settings of the decoder layer that differ from the target's. None: it has the target's."""


class MedusaOptions(HeadOptions):
    """Options of Medusa heads (2401.10774)."""

    type: Literal["medusa"] = "medusa"
    heads: int = Field(5, ge=1)
    """K, the number of heads."""
    layers: int = Field(1, ge=1)
    """The number of residual blocks per head."""
    decay: float = Field(0.8, gt=0, le=1)
    """λ; the loss weight of head k is λᵏ."""


class BlockwiseOptions(HeadOptions):
    """Options of blockwise heads (1811.03115)."""

    type: Literal["blockwise"] = "blockwise"
    output: Literal["shared", "target"] = "target"
    """The output layer of all heads. `shared`: starts as a copy of the target's output layer and is
    trained. `target`: the target's output layer itself, frozen and not stored."""
    k: int = Field(8, ge=2)
    """The block size. p₁ is the target itself, so there are k − 1 heads."""
    hidden: int | None = Field(None, ge=1)
    """The width of the hidden layer per head. None: the width of the target's feed-forward
    layers."""
    sub_loss: Literal["random", "mean"] = "random"
    """The loss of a minibatch. `random`: the loss of one head, drawn uniformly, as in the paper.
    `mean`: the mean over all heads."""


class HydraOptions(HeadOptions):
    """Options of Hydra heads (2402.05109)."""

    type: Literal["hydra"] = "hydra"
    heads: int = Field(4, ge=1)
    """The number of heads."""
    layers: int = Field(1, ge=1)
    """The number of layers of each head's MLP."""
    decay: float = Field(1.0, gt=0, le=1)
    """The loss weight of head k is decay^(k − 1). In the paper all heads have the same weight."""


class HydraPlusOptions(HydraOptions, AttendingOptions):
    """Options of Hydra++ heads (2402.05109). The paper trains them on the target's distribution:
    set the stage's `losses` to `forward_kl: 1`."""

    type: Literal["hydra_plus"] = "hydra_plus"  # type: ignore[assignment]
    layers: int = Field(4, ge=1)
    """The number of layers of each head's MLP; four in the paper."""


class Eagle1Options(EagleOptions):
    """Options of EAGLE-1 heads (2401.15077). The token loss is one of the stage's `losses` (the
    paper's w_cls: `forward_kl: 0.1`)."""

    type: Literal["eagle1"] = "eagle1"
    output: Literal["target"] = "target"
    """The output layer: the target's, frozen and not stored."""
    depth: int = Field(7, ge=1)
    """The max depth of a draft, also used to evaluate on dev text. At least `steps`."""
    steps: int = Field(1, ge=1)
    """The steps that are trained, each on the states of the one before. HASS (2408.15766) has 3."""
    regression: float = Field(1.0, ge=0)
    """w_reg, the loss weight of the feature loss."""
    noise: float = Field(0.1, ge=0)
    """a; training adds noise from U(−a, a) to the features."""
    bias: bool = False
    """A bias in `fc`. vLLM reads no drafter with one; SGLang reads only those."""

    @property
    def longest_draft(self) -> int:
        return max(self.depth, self.steps)


class Eagle3Options(EagleOptions):
    """Options of EAGLE-3 heads (2503.01840). The losses are the stage's `losses`; the paper trains
    on the target's distribution, `forward_kl: 1`."""

    type: Literal["eagle3"] = "eagle3"
    output: Literal["shared", "target"] = "shared"
    """The output layer. `shared`: one separate layer that starts as a copy of the target's and is
    trained. `target`: the target's output layer itself, frozen and not stored."""
    steps: int = Field(7, ge=1)
    """The number of steps of the training-time test, and the max depth of a draft. Each step reads
    the states of the previous step."""
    decay: float = Field(0.8, gt=0, le=1)
    """The loss weight of step k is decay^(k − 1)."""
    fc_norm: bool = False
    """Of EAGLE-3.1 (2605.09992): a norm for each of the three features before `fc`."""
    norm_output: bool = False
    """Of EAGLE-3.1: the next step reads the state after the final norm. EAGLE-3: before it."""
    norm_before_fc: bool = False
    """One norm for the concatenated features before `fc`, as in drafters published for gpt-oss."""
    norm_before_residual: bool = False
    """The residual stream of the layer starts with the normed state, as in drafters that the
    library speculators trained. EAGLE-3: with the state itself."""
    captured_layers: list[int] | None = Field(None, min_length=1)
    """The layers of the target whose outputs are read, counted from 0. None: the outputs of 1,
    n // 2 − 1 and n − 4, which engines read by default."""

    @property
    def longest_draft(self) -> int:
        return self.steps


class PEagleOptions(AttendingOptions):
    """Options of P-EAGLE heads (2602.01469)."""

    type: Literal["p_eagle"] = "p_eagle"
    output: Literal["shared", "target"] = "shared"
    """The output layer. `shared`: one separate layer that starts as a copy of the target's and is
    trained. `target`: the target's output layer itself, frozen and not stored."""
    tokens: int = Field(8, ge=2)
    """K, the number of tokens that one pass predicts, and the max depth of a draft."""
    layers: int = Field(4, ge=1)
    """The number of decoder layers. The first one reads the token and the target's features."""
    keep: float = Field(0.7, gt=0, le=1)
    """r; place i of a draft is trained for rⁱ of the text's drafts."""
    keep_min: float = Field(0.2, ge=0, le=1)
    """r_min; each place is trained for at least this share."""
    embeddings: Literal["target", "trained"] = "target"
    """The token embeddings. `target`: the target's, frozen and not stored; only the stand-in's is
    trained. `trained`: a separate table that starts as a copy of the target's, as in the paper."""
    mask_token: int | None = Field(None, ge=0)
    """The id of the token whose embedding is the stand-in, in trained embeddings and in exports.
    Texts must never contain it. None: an unused token."""
    norm_before_residual: bool = False
    """The residual stream of the first layer starts with the normed state, as the library
    speculators can train it."""
    captured_layers: list[int] | None = Field(None, min_length=1)
    """The layers of the target whose outputs are read, counted from 0. None: those of EAGLE-3."""
    layer: LayerSettings | None = None
    """Settings of the layers that differ from the target's, as imports set them. None: the
    target's."""

    @property
    def longest_draft(self) -> int:
        return self.tokens


class MtpOptions(AttendingOptions):
    """Options of heads of multi-token prediction."""

    type: Literal["mtp"] = "mtp"
    output: Literal["target"] = "target"
    """The output layer: the target's, frozen and not stored."""
    layers: int = Field(1, ge=1)
    """The number of layers. One layer drafts all tokens, and reads its own state after the first.
    Of several, each drafts one token, in chains."""
    depth: int = Field(3, ge=1)
    """The max depth of a draft, and the number of steps that are trained. With several layers it is
    at most their number."""
    decay: float = Field(0.6, gt=0, le=1)
    """The loss weight of step k is decay^(k − 1) (FastMTP's β)."""

    @property
    def longest_draft(self) -> int:
        return self.depth

    def require_window(self) -> None:
        super().require_window()
        if 1 < self.layers < self.depth:
            raise UserError(
                f"depth is {self.depth}, but each of the {self.layers} layers of these mtp heads "
                f"drafts one token; set depth to at most {self.layers}"
            )


class DFlashOptions(AttendingOptions):
    """Options of DFlash heads (2602.06036)."""

    type: Literal["dflash"] = "dflash"
    output: Literal["target"] = "target"
    """The output layer: the target's, frozen and not stored."""
    layers: int = Field(5, ge=1)
    """m, the number of the drafter's layers."""
    block: int = Field(16, ge=2)
    """S, the tokens of a block: the last token of the text, then mask tokens. A draft has at most
    S − 1 tokens."""
    taps: list[int] | None = None
    """The target's layers whose outputs are read, counted from 0 and ascending. None: m layers,
    spread evenly from the second to the fourth from the end, as in the paper."""
    mask_token: int | None = Field(None, ge=0)
    """The id of the mask token. Its embedding is the target's. Texts must never contain it. None:
    the highest id that the tokenizer does not use in texts."""
    anchors: int = Field(512, ge=1)
    """The number of blocks per text and visit in training, at places drawn anew each time."""
    decay: float = Field(7.0, gt=0)
    """γ; the loss weight of place k is exp(−(k − 1)/γ). 7 suits blocks of 16, 4 suits blocks
    of 8."""
    layer: LayerSettings | None = None
    """Settings of the layers that differ from the target's, as imports set them. None: the
    target's."""

    @property
    def longest_draft(self) -> int:
        return self.block


class DFlash2Options(DFlashOptions):
    """Options of DFlash2 heads. The defaults are those of the published drafters."""

    type: Literal["dflash2"] = "dflash2"  # type: ignore[assignment]
    block: int = Field(8, ge=2)
    """S, the tokens of a block: the last token of the text, then mask tokens. A draft has at most
    S − 1 tokens."""
    decay: float = Field(4.0, gt=0)
    """γ; the loss weight of place k is exp(−(k − 1)/γ)."""
    kernel: int = Field(2, ge=1)
    """The tokens that a convolution mixes: a token and those before it in its block."""
    group: int = Field(16, ge=1)
    """The channels that share what a convolution adds to its kernel. It divides the hidden size."""
    rank: int = Field(256, ge=1)
    """R, the rank of the selector."""
    candidates: int = Field(16, ge=1)
    """K, the likeliest tokens of a place, among which the selector chooses."""
    selector_weight: float = Field(1.0, gt=0)
    """The weight of the selector's cross-entropy beside the stage's losses."""


class DSparkOptions(DFlashOptions):
    """Options of DSpark heads (2607.05147). The paper's loss is `cross_entropy: 0.1` and
    `total_variation: 1.8` in the stage's `losses`; the confidence is added to it."""

    type: Literal["dspark"] = "dspark"  # type: ignore[assignment]
    block: int = Field(7, ge=2)
    """S, the tokens of a block: the last token of the text, then mask tokens. Each predicts the
    token after it, so a draft has at most S tokens."""
    decay: float = Field(4.0, gt=0)
    """γ; the loss weight of place k is exp(−(k − 1)/γ)."""
    rank: int = Field(256, ge=1)
    """R, the rank of the Markov head."""
    confidence: bool = True
    """Learn the confidence head. The losses must then contain `total_variation`, from which it
    learns. The draft-length policy `reach` reads it."""


class XPressOptions(DFlashOptions):
    """Options of XPress heads (2608.02438). The defaults are those of the library speculators. Its
    loss is `cross_entropy: 0.1` and `total_variation: 1.8` in the stage's `losses`."""

    type: Literal["xpress"] = "xpress"  # type: ignore[assignment]
    block: int = Field(8, ge=2)
    """S, the tokens of a block: the last token of the text, then mask tokens. A draft has at most
    S − 1 tokens."""
    decay: float = Field(4.0, gt=0)
    """γ; the loss weight of place k is exp(−(k − 1)/γ)."""
    rank: int = Field(256, ge=1)
    """R, the rank of the refiner."""
    ratio: int = Field(2, ge=1)
    """The width of the refiner's feed-forward network, as a multiple of the rank."""
    passes: int = Field(3, ge=0)
    """P, the Jacobi passes in training, each after the likeliest tokens of the one before."""
    pass_weight: float = Field(0.3, ge=0)
    """The weight of the cross-entropy in the passes, their mean, beside the stage's losses."""
    base_weight: float = Field(0.6, ge=0)
    """The weight of the cross-entropy of the block without the refiner."""


class DominoOptions(DFlashOptions):
    """Options of Domino heads (2605.29707). The sizes are those of Model Optimizer's recipe. The
    paper's loss is `cross_entropy: 1` in the stage's `losses`."""

    type: Literal["domino"] = "domino"  # type: ignore[assignment]
    block: int = Field(16, ge=2)
    """S, the tokens of a block: the last token of the text, then mask tokens. Each predicts the
    token after it, so a draft has at most S tokens."""
    gru: int = Field(1024, ge=1)
    """G, the size of the GRU's state."""
    rank: int = Field(256, ge=1)
    """R, the rank of what is added to the logits."""
    base_weight: float = Field(0.5, ge=0)
    """The weight of the cross-entropy of the block without the GRU."""


class KangarooOptions(AttendingOptions):
    """Options of Kangaroo's adapter (2404.18911). The paper trains it on the target's distribution:
    set the stage's `losses` to `forward_kl: 1`."""

    type: Literal["kangaroo"] = "kangaroo"
    output: Literal["target"] = "target"
    """The output layer: the target's, frozen and not stored."""
    exit_layer: int = Field(2, ge=1)
    """The number of the target's layers that a draft runs through, from the first on. The paper has
    2 of 32 and 3 of 40 layers."""
    depth: int = Field(6, ge=1)
    """The max depth of a draft, also used to evaluate on dev text. Training uses one step, because
    all steps are alike."""

    @property
    def longest_draft(self) -> int:
        return self.depth


class PassOptions(HeadOptions):
    """Options of PaSS's look-ahead embeddings (2311.13581)."""

    type: Literal["pass"] = "pass"
    output: Literal["target"] = "target"
    """The output layer: the target's, frozen and not stored."""
    output_rank: None = None
    """None, because the target itself drafts."""
    tokens: int = Field(6, ge=1)
    """k, the number of look-ahead tokens. A draft has at most k + 1 tokens: the first one is the
    target's own."""
    keep: float = Field(0.7, gt=0, le=1)
    """r; look-ahead token i is trained for rⁱ of the text's drafts."""
    keep_min: float = Field(0.2, ge=0, le=1)
    """r_min; each look-ahead token is trained for at least this share."""
