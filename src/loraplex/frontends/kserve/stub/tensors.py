"""Tensors of Triton's Python backend -> wire tensors, and back.

BF16, which numpy does not have, goes through DLPack: its bits are read where they lie, and a tensor
is made of an array of 16-bit numbers whose description is changed to BF16.
"""

import ctypes
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .wire import WireTensor

_DTYPES = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
_BFLOAT = 4
"""DLPack's code of the type."""
_LENGTH = struct.Struct("<I")
_UNUSED, _USED = b"dltensor", b"used_dltensor"
"""Names of capsules: taking a tensor out of one renames it. A capsule keeps no copy."""


class _ManagedTensor(ctypes.Structure):
    """The beginning of DLPack's DLManagedTensor, which is a DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class TensorSpecs:
    """Tensors of a model's configuration."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: the fields of model_config.proto."""
        self._num_batch_dims = 1 if int(config.get("max_batch_size", 0)) > 0 else 0
        self._inputs = {row["name"]: row for row in config["input"]}
        self.outputs = frozenset(row["name"] for row in config["output"])

    def to_wire(self, tensor: Any) -> WireTensor:
        """tensor: a pb_utils.Tensor in the memory of the host."""
        row = self._inputs[tensor.name()]
        datatype = _datatype(row["data_type"])
        shape = [int(dim) for dim in tensor.shape()]
        if row.get("reshape"):  # Triton has reshaped it: the dimensions that clients see
            shape = [*shape[: self._num_batch_dims], *(int(dim) for dim in row["dims"])]
        return WireTensor(tensor.name(), datatype, tuple(shape), _raw(tensor, datatype))


def from_wire(tensor: WireTensor, backend: Any) -> Any:
    """A pb_utils.Tensor. backend: the module triton_python_backend_utils."""
    if tensor.datatype == "BYTES":
        return backend.Tensor(tensor.name, _strings(tensor.data, tensor.shape))
    if tensor.datatype == "BF16":
        bits = np.frombuffer(tensor.data, "<u2").reshape(tensor.shape)
        return backend.Tensor.from_dlpack(tensor.name, _bf16_capsule(bits))
    array = np.frombuffer(tensor.data, _DTYPES[tensor.datatype]).reshape(tensor.shape)
    return backend.Tensor(tensor.name, array)


def _datatype(config_name: str) -> str:
    name = config_name.removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


def _raw(tensor: Any, datatype: str) -> bytes:
    if datatype == "BF16":
        return _dlpack_bytes(tensor.to_dlpack())
    array = tensor.as_numpy()
    if datatype == "BYTES":
        return b"".join(_LENGTH.pack(len(element)) + element for element in array.flat)
    return bytes(np.ascontiguousarray(array, _DTYPES[datatype]).tobytes())


def _strings(data: bytes, shape: Sequence[int]) -> Any:
    elements, start = [], 0
    while start < len(data):
        (length,) = _LENGTH.unpack_from(data, start)
        start += _LENGTH.size + length
        elements.append(data[start - length : start])
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array.reshape(tuple(shape))


def _dlpack_bytes(capsule: Any) -> bytes:
    """The elements of a tensor that is dense and in the memory of the host."""
    managed = _ManagedTensor.from_address(_pointer(capsule))
    count = math.prod(managed.shape[: managed.ndim])
    if count == 0:
        return b""
    return ctypes.string_at(managed.data + managed.byte_offset, count * managed.bits // 8)


def _bf16_capsule(bits: Any) -> Any:
    """A capsule with a tensor whose elements have these bits.

    numpy's own capsule cannot be passed on: its destructor complains of the name that the Python
    backend gives to a used one. So the tensor is taken out of it, and put into a new one.
    """
    capsule = np.array(bits).__dlpack__()
    address = _pointer(capsule)
    _ManagedTensor.from_address(address).code = _BFLOAT
    ctypes.pythonapi.PyCapsule_SetName(ctypes.py_object(capsule), ctypes.c_char_p(_USED))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    return new(ctypes.c_void_p(address), ctypes.c_char_p(_UNUSED), None)


def _pointer(capsule: Any) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype = ctypes.c_void_p
    address = get(ctypes.py_object(capsule), ctypes.c_char_p(_UNUSED))
    assert isinstance(address, int)
    return address
