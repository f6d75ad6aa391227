"""Hashes that tell whether two tokenizers give the same token ids the same meaning."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from decode.errors import UserError


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
            found = cls(**(fields | {"eos_token_ids": tuple(fields["eos_token_ids"])}))
        except (KeyError, TypeError) as error:
            raise UserError(
                f"not a tokenizer fingerprint: found the fields {sorted(fields)}, expected "
                "eos_token_ids, tokenizer_sha256, vocab_sha256 and vocab_size. "
                "Make the file again with this version."
            ) from error
        return found


def eos_token_ids(tokenizer: Any, *configs: Any) -> tuple[int, ...]:
    """All ids that end a text, ascending. Chat models have several. Empty if none is known.

    configs: model or generation configs whose `eos_token_id` is an int, a list of them or None.
    """
    ids: set[int] = set()
    for holder in (tokenizer, *configs):
        found = getattr(holder, "eos_token_id", None)
        if found is not None:
            ids.update(found if isinstance(found, Iterable) else [found])
    return tuple(sorted(ids))


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
        eos_token_ids=eos_token_ids(tokenizer, text_config, generation_config),
    )


def require_same_vocabulary(
    found: Fingerprint, expected: Fingerprint, what: str, *, padding: bool = False
) -> None:
    """Raises UserError unless token ids mean the same tokens in `found` and `expected`.

    what: names the owner of `found`, for the message: 'the drafter in runs/x'.
    The tokenizers may split text differently and have different end-of-text ids. Neither changes
    the token of an id.

    padding: allow output layers with different numbers of rows. Models of one family pad the same
    vocabulary to different sizes. Rows past the tokenizer's last id are not tokens.
    """
    differences = []
    if found.vocab_size != expected.vocab_size and not padding:
        differences.append(f"{found.vocab_size} output rows, expected {expected.vocab_size}")
    if found.vocab_sha256 != expected.vocab_sha256:
        hashes = (found.vocab_sha256[:12], expected.vocab_sha256[:12])
        differences.append("token strings hash to {}…, expected {}…".format(*hashes))
    if differences:
        raise UserError(
            f"{what} has another vocabulary than the target: {'; '.join(differences)}. "
            "Token ids would change their meaning between the two. Use parts made for the same "
            "target, or make this one again with the target in use."
        )


def token_count(tokenizer: Any, rows: int) -> int:
    """How many of the first `rows` output rows can be tokens: the tokenizer's highest id plus one.
    The rows after these are padding."""
    return min(rows, max(tokenizer.get_vocab().values(), default=-1) + 1)


def _vocab_sha256(tokenizer: Any) -> str:
    # Ids are part of the hash because a vocabulary may have gaps. JSON keeps the strings separate.
    by_id = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    return _sha256_of_json(by_id)


def _tokenizer_sha256(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        # A tokenizer in pure Python cannot be serialised, so its class name represents its rules.
        return _sha256_of_json([type(tokenizer).__name__, _vocab_sha256(tokenizer)])
    description = json.loads(backend.to_str())
    # Padding and truncation are left out: they are settings of a call, stored in the same file.
    return _sha256_of_json(
        {key: description[key] for key in ("model", "normalizer", "pre_tokenizer", "added_tokens")}
    )


def _sha256_of_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
