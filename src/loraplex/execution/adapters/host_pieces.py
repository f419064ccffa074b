"""Views of a canonical adapter file's tensors: the pieces that an adapter's targets name."""

from collections.abc import Iterable, Mapping

import torch

from loraplex.adapters.canonical import CanonicalFile, CanonicalRow, RowKind
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.adapter import OUTSIDE_LAYERS, LoraTarget, TargetPart, each_expert
from loraplex.core.errors import InvalidAdapterError
from loraplex.execution.adapters.host_adapters import HostAdapter, HostPart, HostWeight

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}
_KINDS = {
    TargetPart.LORA: RowKind.LORA,
    TargetPart.FACTOR: RowKind.MAGNITUDE,
    TargetPart.BIAS: RowKind.BIAS,
    TargetPart.SHIFT: RowKind.LORA,
    TargetPart.ROWS: RowKind.FULL,
    TargetPart.TOKENS: RowKind.TOKENS,
    TargetPart.EMBEDDING_A: RowKind.LORA,
    TargetPart.EMBEDDING_B: RowKind.LORA,
}

_RowsByPlace = Mapping[tuple[int, str, int, RowKind], CanonicalRow]


def host_adapter(content: CanonicalFile, targets: Iterable[LoraTarget]) -> HostAdapter:
    """Return the adapter in the pieces that staging cut.

    Raises InvalidAdapterError if they do not belong to this file: every row must be used whole.
    """
    rows = {(_layer(row), row.module, row.expert or 0, row.kind): row for row in content.rows}
    weights: list[HostWeight] = []
    parts: list[HostPart] = []
    used = 0
    for target in sorted(each_expert(targets)):
        piece = _piece(target, rows)
        used += _num_values(piece)
        if isinstance(piece, HostWeight):
            weights.append(piece)
        else:
            parts.append(piece)
    held = sum(tensor.num_values for row in content.rows for tensor in row.tensors.values())
    if used != held:
        raise InvalidAdapterError(
            f"it holds another adapter: the pieces that were staged have {used} values of {held}"
        )
    return HostAdapter(content.digest, tuple(weights), tuple(parts))


def _piece(target: LoraTarget, rows: _RowsByPlace) -> HostWeight | HostPart:
    row = rows.get((target.layer, target.module, target.expert, _KINDS[target.part]))
    if row is None:
        raise InvalidAdapterError(f"it has no {target.part} of {target.module}, {target.layer}")
    first, end = target.first, target.first + target.rank
    match target.part:
        case TargetPart.LORA:
            outputs = slice(target.first, target.first + target.out_features)
            b = _tensor(row, "b")[outputs]
            piece: HostWeight | HostPart = HostWeight(target, _tensor(row, "a"), b, row.scale)
        case TargetPart.FACTOR:
            is_quotient = "factor" in row.tensors
            values = _part_of(row, "factor" if is_quotient else "magnitude", target)
            piece = HostPart(target, values, is_quotient=is_quotient)
        case TargetPart.BIAS:
            piece = HostPart(target, _part_of(row, "bias", target))
        case TargetPart.SHIFT:
            piece = HostPart(target, _part_of(row, "bias", target), row.scale)
        case TargetPart.ROWS:
            is_base = "base" in row.tensors
            weight = _tensor(row, "base" if is_base else "weight")
            values = weight.view(-1, target.out_features)[first:end]
            piece = HostPart(target, values, is_base=is_base)
        case TargetPart.TOKENS:
            indices = _tensor(row, "indices")[first:end]
            piece = HostPart(target, _tensor(row, "weight")[first:end], indices=indices)
        case TargetPart.EMBEDDING_A:
            piece = HostPart(target, _tensor(row, "a")[:, first:end].t(), row.scale)
        case TargetPart.EMBEDDING_B:
            piece = HostPart(target, _tensor(row, "b").t())
    _check_shape(piece)
    return piece


def _part_of(row: CanonicalRow, name: str, target: LoraTarget) -> torch.Tensor:
    return _tensor(row, name)[target.first : target.first + target.out_features]


def _tensor(row: CanonicalRow, name: str) -> torch.Tensor:
    raw = row.tensors.get(name, RawTensor("F32", (0,), b""))
    if raw.num_bytes == 0:
        raise InvalidAdapterError(f"{row.origin} has no {name}")
    return torch.frombuffer(raw.data, dtype=_DTYPES[raw.dtype]).view(raw.shape)


def _check_shape(piece: HostWeight | HostPart) -> None:
    target = piece.target
    if isinstance(piece, HostWeight):
        found = [piece.a.shape, piece.b.shape]
        fits = found == [(target.rank, target.in_features), (target.out_features, target.rank)]
    else:
        found = [piece.values.shape]
        shape = (target.rank, target.out_features)
        fits = piece.values.shape == (shape if piece.values.dim() == 2 else shape[1:])
    if not fits:
        raise InvalidAdapterError(
            f"{target.module} of layer {target.layer} has {[list(shape) for shape in found]}, "
            f"staged as {target}"
        )


def _num_values(piece: HostWeight | HostPart) -> int:
    if isinstance(piece, HostPart):
        return piece.values.numel() + (0 if piece.indices is None else piece.indices.numel())
    # A is shared by the pieces of one row.
    return piece.b.numel() + (piece.a.numel() if piece.target.first == 0 else 0)


def _layer(row: CanonicalRow) -> int:
    return OUTSIDE_LAYERS if row.layer is None else row.layer
