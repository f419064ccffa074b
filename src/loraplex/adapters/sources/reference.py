"""References to adapters: a path, a hub id, a URL, or an object in an object store.

    /adapters/zh, v1.2/zh.safetensors, file:///adapters/zh     a path on this machine
    hf://owner/name@revision/folder, owner/name                the Hugging Face hub
    https://host/zh.safetensors, https://host/zh/              a file, or a folder of known files
    hf://owner/name/zh.gguf                                    a GGUF file, from any of these
    s3://bucket/zh, gs://bucket/zh, az://container/zh          an object store

`#sha256=HEX` after anything but a path is the checksum of the file, or of a folder's weights file.
"""

import dataclasses
import enum
import os
import re
import urllib.parse
from pathlib import Path

from loraplex.core.errors import InvalidAdapterError

GGUF_SUFFIX = ".gguf"
"""Ending of GGUF files, which have no fixed name in a folder."""
FILE_SUFFIXES = (".safetensors", GGUF_SUFFIX)
OBJECT_SCHEMES = ("s3", "gs", "gcs", "az", "abfs")
DEFAULT_REVISION = "main"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_HUB_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
_HUB_ID = re.compile(rf"{_HUB_NAME}/{_HUB_NAME}")
_HUB = re.compile(
    rf"(?P<id>{_HUB_NAME}/{_HUB_NAME})(?:@(?P<revision>[A-Za-z0-9_.%-]+))?(?:/(?P<folder>.*))?"
)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_CHECKSUM = re.compile(r"sha256=([0-9a-fA-F]{64})")
_MAX_CHARS = 8192
_ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar")


class SourceKind(enum.Enum):
    LOCAL = "a path"
    HUB = "the Hugging Face hub"
    HTTP = "http"
    OBJECT = "an object store"


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """Place of an adapter."""

    kind: SourceKind
    location: str
    """Path; hub id; URL without its checksum."""
    revision: str = DEFAULT_REVISION
    """Branch, tag or commit of a hub repository."""
    folder: str = ""
    """Folder in a hub repository, without slashes at its ends."""
    sha256: str | None = None

    @property
    def file_suffix(self) -> str:
        """Return the ending of one file; empty: a folder, in which known file names are tried."""
        path = self.folder if self.kind is SourceKind.HUB else self.location
        if self.kind is SourceKind.HTTP:
            path = urllib.parse.urlsplit(self.location).path
        return next(filter(path.endswith, FILE_SUFFIXES), "")

    def __str__(self) -> str:
        """Return the text for messages, without the query, which may contain a signature."""
        if self.kind is SourceKind.HUB:
            folder = f"/{self.folder}" if self.folder else ""
            return f"hf://{self.location}@{self.revision}{folder}"
        if self.kind is SourceKind.HTTP:
            return shown(self.location)
        return self.location


def parse(text: str) -> Reference:
    """Parse a reference. Raises InvalidAdapterError."""
    if len(text) > _MAX_CHARS:
        raise InvalidAdapterError(
            f"the source of an adapter has {len(text)} characters; at most {_MAX_CHARS} are read",
            param="path",
        )
    match = _SCHEME.match(text)
    if match is None:
        is_hub_id = _HUB_ID.fullmatch(text) is not None and not _is_here(text)
        reference = Reference(SourceKind.HUB if is_hub_id else SourceKind.LOCAL, text)
    else:
        reference = _with_scheme(text, match[1].lower(), text[match.end() :])
    if str(reference).lower().endswith(_ARCHIVES):
        raise InvalidAdapterError(
            f"{reference} is an archive, which is not unpacked: give a folder, or a "
            f"{' or '.join(FILE_SUFFIXES)} file",
            param="path",
        )
    return reference


def shown_source(text: str) -> str:
    """Return a source without secrets: a URL loses its query. The text must have parsed."""
    match = _SCHEME.match(text)
    is_address = match is not None and match[1].lower() != "file"
    return shown(text) if is_address else text


def shown(url: str) -> str:
    """Return a URL without the parts that may be secret."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(
        (parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")
    )


def _with_scheme(text: str, scheme: str, rest: str) -> Reference:
    if scheme == "file":
        return Reference(SourceKind.LOCAL, urllib.parse.unquote(rest))
    bare, _, fragment = rest.partition("#")
    sha256 = _checksum(text, fragment)
    if any(character.isspace() or not character.isprintable() for character in bare):
        raise InvalidAdapterError(f"{text!r} has blanks or control characters", param="path")
    if scheme in ("http", "https"):
        url = f"{scheme}://{bare}"
        _check_url(url)
        return Reference(SourceKind.HTTP, url, sha256=sha256)
    if scheme == "hf":
        return _hub(text, bare, sha256)
    if scheme in OBJECT_SCHEMES:
        bucket, _, key = bare.partition("/")
        _check_key(text, key)
        # "::" would be another URL within this one, for fsspec.
        if not (_BUCKET.fullmatch(bucket) and key.strip("/")) or "::" in key:
            raise _invalid(text, f"{scheme}://BUCKET/FOLDER")
        return Reference(SourceKind.OBJECT, f"{scheme}://{bare.rstrip('/')}", sha256=sha256)
    known = ", ".join(f"{name}://" for name in ("file", "hf", "https", "http", *OBJECT_SCHEMES))
    raise InvalidAdapterError(
        f"adapters do not come from {scheme}://; they come from a path, {known}", param="path"
    )


def _hub(text: str, bare: str, sha256: str | None) -> Reference:
    match = _HUB.fullmatch(bare.rstrip("/"))
    if match is None:
        raise _invalid(text, "hf://OWNER/NAME, hf://OWNER/NAME@REVISION or hf://OWNER/NAME/FOLDER")
    folder = (match["folder"] or "").strip("/")
    _check_key(text, folder)
    return Reference(
        SourceKind.HUB,
        match["id"],
        revision=match["revision"] or DEFAULT_REVISION,
        folder=folder,
        sha256=sha256,
    )


def _check_url(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidAdapterError(f"{url!r} is not an address: {error}", param="path") from error
    if not host:
        raise InvalidAdapterError(f"{url!r} names no host", param="path")
    if "@" in parts.netloc:
        raise InvalidAdapterError(
            f"{shown(url)}: an address must not hold a user or a password", param="path"
        )


def _check_key(text: str, key: str) -> None:
    if any(part in (".", "..") for part in key.split("/")) or "\\" in key:
        raise InvalidAdapterError(f"{text!r} leaves its root", param="path")


def _checksum(text: str, fragment: str) -> str | None:
    if not fragment:
        return None
    match = _CHECKSUM.fullmatch(fragment)
    if match is None:
        raise _invalid(text, "#sha256= and 64 hexadecimal digits after #")
    return match[1].lower()


def _invalid(text: str, wanted: str) -> InvalidAdapterError:
    return InvalidAdapterError(
        f"{text!r} is not a source of an adapter: write {wanted}", param="path"
    )


def _is_here(path: str) -> bool:
    """Whether a text such as owner/name is a path: its first folder exists."""
    return Path(path).parts[0] in (".", "..") or os.path.exists(Path(path).parts[0])


def gguf_files_of(folder: Path) -> list[Path]:
    """Return the GGUF files of a folder by name; of anything else, none. Raises OSError."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.endswith(GGUF_SUFFIX))
