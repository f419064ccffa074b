"""Export of the canonical form to TensorRT-LLM's LoRA tensors, the inverse of `trtllm`.

Only an export multiplies B by the scale, in float32, before the one rounding to the storage type.
Rows that the tensors cannot represent are refused by name. This module writes no file.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from loraplex.adapters.canonical import CanonicalRow, RowKind
from loraplex.adapters.formats.modules import LoraModule, linear_path, module_of
from loraplex.adapters.formats.storage_type import StorageType
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.errors import InvalidAdapterError, InvalidParameterError, UnsupportedFeatureError

_MAX_SHOWN = 20


_TENSOR_TYPES = {
    StorageType.FLOAT32: "F32",
    StorageType.FLOAT16: "F16",
    StorageType.BFLOAT16: "BF16",
}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    layer: int
    module: LoraModule
    row: CanonicalRow
    factor: RawTensor | None
    """DoRA's factor, if the row has one."""

    @property
    def num_values(self) -> int:
        num_factors = 0 if self.factor is None else self.factor.num_values
        return num_factors + sum(math.prod(tensor.shape) for tensor in self.row.tensors.values())


def _is_plain(row: CanonicalRow) -> bool:
    """Whether a row is LoRA of a decoder layer's module with A and B only."""
    is_lora = row.kind is RowKind.LORA and set(row.tensors) == {"a", "b"}
    return is_lora and row.layer is not None and row.expert is None


def _is_factor(row: CanonicalRow) -> bool:
    """Whether a row is a DoRA factor of the form that TensorRT-LLM reads."""
    return row.kind is RowKind.MAGNITUDE and "factor" in row.tensors


def _what(row: CanonicalRow) -> str:
    """Return the contents of a row that is not plain, for messages."""
    if row.kind is RowKind.MAGNITUDE:
        return "DoRA: its magnitudes must first be divided by norms of the base's weight"
    return f"{row.kind}: {', '.join(sorted(row.tensors))}"


def module_path(row: CanonicalRow) -> str:
    """Return the Hugging Face path, in a causal LM, of the module that a row adapts.

    Raises UnsupportedFeatureError for a row that is not LoRA of a decoder layer's linear layer.
    """
    parent = row.origin.removesuffix(f".{row.module}").rpartition(".")[2]
    is_known = "." in row.module or parent in ("self_attn", "mlp")
    if not _is_plain(row) or not row.origin.endswith(f".{row.module}") or not is_known:
        raise UnsupportedFeatureError(
            f"{row.origin or row.module!r} ({_what(row)}, layer {row.layer}, expert {row.expert}) "
            "is not plain LoRA of a linear layer of a decoder layer"
        )
    assert row.layer is not None
    return linear_path(row.layer, row.module, parent)


def common_storage_type(rows: Iterable[CanonicalRow]) -> StorageType:
    """Return the type of all tensors. Raises InvalidParameterError if they differ."""
    found = {tensor.dtype for row in rows for tensor in row.tensors.values()}
    kept = [storage for storage, dtype in _TENSOR_TYPES.items() if found == {dtype}]
    if not kept:
        raise InvalidParameterError(
            f"the adapter's tensors are {', '.join(sorted(found))}: choose one of "
            f"{', '.join(StorageType)} for all",
            param="dtype",
        )
    return kept[0]


def holding_module(row: CanonicalRow) -> LoraModule | None:
    """Return TensorRT-LLM's module for a row; None if it has none."""
    parent, module = module_path(row).split(".")[-2:]
    return module_of(parent, module)


