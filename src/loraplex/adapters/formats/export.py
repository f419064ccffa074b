"""Export of the canonical form to TensorRT-LLM's LoRA tensors, the inverse of `trtllm`.

Only an export multiplies B by the scale, in float32, before the one rounding to the storage type.
Rows that the tensors cannot represent are refused by name. This module writes no file.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from loraplex.adapters.canonical import CanonicalRow, RowKind
from loraplex.adapters.formats.modules import (
    EXPERT_MODULES,
    ROUTER,
    LoraModule,
    module_of,
)
from loraplex.adapters.formats.storage_type import StorageType
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.errors import InvalidAdapterError, InvalidParameterError, UnsupportedFeatureError

_MAX_SHOWN = 20
_GATE_UP = "gate_up_proj"

_TENSOR_TYPES = {
    StorageType.FLOAT32: "F32",
    StorageType.FLOAT16: "F16",
    StorageType.BFLOAT16: "BF16",
}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Exported:
    """Row of lora_weights before it is rounded."""

    layer: int
    module: LoraModule
    rows: dict[int | None, CanonicalRow]
    """Rows by expert; None of a module without experts."""
    factor: RawTensor | None
    """DoRA's factor, if the module has one."""

    @property
    def rank(self) -> int:
        """Largest rank of the rows: those of experts are padded to it."""
        return max(row.tensors["a"].shape[0] for row in self.rows.values())

    @property
    def origin(self) -> str:
        return next(iter(self.rows.values())).origin

    def num_values(self, num_experts: int) -> int:
        """Return the length of the row before it is padded. num_experts: of the base."""
        tensors = next(iter(self.rows.values())).tensors
        num_features = tensors["a"].shape[1] + tensors["b"].shape[0]
        num_factors = 0 if self.factor is None else self.factor.num_values
        num_copies = 1 if None in self.rows else num_experts
        return num_copies * self.rank * num_features + num_factors


def _is_plain(row: CanonicalRow) -> bool:
    """Whether a row is LoRA of a decoder layer's module, or an expert's, with A and B only."""
    is_lora = row.kind is RowKind.LORA and set(row.tensors) == {"a", "b"}
    is_of_expert = row.module in EXPERT_MODULES
    return is_lora and row.layer is not None and (row.expert is not None) == is_of_expert


def _is_factor(row: CanonicalRow) -> bool:
    """Whether a row is a DoRA factor of the form that TensorRT-LLM reads."""
    return row.kind is RowKind.MAGNITUDE and "factor" in row.tensors


def _what(row: CanonicalRow) -> str:
    """Return the contents of a row that is not plain, for messages."""
    if row.kind is RowKind.MAGNITUDE:
        return "DoRA: its magnitudes must first be divided by norms of the base's weight"
    expert = "" if row.expert is None else f" of expert {row.expert}"
    return f"{row.kind}{expert}: {', '.join(sorted(row.tensors))}"


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
    path = row.origin.rpartition(".")[0]
    return module_of(path.rpartition(".")[2], row.module)


def lora_tensors(
    rows: Sequence[CanonicalRow], storage: StorageType, num_experts: int | None = None
) -> tuple[RawTensor, RawTensor]:
    """Return (lora_weights [1, N, W], lora_config int32 [1, N, 3 or, with DoRA, 4]).

    Rows are ordered by layer and module id. num_experts: of the base; by default `count_experts`.
    Raises UnsupportedFeatureError with every row that they cannot represent, InvalidAdapterError if
    a value is too large for the storage type or an expert's number for the base.
    """
    entries = _entries(rows)
    found = count_experts(rows)
    if num_experts is not None and num_experts < found:
        raise InvalidAdapterError(f"the adapter has {found} experts, the base model {num_experts}")
    num_experts = num_experts or found
    dtype = _TENSOR_TYPES[storage]
    width = max(entry.num_values(num_experts) for entry in entries)
    bits = np.zeros((len(entries), width), "<u4" if dtype == "F32" else "<u2")
    num_columns = 3 if all(entry.factor is None for entry in entries) else 4
    config = np.empty((len(entries), num_columns), "<i4")
    for index, entry in enumerate(entries):
        values = _values(entry, num_experts)
        bits[index, : len(values)] = _rounded(values, storage, entry.origin)
        columns = (entry.module.id, entry.layer, entry.rank, entry.factor is not None)
        config[index] = columns[:num_columns]
    return (
        RawTensor(dtype, (1, *bits.shape), bits.view(np.uint8).reshape(-1).data),
        RawTensor("I32", (1, *config.shape), config.view(np.uint8).reshape(-1).data),
    )


