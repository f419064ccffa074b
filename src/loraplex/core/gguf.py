"""GGUF files: metadata, and where each tensor lies. Free of torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
Every length is checked against the file's, so a broken or hostile file is an error.
"""

import enum
import math
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from loraplex.core.errors import ConfigError, UnsupportedModelError

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMENSIONS: Final = 4
_MAX_NAME_BYTES: Final = 1 << 16
_SCALARS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING: Final = 8
_ARRAY: Final = 9
_SMALLEST_STRING: Final = 8
"""Bytes of its length."""


SPLIT_COUNT: Final = "split.count"
_SPLIT_TENSORS: Final = "split.tensors.count"
_PART: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""Name of a part of a split file, as llama.cpp's llama-gguf-split writes it."""
_MAX_SHOWN: Final = 3


class BlockType(enum.Enum):
    """Types of tensors that are read: their number in files, values in a block, and its bytes."""

    F32 = (0, 1, 4)
    F16 = (1, 1, 2)
    BF16 = (30, 1, 2)
    Q4_0 = (2, 32, 18)
    Q4_1 = (3, 32, 20)
    Q5_0 = (6, 32, 22)
    Q5_1 = (7, 32, 24)
    Q8_0 = (8, 32, 34)
    Q2_K = (10, 256, 84)
    Q3_K = (11, 256, 110)
    Q4_K = (12, 256, 144)
    Q5_K = (13, 256, 176)
    Q6_K = (14, 256, 210)
    IQ4_NL = (20, 32, 18)
    IQ4_XS = (23, 256, 136)
    MXFP4 = (39, 32, 17)

    def __init__(self, number: int, num_values: int, num_bytes: int) -> None:
        self.number = number
        self.num_values = num_values
        self.num_bytes = num_bytes


_TYPES: Final = {kind.number: kind for kind in BlockType}
_OTHER_TYPES: Final = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
"""Types that are not read, for messages."""


class GgufTensor(NamedTuple):
    shape: tuple[int, ...]
    """Outputs first, as torch has it."""
    kind: BlockType
    path: Path
    start: int
    """Offset in the file of that path."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.kind.num_values * self.kind.num_bytes


class GgufFile(NamedTuple):
    """File, or several that are the parts of one; path and metadata are those of the first."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def bytes_of(self, name: str) -> bytearray:
        """Read a tensor's bytes. Raises ConfigError if the file has become shorter."""
        tensor = self.tensors[name]
        data = bytearray(tensor.num_bytes)
        try:
            with tensor.path.open("rb") as file:
                file.seek(tensor.start)
                num_read = file.readinto(data)
        except OSError as error:
            raise ConfigError(f"cannot read {tensor.path}: {error.strerror}") from error
        if num_read != len(data):
            raise ConfigError(f"{tensor.path} became shorter while it was read")
        return data


def gguf_stem(path: Path) -> str:
    """Return a file's name without its ending, and without the number of a part."""
    part = _PART.fullmatch(path.name)
    return part[1] if part else path.stem


def gguf_parts(path: Path) -> list[Path]:
    """Return the parts of the split file that a path is one of, or the path alone."""
    part = _PART.fullmatch(path.name)
    if part is None or not 1 <= int(part[2]) <= int(part[3]):
        return [path]
    names = (part_name(part[1], number, int(part[3])) for number in range(1, int(part[3]) + 1))
    return [path.with_name(name) for name in names]


def part_name(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05d}-of-{count:05d}.gguf"


def read_gguf(path: Path) -> GgufFile:
    """Read metadata and descriptions of tensors, of all parts if it is one of a split file.

    Raises ConfigError, UnsupportedModelError.
    """
    paths = gguf_parts(path)
    missing = [part.name for part in paths if not part.exists()]
    if missing and len(paths) > 1:
        shown = ", ".join(missing[:_MAX_SHOWN]) + ", ..." * (len(missing) > _MAX_SHOWN)
        raise ConfigError(
            f"{path} is a part of a model of {len(paths)} files, of which {len(missing)} are "
            f"missing in its folder: {shown}"
        )
    return _joined([_read_part(part, number, len(paths)) for number, part in enumerate(paths)])


def _read_part(path: Path, number: int, count: int) -> GgufFile:
    """Read part `number`, from 0, of `count`. Raises ConfigError if it is another."""
    file = _read_file(path)
    found = (file.metadata.get(SPLIT_COUNT), file.metadata.get("split.no"))
    if count == 1 and found[0] not in (None, 0, 1):
        raise ConfigError(
            f"{path} is a part of a split model ({SPLIT_COUNT} is {str(found[0])[:80]}): name its "
            "parts NAME-00001-of-00003.gguf and so on, with the number of parts, in one folder"
        )
    if count > 1 and found != (count, number):
        raise ConfigError(
            f"{path}: {SPLIT_COUNT} is {str(found[0])[:80]} and split.no is {str(found[1])[:80]}, "
            f"but the name means {count} and {number}: it is a part of another split"
        )
    return file


