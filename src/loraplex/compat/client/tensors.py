"""Tensors of requests: from values, from a program's flags, and for tritonclient."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton_grpc
from tritonclient.utils import np_to_triton_dtype

from loraplex.compat.flags import Flags

Array = npt.NDArray[Any]

CACHE_AND_TIMES = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
)
"""Outputs that return_perf_metrics adds in every model that generates text."""

_OUTPUTS_OF_FLAGS = {
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
    "return_context_logits": ("context_logits",),
    "return_generation_logits": ("generation_logits",),
    "return_perf_metrics": CACHE_AND_TIMES,
}
"""Outputs that a flag adds, by the flag and its tensor."""

BFLOAT16_BITS = np.dtype("V2")
"""NumPy's type for elements of two bytes without a meaning: it has no bfloat16."""


def inputs(arrays: Mapping[str, Array]) -> list[Any]:
    """Return the arrays as tritonclient's inputs."""
    return [_input(name, array) for name, array in arrays.items()]


def row(values: Sequence[Any], dtype: Any = np.int32) -> Array:
    """Return [1, len(values)]: one element of a batch."""
    return np.array([values], dtype=dtype)


def texts(rows: Sequence[Sequence[str]]) -> Array:
    """Return BYTES of the shape [rows, words]."""
    array = np.empty((len(rows), len(rows[0])), dtype=object)
    for at, words in enumerate(rows):
        array[at, :] = [word.encode() for word in words]
    return array


def flag_tensors(options: Flags, num_rows: int = 1) -> dict[str, Array]:
    """Return the tensors of the flags that have one, equal for each row of the batch.

    A flag without a value (None, an empty list, a switch that is off) sends none.
    """
    tensors = {}
    for flag in options.rows:
        value = options.get(flag.key)
        if not flag.tensor or value is None or value is False or value in ((), []):
            continue
        dtype, _, name = flag.tensor.partition(" ")
        values = value if isinstance(value, list | tuple) else [value]
        rows = [values] * num_rows
        tensors[name or flag.key] = texts(rows) if dtype == "object" else np.array(rows, dtype)
    return tensors


def requested_names(options: Flags) -> list[str]:
    """Return the names of the outputs that the flags of a program add."""
    groups = [names for flag, names in _OUTPUTS_OF_FLAGS.items() if options.get(flag)]
    return [name for names in groups for name in names]


def requested_outputs(names: Sequence[str]) -> list[Any] | None:
    """Return tritonclient's objects for output names; None requests all outputs."""
    return [triton_grpc.InferRequestedOutput(name) for name in names] or None


def bfloat16_bits(values: Array) -> Array:
    """Round to bfloat16, to nearest with ties to even; infinities and NaN stay what they are."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = np.where(np.isnan(values), (bits >> 16) | 0x40, rounded)
    return quiet.astype(np.uint16).view(BFLOAT16_BITS)


def decoded(output: Array) -> list[str]:
    """Return the elements of BYTES as texts."""
    return [bytes(text).decode(errors="replace") for text in output.flat]


def text_of(output: Array) -> str:
    """Return the first element of BYTES as text."""
    return decoded(output)[0]


def _input(name: str, array: Array) -> Any:
    # Versions of tritonclient disagree about the array type for BF16, so the tensor is made as
    # FP16, which has as many bytes, and renamed in its protobuf message.
    is_bfloat16 = array.dtype == BFLOAT16_BITS
    content = np.ascontiguousarray(array).view(np.float16) if is_bfloat16 else array
    tensor = triton_grpc.InferInput(name, content.shape, np_to_triton_dtype(content.dtype))
    tensor.set_data_from_numpy(content)
    if is_bfloat16:
        tensor._input.datatype = "BF16"
    return tensor
