"""Account of every tensor of an adapter: applied, left out, or refused, and why.

A load is refused at the first tensor that cannot be applied. Here the tensors of each module go
through the same steps apart from the others, so that what is wrong with one hides nothing else.
"""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from loraplex.adapters.base_check import check_cast, check_magnitudes, check_shapes
from loraplex.adapters.base_copies import without_base_copies
from loraplex.adapters.canonical import CanonicalRow
from loraplex.adapters.formats import peft, trtllm
from loraplex.adapters.formats.gguf_lora import B, GgufLora
from loraplex.adapters.formats.inputs import (
    GgufLoraFile,
    LoraFile,
    PairFolder,
    PeftFolder,
    open_input,
    read_fitting_rows,
)
from loraplex.adapters.formats.modules import LORA_MODULES
from loraplex.adapters.formats.peft_names import (
    PeftSlot,
    TensorName,
    is_of_other_tower,
    is_unread,
    parse_name,
)
from loraplex.adapters.fused_modules import fit_modules
from loraplex.adapters.shapes import other_layout
from loraplex.adapters.staged import Examination, ExaminedTensor, StageRequest
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.errors import LoraplexError

_MAX_TENSORS: Final = 10_000
_MAX_CHARS: Final = 1000
"""Characters of a name or reason."""
_OTHER_TOWER: Final = (
    "left out: it is of images, sound or draft tokens, and no text passes through it"
)
_UNREAD: Final = "left out: its layer reads the keys and values of another one"
_BASE_COPY: Final = "left out: a copy of the base model's own weight, with the same values"
_COPIES: Final = (PeftSlot.WEIGHT, PeftSlot.BIAS, PeftSlot.BASE_WEIGHT, PeftSlot.BASE_BIAS)
_FACTORS: Final = {PeftSlot.A: 0, PeftSlot.B: 1}
"""Axis of the rank."""

_Tensors = Mapping[str, RawTensor]
_Place = tuple[int | None, str, int | None]


def examine(request: StageRequest) -> Examination:
    """Examine the adapter of a request. Raises as `stage`, if its tensors cannot be listed."""
    source = open_input(request.path, request.limits)
    if isinstance(source, PeftFolder):
        tensors = list(_of_peft(request, source))
    elif isinstance(source, GgufLoraFile):
        tensors = list(_of_gguf(request, source.lora))
    elif isinstance(source, PairFolder | LoraFile) and (pair := source.read_pair(request.limits)):
        tensors = list(_of_pair(request, *pair))
    else:
        rows = read_fitting_rows(source, request.shapes, request.limits)
        tensors = [tensor for row in rows for tensor in _of_row(row)]
    tensors.sort(key=lambda tensor: not tensor.refused)
    return Examination(
        format=source.format,
        trained_on=source.trained_on,
        tensors=tuple(tensors[:_MAX_TENSORS]),
        num_tensors=len(tensors),
        num_refused=sum(tensor.refused for tensor in tensors),
    )


def _of_peft(request: StageRequest, source: PeftFolder) -> Iterator[ExaminedTensor]:
    tensors = source.read_tensors(request.limits)
    parsed = {name: parse_name(name) for name in tensors}
    refused = dict(_refusals(request, source, tensors, parsed))
    left_out = {name: _OTHER_TOWER for name in tensors if is_of_other_tower(name)}
    left_out |= {name: _UNREAD for name in tensors if is_unread(name, request.shapes)}
    left_out |= dict.fromkeys(_base_copies(request, source, tensors, parsed), _BASE_COPY)
    for name, tensor in tensors.items():
        place = None if is_of_other_tower(name) else parsed[name]
        reason = refused.get(name) or left_out.get(name)
        axis = None if place is None else _FACTORS.get(place.slot)
        yield ExaminedTensor(
            name=name[:_MAX_CHARS],
            shape=tensor.shape,
            dtype=tensor.dtype,
            module=None if place is None else place.module,
            layer=None if place is None else place.layer,
            expert=None if place is None else place.expert,
            rank=tensor.shape[axis] if axis is not None and len(tensor.shape) == 2 else None,
            applied=reason is None,
            refused=name in refused,
            reason=None if reason is None else reason[:_MAX_CHARS],
        )


def _of_pair(
    request: StageRequest, weights: RawTensor, config: RawTensor
) -> Iterator[ExaminedTensor]:
    limits = request.limits
    rows = trtllm.single_rows(weights, config, request.shapes, limits.max_ranks)
    for index, (columns, convert) in enumerate(rows):
        module_id, layer, rank = columns[:3]
        is_known = 0 <= module_id < len(LORA_MODULES)
        reason = _problem(request, convert)
        yield ExaminedTensor(
            name=f"lora_weights[{index}]",
            shape=weights.shape[-1:],
            dtype=weights.dtype,
            module=LORA_MODULES[module_id].name if is_known else None,
            layer=layer,
            expert=None,
            rank=rank,
            applied=reason is None,
            refused=reason is not None,
            reason=None if reason is None else reason[:_MAX_CHARS],
        )


