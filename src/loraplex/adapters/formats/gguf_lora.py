"""LoRA adapters as GGUF files, as convert_lora_to_gguf.py of llama.cpp writes them.

A weight W of the base model has the factors `W.lora_a` [rank, in] and `W.lora_b` [out, rank]; their
product is multiplied by adapter.lora.alpha / rank, or by 1 if alpha is 0 (llama.cpp's
src/llama-adapter.h). B has its rows in the order that W has in GGUF files, and A of the token
embedding is stored transposed, [vocabulary, rank].
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from loraplex.adapters.canonical import CanonicalRow, RowKind, sort_rows
from loraplex.adapters.formats.canonical_file import check_rows
from loraplex.adapters.formats.peft_names import TensorName, parse_name
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import (
    RawTensor,
    StagingLimits,
    check_is_no_pointer,
    open_bounded,
)
from loraplex.core.adapter import EMBEDDING
from loraplex.core.errors import (
    AdapterMismatchError,
    AdapterTooLargeError,
    ConfigError,
    InvalidAdapterError,
    UnsupportedFeatureError,
    UnsupportedModelError,
)
from loraplex.core.gguf import SPLIT_COUNT, BlockType, GgufFile, parse_gguf
from loraplex.core.gguf_names import HeadLayout, family_of, hugging_face_name

A: Final = ".lora_a"
B: Final = ".lora_b"
_ALPHA: Final = "adapter.lora.alpha"
_INVOCATION: Final = "adapter.alora.invocation_tokens"
_KNOWN: Final = frozenset(
    # The last two describe the adapter's use to people.
    ("adapter.type", _ALPHA, _INVOCATION, "adapter.lora.task_name", "adapter.lora.prompt_prefix")
)
_FLOATS: Final = {BlockType.F32: "F32", BlockType.F16: "F16", BlockType.BF16: "BF16"}
_Q8_0: Final = np.dtype([("scale", "<f2"), ("codes", "i1", 32)])
_HUB: Final = "https://huggingface.co/"


@dataclasses.dataclass(frozen=True, slots=True)
class GgufLora:
    """Adapter of which the header has been read."""

    file: GgufFile
    alpha: float
    factors: Mapping[str, tuple[str, ...]]
    """Names of the file's tensors, by the weight of the base model that they change."""

    @property
    def trained_on(self) -> str | None:
        """Name of the base model, if the file has it."""
        fields = self.file.metadata
        url = str(fields.get("general.base_model.0.repo_url", ""))
        if url.startswith(_HUB):
            return url.removeprefix(_HUB)
        name = fields.get("general.base_model.0.name")
        return name.replace(" ", "-") if isinstance(name, str) else None

    def rows(self, shapes: BaseShapes) -> tuple[CanonicalRow, ...]:
        """Return the rows of all weights. Raises as `row`."""
        if not self.factors:
            raise InvalidAdapterError(f"{self.file.path} has no tensors")
        return sort_rows(self.row(weight, shapes) for weight in self.factors)

    def place(self, weight: str) -> TensorName:
        """Return the module of a weight. Raises InvalidAdapterError for an unknown one."""
        with _adapter_errors():
            name = hugging_face_name(self.file, weight)
        place = parse_name(name) if name is not None and name.endswith(".weight") else None
        if place is None:
            raise InvalidAdapterError(f"{self.file.path}: {weight} is no weight of a linear layer")
        return place

    def row(self, weight: str, shapes: BaseShapes) -> CanonicalRow:
        """Return the row of one weight; shapes: of the base, by which B is ordered.

        Raises InvalidAdapterError for a broken tensor, UnsupportedFeatureError for one that is no
        factor of LoRA or of a type that is not read, AdapterMismatchError for another architecture.
        """
        family = family_of(self.file)
        if shapes.architecture not in family.architectures:
            raise AdapterMismatchError(
                f"{self.file.path} is of the architecture {family.name} "
                f"({', '.join(family.architectures)}); the base model is {shapes.architecture}"
            )
        place, names = self.place(weight), self.factors[weight]
        for name in names:
            if not name.endswith((A, B)):
                raise UnsupportedFeatureError(
                    f"{self.file.path}: tensor {name} is neither a {A} nor a {B}; only LoRA is "
                    "read from GGUF files"
                )
        if len(names) < 2:
            raise InvalidAdapterError(
                f"{self.file.path}: tensor {names[0]} has no partner "
                f"{weight}{B if names[0].endswith(A) else A}"
            )
        a, b = self._matrix(weight + A), self._matrix(weight + B)
        if place.module == EMBEDDING:
            a = _with_elements(a, a.bits().T)
        heads = _layout(shapes, -1 if place.layer is None else place.layer)
        with _adapter_errors():
            rows = family.file_rows(f"{place.path}.weight", b.shape[0], heads)
            columns = family.file_columns(f"{place.path}.weight", heads)
        if rows is not None:
            b = _with_elements(b, b.bits()[_checked(rows, b.shape[0], weight)])
        if columns is not None:
            a = _with_elements(a, a.bits()[:, _checked(columns, a.shape[1], weight)])
        scale = float(np.float32(self.alpha / a.shape[0])) if self.alpha else 1.0
        row = CanonicalRow(
            place.layer, place.module, None, RowKind.LORA, scale, {"a": a, "b": b}, place.path
        )
        return check_rows((row,))[0]

    def _matrix(self, name: str) -> RawTensor:
        """Read a matrix; Q8_0 becomes float32, exactly."""
        described = self.file.tensors[name]
        if len(described.shape) != 2 or 0 in described.shape:
            raise InvalidAdapterError(
                f"{self.file.path}: tensor {name} has shape {list(described.shape)}; a matrix with "
                "at least one row and column is needed"
            )
        with _adapter_errors():
            data = self.file.bytes_of(name)
        if described.kind in _FLOATS:
            return RawTensor(_FLOATS[described.kind], described.shape, data)
        if described.kind is not BlockType.Q8_0:
            raise UnsupportedFeatureError(
                f"{self.file.path}: tensor {name} is {described.kind.name}; read from adapters are "
                f"{', '.join(kind.name for kind in _FLOATS)} and {BlockType.Q8_0.name}"
            )
        blocks = np.frombuffer(data, _Q8_0)
        values = blocks["scale"].astype("<f4")[:, None] * blocks["codes"].astype("<f4")
        return RawTensor("F32", described.shape, values.tobytes())


