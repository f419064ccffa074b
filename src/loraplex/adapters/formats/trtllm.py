"""LoRA tensors of TensorRT-LLM: lora_weights and lora_config, in a folder, a file or a request.

A row of lora_weights [N, W] is A [rank, in], row-major, then B [out, rank], row-major, then of DoRA
its factor [out], then zeros up to W; the row of lora_config [N, 3 or 4] has (module id, layer,
rank, is DoRA). A batch dimension of 1 may come first. B already includes the scale, and DoRA's
magnitude is divided by the norms of W + B A (TensorRT-LLM's examples/dora). Of experts, a row has A
of all of them [experts, rank, in], then B [experts, out, rank]; the rank is that of one expert. The
numbers of features and experts are those of the base model, since the tensors do not include them.
The fixed sentences of errors are those of TensorRT-LLM's loraValidateRequestTensors, which clients
search for.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from loraplex.adapters.canonical import CanonicalRow, RowKind, sort_rows
from loraplex.adapters.formats.modules import LORA_MODULES, LoraModule, linear_path
from loraplex.adapters.formats.npy import read_npy
from loraplex.adapters.formats.single_experts import Bits, magnitudes, single_experts
from loraplex.adapters.shapes import NO_MODULE, BaseShapes
from loraplex.adapters.tensor_file import RawTensor, SafetensorsContent, TensorHeader, encode_header
from loraplex.core.errors import (
    AdapterMismatchError,
    AdapterTooLargeError,
    InvalidAdapterError,
    UnsupportedFeatureError,
)
from loraplex.core.rank_limits import RankLimits

WEIGHTS_NAME = "model.lora_weights.npy"
CONFIG_NAMES = ("model.lora_config.npy", "model.lora_keys.npy")
"""Names of lora_config; the second is that of TensorRT-LLM before 0.8. The first wins."""

_LLGTRT_NAMES = ("weights", "config")
"""Tensors of a .safetensors file that scripts/extract_lora.py of llgtrt writes."""
_WEIGHT_TYPES = {"F16": "<u2", "BF16": "<u2", "F32": "<u4"}
_NUM_FIXED_COLUMNS = 3
_TYPE_NAMES = {
    **dict.fromkeys(("fp16", "float16", "f16"), "F16"),
    **dict.fromkeys(("bf16", "bfloat16"), "BF16"),
    **dict.fromkeys(("fp32", "float32", "f32"), "F32"),
    **dict.fromkeys(("int32", "i32"), "I32"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class _ConfigRow:
    """Row of lora_config, checked against the base."""

    row: int
    module: LoraModule
    layer: int
    rank: int
    in_features: int
    parts: tuple[str, ...]
    """Layers of the base that form the module."""
    out_features: tuple[int, ...]
    """Output features of each of these layers."""
    paths: dict[str, str]
    """Hugging Face path of each of these layers, of experts with {expert} for the number."""
    num_experts: int | None
    """Number of experts that the row is of; None: it is no experts'."""
    is_dora: bool

    def __str__(self) -> str:
        return f"row {self.row} ({self.module.name} of layer {self.layer})"

    @property
    def size(self) -> str:
        """Number of values without DoRA, as a product."""
        experts = "" if self.num_experts is None else f"{self.num_experts} experts x "
        return f"{experts}{self.rank} x ({self.in_features} + {sum(self.out_features)})"

    @property
    def num_of_one(self) -> int:
        """Number of values of A and B of one expert, or of a module without experts."""
        return self.rank * (self.in_features + sum(self.out_features))

    @property
    def num_a(self) -> int:
        return (self.num_experts or 1) * self.rank * self.in_features

    @property
    def num_ab(self) -> int:
        return (self.num_experts or 1) * self.num_of_one

    @property
    def num_values(self) -> int:
        return self.num_ab + (sum(self.out_features) if self.is_dora else 0)


def config_file(folder: Path) -> Path | None:
    """Return the file of lora_config in a folder, by its new or its old name."""
    return next((folder / name for name in CONFIG_NAMES if (folder / name).exists()), None)


def read_pair(folder: Path, config: Path, max_bytes: int) -> tuple[RawTensor, RawTensor]:
    """Read (lora_weights, lora_config) of a folder.

    Raises InvalidAdapterError, AdapterTooLargeError.
    """
    weights = read_npy(folder / WEIGHTS_NAME, max_bytes)
    return weights, read_npy(config, max_bytes)


def pair_of(content: SafetensorsContent) -> tuple[RawTensor, RawTensor] | None:
    """Return (lora_weights, lora_config) of llgtrt's file; None: it is another."""
    weights, config = map(content.tensors.get, _LLGTRT_NAMES)
    if weights is None or config is None or len(content.tensors) > 2:
        return None
    return weights, config


