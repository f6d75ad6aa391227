"""P-EAGLE's layers for vLLM (2602.01469).

As format eagle3, with several decoder layers, `layers.0` to `layers.{n − 1}`: the first is
EAGLE-3's, the others read H and have `input_layernorm` only. `mask_hidden` [1, 1, 3H] stands for
unknown features. In the embeddings, `embed_tokens.weight` [V, H], the row of `pard_token` stands
for unknown tokens. No text contains this token. The other rows are the target's, or trained.

Published drafters also name this token `mask_token_id` or `ptd_token_id`. `speculators_p_eagle` has
the layout of the library speculators.
"""

from typing import Any, ClassVar

from torch import Tensor

from decode.base.errors import UserError
from decode.drafters.pard import free_token
from decode.model.loading import Target
from draftsmith.export.file_schema import is_count
from draftsmith.export.formats import FORMATS, ExportJob, ImportJob
from draftsmith.export.formats.eagle3_layer import (
    MASK_HIDDEN,
    MODEL_TYPE,
    ROWS,
    Eagle3,
    expected_inputs,
    features_table,
    has_stand_in,
    named_inputs,
    output_option,
)
from draftsmith.export.formats.published_keys import Keys
from draftsmith.export.formats.published_layer import (
    EMBEDDINGS,
    captured_count,
    mask_problems,
)
from draftsmith.export.formats.tensor_table import TensorRow, layer_rows
from draftsmith.export.published import Checkpoint
from heads.p_eagle_heads import PEagleDrafter

MASK_EMBEDDING, TABLE = "mask_embedding", "embeddings.weight"
RESIDUAL = "norm_before_residual"
# The names of the stand-in's token in published configs, in vLLM's order.
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
# Settings of EAGLE-3 that these heads do not have.
UNSUPPORTED = ("fc_norm", "norm_output", "norm_before_fc")


class PEagle(Eagle3):
    """vLLM needs `parallel_drafting` in its speculative_config to read it. mask_token: the name of
    the stand-in's token in the config."""

    layer = "layers.0"
    mask_token: ClassVar[str] = "pard_token"
    name = "p_eagle"
    kinds = ("p_eagle",)
    vllm = {"method": "eagle3", "parallel_drafting": True}
    sglang = None
    holds_windows = True
    drafter = PEagleDrafter
    depth_option = "tokens"
    published_keys: ClassVar[Keys] = {
        **Eagle3.published_keys,
        "": (*Eagle3.published_keys[""], *MASK_TOKENS),
    }

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return MODEL_TYPE not in checkpoint.config and has_stand_in(checkpoint.names)

    def extra_config(self, heads: Any) -> dict[str, Any]:
        options = heads.options
        config = {ROWS: heads.rows, "num_hidden_layers": options.layers}
        config |= {RESIDUAL: True} if options.norm_before_residual else {}
        return config | named_inputs(options.captured_layers)

    def config_file(self, config: dict[str, Any], heads: Any, job: ExportJob) -> dict[str, Any]:
        return config | {self.mask_token: mask_token(heads, job.loaded_target)}

    def extra_expected_keys(self, config: dict[str, Any]) -> dict[str, Any]:
        counts = (ROWS, "num_hidden_layers", self.mask_token)
        expected: dict[str, Any] = dict.fromkeys(counts, is_count)
        expected |= {RESIDUAL: True} if RESIDUAL in config else {}
        return expected | expected_inputs(config)

    def stored_settings(self, contents: dict[str, Any]) -> dict[str, Any]:
        """Under any name of the stand-in's token."""
        named = [contents[name] for name in MASK_TOKENS if contents.get(name) is not None]
        return contents | ({self.mask_token: named[0]} if named else {})

    def layer_count(self, contents: dict[str, Any]) -> int:
        count: Any = contents.get("num_hidden_layers")
        return count if is_count(count) else 1

    def published_config(
        self, job: ImportJob, contents: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], list[str]]:
        config, problems = super().published_config(job, contents, tensors)
        problems += [
            f"config.json: {name} is True, expected False, because P-EAGLE heads have no such norm"
            for name in UNSUPPORTED
            if config.pop(name) is True
        ]
        if not config[RESIDUAL]:
            del config[RESIDUAL]
        token: Any = contents.get(self.mask_token)
        rows: Any = contents.get("vocab_size")
        if not is_count(token) or (is_count(rows) and token >= rows):
            problems.append(
                f"config.json: {self.mask_token} is {token!r}, expected the id of the embedding "
                "that stands for unknown tokens"
            )
        if MASK_HIDDEN in tensors:  # In some files it has fewer dimensions.
            tensors[MASK_HIDDEN] = tensors[MASK_HIDDEN].reshape(1, 1, -1)
        config |= {"num_hidden_layers": self.layer_count(contents), self.mask_token: token}
        return config, problems

    def target_problems(
        self, contents: dict[str, Any], tensors: dict[str, Tensor], target: Target
    ) -> list[str]:
        """The embeddings may be trained, so they stay."""
        token: Any = contents.get(self.mask_token)
        return mask_problems(self.mask_token, token, target) if is_count(token) else []

    def state(self, heads: Any, target: Target) -> dict[str, Tensor]:
        """With all embeddings, as they are written."""
        state = super().state(heads, target)
        if TABLE not in state:
            stand_in = state.pop(MASK_EMBEDDING)
            table = _target_table(target).to(stand_in, copy=True)
            table[mask_token(heads, target)] = stand_in
            state[TABLE] = table
        return state

    def table(self, config: dict[str, Any]) -> list[TensorRow]:
        hidden, later = config["hidden_size"], range(1, config["num_hidden_layers"])
        layers = [layer_rows(config, f"layers.{x}", hidden, ["input_layernorm"]) for x in later]
        return [
            *features_table(config, self.layer),
            *(row for layer in layers for row in layer),
            TensorRow(MASK_HIDDEN, (1, 1, captured_count(config) * hidden)),
            TensorRow(EMBEDDINGS, (config["vocab_size"], hidden), TABLE, implied=True),
        ]

    def value_problems(self, config: dict[str, Any], weights: dict[str, Tensor]) -> list[str]:
        token = config[self.mask_token]
        if token >= config["vocab_size"]:
            return [f"{self.mask_token} is {token}, but there is no such embedding"]
        return super().value_problems(config, weights)

    def options(
        self, config: dict[str, Any], state: dict[str, Tensor], target: Target
    ) -> dict[str, Any]:
        """Without trained embeddings, the stand-in alone stays in the state."""
        token = config[self.mask_token]
        named = {"layers": config["num_hidden_layers"], RESIDUAL: config.get(RESIDUAL, False)}
        named |= output_option(state)
        targets = _target_table(target).cpu().to(state["fc.weight"].dtype)
        table = state.pop(TABLE, targets)
        differs = (table != targets).any(1)
        differs[token] = False
        is_trained = bool(differs.any())
        if is_trained or token != _usual_mask_token(target):
            named["mask_token"] = token
        if is_trained:
            named["embeddings"] = "trained"
            state[TABLE] = table
        else:
            state[MASK_EMBEDDING] = table[token].clone()
        return named


FORMATS.register("p_eagle")(PEagle())


def _target_table(target: Target) -> Tensor:
    return target.model.get_input_embeddings().weight.detach()


def mask_token(heads: Any, target: Target) -> int:
    token: int | None = heads.options.mask_token
    return free_token(target) if token is None else token


def _usual_mask_token(target: Target) -> int | None:
    try:
        return free_token(target)
    except UserError:  # a target without an unused token
        return None
