"""The tensors of a request against the table of its model: names, types, shapes, batch.

Gives one `Inputs` per element of the batch. The texts begin as Triton's own do, so that a client
that looks for them finds them.
"""

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from loraplex.core.errors import InvalidTensorError, UnsupportedFeatureError
from loraplex.core.support import Support
from loraplex.frontends.kserve.models.kinds import (
    IGNORED_INPUTS,
    InputSpec,
    ModelKind,
)
from loraplex.frontends.kserve.tensors import Array, Tensor, to_texts


class Inputs(msgspec.Struct, frozen=True, eq=False):
    """The used inputs of one element of a batch, by field."""

    kind: ModelKind
    tensors: Mapping[str, Tensor]
    """Those that were sent, of the whole batch, which stands in front."""
    index: int
    """Index of the element."""
    batch_size: int

    def own(self, field: str) -> Tensor:
        """Part of a tensor that was sent that belongs to this element; it may be empty."""
        tensor = self.tensors[field]
        size = math.prod(tensor.shape[1:])
        return tensor.rows(self.index * size, (self.index + 1) * size)

    def tensor(self, field: str) -> Tensor | None:
        """The tensor without its batch dimension; None if it was not sent or is empty."""
        tensor = self.tensors.get(field)
        return self.own(field) if tensor is not None and 0 not in tensor.shape else None

    def array(self, field: str) -> Array | None:
        """Array of tensor(), without its name and type."""
        tensor = self.tensor(field)
        return None if tensor is None else tensor.array

    def first(self, field: str, default: Any = None) -> Any:
        """The first value of a tensor, as its data type has it; the default if it was not sent or
        is empty."""
        tensor = self.tensors.get(field)
        if tensor is None or 0 in tensor.shape:
            return default
        return tensor.element(self.index and self.index * math.prod(tensor.shape[1:]))

    def texts(self, field: str) -> tuple[str, ...]:
        tensor = self.tensors.get(field)
        if tensor is None:
            return ()
        strings = tensor.strings if self.batch_size == 1 else self.own(field).strings
        return tuple(to_texts(tensor.name, strings))


def read_inputs(
    kind: ModelKind,
    model: str,
    tensors: Sequence[Tensor],
    *,
    max_batch_size: int,
    is_pooled: bool = False,
) -> list[Inputs]:
    """Check every tensor and split the batch. Raises InvalidTensorError, UnsupportedFeatureError.

    max_batch_size 0: the tensors have no batch dimension, and there is one element. A stop request
    may lack the required tensors, as it needs none of them; so may a pooled one, which generates
    nothing: its conversion refuses an empty prompt.
    """
    has_batch = max_batch_size > 0
    sent = _sent(kind, model, tensors, has_batch)
    used: dict[str, Tensor] = {}
    for row, tensor in sent.values():
        _check_tensor(row, model, tensor, has_batch)
        if row.field:
            used[row.field] = tensor
    sizes = {tensor.shape[0] for _, tensor in sent.values()}
    batch_size = max(sizes, default=0)
    if len(sizes) > 1 or batch_size > max(max_batch_size, 1) or 0 in sizes:
        raise _wrong_batch(model, [tensor for _, tensor in sent.values()], max_batch_size)
    elements = [Inputs(kind, used, index, batch_size) for index in range(batch_size)]
    missing = [name for name in kind.required_inputs if name not in sent]
    if missing and not (elements and (is_pooled or elements[0].first("stop"))):
        raise _missing(kind, model, sent, missing)
    return elements


