"""The file of tenants and the hashes of their API keys (TOML).

    [tenants.acme]                # all of these may be left out
    use = ["fr-*", "legal"]       # adapters: "all", "none", or patterns of names
    list = "all"
    manage = "none"
    models = "all"
    operator = false
    requests_per_minute = 600     # limits: no line is no limit
    tokens_per_minute = 100000
    max_concurrent_requests = 16
    max_prompt_tokens = 4096
    max_n = 4
    share_weight = 2.0            # of an engine, where fair_share goes by tenant

    [[keys]]
    id = "5f0c2a91"
    tenant = "acme"
    sha256 = "..."                # of the whole key, in hexadecimal
    created = 2026-01-31T12:00:00Z

    [[revoked]]
    id = "5f0c2a91"

What we write we append, so that an operator's own lines and comments stay as they are.
"""

import datetime
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.errors import ConfigError
from loraplex.core.principal import (
    ALL,
    DEFAULT_TENANT,
    NONE,
    Names,
    Principal,
    Rights,
    TenantLimits,
)
from loraplex.core.scheduler_settings import weight_problem
from loraplex.serving.access.api_keys import MAX_KEYS

MAX_FILE_BYTES = 16 << 20
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_HASH = re.compile(r"[0-9a-f]{64}")
_TENANTS_RIGHTS = Rights(manage=NONE, operator=False)
"""What a tenant has for which nothing else is written."""

NamesField = str | tuple[str, ...]


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A key, as far as a file knows it."""

    id: str
    tenant: str
    sha256: str
    created: datetime.datetime | None = None


class _Revoked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str


class _TenantTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    use: NamesField | None = None
    list: NamesField | None = None
    manage: NamesField | None = None
    models: NamesField | None = None
    operator: bool | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    max_prompt_tokens: int | None = None
    max_n: int | None = None
    share_weight: float | None = None


class KeyFile(msgspec.Struct, frozen=True):
    """A file, read and checked."""

    tenants: Mapping[str, Principal]
    keys: tuple[KeyEntry, ...]
    """Revoked ones among them."""
    revoked: frozenset[str]

    @property
    def valid_keys(self) -> list[KeyEntry]:
        return [key for key in self.keys if key.id not in self.revoked]


EMPTY = KeyFile({}, (), frozenset())


def principal_of(tenants: Mapping[str, Principal], tenant: str) -> Principal:
    """Rights of a tenant as its file has them, or the defaults; `default` may do everything."""
    if tenant in tenants:
        return tenants[tenant]
    return Principal(tenant, rights=_default_rights(tenant))


def is_tenant(name: str) -> bool:
    """Whether it may be a tenant's name."""
    return _TENANT.fullmatch(name) is not None


def check_tenant(name: str, where: str) -> None:
    """Raise ConfigError unless it may be a tenant's name."""
    if not is_tenant(name):
        raise ConfigError(
            f"{where}: a tenant is called by at most 128 letters, digits, '.', '_' and '-', "
            f"got {name[:80]!r}"
        )


def read_key_file(path: Path) -> KeyFile:
    """Raises ConfigError that names the file and what is wrong in it."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read api_keys_file {path}: {error.strerror}") from error
    return parse_key_file(content, str(path))


def parse_key_file(content: bytes, where: str) -> KeyFile:
    """Read the bytes of a key file; errors contain its path."""
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{where}: a file of keys has at most {readable_bytes(MAX_FILE_BYTES)}")
    try:
        tables = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # too large a number, too deep a list
        raise ConfigError(f"{where} is not TOML: {error}") from None
    for name in tables:
        if name not in ("tenants", "keys", "revoked"):
            raise ConfigError(f"{where}: {name}: unknown; known: tenants, keys, revoked")
    tenants = _tenants(tables.get("tenants", {}), where)
    keys = _entries(tables.get("keys", []), KeyEntry, f"{where}: keys")
    revoked = _entries(tables.get("revoked", []), _Revoked, f"{where}: revoked")
    _check_keys(keys, tenants, where)
    return KeyFile(tenants, keys, frozenset(entry.id for entry in revoked))


def _tenants(tables: Any, where: str) -> dict[str, Principal]:
    if not isinstance(tables, dict):
        raise ConfigError(f"{where}: tenants must be tables [tenants.NAME]")
    tenants = {}
    for name, table in tables.items():
        place = f"{where}: tenants.{name}"
        check_tenant(name, place)
        tenants[name] = _principal(name, _converted(table, _TenantTable, place), place)
    return tenants


def _principal(tenant: str, table: _TenantTable, where: str) -> Principal:
    limits = {field: getattr(table, field) for field in TenantLimits.__struct_fields__}
    for field, value in limits.items():
        if value is not None and value < 1:
            raise ConfigError(f"{where}.{field} must be at least 1, got {value}")
    weight = table.share_weight
    if weight is not None and (wrong := weight_problem(weight)):
        raise ConfigError(f"{where}.share_weight {wrong}")
    rights = _default_rights(tenant)
    given = {
        field: _names(getattr(table, field), f"{where}.{field}")
        for field in ("use", "list", "manage", "models")
        if getattr(table, field) is not None
    }
    rights = msgspec.structs.replace(rights, **given)
    if table.operator is not None:
        rights = msgspec.structs.replace(rights, operator=table.operator)
    return Principal(tenant, rights, TenantLimits(**limits), weight)


def _default_rights(tenant: str) -> Rights:
    return Rights() if tenant == DEFAULT_TENANT else _TENANTS_RIGHTS


def _names(value: NamesField, where: str) -> Names:
    match value:
        case "all":
            return ALL
        case "none":
            return NONE
        case str():
            raise ConfigError(f'{where} must be "all", "none" or a list of patterns, got {value!r}')
    return Names(tuple(value))


def _entries(tables: Any, kind: type[Any], where: str) -> tuple[Any, ...]:
    if not isinstance(tables, list):
        raise ConfigError(f"{where} must be tables in double brackets")
    return tuple(_converted(table, kind, f"{where}[{i}]") for i, table in enumerate(tables))


def _converted(table: Any, kind: type[Any], where: str) -> Any:
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_keys(keys: tuple[KeyEntry, ...], tenants: Mapping[str, Principal], where: str) -> None:
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{where}: has {len(keys)} keys; at most {MAX_KEYS} are allowed")
    ids: set[str] = set()
    hashes: set[str] = set()
    for key in keys:
        place = f"{where}: key {key.id[:80]!r}"
        if not _HASH.fullmatch(key.sha256):
            raise ConfigError(f"{place}: sha256 must be 64 hexadecimal digits, in small letters")
        if key.tenant not in tenants:
            raise ConfigError(f"{place}: there is no [tenants.{key.tenant[:80]}]")
        if key.id in ids or key.sha256 in hashes:
            raise ConfigError(f"{place}: occurs twice")
        ids.add(key.id)
        hashes.add(key.sha256)