def _of_gguf(request: StageRequest, lora: GgufLora) -> Iterator[ExaminedTensor]:
    for weight, names in lora.factors.items():
        reason = _problem(request, functools.partial(_gguf_rows, lora, weight, request))
        place = None
        with contextlib.suppress(LoraplexError):
            place = lora.place(weight)
        b = lora.file.tensors.get(weight + B)
        for name in names:
            described = lora.file.tensors[name]
            yield ExaminedTensor(
                name=name[:_MAX_CHARS],
                shape=described.shape,
                dtype=described.kind.name,
                module=None if place is None else place.module,
                layer=None if place is None else place.layer,
                expert=None,
                rank=b.shape[-1] if b is not None and len(b.shape) == 2 else None,
                applied=reason is None,
                refused=reason is not None,
                reason=None if reason is None else reason[:_MAX_CHARS],
            )


def _gguf_rows(lora: GgufLora, weight: str, request: StageRequest) -> tuple[CanonicalRow, ...]:
    return (lora.row(weight, request.shapes),)


def _of_row(row: CanonicalRow) -> Iterator[ExaminedTensor]:
    """Yield the tensors of a canonical adapter file, which names the modules that they change."""
    for slot, tensor in row.tensors.items():
        yield ExaminedTensor(
            name=f"{row.origin}.{slot}",
            shape=tensor.shape,
            dtype=tensor.dtype,
            module=row.module,
            layer=row.layer,
            expert=row.expert,
            rank=row.tensors["a"].shape[0] if slot in ("a", "b") else None,
        )


def _refusals(
    request: StageRequest,
    source: PeftFolder,
    tensors: _Tensors,
    parsed: Mapping[str, TensorName | None],
) -> Iterator[tuple[str, str]]:
    """Yield each tensor that is refused, with its reason."""
    groups: dict[tuple[int | None, str], dict[str, TensorName]] = defaultdict(dict)
    for name, place in parsed.items():
        if is_of_other_tower(name) or is_unread(name, request.shapes):
            continue
        if place is None:
            yield name, peft.foreign_error(name).message
        else:
            groups[place.layer, _family(place)][name] = place
    for group in groups.values():
        reason = _problem_of(request, source, tensors, group)
        if reason is None:
            continue
        single = dict(_of_single_modules(request, source, tensors, group))
        for name in group:
            if not single or name in single:
                yield name, single.get(name, reason)


def _base_copies(
    request: StageRequest,
    source: PeftFolder,
    tensors: _Tensors,
    parsed: Mapping[str, TensorName | None],
) -> Iterator[str]:
    """Yield the tensors that a load leaves out because they are the base's own weights."""
    for name, place in parsed.items():
        if place is None or place.layer is not None or place.slot not in _COPIES:
            continue
        with contextlib.suppress(LoraplexError):
            rows = peft.module_rows(source.config, {name: tensors[name]}, request.shapes)
            if without_base_copies(rows, request.base_folder, request.shapes)[1]:
                yield name


def _family(place: TensorName) -> str:
    """Return a name that modules share which one layer of the base may hold together."""
    if place.layer is None:
        return ""
    if place.module.startswith("experts"):
        return "experts"
    return next(iter(sorted((place.module, *other_layout(place.module)), key=len, reverse=True)))


def _of_single_modules(
    request: StageRequest, source: PeftFolder, tensors: _Tensors, group: Mapping[str, TensorName]
) -> Iterator[tuple[str, str]]:
    """Yield the tensors of the group whose module is refused by itself, with its reason."""
    modules: dict[_Place, list[str]] = defaultdict(list)
    for name, place in group.items():
        modules[place.layer, place.module, place.expert].append(name)
    if len(modules) == 1 or any(place.is_stacked for place in group.values()):
        return
    for names in modules.values():
        reason = _problem_of(request, source, tensors, names)
        if reason is not None:
            yield from ((name, reason) for name in names)


def _problem_of(
    request: StageRequest, source: PeftFolder, tensors: _Tensors, names: Iterable[str]
) -> str | None:
    """Return why the tensors of these names cannot be applied, without regard to others."""
    of_names = {name: tensors[name] for name in names}
    return _problem(request, lambda: peft.module_rows(source.config, of_names, request.shapes))


def _problem(request: StageRequest, convert: Callable[[], Iterable[CanonicalRow]]) -> str | None:
    """Return why rows cannot be applied; convert: returns them, or raises."""
    try:
        rows = fit_modules(convert(), request.shapes)
        rows, _ = without_base_copies(rows, request.base_folder, request.shapes)
        check_shapes(rows, request.shapes, request.limits.max_ranks)
        if request.pool_dtype:
            check_cast(rows, request.pool_dtype)
            check_magnitudes(rows, request.pool_dtype)
    except LoraplexError as error:
        return error.message
    return None