def lora_tensors(rows: Sequence[CanonicalRow], storage: StorageType) -> tuple[RawTensor, RawTensor]:
    """Return (lora_weights [1, N, W], lora_config int32 [1, N, 3 or, with DoRA, 4]).

    Rows are ordered by layer and module id. Raises UnsupportedFeatureError with every row that
    they cannot represent, InvalidAdapterError if a value is too large for the storage type.
    """
    entries = _entries(rows)
    dtype = _TENSOR_TYPES[storage]
    width = max(entry.num_values for entry in entries)
    bits = np.zeros((len(entries), width), "<u4" if dtype == "F32" else "<u2")
    num_columns = 3 if all(entry.factor is None for entry in entries) else 4
    config = np.empty((len(entries), num_columns), "<i4")
    for index, entry in enumerate(entries):
        a, b = entry.row.tensors["a"], _stored_b(entry)
        values = np.concatenate([_float32(a).ravel(), b.ravel(), _stored_factor(entry)])
        bits[index, : len(values)] = _rounded(values, storage, entry.row.origin)
        columns = (entry.module.id, entry.layer, a.shape[0], entry.factor is not None)
        config[index] = columns[:num_columns]
    return (
        RawTensor(dtype, (1, *bits.shape), bits.view(np.uint8).reshape(-1).data),
        RawTensor("I32", (1, *config.shape), config.view(np.uint8).reshape(-1).data),
    )


def _entries(rows: Sequence[CanonicalRow]) -> list[_Entry]:
    """Return the rows with their modules, in the order of the export."""
    entries: dict[tuple[int, int], _Entry] = {}
    factors = {(row.layer, row.module): row.tensors["factor"] for row in rows if _is_factor(row)}
    rows = [row for row in rows if not _is_factor(row)]
    refused = [f"{row.origin} ({_what(row)})" for row in rows if not _is_plain(row)]
    rows = [row for row in rows if _is_plain(row)]
    for row in rows:
        module = holding_module(row)
        if module is None:
            refused.append(module_path(row))
            continue
        assert row.layer is not None
        factor = factors.get((row.layer, row.module))
        entry = entries.setdefault((row.layer, module.id), _Entry(row.layer, module, row, factor))
        if entry.row is not row:
            raise UnsupportedFeatureError(
                f"{entry.row.origin} and {row.origin} would both be {module.name} of layer "
                f"{row.layer}"
            )
    if refused:
        more = f" and {len(refused) - _MAX_SHOWN} more" if len(refused) > _MAX_SHOWN else ""
        raise UnsupportedFeatureError(
            f"TensorRT-LLM's format has no module for {', '.join(refused[:_MAX_SHOWN])}{more}"
        )
    if not entries:
        raise InvalidAdapterError("the adapter has no rows")
    return [entries[place] for place in sorted(entries)]


def _stored_b(entry: _Entry) -> npt.NDArray[np.float32]:
    """Return scaled B, its rows in the order of the module's parts."""
    with np.errstate(over="ignore"):
        b = _float32(entry.row.tensors["b"]) * np.float32(entry.row.scale)
    return _in_parts_order(entry, b)


def _stored_factor(entry: _Entry) -> npt.NDArray[np.float32]:
    if entry.factor is None:
        return np.empty(0, np.float32)
    return _in_parts_order(entry, _float32(entry.factor))


def _in_parts_order(entry: _Entry, outputs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Concatenate values or rows per output, in the order of the module's parts."""
    half, rest = divmod(len(outputs), 2)
    if entry.row.module != "gate_up_proj":
        return outputs
    if rest:
        raise InvalidAdapterError(
            f"{entry.row.origin} has {len(outputs)} outputs: its two halves are not equal"
        )
    return np.concatenate([outputs[half:], outputs[:half]])


def _float32(tensor: RawTensor) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return tensor.array().astype(np.float32)


def _rounded(
    values: npt.NDArray[np.float32], storage: StorageType, origin: str
) -> npt.NDArray[np.unsignedinteger]:
    """Return bit patterns of the nearest values of the storage type, ties to even."""
    bits: npt.NDArray[np.unsignedinteger]
    if storage is StorageType.BFLOAT16:
        wide = values.view(np.uint32)
        half = np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1))
        bits = ((wide + half) >> np.uint32(16)).astype(np.uint16)
    elif storage is StorageType.FLOAT16:
        with np.errstate(over="ignore"):
            bits = values.astype(np.float16).view(np.uint16)
    else:
        bits = values.view(np.uint32)
    stored = RawTensor(_TENSOR_TYPES[storage], bits.shape, bits.view(np.uint8).data)
    if not stored.is_finite():
        raise InvalidAdapterError(
            f"{origin} has values up to {np.abs(values).max():g} once its scale is applied: too "
            f"large for {storage}"
        )
    return bits