def _sent(
    kind: ModelKind, model: str, tensors: Sequence[Tensor], has_batch: bool
) -> dict[str, tuple[InputSpec, Tensor]]:
    """Return the sent tensors by name, with a batch dimension, and their rows.

    An adapter's tensors may lack that dimension; without batches all do.
    """
    sent: dict[str, tuple[InputSpec, Tensor]] = {}
    for tensor in tensors:
        if tensor.name in IGNORED_INPUTS:
            continue
        row = kind.inputs_by_name.get(tensor.name)
        if row is None:
            raise _unexpected("input", tensor.name, [r.name for r in kind.declared_inputs], model)
        if tensor.name in sent:
            raise InvalidTensorError(
                f"input '{tensor.name}' already exists in request for model '{model}'",
                param=tensor.name,
            )
        if not has_batch or (row.is_adapter and len(tensor.shape) == len(row.dims)):
            tensor = msgspec.structs.replace(tensor, shape=(1, *tensor.shape))
        sent[tensor.name] = row, tensor
    return sent


def check_requested(kind: ModelKind, model: str, requested: Sequence[str]) -> None:
    """Raise InvalidTensorError for the first requested output that the model does not have."""
    for name in requested:
        if name not in kind.outputs_by_name:
            raise _unexpected("output", name, [row.name for row in kind.outputs], model)


def _unexpected(what: str, name: str, known: list[str], model: str) -> InvalidTensorError:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else f"; its {what}s are {', '.join(known)}"
    return InvalidTensorError(
        f"unexpected inference {what} '{name}' for model '{model}'{hint}", param=name
    )


def _check_tensor(row: InputSpec, model: str, tensor: Tensor, has_batch: bool) -> None:
    if not row.field:
        _check_served(row, tensor)
    if tensor.datatype != row.datatype and tensor.datatype not in row.other_datatypes:
        datatypes = (row.datatype, *row.other_datatypes)
        expected_type = " or ".join(f"'{datatype}'" for datatype in datatypes)
        raise InvalidTensorError(
            f"inference input '{row.name}' data-type is '{tensor.datatype}', but model '{model}' "
            f"expects {expected_type}",
            param=row.name,
        )
    dims = tensor.shape[1:]
    if not tensor.shape or not (dims == row.dims or _fits(row, dims)):
        batch = [-1] if has_batch else []
        expected_shape = ",".join(str(dim) for dim in (*batch, *row.dims))
        shape = ",".join(str(dim) for dim in (tensor.shape if has_batch else dims))
        shape_note = "The first dimension is the batch, -1 is any size" if has_batch else "No batch"
        raise InvalidTensorError(
            f"unexpected shape for input '{row.name}' for model '{model}'. Expected "
            f"[{expected_shape}], got [{shape}]. {shape_note}",
            param=row.name,
        )


def _fits(row: InputSpec, dims: tuple[int, ...]) -> bool:
    return len(dims) == len(row.dims) and (
        row.is_adapter
        or all(expected in (-1, dim) for expected, dim in zip(row.dims, dims, strict=True))
    )


def _wrong_batch(model: str, tensors: Sequence[Tensor], max_batch_size: int) -> InvalidTensorError:
    """Return the error of tensors whose batch sizes differ, or are not allowed."""
    first = tensors[0]
    other = next((tensor for tensor in tensors if tensor.shape[0] != first.shape[0]), None)
    if other is None:
        return InvalidTensorError(
            f"inference request batch-size must be <= {max_batch_size} for '{model}', and at "
            f"least 1; it is {first.shape[0]}"
        )
    return InvalidTensorError(
        f"input '{other.name}' batch size does not match other inputs for '{model}': it "
        f"is {other.shape[0]}, that of '{first.name}' is {first.shape[0]}",
        param=other.name,
    )


def _missing(
    kind: ModelKind, model: str, names: Collection[str], missing: Sequence[str]
) -> InvalidTensorError:
    got = ",".join(f"'{name}'" for name in names)
    lacking = ",".join(f"'{name}'" for name in missing)
    return InvalidTensorError(
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
    value = next((v for v in tensor.array.ravel().tolist() if v not in row.neutral), None)
    if value is None:
        return
    neutral = " or ".join(repr(each) for each in row.neutral)
    without = f"leave it out or send {neutral}" if neutral else "leave it out"
    raise UnsupportedFeatureError(
        f"input '{row.name}' requests {row.reason}, which is not served; {without}",
        param=row.name,
    )