def with_separate_halves(rows: Iterable[CanonicalRow]) -> Iterator[CanonicalRow]:
    """Yield the rows, those of a fused gate_up_proj of experts as one for each half.

    TensorRT-LLM's tensors have no module for both. The halves share A.
    """
    for row in rows:
        prefix, _, name = row.module.rpartition(".")
        if not prefix or name != _GATE_UP:
            yield row
            continue
        origin = row.origin.rpartition(".")[0]
        for half, part in enumerate(("gate_proj", "up_proj")):
            tensors = {
                name: tensor if name == "a" else _half(tensor, half, row.origin)
                for name, tensor in row.tensors.items()
            }
            yield dataclasses.replace(
                row, module=f"{prefix}.{part}", tensors=tensors, origin=f"{origin}.{part}"
            )


def count_experts(rows: Iterable[CanonicalRow]) -> int:
    """Return the number of experts that an adapter shows: a router's outputs, else the largest
    number and one; 0 without experts."""
    found = 0
    for row in rows:
        if row.module == ROUTER and "b" in row.tensors:
            found = max(found, row.tensors["b"].shape[0])
        elif row.expert is not None:
            found = max(found, row.expert + 1)
    return found


def _entries(rows: Sequence[CanonicalRow]) -> list[_Exported]:
    """Return the rows with their modules, in the order of the export."""
    entries: dict[tuple[int, int], _Exported] = {}
    rows = list(with_separate_halves(rows))
    factors = {(row.layer, row.module): row.tensors["factor"] for row in rows if _is_factor(row)}
    rows = [row for row in rows if not _is_factor(row)]
    refused = [f"{row.origin} ({_what(row)})" for row in rows if not _is_plain(row)]
    rows = [row for row in rows if _is_plain(row)]
    for row in rows:
        module = holding_module(row)
        if module is None:
            refused.append(row.origin or f"{row.module!r} of layer {row.layer}")
            continue
        assert row.layer is not None
        factor = factors.get((row.layer, row.module))
        entry = entries.setdefault((row.layer, module.id), _Exported(row.layer, module, {}, factor))
        if row.expert in entry.rows:
            raise UnsupportedFeatureError(
                f"{entry.rows[row.expert].origin} and {row.origin} would both be {module.name} of "
                f"layer {row.layer}"
            )
        entry.rows[row.expert] = row
    if refused:
        more = f" and {len(refused) - _MAX_SHOWN} more" if len(refused) > _MAX_SHOWN else ""
        raise UnsupportedFeatureError(
            f"TensorRT-LLM's format has no module for {', '.join(refused[:_MAX_SHOWN])}{more}"
        )
    if not entries:
        raise InvalidAdapterError("the adapter has no rows")
    return [entries[place] for place in sorted(entries)]


def _values(entry: _Exported, num_experts: int) -> npt.NDArray[np.float32]:
    """Return a row of lora_weights: A, then scaled B, its rows in the order of the module's parts.

    Of experts, A of all and then B of all, with zeros for what an expert lacks.
    """
    row = entry.rows.get(None)
    if row is not None:
        b = _in_parts_order(row, _scaled_b(row))
        factor = np.empty(0, np.float32) if entry.factor is None else _float32(entry.factor)
        pieces = (_float32(row.tensors["a"]), b, _in_parts_order(row, factor))
        return np.concatenate([piece.ravel() for piece in pieces])
    first = next(iter(entry.rows.values()))
    in_features, out_features = first.tensors["a"].shape[1], first.tensors["b"].shape[0]
    a = np.zeros((num_experts, entry.rank, in_features), np.float32)
    b = np.zeros((num_experts, out_features, entry.rank), np.float32)
    for expert, row in entry.rows.items():
        rank = row.tensors["a"].shape[0]
        sizes = (row.tensors["a"].shape[1], row.tensors["b"].shape[0])
        if expert is None or sizes != (in_features, out_features):
            raise InvalidAdapterError(
                f"{row.origin} has {sizes[0]} inputs and {sizes[1]} outputs; {first.origin} has "
                f"{in_features} and {out_features}"
            )
        a[expert, :rank], b[expert, :, :rank] = _float32(row.tensors["a"]), _scaled_b(row)
    return np.concatenate([a.ravel(), b.ravel()])


def _scaled_b(row: CanonicalRow) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return _float32(row.tensors["b"]) * np.float32(row.scale)


def _in_parts_order(row: CanonicalRow, outputs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Order values or rows per output as the module's parts."""
    if row.module != _GATE_UP:
        return outputs
    half = _half_size(len(outputs), row.origin)
    return np.concatenate([outputs[half:], outputs[:half]])


def _half(tensor: RawTensor, half: int, origin: str) -> RawTensor:
    """Return the first or second half of a tensor's rows."""
    size = _half_size(tensor.shape[0], origin)
    num_bytes = tensor.num_bytes // 2
    data = memoryview(tensor.data)[half * num_bytes : (half + 1) * num_bytes]
    return RawTensor(tensor.dtype, (size, *tensor.shape[1:]), data)


def _half_size(size: int, origin: str) -> int:
    half, rest = divmod(size, 2)
    if rest:
        raise InvalidAdapterError(f"{origin} has {size} outputs: its two halves are not equal")
    return half


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
