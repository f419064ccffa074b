"""Canonical adapter files from users, which are checked as any other format.

Files that the staging worker wrote itself are not read here; a user's file may contain anything.
"""

from loraplex.adapters.canonical import CanonicalRow, RowKind
from loraplex.core.errors import InvalidAdapterError

# The tensors of each kind of row with their numbers of dimensions; a row has one of the sets.
_TENSORS: dict[RowKind, tuple[dict[str, tuple[int, ...]], ...]] = {
    RowKind.LORA: ({"a": (2,), "b": (2,)}, {"a": (2,), "b": (2,), "bias": (1,)}),
    RowKind.BIAS: ({"bias": (1,)},),
    RowKind.MAGNITUDE: ({"magnitude": (1,)}, {"factor": (1,)}),
    RowKind.FULL: ({"weight": (1, 2)}, {"base": (2,)}),
    RowKind.TOKENS: ({"indices": (1,), "weight": (2,)},),
}


def check_rows(rows: tuple[CanonicalRow, ...]) -> tuple[CanonicalRow, ...]:
    """Return the rows if each is different and its tensors belong together.

    Raises InvalidAdapterError.
    """
    if not rows:
        raise InvalidAdapterError("the adapter has no rows")
    places: dict[tuple[int | None, str, int | None], set[RowKind]] = {}
    for row in rows:
        where = f"the {row.kind} row of layer {row.layer}, module {row.module!r}"
        if row.expert is not None:
            where += f", expert {row.expert}"
        kinds = places.setdefault((row.layer, row.module, row.expert), set())
        if row.kind in kinds:
            raise InvalidAdapterError(f"{where} occurs twice")
        kinds.add(row.kind)
        _check_tensors(row, where)
    for (layer, module, _expert), kinds in places.items():
        if RowKind.MAGNITUDE in kinds and RowKind.LORA not in kinds:
            raise InvalidAdapterError(
                f"the magnitude row of layer {layer}, module {module!r} has no lora row"
            )
    return rows


def _check_tensors(row: CanonicalRow, where: str) -> None:
    understood = _TENSORS[row.kind]
    wanted = next((names for names in understood if set(names) == set(row.tensors)), None)
    if wanted is None:
        needed = " or ".join(" and ".join(names) for names in understood)
        raise InvalidAdapterError(
            f"{where} has the tensors {sorted(row.tensors)}; {needed} are needed"
        )
    for name, dimensions in wanted.items():
        tensor = row.tensors[name]
        is_typed = tensor.dtype == "I64" if name == "indices" else tensor.is_float
        if not is_typed or len(tensor.shape) not in dimensions or 0 in tensor.shape:
            kind = "I64" if name == "indices" else "float"
            raise InvalidAdapterError(
                f"{name} of {where} is {tensor.dtype} {list(tensor.shape)}; {kind} of "
                f"{' or '.join(map(str, dimensions))} dimensions is needed"
            )
        if name != "indices" and not tensor.is_finite():
            raise InvalidAdapterError(f"{name} of {where} holds NaN or infinity")
    _check_sizes(row, where)
    if not abs(row.scale) < float("inf"):
        raise InvalidAdapterError(f"the scale of {where} is {row.scale}")


def _check_sizes(row: CanonicalRow, where: str) -> None:
    """Check the shapes of one row's tensors against each other."""
    shapes = {name: list(tensor.shape) for name, tensor in row.tensors.items()}
    if row.kind is RowKind.LORA and shapes["a"][0] != shapes["b"][1]:
        raise InvalidAdapterError(
            f"a {shapes['a']} and b {shapes['b']} of {where} have different ranks"
        )
    if row.kind is RowKind.TOKENS:
        indices = row.tensors["indices"].integers().tolist()
        is_set = len(set(indices)) == len(indices) and min(indices) >= 0
        if len(indices) != shapes["weight"][0] or not is_set:
            raise InvalidAdapterError(
                f"{where} has {len(indices)} indices for {shapes['weight'][0]} rows; a different "
                "token id for each is needed"
            )
