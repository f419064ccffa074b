"""The tensors of a request against the table of its model: names, types, shapes, batch.

Gives one `Inputs` per element of the batch. The texts begin as Triton's own do, so that a client
that looks for them finds them.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence

import numpy as np

from loraplex.core.errors import InvalidTensorError, UnsupportedFeatureError
from loraplex.core.support import Support
from loraplex.frontends.kserve.models.kinds import (
    IGNORED_INPUTS,
    InputSpec,
    ModelKind,
)
from loraplex.frontends.kserve.tensors import Array, Tensor, to_text


class Inputs:
    """The used inputs of one element of a batch, by field."""

    def __init__(self, kind: ModelKind, tensors: Mapping[str, Tensor]) -> None:
        self.kind = kind
        self._tensors = tensors

    def __contains__(self, field: str) -> bool:
        return field in self._tensors

    def tensor(self, field: str) -> Tensor | None:
        """The tensor without its batch dimension; None if it was not sent or is empty."""
        tensor = self._tensors.get(field)
        return None if tensor is None or tensor.array.size == 0 else tensor

    def sent(self, field: str) -> Tensor:
        """As tensor(), of a field that was sent; it may be empty."""
        return self._tensors[field]

    def array(self, field: str) -> Array | None:
        """As tensor(), without its name and type."""
        tensor = self.tensor(field)
        return None if tensor is None else tensor.array

    def integer(self, field: str, default: int) -> int:
        array = self.array(field)
        return default if array is None else int(array.flat[0])

    def number(self, field: str, default: float) -> float:
        array = self.array(field)
        return default if array is None else float(array.flat[0])

    def flag(self, field: str) -> bool:
        array = self.array(field)
        return array is not None and bool(array.flat[0])

    def texts(self, field: str) -> tuple[str, ...]:
        array = self.array(field)
        if array is None:
            return ()
        return tuple(to_text(self.kind.input_of(field), element) for element in array.flat)


def read_inputs(
    kind: ModelKind, model: str, tensors: Sequence[Tensor], *, max_batch_size: int
) -> list[Inputs]:
    """Check every tensor and split the batch. Raises InvalidTensorError, UnsupportedFeatureError.

    max_batch_size 0: the tensors have no batch dimension, and there is one element. A stop request
    may lack the required tensors: it asks for nothing that needs them.
    """
    rows = _rows_by_name(kind, model, tensors)
    has_batch = max_batch_size > 0
    kept = [_batched(rows[t.name], t, has_batch) for t in tensors if t.name in rows]
    for tensor in kept:
        _check_served(rows[tensor.name], tensor)
        _check_tensor(rows[tensor.name], model, tensor, has_batch)
    batch_size = _batch_size(model, kept, max_batch_size)
    elements = [
        Inputs(
            kind,
            {
                rows[tensor.name].field: dataclasses.replace(tensor, array=tensor.array[index])
                for tensor in kept
                if rows[tensor.name].support is Support.WORKS
            },
        )
        for index in range(batch_size)
    ]
    if not (elements and elements[0].flag("stop")):
        _check_required(kind, model, [tensor.name for tensor in kept])
    return elements


def _batched(row: InputSpec, tensor: Tensor, has_batch: bool) -> Tensor:
    """The tensor with a batch dimension: an adapter's may lack it, without batches all do."""
    may_lack = row.is_adapter and len(tensor.shape) == len(row.dims)
    if has_batch and not may_lack:
        return tensor
    return dataclasses.replace(tensor, array=tensor.array[np.newaxis])


def _rows_by_name(kind: ModelKind, model: str, tensors: Sequence[Tensor]) -> dict[str, InputSpec]:
    rows: dict[str, InputSpec] = {}
    for tensor in tensors:
        if tensor.name in IGNORED_INPUTS:
            continue
        row = kind.input(tensor.name)
        if row is None:
            raise _unexpected("input", tensor.name, [r.name for r in kind.declared_inputs], model)
        if tensor.name in rows:
            raise InvalidTensorError(
                f"input '{tensor.name}' already exists in request for model '{model}'",
                param=tensor.name,
            )
        rows[tensor.name] = row
    return rows