def encode_lora_file(weights: RawTensor, config: RawTensor) -> list[bytes | bytearray | memoryview]:
    """Return the pieces of llgtrt's file: weights [N, W], config [N, 3], without a batch."""
    tensors = {
        name: RawTensor(tensor.dtype, tensor.shape[-2:], tensor.data)
        for name, tensor in zip(_LLGTRT_NAMES, (weights, config), strict=True)
    }
    return [encode_header(tensors, {}), *(tensor.data for tensor in tensors.values())]


def request_tensor(header: TensorHeader, data: bytes | bytearray | memoryview) -> RawTensor:
    """Return a tensor of a request. An unknown type keeps its name."""
    dtype = _TYPE_NAMES.get(header.dtype.lower().removeprefix("type_"), header.dtype)
    return RawTensor(dtype, header.shape, data)


def canonical_rows(
    weights: RawTensor, config: RawTensor, shapes: BaseShapes, max_ranks: RankLimits
) -> tuple[CanonicalRow, ...]:
    """Return the rows of an adapter.

    Fused modules become one row per part, and experts one per expert whose B is not zero. Raises
    InvalidAdapterError for broken tensors, AdapterMismatchError for those of another base,
    AdapterTooLargeError for a rank above max_ranks, UnsupportedFeatureError for DoRA of experts.
    """
    bits, table = _matrices(weights, config)
    rows: list[CanonicalRow] = []
    owners: dict[tuple[int, str], _ConfigRow] = {}
    for index, columns in enumerate(table):
        entry = _entry(index, columns, bits[index], shapes, max_ranks)
        for part in entry.parts:
            first = owners.setdefault((entry.layer, part), entry)
            if first is not entry:
                raise InvalidAdapterError(
                    f"{first} and {entry} of lora_config both hold {part} of one layer"
                )
        rows += _rows_of(entry, bits[index], weights.dtype)
    if not rows:
        raise InvalidAdapterError("the adapter changes nothing: every B of lora_weights is zero")
    return sort_rows(rows)


def single_rows(
    weights: RawTensor, config: RawTensor, shapes: BaseShapes, max_ranks: RankLimits
) -> Iterator[tuple[list[int], Callable[[], list[CanonicalRow]]]]:
    """Yield each row of lora_config, and a function that returns its canonical rows or raises."""
    bits, table = _matrices(weights, config)

    def rows(index: int) -> list[CanonicalRow]:
        entry = _entry(index, table[index], bits[index], shapes, max_ranks)
        return list(_rows_of(entry, bits[index], weights.dtype))

    for index, columns in enumerate(table):
        yield columns, functools.partial(rows, index)


def _matrices(weights: RawTensor, config: RawTensor) -> tuple[Bits, list[list[int]]]:
    shape = _matrix_shape("lora_weights", weights)
    config_shape = _matrix_shape("lora_keys", config)
    _check_tensors(weights, config, shape, config_shape)
    bits = np.ndarray(shape, _WEIGHT_TYPES[weights.dtype], weights.data)
    return bits, np.ndarray(config_shape, "<i4", config.data).tolist()


def _matrix_shape(name: str, tensor: RawTensor) -> tuple[int, int]:
    """Return the shape without its batch dimension."""
    shape = tensor.shape
    if len(shape) not in (2, 3):
        raise InvalidAdapterError(
            f"Invalid shape for {name} tensor: {list(shape)}; [rows, values] or [1, rows, values] "
            "is needed"
        )
    if len(shape) == 3 and shape[0] != 1:
        raise InvalidAdapterError(
            "Expected batch dimension to be 1 for each lora request: "
            f"{name} has shape {list(shape)}"
        )
    if min(shape) < 1:
        raise InvalidAdapterError(
            f"Invalid shape for {name} tensor: {list(shape)}; an adapter has at least one row"
        )
    return shape[-2], shape[-1]


def _check_tensors(
    weights: RawTensor,
    config: RawTensor,
    weights_shape: tuple[int, int],
    config_shape: tuple[int, int],
) -> None:
    if weights.dtype not in _WEIGHT_TYPES:
        raise InvalidAdapterError(
            "Expected lora weights to be the same data type as base model, or another of "
            f"{', '.join(_WEIGHT_TYPES)}, but they are {weights.dtype}"
        )
    if config.dtype != "I32":
        raise InvalidAdapterError(f"Expected  lora keys to have TYPE_INT32 but was {config.dtype}")
    for name, tensor in (("lora_weights", weights), ("lora_keys", config)):
        needed = math.prod(tensor.shape) * tensor.item_bytes
        if tensor.num_bytes != needed:
            raise InvalidAdapterError(
                f"{name} of shape {list(tensor.shape)} and type {tensor.dtype} needs {needed} "
                f"bytes, it has {tensor.num_bytes}"
            )
    if weights_shape[0] != config_shape[0]:
        raise InvalidAdapterError(
            "Expected dim1 lora_weights and lora_keys to have the same size, but they have "
            f"{weights_shape[0]} and {config_shape[0]} rows"
        )
    if config_shape[1] not in (3, 4):
        raise InvalidAdapterError(
            "Expected dim2 of lora_keys to have a size in [3, 4] (module id, layer, rank, is "
            f"DoRA), but it is {config_shape[1]}"
        )


