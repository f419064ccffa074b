"""Canonical form of an adapter, into which every import is converted, and its digest.

It has rows of (layer or none, module, expert or none, kind), each with its unconverted tensors and
a float32 scale. The digest is the adapter's identity: it covers the sorted rows, tensor types and
bytes and the bits of the scales, but neither names nor the order in a file. Torch-free.
"""

import dataclasses
import enum
import hashlib
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from loraplex.adapters.durable_files import write_atomically
from loraplex.adapters.tensor_file import (
    RawTensor,
    SafetensorsContent,
    StagingLimits,
    encode_header,
    read_tensors,
)
from loraplex.core.adapter import OUTSIDE_LAYERS
from loraplex.core.errors import InvalidAdapterError

FORMAT = "loraplex-adapter"
FORMAT_VERSION = "1"

_DIGEST_PREFIX = b"loraplex-adapter-digest-1\0"
_OWN_LIMITS = StagingLimits(
    max_file_bytes=sys.maxsize, max_header_bytes=256 << 20, max_tensors=sys.maxsize
)
"""Limits of files that this package wrote."""


class RowKind(enum.StrEnum):
    """Effect of a row on its target, and the row's tensors."""

    LORA = "lora"
    """"a" [rank, in], "b" [out, rank]; "bias" [out] if lora_B has one: scale * (B A x + bias)."""
    BIAS = "bias"
    """"bias" [out] that replaces the base's."""
    MAGNITUDE = "magnitude"
    """"magnitude" [out] of DoRA: the row norms of the weight with its LoRA (arXiv:2402.09353). Or
    "factor" [out]: their quotient by the norms of the base's weight."""
    FULL = "full"
    """"weight": a trained copy that replaces the base's. Or "base": it replaces the base's own
    parameter, so a tied parameter changes with it."""
    TOKENS = "tokens"
    """Token embedding rows that replace the base's: "indices" I64 [n], "weight" [n, hidden]."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CanonicalRow:
    """Tensors of one target; embed_tokens, norm and lm_head have no layer."""

    layer: int | None
    module: str
    expert: int | None
    kind: RowKind
    scale: float
    """Factor of a x A^T, a float32 value."""
    tensors: Mapping[str, RawTensor]
    origin: str = ""
    """The module's name in the source, for messages; not part of the digest."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def target_layer(self) -> int:
        """Layer of its targets."""
        return OUTSIDE_LAYERS if self.layer is None else self.layer


@dataclasses.dataclass(frozen=True, slots=True)
class CanonicalFile:
    digest: str
    rows: tuple[CanonicalRow, ...]


class _RowHeader(msgspec.Struct, frozen=True):
    """Metadata of one row of a canonical adapter file. Its tensors are named "{index}.{tensor}"."""

    layer: int | None
    module: str
    expert: int | None
    kind: RowKind
    scale_bits: int
    origin: str


def sort_rows(rows: Iterable[CanonicalRow]) -> tuple[CanonicalRow, ...]:
    """Sort rows by layer (none first), module, expert (none first), kind."""
    return tuple(sorted(rows, key=_row_key))


def digest(rows: Iterable[CanonicalRow]) -> str:
    """Return the identity of an adapter: 64 hexadecimal digits."""
    sha = hashlib.sha256(_DIGEST_PREFIX)
    ordered = sort_rows(rows)
    sha.update(struct.pack("<Q", len(ordered)))
    for row in ordered:
        sha.update(_encode_row(row))
        for name, tensor in sorted(row.tensors.items()):
            sha.update(_text(name) + _text(tensor.dtype))
            sha.update(struct.pack(f"<Q{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape))
            sha.update(struct.pack("<Q", tensor.num_bytes))
            sha.update(tensor.data)
    return sha.hexdigest()


def write_canonical(rows: Sequence[CanonicalRow], adapter_digest: str, path: Path) -> None:
    """Write rows with their digest as a safetensors file, which is complete or absent."""
    ordered = sort_rows(rows)
    named = [
        (f"{index}.{name}", tensor)
        for index, row in enumerate(ordered)
        for name, tensor in sorted(row.tensors.items())
    ]
    # The largest elements first, so that every tensor is aligned.
    tensors = dict(sorted(named, key=lambda item: -item[1].item_bytes))
    headers = [
        _RowHeader(row.layer, row.module, row.expert, row.kind, _scale_bits(row.scale), row.origin)
        for row in ordered
    ]
    metadata = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "digest": adapter_digest,
        "rows": msgspec.json.encode(headers).decode(),
    }
    data = (tensor.data for tensor in tensors.values())
    write_atomically(path, [encode_header(tensors, metadata), *data])


def read_canonical(path: Path) -> CanonicalFile:
    """Read a file that write_canonical wrote. Raises InvalidAdapterError if it is another one.

    The digest is the one stated in the file; it is not computed again.
    """
    # No limit by the size of now: another process may write the same adapter meanwhile.
    return parse_canonical(path, read_tensors(path, _OWN_LIMITS))


def parse_canonical(path: Path, content: SafetensorsContent) -> CanonicalFile:
    """Return read_canonical's result for content that was read before; path is for messages."""
    metadata = content.metadata
    if (metadata.get("format"), metadata.get("format_version")) != (FORMAT, FORMAT_VERSION):
        raise InvalidAdapterError(
            f"{path} is not a canonical adapter file of version {FORMAT_VERSION}"
        )
    try:
        headers = msgspec.json.decode(metadata["rows"], type=list[_RowHeader])
        return CanonicalFile(metadata["digest"], _rows(headers, content))
    except (KeyError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise InvalidAdapterError(f"{path} is a broken canonical adapter file: {error}") from error


def _rows(headers: Sequence[_RowHeader], content: SafetensorsContent) -> tuple[CanonicalRow, ...]:
    tensors: list[dict[str, RawTensor]] = [{} for _ in headers]
    for name, tensor in content.tensors.items():
        index, _, short = name.partition(".")
        if not index.isascii() or not index.isdigit() or int(index) >= len(headers):
            raise KeyError(name)
        tensors[int(index)][short] = tensor
    return tuple(
        CanonicalRow(
            header.layer,
            header.module,
            header.expert,
            header.kind,
            float(np.uint32(header.scale_bits).view(np.float32)),
            of_row,
            header.origin,
        )
        for header, of_row in zip(headers, tensors, strict=True)
    )


def _row_key(row: CanonicalRow) -> tuple[int, str, int, str]:
    layer = -1 if row.layer is None else row.layer
    return layer, row.module, -1 if row.expert is None else row.expert, row.kind.value


def _encode_row(row: CanonicalRow) -> bytes:
    layer, module, expert, kind = _row_key(row)
    place = struct.pack("<qq", layer, expert)
    count = struct.pack("<IQ", _scale_bits(row.scale), len(row.tensors))
    return place + _text(module) + _text(kind) + count


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _scale_bits(scale: float) -> int:
    return int(np.float32(scale).view(np.uint32))