def check_requested(kind: ModelKind, model: str, requested: Sequence[str]) -> None:
    """Raise InvalidTensorError for the first requested output that the model does not have."""
    for name in requested:
        if kind.output(name) is None:
            raise _unexpected("output", name, [row.name for row in kind.outputs], model)


def _unexpected(what: str, name: str, known: list[str], model: str) -> InvalidTensorError:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else f"; its {what}s are {', '.join(known)}"
    return InvalidTensorError(
        f"unexpected inference {what} '{name}' for model '{model}'{hint}", param=name
    )


def _check_tensor(row: InputSpec, model: str, tensor: Tensor, has_batch: bool) -> None:
    datatypes = (row.datatype, *row.other_datatypes)
    if tensor.datatype not in datatypes:
        expected_type = " or ".join(f"'{datatype}'" for datatype in datatypes)
        raise InvalidTensorError(
            f"inference input '{row.name}' data-type is '{tensor.datatype}', but model '{model}' "
            f"expects {expected_type}",
            param=row.name,
        )
    dims = tensor.shape[1:]
    fits = len(dims) == len(row.dims) and (
        row.is_adapter
        or all(expected in (-1, dim) for expected, dim in zip(row.dims, dims, strict=True))
    )
    if not fits or not tensor.shape:
        batch = [-1] if has_batch else []
        expected_shape = ",".join(str(dim) for dim in (*batch, *row.dims))
        shape = ",".join(str(dim) for dim in (tensor.shape if has_batch else dims))
        told = "The first dimension is the batch, -1 is any size" if has_batch else "No batch"
        raise InvalidTensorError(
            f"unexpected shape for input '{row.name}' for model '{model}'. Expected "
            f"[{expected_shape}], got [{shape}]. {told}",
            param=row.name,
        )


def _batch_size(model: str, tensors: Sequence[Tensor], max_batch_size: int) -> int:
    if not tensors:
        return 0
    batch_size = tensors[0].shape[0]
    for tensor in tensors:
        if tensor.shape[0] != batch_size:
            raise InvalidTensorError(
                f"input '{tensor.name}' batch size does not match other inputs for '{model}': it "
                f"is {tensor.shape[0]}, that of '{tensors[0].name}' is {batch_size}",
                param=tensor.name,
            )
    if not 1 <= batch_size <= max(max_batch_size, 1):
        raise InvalidTensorError(
            f"inference request batch-size must be <= {max_batch_size} for '{model}', and at "
            f"least 1; it is {batch_size}"
        )
    return batch_size


def _check_required(kind: ModelKind, model: str, names: Sequence[str]) -> None:
    required = [row.name for row in kind.inputs if row.required]
    if kind.input("input_ids") is not None:
        required.insert(0, "input_ids")
    missing = [name for name in required if name not in names]
    if missing:
        got = ",".join(f"'{name}'" for name in names)
        lacking = ",".join(f"'{name}'" for name in missing)
        raise InvalidTensorError(
            f"expected {_expected_count(kind)} but got {len(names)} inputs for model '{model}'. "
            f"Got input(s) [{got}], but missing required input(s) [{lacking}]. Please provide all "
            f"required input(s): {missing[0]} is not present in the request",
            param=missing[0],
        )


def _expected_count(kind: ModelKind) -> str:
    declared = kind.declared_inputs
    num_required = sum(row.required for row in declared)
    if num_required == len(declared):
        return f"{num_required} inputs"
    return f"number of inputs between {num_required} and {len(declared)}"


def _check_served(row: InputSpec, tensor: Tensor) -> None:
    if row.support is not Support.REFUSED:
        return
    asked = next((v for v in tensor.array.ravel().tolist() if v not in row.neutral), None)
    if asked is None:
        return
    neutral = " or ".join(repr(value) for value in row.neutral)
    without = f"leave it out or send {neutral}" if neutral else "leave it out"
    raise UnsupportedFeatureError(
        f"input '{row.name}' asks for {row.reason}, which is not served; {without}",
        param=row.name,
    )