def _entry(
    row: int,
    columns: list[int],
    bits: Bits,
    shapes: BaseShapes,
    max_ranks: RankLimits,
) -> _ConfigRow:
    """Parse one row of lora_config; bits: that of lora_weights. Raises as canonical_rows."""
    module_id, layer, rank = columns[:_NUM_FIXED_COLUMNS]
    is_dora = columns[_NUM_FIXED_COLUMNS:]
    where = f"row {row} of lora_config (module id {module_id}, layer {layer}, rank {rank})"
    if not 0 <= module_id < len(LORA_MODULES):
        raise InvalidAdapterError(f"{where}: module ids are 0 to {len(LORA_MODULES) - 1}")
    if not 0 <= layer < shapes.num_layers:
        raise AdapterMismatchError(
            f"Expected layerId to be in the range [0, numModelLayers): {where}; the base model "
            f"has {shapes.num_layers} layers"
        )
    if rank <= 0:
        raise InvalidAdapterError(f"Expected adapterSize to be > 0: {where}")
    module = _as_stored(LORA_MODULES[module_id], layer, shapes)
    if is_dora and is_dora[0] not in (0, 1):
        raise InvalidAdapterError(f"{where}: the fourth column is {is_dora[0]}; it must be 0 or 1")
    parts, in_features, out_features = _parts(module, layer, shapes, where)
    entry = _ConfigRow(
        row=row,
        module=module,
        layer=layer,
        rank=rank,
        in_features=in_features,
        parts=parts,
        out_features=out_features,
        paths={part: _path(layer, part, shapes) for part in parts},
        num_experts=shapes.layer(layer).num_experts.get(parts[0]),
        is_dora=is_dora == [1],
    )
    _check_width(entry, bits, where)
    for part in parts:
        if rank > max_ranks.of(part):
            raise AdapterTooLargeError(
                f"Invalid low_rank ({rank}). low_rank must be smaller than mMaxLowRank "
                f"({max_ranks.of(part)}): {where} is above the server's "
                f"{max_ranks.setting_of(part)}"
            )
    return entry


def _check_width(entry: _ConfigRow, bits: Bits, where: str) -> None:
    """Check that a row of lora_weights has the values that its module takes."""
    if entry.num_experts is not None:
        if entry.is_dora:
            raise UnsupportedFeatureError(
                f"{where}: DoRA of experts is not served; set column 3 to 0"
            )
        num = entry.num_of_one
        is_short = _is_zero(bits[num : 2 * num]) and _is_zero(bits[num:])
        if entry.num_experts > 1 and is_short and not _is_zero(bits[:num]):
            raise InvalidAdapterError(
                f"lora_weights has to few values for {entry.module.name}: {where} needs "
                f"{entry.size} = {entry.num_values} and has {num}, those of one expert. Converters "
                "that write all experts to one place keep only the last: convert the adapter "
                "again, to A of all experts and then B of all experts"
            )
    if entry.num_values > len(bits):
        raise InvalidAdapterError(
            f"lora_weights has to few values for {entry.module.name}: {where} needs {entry.size}"
            f"{' + DoRA' if entry.is_dora else ''} = {entry.num_values}, a row has {len(bits)}"
        )


def _parts(
    module: LoraModule, layer: int, shapes: BaseShapes, where: str
) -> tuple[tuple[str, ...], int, tuple[int, ...]]:
    """Return the layers that form the module, their in_features, and each one's out_features."""
    everything, modules = _layer_modules(layer, shapes), _enabled_modules(layer, shapes)
    parts = module.parts_in(everything)
    inputs = {modules[part][0] for part in parts if part in modules}
    if len(inputs) != 1 or not modules.keys() >= set(parts):
        held = ((other.name, other.parts_in(everything)) for other in LORA_MODULES)
        enabled = ", ".join(name for name, own in held if own and modules.keys() >= set(own))
        raise AdapterMismatchError(
            f"lora module {module.name} not enabled for this model: {where}; this layer of the "
            f"base model can be adapted in {enabled or NO_MODULE}"
        )
    return parts, inputs.pop(), tuple(modules[part][1] for part in parts)