def read_gguf_lora(path: Path, limits: StagingLimits) -> GgufLora:
    """Read the header of a file.

    Raises InvalidAdapterError if it is broken or no adapter, AdapterTooLargeError if it is over a
    limit, UnsupportedFeatureError for a feature, type or architecture that is not served.
    """
    with open_bounded(path, limits.max_file_bytes) as (opened, size), _adapter_errors():
        check_is_no_pointer(path, opened)
        file = parse_gguf(path, opened, size, limits.max_header_bytes)
        alpha = _alpha(file)
        family_of(file)
    if file.metadata.get(SPLIT_COUNT, 1) not in (0, 1):
        raise UnsupportedFeatureError(
            f"{path} is one of {str(file.metadata[SPLIT_COUNT])[:80]} parts of a split adapter, "
            "which llama.cpp does not read either: join them with llama-gguf-split --merge"
        )
    if len(file.tensors) > limits.max_tensors:
        raise AdapterTooLargeError(
            f"{path} declares {len(file.tensors)} tensors; at most {limits.max_tensors} are read"
        )
    if sum(tensor.num_bytes for tensor in file.tensors.values()) > size:
        raise InvalidAdapterError(f"{path} is broken: its tensors overlap")
    factors: dict[str, tuple[str, ...]] = {}
    for name in file.tensors:
        weight = name.removesuffix(A).removesuffix(B)
        factors[weight] = (*factors.get(weight, ()), name)
    return GgufLora(file, alpha, factors)


def _alpha(file: GgufFile) -> float:
    """Return adapter.lora.alpha, 0 if it is missing, of a file that is a LoRA adapter."""
    fields, path = file.metadata, file.path
    kinds = [str(fields.get(name))[:80] for name in ("general.type", "adapter.type")]
    if kinds != ["adapter", "lora"]:
        raise InvalidAdapterError(
            f"{path} is no LoRA adapter: its general.type is {kinds[0]}, its adapter.type "
            f"{kinds[1]}; `adapter` and `lora` are needed. A model is served with loraplex serve "
            f"{path}"
        )
    if fields.get(_INVOCATION):
        raise UnsupportedFeatureError(
            f"{path}: {_INVOCATION} needs LoRA that begins within a prompt (aLoRA), not served yet"
        )
    unknown = [name for name in fields if name.startswith("adapter.") and name not in _KNOWN]
    if unknown:
        raise UnsupportedFeatureError(
            f"{path}: metadata {unknown[0][:80]} is unknown, and so is its effect"
        )
    alpha = fields.get(_ALPHA, 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise InvalidAdapterError(
            f"{path}: metadata {_ALPHA} must be a finite number, got {str(alpha)[:80]}"
        )
    return float(alpha)


def _layout(shapes: BaseShapes, layer: int) -> HeadLayout:
    outputs = {
        module: out
        for module, (_, out) in shapes.layer(layer).modules.items()
        if shapes.has_module(layer, module)
    }
    return HeadLayout.of(outputs, shapes.layer(layer).head_dim, shapes.num_key_heads)


def _checked(order: list[int], size: int, weight: str) -> list[int]:
    """Return the order. Raises AdapterMismatchError if a tensor has another size."""
    if len(order) != size:
        raise AdapterMismatchError(
            f"a factor of {weight} has {size} rows or columns; the base model's layer has "
            f"{len(order)}"
        )
    return order


def _with_elements(tensor: RawTensor, bits: np.ndarray) -> RawTensor:
    return RawTensor(tensor.dtype, bits.shape, bits.tobytes())


@contextlib.contextmanager
def _adapter_errors() -> Iterator[None]:
    """Raise errors about a GGUF file as errors about an adapter."""
    try:
        yield
    except UnsupportedModelError as error:
        raise UnsupportedFeatureError(error.message) from error
    except ConfigError as error:
        raise InvalidAdapterError(error.message) from error
