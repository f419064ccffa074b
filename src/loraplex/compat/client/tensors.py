"""Input tensors for tritonclient, of either wire."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.utils import np_to_triton_dtype

Array = npt.NDArray[Any]

BFLOAT16_BITS = np.dtype("V2")
"""How NumPy holds what it has no type for: raw elements of two bytes."""


def inputs(module: ModuleType, arrays: Mapping[str, Array]) -> list[Any]:
    """`module` is tritonclient.grpc or tritonclient.http: their tensors have one interface."""
    return [_input(module, name, array) for name, array in arrays.items()]


def row(values: Sequence[Any], dtype: Any) -> Array:
    """[1, len(values)]: one element of a batch."""
    return np.array([values], dtype=dtype)


def texts(values: Sequence[str]) -> Array:
    """[1, len(values)], as BYTES."""
    array = np.empty((1, len(values)), dtype=object)
    array[0, :] = [value.encode() for value in values]
    return array


def bfloat16_bits(values: Array) -> Array:
    """Rounded to nearest, ties to even; infinities and NaN stay what they are."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = np.where(np.isnan(values), (bits >> 16) | 0x40, rounded)
    return quiet.astype(np.uint16).view(BFLOAT16_BITS)


def _input(module: ModuleType, name: str, array: Array) -> Any:
    if array.dtype == BFLOAT16_BITS:
        return _bfloat16_input(module, name, array)
    tensor = module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


def _bfloat16_input(module: ModuleType, name: str, bits: Array) -> Any:
    """Versions of tritonclient do not agree on what array they take for BF16, so it is made as
    the other type of two bytes and renamed.
    """
    tensor = module.InferInput(name, bits.shape, "FP16")
    tensor.set_data_from_numpy(np.ascontiguousarray(bits).view(np.float16))
    if hasattr(tensor, "_input"):
        tensor._input.datatype = "BF16"  # gRPC's holds its protobuf message
    else:
        tensor._datatype = "BF16"
    return tensor
