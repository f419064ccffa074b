"""Fused and separate projections: an adapter of one layout on a base model of the other.

A base may compute q, k and v, or gate and up, by one linear layer. The LoRA of its parts is then
one LoRA whose B has a block for each part, and LoRA of the fused layer is, on a base with separate
layers, LoRA of each of them with the same A. Both are exact. Qwen3-Next has the parts by key head.
"""

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from loraplex.adapters.canonical import CanonicalRow, RowKind, sort_rows
from loraplex.adapters.shapes import FUSED_MODULES, BaseShapes
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.errors import AdapterMismatchError, UnsupportedFeatureError

_Parts = dict[str, CanonicalRow]


def fit_modules(rows: Iterable[CanonicalRow], shapes: BaseShapes) -> tuple[CanonicalRow, ...]:
    """Return the rows for the linear layers that the base has. Other rows stay as they are.

    Raises AdapterMismatchError, or UnsupportedFeatureError for what only some parts have.
    """
    fitted: list[CanonicalRow] = []
    joined: dict[tuple[int, str, RowKind], _Parts] = defaultdict(dict)
    for row in rows:
        if row.layer is None or row.kind is RowKind.FULL:
            fitted.append(row)
            continue
        own, parts = shapes.layer(row.layer), FUSED_MODULES.get(row.module, ())
        has = functools.partial(shapes.has_module, row.layer)
        wholes = (fused for fused, sizes in own.fused.items() if row.module in sizes)
        whole = next(filter(has, wholes), None)
        if has(row.module):
            fitted.append(row)
        elif whole is not None:
            joined[row.layer, whole, row.kind][row.module] = row
        elif parts and all(map(has, parts)):
            fitted += _split(row, {part: own.modules[part][1] for part in parts})
        else:
            fitted.append(row)
    taken = {(row.layer, row.module): row for row in fitted}
    for (layer, fused, kind), of_parts in joined.items():
        if (layer, fused) in taken:
            first, second = taken[layer, fused], next(iter(of_parts.values()))
            raise AdapterMismatchError(
                f"{first.origin} and {second.origin} change the same outputs of the base model's "
                f"{fused}"
            )
        own = shapes.layer(layer)
        row = _join(layer, fused, kind, of_parts, own.fused[fused])
        fitted.append(_by_head(row, own.fused[fused], own.split_heads.get(fused, 1)))
    return sort_rows(fitted)


def _split(row: CanonicalRow, sizes: Mapping[str, int]) -> Iterator[CanonicalRow]:
    """Yield the rows of the parts. sizes: outputs of each part, in order."""
    for name, tensor in row.tensors.items():
        if name != "a" and tensor.shape[0] != sum(sizes.values()):
            raise AdapterMismatchError(
                f"tensor {row.origin} ({name}) has {tensor.shape[0]} outputs; the base model's "
                f"{', '.join(sizes)} have {sum(sizes.values())}"
            )
    first = 0
    for part, size in sizes.items():
        tensors = {
            name: tensor if name == "a" else _outputs(tensor, first, size)
            for name, tensor in row.tensors.items()
        }
        yield CanonicalRow(row.layer, part, None, row.kind, row.scale, tensors, _renamed(row, part))
        first += size


def _renamed(row: CanonicalRow, module: str) -> str:
    """Return the row's origin with another module at its end."""
    if row.origin.endswith(row.module):
        return row.origin.removesuffix(row.module) + module
    return f"{row.origin.rpartition('.')[0]}.{module.rpartition('.')[2]}"


def _outputs(tensor: RawTensor, first: int, size: int) -> RawTensor:
    row_bytes = tensor.num_bytes // tensor.shape[0]
    data = memoryview(tensor.data)[first * row_bytes : (first + size) * row_bytes]
    return RawTensor(tensor.dtype, (size, *tensor.shape[1:]), data)


