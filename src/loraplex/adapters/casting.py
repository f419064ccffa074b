"""What becomes of an adapter's values in the engine's pool: another type, and whether they fit."""

from collections.abc import Iterable

from loraplex.adapters.canonical import CanonicalRow
from loraplex.core.errors import InvalidAdapterError

POOL_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""By torch's names: safetensors' own."""

# The smallest value that rounds to infinity: half a step above the largest finite one.
_TOO_LARGE = {"F16": 65520.0, "F32": 2.0**128 - 2.0**103, "BF16": 2.0**128 - 2.0**119}
_WIDER = {"F16": ("F16",), "BF16": ("BF16",), "F32": ("F32", "F16", "BF16")}


def check_cast(rows: Iterable[CanonicalRow], pool_dtype: str) -> list[str]:
    """A warning if tensors are rounded to the pool's type.

    Raises InvalidAdapterError, with the tensor's name, if a value is too large for it.
    """
    pool = POOL_TYPES[pool_dtype]
    rounded: dict[str, int] = {}
    for row in rows:
        for name, tensor in row.tensors.items():
            if not tensor.is_float or tensor.dtype in _WIDER[pool]:
                continue
            rounded[tensor.dtype] = rounded.get(tensor.dtype, 0) + 1
            largest = tensor.largest_magnitude()
            if largest >= _TOO_LARGE[pool]:
                raise InvalidAdapterError(
                    f"{name} of {row.origin} ({tensor.dtype}) has values up to {largest:g}: too "
                    f"large for the {pool_dtype} that this server computes in"
                )
    return [
        f"{count} tensors are {dtype}: they are rounded to the {pool_dtype} that this server "
        "computes in"
        for dtype, count in sorted(rounded.items())
    ]
