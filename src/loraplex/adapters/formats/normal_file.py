"""Our own normal file as an adapter that a user brings: checked as any other.

What the staging worker wrote itself is not read here; what a user gives may say anything.
"""

from loraplex.adapters.normal import NormalRow, RowKind
from loraplex.core.errors import InvalidAdapterError, UnsupportedFeatureError


def check_rows(rows: tuple[NormalRow, ...]) -> tuple[NormalRow, ...]:
    """The rows, if each is LoRA of another linear layer and its matrices belong together.

    Raises InvalidAdapterError, or UnsupportedFeatureError for other kinds of rows.
    """
    if not rows:
        raise InvalidAdapterError("the adapter has no rows")
    places = set()
    for row in rows:
        where = f"the row of layer {row.layer}, module {row.module!r}"
        if row.kind is not RowKind.LORA or row.layer is None or row.expert is not None:
            raise UnsupportedFeatureError(
                f"{where} is of kind {row.kind}, expert {row.expert}: only LoRA of a decoder "
                "layer's linear layers is served yet"
            )
        if (row.layer, row.module) in places:
            raise InvalidAdapterError(f"{where} is there twice")
        places.add((row.layer, row.module))
        _check_matrices(row, where)
    return rows


def _check_matrices(row: NormalRow, where: str) -> None:
    if set(row.tensors) != {"a", "b"}:
        raise InvalidAdapterError(
            f"{where} has the tensors {sorted(row.tensors)}; a and b are needed"
        )
    a, b = row.tensors["a"], row.tensors["b"]
    for name, tensor in (("a", a), ("b", b)):
        if not tensor.is_float or len(tensor.shape) != 2 or 0 in tensor.shape:
            raise InvalidAdapterError(
                f"{name} of {where} is {tensor.dtype} {list(tensor.shape)}; a matrix of floats is "
                "needed"
            )
        if not tensor.is_finite():
            raise InvalidAdapterError(f"{name} of {where} holds NaN or infinity")
    if a.shape[0] != b.shape[1]:
        raise InvalidAdapterError(
            f"a {list(a.shape)} and b {list(b.shape)} of {where} have different ranks"
        )
    if not abs(row.scale) < float("inf"):
        raise InvalidAdapterError(f"the scale of {where} is {row.scale}")
