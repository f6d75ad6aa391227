"""Is this the target that a drafter, a cache or a replay buffer was made for?

There are three answers, from weak to strong:

- `require_same_vocabulary`: token ids mean the same tokens. Enough for a small language model.
- `require_same_weights`: the weights are equal up to rounding, in any dtype. For heads, which read
  the target's hidden states.
- `require_same_target` (`decode.model.same_target`): everything in a description is the same. Every
  drafter directory describes its target's vocabulary. A cache or a replay buffer also describes the
  target's revision, dtype and weights.

A name or a hash of the files cannot tell. A model is the same from a hub, a directory and a GGUF
file, in float32 and in bfloat16. After a little training it is different under the same name.
"""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from decode.base.artifact import json_sha256
from decode.base.errors import UserError
from decode.model.pretrained import complete, require_present

logger = logging.getLogger(__name__)

# Numbers of each weight in a sample of weights.
SAMPLED_NUMBERS = 4


@dataclass(frozen=True)
class Fingerprint:
    """Identifies a vocabulary and the way text is split into its tokens.

    vocab_sha256: over the token strings in id order, so a permuted vocabulary differs.
    vocab_size: rows of the output layer, which may exceed the number of token strings.
    tokenizer_sha256: over everything that decides how text becomes ids.
    eos_token_ids: the ids that end a text, ascending.
    """

    vocab_sha256: str
    vocab_size: int
    tokenizer_sha256: str
    eos_token_ids: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` is the inverse."""
        return asdict(self) | {"eos_token_ids": list(self.eos_token_ids)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Fingerprint":
        """Reads the output of `to_dict`. Raises UserError if a field is missing, unknown or of
        another type."""
        try:
            return cls(**(fields | {"eos_token_ids": tuple(fields["eos_token_ids"])}))
        except (KeyError, TypeError) as error:
            raise UserError(
                f"not a tokenizer fingerprint: found the fields {sorted(fields)}, expected "
                "eos_token_ids, tokenizer_sha256, vocab_sha256 and vocab_size. "
                "Make the file again with this version."
            ) from error


def eos_token_ids(tokenizer: Any, *configs: Any, rows: int) -> tuple[int, ...]:
    """All ids that end a text, ascending. Chat models have several. Empty if none is known.

    configs: model or generation configs whose `eos_token_id` is an int, a list of them or None.
    rows: the number of rows of the output layer. The model cannot say ids from there on, so they
    are left out with a warning. Raises UserError for anything else than ids.
    """
    ids: set[int] = set()
    for holder in (tokenizer, *configs):
        value = getattr(holder, "eos_token_id", None)
        listed = value if isinstance(value, list | tuple) else [value]
        if not all(token is None or type(token) is int for token in listed):
            raise UserError(
                f"eos_token_id of {type(holder).__name__} is {value!r}; expected token ids"
            )
        ids.update(token for token in listed if token is not None)
    outside = sorted(token for token in ids if not 0 <= token < rows)
    if outside:
        logger.warning(
            "end-of-text ids %s are outside the model's %s tokens, so they are not used",
            outside,
            rows,
        )
    return tuple(sorted(ids.difference(outside)))


def fingerprint(tokenizer: Any, config: Any, generation_config: Any = None) -> Fingerprint:
    """The fingerprint of a tokenizer and the model config it is used with.

    config: its `vocab_size` (of the text part, for multi-modal models) is the number of rows of the
        output layer.
    generation_config: chat models list end-of-text ids here that their config lacks.
    """
    text_config = config.get_text_config()
    return Fingerprint(
        vocab_sha256=_vocab_sha256(tokenizer),
        vocab_size=text_config.vocab_size,
        tokenizer_sha256=_tokenizer_sha256(tokenizer),
        eos_token_ids=eos_token_ids(
            tokenizer, text_config, generation_config, rows=text_config.vocab_size
        ),
    )


def token_count(tokenizer: Any, rows: int) -> int:
    """How many of the first `rows` output rows can be tokens: the tokenizer's highest id plus one.
    The rows after these are padding."""
    return min(rows, max(tokenizer.get_vocab().values(), default=-1) + 1)


def require_same_vocabulary(
    actual: Fingerprint, expected: Fingerprint, what: str, *, padding: bool = False
) -> None:
    """Raises UserError unless token ids mean the same tokens in `actual` and `expected`.

    what: names the owner of `actual`, for the message: 'the drafter in runs/x'.
    The tokenizers may split text differently and have different end-of-text ids. Neither changes
    the token of an id.

    padding: allow output layers with different numbers of rows. Models of one family pad the same
    vocabulary to different sizes. Rows past the tokenizer's last id are not tokens.
    """
    differences = []
    if actual.vocab_size != expected.vocab_size and not padding:
        differences.append(f"{actual.vocab_size} output rows, expected {expected.vocab_size}")
    if actual.vocab_sha256 != expected.vocab_sha256:
        hashes = (actual.vocab_sha256[:12], expected.vocab_sha256[:12])
        differences.append("token strings hash to {}…, expected {}…".format(*hashes))
    if differences:
        raise UserError(
            f"{what} has another vocabulary than the target: {'; '.join(differences)}. "
            "The same token id can mean different tokens in the two. Use parts made for the same "
            "target, or make this one again with the target in use."
        )


# The hash and the sample of the weights of some models, and the rounding of their dtypes.
_IDENTITIES: WeakKeyDictionary[nn.Module, tuple[str, Tensor, float]] = WeakKeyDictionary()


def keep_identity(model: nn.Module) -> None:
    """Compute `sampled_weights_sha256` and `sample_weights` of a model that does not change, and
    keep them: because it is sharded, or because its weights get another form. All processes of a
    sharded model must call this. Later each can ask for them alone."""
    _IDENTITIES[model] = sampled_weights_sha256(model), sample_weights(model), _rounding(model)


def sampled_weights_sha256(model: nn.Module) -> str:
    """A hash over some numbers of every weight and buffer. It distinguishes models with the same
    name and vocabulary, and a model in two dtypes. Raises UserError for offloaded weights."""
    if model in _IDENTITIES:
        return _IDENTITIES[model][0]
    require_present(model, "training on the target's outputs, or a cache of them,")
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items(), key=lambda named: named[0]):
        digest.update(name.encode())
        digest.update(_some_numbers(tensor, 64).contiguous().numpy().tobytes())
    return digest.hexdigest()


def sample_weights(model: nn.Module) -> Tensor:
    """float32 [m] on the CPU: a few numbers of every weight, in the order of the weights' names.
    Raises UserError for offloaded weights."""
    if model in _IDENTITIES:
        return _IDENTITIES[model][1]
    require_present(model, "a drafter made of heads on the target")
    weights = sorted(model.named_parameters(), key=lambda named: named[0])
    return torch.cat([_some_numbers(weight, SAMPLED_NUMBERS) for _, weight in weights])


def require_same_weights(stored: Tensor, dtype: str, model: nn.Module, what: str) -> None:
    """Raises UserError unless `stored`, a sample of weights taken in `dtype` (such as bfloat16),
    matches the weights of `model` up to rounding. what: describes the expected target, for the
    message."""
    sample = sample_weights(model)
    if len(sample) != len(stored):
        raise UserError(
            f"{what} is another model: it has about {len(stored) // SAMPLED_NUMBERS} weight "
            f"tensors, and the target in use has about {len(sample) // SAMPLED_NUMBERS}. Use the "
            "target it was made for, or make it again with this one"
        )
    eps = max(torch.finfo(getattr(torch, dtype)).eps, _rounding(model))
    # float16 cannot distinguish values below 1e-7 from 0.
    differs = (sample - stored).abs() > eps * torch.maximum(sample.abs(), stored.abs()) + 1e-7
    if differs.any():
        raise UserError(
            f"{what} has other weights than the target in use ({int(differs.sum())} of "
            f"{len(sample)} compared numbers differ by more than rounding), so its hidden states "
            "are different. Use the target it was made for, or make it again with this one"
        )


def _rounding(model: nn.Module) -> float:
    """The largest relative rounding error of the weights' dtypes."""
    if model in _IDENTITIES:
        return _IDENTITIES[model][2]
    # Quantised weights may be integers, which are not rounded.
    return max(torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point())


def _some_numbers(weight: Tensor, count: int) -> Tensor:
    """float32 [≤ count] on the CPU: numbers spread over a weight. For a quantised weight these are
    its dequantised values, or its integers if those are not available."""
    flat = complete(weight.detach())
    try:
        flat = flat.flatten()
    except NotImplementedError:  # tensor classes that know few operations, such as torchao's
        flat = flat.dequantize().flatten()
    return flat[:: max(1, len(flat) // count)][:count].float().cpu()


def _vocab_sha256(tokenizer: Any) -> str:
    # Ids are part of the hash because a vocabulary may have gaps. JSON keeps the strings separate.
    by_id = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    return json_sha256(by_id)


def _tokenizer_sha256(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        # A tokenizer in pure Python cannot be serialised, so its class name represents its rules.
        return json_sha256([type(tokenizer).__name__, _vocab_sha256(tokenizer)])
    description = json.loads(backend.to_str())
    # Padding and truncation are left out: they are settings of a call, stored in the same file.
    return json_sha256(
        {key: description[key] for key in ("model", "normalizer", "pre_tokenizer", "added_tokens")}
    )