def _path(layer: int, part: str, shapes: BaseShapes) -> str:
    path = shapes.layer(layer).paths.get(part)
    return linear_path(layer, part) if path is None else path.replace("{}", str(layer), 1)


def _as_stored(module: LoraModule, layer: int, shapes: BaseShapes) -> LoraModule:
    """Return the module that an id means for this layer of the base.

    Of a base with a fused gate_up_proj older converters write both halves as mlp_h_to_4h.
    """
    is_fused = any(
        "gate_proj" in parts and shapes.has_module(layer, fused)
        for fused, parts in shapes.layer(layer).fused.items()
    )
    both = next(other for other in LORA_MODULES if other.name == "mlp_gate_up")
    return both if is_fused and module.name == "mlp_h_to_4h" else module


def _layer_modules(layer: int, shapes: BaseShapes) -> dict[str, tuple[int, int]]:
    """Return (in_features, out_features) of a layer's modules; a fused layer's parts, too."""
    own = shapes.layer(layer)
    modules = {
        name: features for name, features in own.modules.items() if shapes.has_module(layer, name)
    }
    parts = {
        part: (modules[fused][0], size)
        for fused, sizes in own.fused.items()
        if fused in modules
        for part, size in sizes.items()
    }
    return parts | modules


def _enabled_modules(layer: int, shapes: BaseShapes) -> dict[str, tuple[int, int]]:
    """Return those of a layer's modules that may be adapted."""
    fused = {part: whole for whole, parts in shapes.layer(layer).fused.items() for part in parts}
    return {
        name: features
        for name, features in _layer_modules(layer, shapes).items()
        if shapes.enables(name if shapes.has_module(layer, name) else fused[name])
    }


def _rows_of(entry: _ConfigRow, bits: Bits, dtype: str) -> Iterator[CanonicalRow]:
    """Yield the canonical rows in one row of lora_weights: those of experts, else one or two per
    part of the module."""
    pieces = {
        "A": bits[: entry.num_a],
        "B": bits[entry.num_a : entry.num_ab],
        "DoRA's factor": bits[entry.num_ab : entry.num_values],
    }
    for name, piece in pieces.items():
        if not _tensor(piece, piece.shape, dtype).is_finite():
            raise InvalidAdapterError(f"{name} in {entry} of lora_weights holds NaN or infinity")
    if not _is_zero(bits[entry.num_values :]):
        raise AdapterMismatchError(
            f"{entry} of lora_weights has more than the {entry.num_values} values that the base "
            f"model's {entry.module.name} takes at rank {entry.rank} ({entry.size}): what follows "
            "must be zeros"
        )
    if entry.num_experts is not None:
        yield from _expert_rows(entry, bits, dtype)
        return
    a = _tensor(pieces["A"], (entry.rank, entry.in_features), dtype)
    first = 0
    for part, out_features in zip(entry.parts, entry.out_features, strict=True):
        end = first + out_features
        own = slice(entry.num_a + first * entry.rank, entry.num_a + end * entry.rank)
        b = _tensor(bits[own], (out_features, entry.rank), dtype)
        yield _row(entry, part, RowKind.LORA, {"a": a, "b": b})
        if entry.is_dora:
            own = slice(entry.num_ab + first, entry.num_ab + end)
            factor = _tensor(bits[own], (out_features,), dtype)
            yield _row(entry, part, RowKind.MAGNITUDE, {"factor": factor})
        first = end


def _expert_rows(entry: _ConfigRow, bits: Bits, dtype: str) -> Iterator[CanonicalRow]:
    """Yield a row per expert. A stored row has one rank for all, so zeros fill up the others."""
    assert entry.num_experts is not None
    (part,), (out_features,) = entry.parts, entry.out_features
    a = bits[: entry.num_a].reshape(entry.num_experts, entry.rank, entry.in_features)
    b = bits[entry.num_a : entry.num_ab].reshape(entry.num_experts, out_features, entry.rank)
    for expert, of_a, of_b in single_experts(a, b, entry.num_experts):
        tensors = {
            "a": _tensor(of_a, of_a.shape, dtype),
            "b": _tensor(of_b, of_b.shape, dtype),
        }
        yield _row(entry, part, RowKind.LORA, tensors, expert)


def _row(
    entry: _ConfigRow,
    part: str,
    kind: RowKind,
    tensors: dict[str, RawTensor],
    expert: int | None = None,
) -> CanonicalRow:
    path = entry.paths[part].replace("{expert}", str(expert))
    return CanonicalRow(entry.layer, part, expert, kind, 1.0, tensors, path)


def _tensor(bits: Bits, shape: tuple[int, ...], dtype: str) -> RawTensor:
    return RawTensor(dtype, shape, bits.ravel().view(np.uint8).data)


def _is_zero(bits: Bits) -> bool:
    return not magnitudes(bits).any()