def _join(
    layer: int, fused: str, kind: RowKind, rows: _Parts, sizes: Mapping[str, int]
) -> CanonicalRow:
    """Return one row of the fused layer. sizes: outputs of each part, in order."""
    some = next(iter(rows.values()))
    missing = [part for part in sizes if part not in rows]
    if kind is not RowKind.LORA and missing:
        raise UnsupportedFeatureError(
            f"{some.origin} has a {kind}, but {', '.join(missing)} of its layer has none: the base "
            f"model's {fused} is one layer, which has one for all its outputs"
        )
    for part, row in rows.items():
        output = next(tensor for name, tensor in row.tensors.items() if name != "a")
        if output.shape[0] != sizes[part]:
            raise AdapterMismatchError(
                f"tensor {row.origin} has {output.shape[0]} outputs; the base model's {fused} has "
                f"{sizes[part]} for {part}"
            )
    origin = _renamed(some, fused)
    if kind is RowKind.LORA:
        tensors, scale = _joined_lora(rows, sizes)
    else:
        (name,) = some.tensors
        tensors, scale = {name: _stored([rows[part].tensors[name] for part in sizes])}, some.scale
    return CanonicalRow(layer, fused, None, kind, scale, tensors, origin)


def _by_head(row: CanonicalRow, sizes: Mapping[str, int], num_heads: int) -> CanonicalRow:
    """Return a row of which each head's outputs lie together. sizes: of the parts, in order."""
    if num_heads == 1:
        return row
    ends = list(itertools.accumulate(sizes.values()))
    parts = np.split(np.arange(ends[-1]), ends[:-1])
    order = np.concatenate([part.reshape(num_heads, -1) for part in parts], axis=1).ravel()
    tensors = {
        name: tensor
        if name == "a"
        else RawTensor(tensor.dtype, tensor.shape, tensor.bits()[order].tobytes())
        for name, tensor in row.tensors.items()
    }
    return dataclasses.replace(row, tensors=tensors)


def _joined_lora(rows: _Parts, sizes: Mapping[str, int]) -> tuple[dict[str, RawTensor], float]:
    """Return the tensors and the scale of LoRA whose B has a block for each part.

    Where all parts have one A, so does the result; else its rank is the sum of theirs.
    """
    ordered = [rows[part] for part in sizes if part in rows]
    scales = {row.scale for row in ordered}
    # With one scale the bytes stay; else B takes the scales, in float32.
    scale = scales.pop() if len(scales) == 1 else 1.0
    dtypes = {row.tensors["b"].dtype for row in ordered}
    dtype = dtypes.pop() if len(dtypes) == 1 and not scales else "F32"
    first_a = ordered[0].tensors["a"]
    shares_a = all(
        row.tensors["a"].shape == first_a.shape and row.tensors["a"].data == first_a.data
        for row in ordered
    )
    ranks = [row.tensors["a"].shape[0] for row in ordered]
    b = np.zeros((sum(sizes.values()), ranks[0] if shares_a else sum(ranks)), _array_type(dtype))
    bias = np.zeros(sum(sizes.values()), np.float32)
    first_out, first_rank = 0, 0
    for part, size in sizes.items():
        if part in rows:
            row, factor = rows[part], 1.0 if scale == rows[part].scale else rows[part].scale
            rank = row.tensors["b"].shape[1]
            block = _elements(row.tensors["b"], dtype, factor)
            b[first_out : first_out + size, first_rank : first_rank + rank] = block
            if "bias" in row.tensors:
                bias[first_out : first_out + size] = row.tensors["bias"].array() * factor
            first_rank += 0 if shares_a else rank
        first_out += size
    tensors = {
        "a": first_a if shares_a else _stored([row.tensors["a"] for row in ordered]),
        "b": RawTensor(dtype, b.shape, b.tobytes()),
    }
    if any("bias" in row.tensors for row in ordered):
        tensors["bias"] = RawTensor("F32", bias.shape, bias.tobytes())
    return tensors, scale


def _elements(tensor: RawTensor, dtype: str, factor: float) -> npt.NDArray[np.generic]:
    """Return the elements times the factor; their bits if the type is bfloat16."""
    if dtype == "BF16":
        return tensor.bits()
    return tensor.array() * factor if factor != 1.0 else tensor.array()


def _array_type(dtype: str) -> str:
    return {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}[dtype]


def _stored(tensors: list[RawTensor]) -> RawTensor:
    """Return the tensors one below the other, as float32 if their types differ."""
    shape = (sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:])
    if len({tensor.dtype for tensor in tensors}) == 1:
        return RawTensor(tensors[0].dtype, shape, b"".join(tensor.data for tensor in tensors))
    wide = np.concatenate([tensor.array().astype(np.float32) for tensor in tensors])
    return RawTensor("F32", shape, wide.tobytes())
