"""What an artifact stores of its target, and whether a target is that one."""

from typing import Any

from decode.base.device import dtype_name
from decode.base.errors import UserError
from decode.model.identity import Fingerprint, require_same_vocabulary, sampled_weights_sha256
from decode.model.loading import Target


def describe_target(target: Target, *, weights: bool = False) -> dict[str, Any]:
    """The description of a target that an artifact made for it stores, as JSON values. The artifact
    adds the target's name. weights: also describe the dtype and the numbers of the weights. Then
    raises UserError for offloaded weights."""
    description = {"revision": target.revision, "fingerprint": target.fingerprint.to_dict()}
    if weights:
        description["weights"] = sampled_weights_sha256(target.model)
        description["dtype"] = dtype_name(target.dtype)
    return description


def require_same_target(
    stored: dict[str, Any], target: Target, what: str, *, padding: bool = False
) -> None:
    """Raises UserError unless this is the target that `stored`, a result of `describe_target`,
    describes. Without weights in the description, only the vocabularies are compared.

    what: names the artifact, for messages. padding: see `require_same_vocabulary`.
    """
    made_for = Fingerprint.from_dict(stored["fingerprint"])
    require_same_vocabulary(made_for, target.fingerprint, f"the target of {what}", padding=padding)
    if "weights" not in stored:
        return
    expected = describe_target(target, weights=True) | {"target": target.name}
    for key, source in (
        # A difference in revision or dtype also changes the weights, but its message says more.
        ("revision", "another revision of the target"),
        ("dtype", "the target in another dtype"),
        ("weights", "a target with other weights"),
    ):
        require_equal(stored, expected, key, source, what)


def require_equal(
    stored: dict[str, Any], expected: dict[str, Any], key: str, source: str, what: str
) -> None:
    """Raises UserError unless two descriptions of targets, with their names, agree in `key`.

    source: names what the artifact was made from if they differ, for the message.
    """
    if stored[key] != expected[key]:
        raise UserError(
            f"{what} was made from {source}: found "
            f"{stored[key]!r} ({stored['target']}), expected {expected[key]!r} "
            f"({expected['target']}). Make it again, or use the target it was made from."
        )
