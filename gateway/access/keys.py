"""PURE. API keys: what each may do, and the file that lists them. No key is in it, only SHA-256 hashes of keys.

A key is drawn by us, 256 bits of chance, so there is nothing to guess and a slow hash would protect nothing (docs/decisions/0012).
"""

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field, ValidationError

KEY_PREFIX = "ms-"
_BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)


class BadKeys(ValueError):
    """A list of keys that cannot be used; the message says where."""


class ApiKey(BaseModel):
    """One key. None means: without a limit."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    models: list[str] | None = None
    highest_tier: str | None = None
    requests_per_minute: int | None = Field(default=None, gt=0)
    tokens_per_minute: int | None = Field(default=None, gt=0)


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    keys: list[ApiKey]


@dataclass(frozen=True, slots=True)
class KeyTable:
    """All keys there are."""

    keys: Sequence[ApiKey]
    _by_hash: Mapping[str, ApiKey] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_hash", {key.sha256: key for key in self.keys})

    def find(self, secret: str) -> ApiKey | None:
        """The key that this is. What time it takes depends on its hash, which tells nothing about any key."""
        shown = hash_of_key(secret)
        key = self._by_hash.get(shown)
        return key if key is not None and hmac.compare_digest(key.sha256, shown) else None

    def with_key(self, key: ApiKey) -> "KeyTable":
        """Raises BadKeys if there is one of that name."""
        if any(known.name == key.name for known in self.keys):
            raise BadKeys(f"there is a key named {key.name} already")
        return KeyTable((*self.keys, key))

    def without(self, name: str) -> "KeyTable":
        """Raises BadKeys if there is none of that name."""
        kept = tuple(key for key in self.keys if key.name != name)
        if len(kept) == len(self.keys):
            raise BadKeys(f"there is no key named {name}")
        return KeyTable(kept)


def hash_of_key(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def bearer(authorization: str | None) -> str | None:
    """The key in an `authorization` header."""
    found = _BEARER.fullmatch(authorization or "")
    return found[1] if found else None


def read_keys(text: str) -> KeyTable:
    """The file's text. Raises BadKeys."""
    try:
        keys = _File.model_validate_json(text).keys
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadKeys(f"{where}: {first['msg']}" if where else first["msg"]) from None
    for what in ("name", "sha256"):
        values = [getattr(key, what) for key in keys]
        if len(values) != len(set(values)):
            raise BadKeys(f"two keys have the same {what}")
    return KeyTable(tuple(keys))


def write_keys(table: KeyTable) -> str:
    """The text of a file with these keys."""
    return _File(keys=list(table.keys)).model_dump_json(indent=2, exclude_none=True) + "\n"
