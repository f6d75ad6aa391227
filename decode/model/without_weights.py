"""A target without its weights: its config, its tokenizer and the shapes of its model.

Enough to plan a run, or to compare vocabularies. Of a model on the hub only the small files are
downloaded.
"""

from collections.abc import Mapping
from typing import Any

from decode.base.paths import from_home
from decode.model import gguf_file
from decode.model.chat_template import set_template_args
from decode.model.identity import Fingerprint, fingerprint
from decode.model.loading import Target, resolve_device, resolve_dtype
from decode.model.model_names import EMBEDDED, EMBEDDED_PREFIX, require_hub_id
from decode.model.pretrained import (
    config_and_tokenizer,
    gguf_read_once,
    no_progress_bars,
    weights_size,
    without_values,
)


def load_tokenizer(spec: str) -> tuple[Any, Fingerprint]:
    """The tokenizer of a model and its fingerprint. spec: as for
    `decode.model.loading.load_model_and_tokenizer`, which it raises as. No code that comes with
    the model runs."""
    config, tokenizer = load_model_config(spec)
    return tokenizer, fingerprint(tokenizer, config)


def load_model_config(
    spec: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """The config and the tokenizer of a model. Arguments and errors are those of
    `decode.model.loading.load_model_and_tokenizer`."""
    source = spec
    if spec.startswith(EMBEDDED_PREFIX):
        embedded = EMBEDDED[spec.removeprefix(EMBEDDED_PREFIX)]
        source = str(embedded.find() or embedded.hub_id)
    path = from_home(source)
    if path.suffix.lower() == ".gguf" and path.is_file():
        gguf_file.require_gguf()
        with no_progress_bars(), gguf_read_once():
            return config_and_tokenizer(str(path.parent), gguf_file=path.name)
    options: dict[str, Any] = {"trust_remote_code": True} if trust_remote_code else {}
    if path.is_dir():
        return config_and_tokenizer(str(path), **options)
    require_hub_id(source, path)
    if revision is not None:
        options["revision"] = revision
    return config_and_tokenizer(source, **options)


def load_shapes(
    spec: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    chat_template_args: Mapping[str, Any] | None = None,
) -> Target:
    """The target with all weights on the device `meta`, where they have shapes but no values and
    take no memory. It cannot run; its `revision` is None. dtype: as on `device`. A quantised
    checkpoint has the shapes of its plain form, and if it is a directory, `stored_bytes`. Arguments
    and errors are those of `decode.model.loading.load_target`."""
    config, tokenizer = load_model_config(
        spec, revision=revision, trust_remote_code=trust_remote_code
    )
    torch_dtype, path = resolve_dtype(dtype, resolve_device(device)), from_home(spec)
    model = without_values(str(path), config, trust_remote_code, dtype=torch_dtype)
    quantised = vars(model.config).pop("quantization_config", None) is not None
    stored_bytes = (weights_size(path) or None) if quantised else None
    model.eval().requires_grad_(False)
    identity = fingerprint(tokenizer, model.config, model.generation_config)
    set_template_args(tokenizer, chat_template_args or {})
    return Target(model, tokenizer, spec, None, identity, identity.eos_token_ids, stored_bytes)