def _joined(parts: Sequence[GgufFile]) -> GgufFile:
    """Join the parts of a split file. Raises ConfigError if they are not all of its tensors."""
    first = parts[0]
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise ConfigError(f"{part.path}: tensor {name} is in {tensors[name].path}, too")
            tensors[name] = tensor
    wanted = first.metadata.get(_SPLIT_TENSORS, len(tensors))
    if wanted != len(tensors):
        raise ConfigError(
            f"{first.path}: {_SPLIT_TENSORS} is {str(wanted)[:80]}, but its {len(parts)} files "
            f"have {len(tensors)} tensors"
        )
    return GgufFile(first.path, first.metadata, tensors)


def _read_file(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            return _Reader(path, file, size, size).read()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def parse_gguf(path: Path, content: BinaryIO, size: int, max_header_bytes: int) -> GgufFile:
    """Describe one file of `size` bytes that is open already; path is for messages."""
    return _Reader(path, content, size, min(size, max_header_bytes)).read()


class _Reader:
    """Reads one file from its begin. header_end: where metadata and descriptions end at most."""

    def __init__(self, path: Path, file: BinaryIO, size: int, header_end: int) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._header_end = header_end

    def read(self) -> GgufFile:
        if self._bytes(len(_MAGIC)) != _MAGIC:
            raise ConfigError(f"{self._path} is no GGUF file")
        version = self._scalar("<I")
        if version not in _VERSIONS:
            raise UnsupportedModelError(
                f"{self._path}: version {version} of GGUF is not supported; supported: 2, 3"
            )
        num_tensors, num_fields = self._scalar("<Q"), self._scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(self._count(num_fields, _SMALLEST_STRING + 5, "fields")):
            name = self._name()
            if name in metadata:
                raise ConfigError(f"{self._path}: metadata {name} is there twice")
            metadata[name] = self._value(self._scalar("<I"))
        found: dict[str, tuple[tuple[int, ...], BlockType, int]] = {}
        for _ in range(self._count(num_tensors, _SMALLEST_STRING + 24, "tensors")):
            name = self._name()
            if name in found:
                raise ConfigError(f"{self._path}: tensor {name} is there twice")
            found[name] = self._tensor(name)
        return GgufFile(self._path, metadata, self._placed(found, metadata))

    def _placed(
        self, found: Mapping[str, tuple[tuple[int, ...], BlockType, int]], metadata: dict[str, Any]
    ) -> dict[str, GgufTensor]:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise ConfigError(f"{self._path}: general.alignment {alignment!r} is no alignment")
        start = -(-self._file.tell() // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, (shape, kind, offset) in found.items():
            tensor = GgufTensor(shape, kind, self._path, start + offset)
            if shape and shape[-1] % kind.num_values:
                raise ConfigError(
                    f"{self._path}: tensor {name} of shape {list(shape)} cannot be {kind.name}, "
                    f"whose blocks have {kind.num_values} values"
                )
            if tensor.start + tensor.num_bytes > self._size:
                raise ConfigError(f"{self._path} is cut off: it ends within tensor {name}")
            tensors[name] = tensor
        return tensors

    def _tensor(self, name: str) -> tuple[tuple[int, ...], BlockType, int]:
        num_dimensions = self._scalar("<I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ConfigError(f"{self._path}: tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._scalar("<Q") for _ in range(num_dimensions))[::-1]
        number, offset = self._scalar("<I"), self._scalar("<Q")
        if number not in _TYPES:
            raise UnsupportedModelError(
                f"{self._path}: tensor {name} is {_OTHER_TYPES.get(number, f'type {number}')}, "
                f"which is not supported; supported: {', '.join(kind.name for kind in BlockType)}"
            )
        return shape, _TYPES[number], offset

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            item, count = self._scalar("<I"), self._scalar("<Q")
            if item == _STRING:
                number = self._count(count, _SMALLEST_STRING, "items")
                return [self._text() for _ in range(number)]
            form = self._form(item)
            number = self._count(count, struct.calcsize(form), "items")
            data = self._bytes(number * struct.calcsize(form))
            return [value for (value,) in struct.iter_unpack(form, data)]
        return self._scalar(self._form(kind))

    def _form(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ConfigError(f"{self._path}: metadata of type {kind} is not known")
        return _SCALARS[kind]

    def _name(self) -> str:
        text = self._text(_MAX_NAME_BYTES)
        if not text:
            raise ConfigError(f"{self._path}: a name is empty")
        return text

    def _text(self, max_bytes: int | None = None) -> str:
        length = self._scalar("<Q")
        if max_bytes is not None and length > max_bytes:
            raise ConfigError(f"{self._path}: a name of {length} bytes")
        return self._bytes(length).decode(errors="replace")

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack(form, self._bytes(struct.calcsize(form)))
        return value

    def _count(self, count: int, smallest: int, what: str) -> int:
        """Return a count of things of at least `smallest` bytes, if the file can hold them."""
        if count * smallest > self._header_end - self._file.tell():
            raise ConfigError(
                f"{self._path} is cut off: its header of at most {self._header_end} bytes cannot "
                f"hold {count} {what}"
            )
        return count

    def _bytes(self, number: int) -> bytes:
        if number > self._header_end - self._file.tell():
            raise ConfigError(
                f"{self._path} is cut off: its header does not end within {self._header_end} bytes"
            )
        data = self._file.read(number)
        if len(data) != number:
            raise ConfigError(f"{self._path} became shorter while it was read")
        return data
