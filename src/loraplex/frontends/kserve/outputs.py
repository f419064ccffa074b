"""How a client wants its outputs: inline or as bytes, as classes, or in shared memory."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec
import numpy as np

from loraplex.core.errors import InvalidRequestError, InvalidTensorError
from loraplex.frontends.kserve.shared_memory import Place, TenantMemory
from loraplex.frontends.kserve.tensors import (
    Tensor,
    check_raw_size,
    from_raw,
    string_tensor,
    to_raw,
)


def classified(tensor: Tensor, num_classes: int) -> Tensor:
    """BYTES [batch, at most num_classes] by the classification extension, highest first.

    An element is `value:index`, the index within one element of the batch. Outputs of our models
    have no labels, which would follow as `:label`. The first of several dimensions is the
    batch; of a tensor with one it is [num_classes]. Raises InvalidTensorError for a type whose
    values have no order, and for BF16.
    """
    has_batch = len(tensor.shape) > 1
    kind = "" if tensor.datatype == "BF16" else tensor.array.dtype.kind
    if not kind or kind not in "iuf":
        raise InvalidTensorError(
            f"class result not available for output '{tensor.name}' due to unsupported type "
            f"'{tensor.datatype}'; request it without classification",
            param=tensor.name,
        )
    num_rows = tensor.shape[0] if has_batch else 1
    num_columns = math.prod(tensor.shape[1:] if has_batch else tensor.shape)
    rows = tensor.array.reshape(num_rows, num_columns)
    # Backwards twice, so that the first of equal values comes first.
    order = np.argsort(rows[:, ::-1], axis=1, kind="stable")[:, ::-1]
    top = (num_columns - 1 - order)[:, :num_classes]
    texts = [
        _text(row[index], int(index)) for row, best in zip(rows, top, strict=True) for index in best
    ]
    shape = (len(rows), top.shape[1]) if has_batch else (top.shape[1],)
    return string_tensor(tensor.name, texts, shape)


def _text(value: np.generic, index: int) -> str:
    number = value.item()
    return f"{number:f}:{index}" if isinstance(number, float) else f"{number}:{index}"


REGION = "shared_memory_region"
BYTE_SIZE = "shared_memory_byte_size"
OFFSET = "shared_memory_offset"
CLASSIFICATION = "classification"


class OutputWish(msgspec.Struct, frozen=True):
    """Requested form of one output."""

    is_binary: bool = False
    num_classes: int = 0
    """0: the tensor itself."""
    place: Place | None = None


INLINE = OutputWish()
BINARY = OutputWish(is_binary=True)


class Wishes(msgspec.Struct, frozen=True, eq=False):
    """Requested forms of all outputs of a request."""

    memory: TenantMemory
    default: OutputWish = INLINE
    by_name: Mapping[str, OutputWish] = MappingProxyType({})


class Delivered(msgspec.Struct, frozen=True, eq=False):
    """An output as it goes into the message."""

    tensor: Tensor
    wish: OutputWish

    @property
    def is_in_message(self) -> bool:
        """False: its bytes are in a region."""
        return self.wish.place is None


def delivered(outputs: Sequence[Tensor], wishes: Wishes) -> list[Delivered]:
    """Each output in its wanted form; those for regions are written there.

    Raises InvalidRequestError if a region is too small, InvalidTensorError as `classified` does.
    """
    results = []
    for tensor in outputs:
        wish = wishes.by_name.get(tensor.name, wishes.default)
        if wish.num_classes:
            tensor = classified(tensor, wish.num_classes)
        if wish.place is not None:
            _write(tensor, wish.place, wishes.memory)
        results.append(Delivered(tensor, wish))
    return results


def _write(tensor: Tensor, place: Place, memory: TenantMemory) -> None:
    data = to_raw(tensor)
    if len(data) > place.byte_size:
        raise InvalidRequestError(
            f"shared memory size specified with the request for output '{tensor.name}' "
            f"({place.byte_size} bytes) should be at least {len(data)} bytes to hold the results",
            param=tensor.name,
        )
    memory.write(place, data)


def output_wish(
    name: str, parameters: Mapping[str, object], *, is_binary: bool, memory: TenantMemory
) -> OutputWish:
    """Read the parameters of a requested output. Raises InvalidRequestError, NotFoundError."""
    num_classes = _natural(name, parameters, CLASSIFICATION)
    place = place_of(name, parameters)
    if place is None and not num_classes:
        return BINARY if is_binary else INLINE
    if place is not None:
        memory.check(place)
        if num_classes:
            raise InvalidRequestError(
                f"Output can't set both 'shared_memory_region' and 'classification': '{name}'",
                param=name,
            )
    return OutputWish(is_binary=is_binary, num_classes=num_classes, place=place)


def place_of(name: str, parameters: Mapping[str, object]) -> Place | None:
    """Where a tensor lies, from its parameters; None: in the message."""
    region = parameters.get(REGION)
    if region is None:
        return None
    if not isinstance(region, str):
        raise InvalidRequestError(
            f"'{REGION}' of '{name}' must be the name of a region, got {region!r}", param=name
        )
    if BYTE_SIZE not in parameters:
        raise InvalidRequestError(
            f"'{name}' is in shared memory region '{region}'; set its '{BYTE_SIZE}'", param=name
        )
    return Place(region, _natural(name, parameters, OFFSET), _natural(name, parameters, BYTE_SIZE))


def shared_tensor(
    name: str, datatype: object, shape: Sequence[object], place: Place, memory: TenantMemory
) -> Tensor:
    """An input that lies in a region; nothing is read if its size is another one."""
    check_raw_size(name, datatype, shape, place.byte_size)
    return from_raw(name, datatype, shape, memory.read(place))


def _natural(name: str, parameters: Mapping[str, object], key: str) -> int:
    value = parameters.get(key, 0)
    if type(value) is not int or not 0 <= value < 2**63:
        shown = repr(value)[:40]
        raise InvalidRequestError(
            f"'{key}' of '{name}' must be an integer that is not negative, got {shown}", param=name
        )
    return value
