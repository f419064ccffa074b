"""The classification extension: of an output the highest values, as text.

An element of the output is `value:index`, the index within one element of the batch. Outputs of
our models have no labels, which would follow as `:label`.
"""

import math

import numpy as np

from loraplex.core.errors import InvalidTensorError
from loraplex.frontends.kserve.tensors import Tensor, string_tensor


def classified(tensor: Tensor, num_classes: int) -> Tensor:
    """BYTES [batch, at most num_classes], highest first.

    The first of several dimensions is the batch; of a tensor with one it is [num_classes].
    Raises InvalidTensorError for a type whose values have no order, and for BF16.
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
