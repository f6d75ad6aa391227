"""Which requests may be recorded, and for whom."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from decode.base.errors import UserError
from draftsmith.learn.record.kept_answers import NotRecorded
from draftsmith.learn.record.records import TENANT
from draftsmith.net.access import bearer_key

DEFAULT_TENANT = "default"
Consent = Literal["asked", "all"]


@dataclass(frozen=True)
class Tenant:
    """The owner of a key. record: `asked`: only requests with `store: true`; `all`: every request
    without `store: false`."""

    name: str
    record: Consent


class Keys:
    """The tenants by the SHA-256 of their keys. Without tenants, everybody is `default` and is
    recorded if asked."""

    def __init__(self, tenants: dict[str, Tenant] | None = None) -> None:
        self._tenants = tenants

    @classmethod
    def of_file(cls, path: Path) -> "Keys":
        """Read `{"SHA-256 of a key": {"tenant": NAME, "record": "asked" | "all"}, …}`. Raises
        UserError with the first fault."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"--record-keys {path} cannot be read: {error}") from None
        if not isinstance(values, dict):
            raise UserError(f"--record-keys {path} is no JSON object; expected hashes and tenants")
        return cls({_hash(path, key): _tenant(path, key, x) for key, x in values.items()})

    def tenant_of(self, authorization: str, body: dict[str, Any]) -> str | None:
        """The tenant whose journal takes this request; None: it does not ask. authorization: the
        header, or ''. Raises NotRecorded if it asks in vain."""
        store = body.get("store")
        if store is not None and not isinstance(store, bool):
            raise NotRecorded("store is neither true nor false")
        if self._tenants is None:
            return DEFAULT_TENANT if store is True else None
        key = bearer_key(authorization)
        tenant = self._tenants.get(hashlib.sha256(key).hexdigest())
        if tenant is None:
            if store is True:
                raise NotRecorded("the key is not in --record-keys")
            return None
        consents = store is True or (tenant.record == "all" and store is None)
        return tenant.name if consents else None


def _hash(path: Path, key: str) -> str:
    if len(key) != 64 or set(key.lower()) - set("0123456789abcdef"):
        # The value may be a key itself, so the message does not repeat it.
        raise UserError(
            f"--record-keys {path} has a name that is no SHA-256; expected 64 hexadecimal digits, "
            "as `printf %s KEY | sha256sum` prints them"
        )
    return key.lower()


def _tenant(path: Path, key: str, value: Any) -> Tenant:
    match value:
        case {"tenant": str(name), "record": "asked" | "all" as record, **others} if not others:
            if TENANT.fullmatch(name):
                return Tenant(name, record)
    raise UserError(
        f"--record-keys {path}: {key[:8]}… is {json.dumps(value)[:80]}; expected "
        '{"tenant": NAME, "record": "asked" or "all"}, NAME of letters, digits, . _ and -'
    )
