"""Declaration of an adapter that several servers share: one JSON document for each version.

    {"name": "zh", "uri": "s3://bucket/zh", "version": 3, "digest": "9f2c...", "aliases": ["cn"]}

A document that a server wrote is named NAME-HASH.VERSION.json and never changes; a person may
write one under any other name that ends with .json, and edit it.
"""

import hashlib
import re
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from loraplex.adapters.sources.reference import SourceKind, parse
from loraplex.adapters.version import check_name, check_task_id
from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.errors import ConfigError, InvalidAdapterError, LoraplexError
from loraplex.core.principal import DEFAULT_TENANT

MAX_DOCUMENT_BYTES: Final = 64 << 10
SUFFIX: Final = ".json"
_MAX_VERSION: Final = 1 << 53
"""Larger integers are not exact in the JSON of other languages."""
_MAX_ALIASES: Final = 64
_STEM_CHARS: Final = 64
_WRITTEN: Final = re.compile(r"(?P<stem>.+-[0-9a-f]{16})\.(?P<version>[1-9][0-9]{0,15})\.json")

DeclaredName = tuple[str, str, str]
"""(model, tenant, name)"""


class Declaration(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    rename={"is_removed": "removed"},
):
    """Meaning of one name for all servers that share it."""

    name: str
    version: Annotated[int, Meta(ge=1, le=_MAX_VERSION)]
    """The document with the greatest version is valid."""
    uri: str = ""
    """Source of the adapter. Every server must be able to read it."""
    digest: Annotated[str, Meta(max_length=128)] = ""
    """Digest that the source must have; empty: any."""
    model: str = ""
    """Base model; may be empty where a server has only one."""
    tenant: str = DEFAULT_TENANT
    task_id: int | None = None
    aliases: Annotated[tuple[str, ...], Meta(max_length=_MAX_ALIASES)] = ()
    is_removed: bool = False
    """Whether the adapter was unloaded. The document keeps the version from being used again."""
    created: int = 0
    """Unix seconds."""

    @property
    def owner(self) -> tuple[str, str]:
        return self.model, self.tenant

    @property
    def key(self) -> DeclaredName:
        return self.model, self.tenant, self.name

    @property
    def stem(self) -> str:
        """First part of the names of its documents that servers write."""
        shown = re.sub(r"[^A-Za-z0-9_]+", "-", self.name)[:_STEM_CHARS]
        identity = hashlib.sha256("\0".join(self.key).encode()).hexdigest()[:16]
        return f"{shown}-{identity}"

    @property
    def file_name(self) -> str:
        """Name of the document if a server writes it."""
        return written_name(self.stem, self.version)


def written_name(stem: str, version: int) -> str:
    return f"{stem}.{version}{SUFFIX}"


def written_version(file_name: str) -> tuple[str, int] | None:
    """Return the stem and the version of a name that a server may have given a document."""
    match = _WRITTEN.fullmatch(file_name)
    return None if match is None else (match["stem"], int(match["version"]))


def read_declaration(body: bytes, file_name: str) -> Declaration:
    """Parse a document. Raises ConfigError, which names what is wrong."""
    if len(body) > MAX_DOCUMENT_BYTES:
        raise ConfigError(f"{file_name} has more than {readable_bytes(MAX_DOCUMENT_BYTES)}")
    try:
        declaration = msgspec.json.decode(body, type=Declaration)
        check_declaration(declaration)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file_name} declares no adapter: {error}") from error
    except LoraplexError as error:
        raise ConfigError(f"{file_name} declares no adapter: {error.message}") from error
    written = written_version(file_name)
    if written is not None and written[1] != declaration.version:
        raise ConfigError(
            f"{file_name} declares version {declaration.version}; its name has version {written[1]}"
        )
    return declaration


def check_declaration(declaration: Declaration) -> None:
    """Raise InvalidParameterError or InvalidAdapterError for values that no server may bind."""
    for name in (declaration.name, *declaration.aliases):
        check_name(name)
    check_task_id(declaration.task_id)
    if declaration.is_removed:
        return
    if not declaration.uri:
        raise InvalidAdapterError(
            f"the declaration of adapter {declaration.name!r} has no uri, and is not removed",
            param="path",
        )
    reference = parse(declaration.uri)
    if reference.kind is SourceKind.LOCAL and not Path(reference.location).is_absolute():
        raise InvalidAdapterError(
            f"{declaration.uri!r} is relative to the folder of one server: adapters that servers "
            "share need an absolute path or a URL",
            param="path",
        )
