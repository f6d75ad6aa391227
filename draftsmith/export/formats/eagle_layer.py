"""EAGLE's layouts: `config.json` is that of a one-layer llama, with a few settings more."""

from typing import Any

from draftsmith.export.formats import ExportJob
from draftsmith.export.formats.layer_format import (
    LayerFormat,
    expected_window,
    llama_settings,
    window_settings,
)


class EagleLayer(LayerFormat):
    """A subclass defines the extra settings."""

    def settings(self, heads: Any, dtype: str, job: ExportJob) -> dict[str, Any]:
        config = llama_settings(heads.config, self.architecture, dtype) | self.extra_config(heads)
        return config | window_settings(heads.options.window, config["num_hidden_layers"])

    def kind_expected(self, config: dict[str, Any]) -> dict[str, Any]:
        usual = {"model_type": "llama", "num_hidden_layers": 1, "mlp_bias": False}
        if self.holds_windows:
            usual |= expected_window(config)
        return usual | self.extra_expected_keys(config)

    def extra_config(self, heads: Any) -> dict[str, Any]:
        """Return the settings that a llama's config does not have."""
        return {}

    def extra_expected_keys(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the expected values of the extra settings, for `key_problems`."""
        return {}
