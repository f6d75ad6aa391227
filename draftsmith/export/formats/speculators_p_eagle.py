"""P-EAGLE's layers for the library speculators (2602.01469). vLLM serves such a directory.

The weights are those of format p_eagle, with all embeddings. The config is that of format
speculators, and `mask_token_id` in it is the token whose embedding stands for unknown tokens.
"""

from typing import Any, ClassVar

from torch import Tensor

from draftsmith.export.file_schema import is_count
from draftsmith.export.formats import FORMATS, ExportJob, ImportJob
from draftsmith.export.formats.eagle3_layer import (
    OUTER_KEYS,
    ROWS,
    Speculators,
    speculators_keys,
)
from draftsmith.export.formats.p_eagle_layers import RESIDUAL, UNSUPPORTED, PEagle, mask_token
from draftsmith.export.formats.published_layer import LAYER_IDS


class SpeculatorsPEagle(Speculators, PEagle):
    """Readers agree on what a missing `norm_before_residual` means."""

    name = "speculators-peagle"
    kinds = ("p_eagle",)
    vllm = PEagle.vllm
    architecture = "PEagleDraftModel"
    algorithm = "peagle"
    mask_token = "mask_token_id"
    outer_keys: ClassVar[tuple[str, ...]] = (*OUTER_KEYS, mask_token)
    trains_embeddings = True
    depth_option = PEagle.depth_option
    drafter = PEagle.drafter
    published_keys = speculators_keys(mask_token)

    def extra_config(self, heads: Any) -> dict[str, Any]:
        options = heads.options
        return {
            ROWS: heads.rows,
            "num_hidden_layers": options.layers,
            **dict.fromkeys(UNSUPPORTED, False),
            RESIDUAL: options.norm_before_residual,
            LAYER_IDS: [layer + 1 for layer in heads.captured_layers],
            "target_hidden_size": None,
        }

    def extra_expected_keys(self, config: dict[str, Any]) -> dict[str, Any]:
        counts = dict.fromkeys(("num_hidden_layers", self.mask_token), is_count)
        return super().extra_expected_keys(config) | dict.fromkeys(UNSUPPORTED, False) | counts

    def config_file(self, config: dict[str, Any], heads: Any, job: ExportJob) -> dict[str, Any]:
        token = {self.mask_token: mask_token(heads, job.loaded_target)}
        return super().config_file(config, heads, job) | token

    def published_config(
        self, job: ImportJob, contents: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], list[str]]:
        return PEagle.published_config(self, job, contents, tensors)


FORMATS.register("speculators-peagle")(SpeculatorsPEagle())
