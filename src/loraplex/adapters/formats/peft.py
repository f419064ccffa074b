"""LoRA folders of PEFT: adapter_config.json and adapter_model.safetensors (or .bin).

Converts their tensors into canonical rows. Every tensor must be applied, otherwise the load is
refused with the tensor's name. Files are read elsewhere.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from loraplex.adapters.canonical import CanonicalRow, RowKind, sort_rows
from loraplex.adapters.formats.peft_config import CONFIG_NAME, PeftConfig
from loraplex.adapters.formats.peft_experts import stacked_rows
from loraplex.adapters.formats.peft_module import PeftModule
from loraplex.adapters.formats.peft_names import TensorName, parse_name
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import FLOAT_TYPES, RawTensor
from loraplex.core.errors import InvalidAdapterError, UnsupportedFeatureError

WEIGHTS_NAME = "adapter_model.safetensors"
TORCH_WEIGHTS_NAME = "adapter_model.bin"
WEIGHTS_NAMES = (WEIGHTS_NAME, TORCH_WEIGHTS_NAME)
"""Names of the weights file; the first that exists is read."""

# The missing feature of a tensor that no row can represent, by a fragment of its name.
_FOREIGN = {
    **dict.fromkeys(
        (".project_in.", ".project_out."),
        "LoRA of a projection between the embedding and the layers (train with exclude_modules: "
        "project_in, project_out)",
    ),
    ".experts.base_layer.base_layer": "LoRA of a third parameter of experts",
    ".experts": "another layout of experts than those of docs/adapters.md",
    "token_adapter.base_layer.": "trained tokens of a module that is copied as well",
    "trainable_tokens": "more than the trained rows of a token embedding",
    "original_module": "a second copy of a module, in addition to the trained one",
    "lora_": "LoRA of a module that has none here",
    "modules_to_save": "a copy of a module that has no counterpart here",
    "vera_": "VeRA",
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "oft_": "OFT",
    "ia3_": "IA3",
}

_MAX_SHOWN = 20
_UNKNOWN = BaseShapes(0, {})

_Modules = dict[tuple[int | None, str, int | None], PeftModule]


def canonical_rows(
    config: PeftConfig, tensors: Mapping[str, RawTensor], shapes: BaseShapes = _UNKNOWN
) -> tuple[CanonicalRow, ...]:
    """Return the rows of a PEFT adapter. shapes: of the base; tensors of all experts need them.

    Raises InvalidAdapterError for a tensor that is broken, incomplete, duplicated or contradicts
    the config; UnsupportedFeatureError for one that no row can represent.
    """
    rows = module_rows(config, tensors, shapes)
    _check_complete(config, rows)
    return rows


def module_rows(
    config: PeftConfig, tensors: Mapping[str, RawTensor], shapes: BaseShapes
) -> tuple[CanonicalRow, ...]:
    """Return the rows of some modules of a PEFT adapter. Raises as canonical_rows."""
    named: dict[str, TensorName] = {}
    stacked: dict[str, TensorName] = {}
    foreign = []
    for name in tensors:
        parsed = parse_name(name)
        if parsed is None:
            foreign.append(name)
            continue
        (stacked if parsed.is_stacked else named)[name] = parsed
    if foreign:
        raise foreign_error(foreign[0], foreign[1:])
    for name, tensor in tensors.items():
        _check_tensor(name, tensor)
    modules: _Modules = {}
    for name, parsed in named.items():
        place = (parsed.layer, parsed.module, parsed.expert)
        if place not in modules:
            modules[place] = PeftModule(parsed.path, *place)
        modules[place].add(parsed.slot, name, tensors[name])
    if not tensors:
        raise InvalidAdapterError("the adapter has no tensors")
    unnumbered = _without_shared_factors(stacked, tensors, modules)
    rows = sort_rows(
        itertools.chain(
            (row for module in modules.values() for row in module.rows(config)),
            stacked_rows(config, unnumbered, tensors, shapes),
        )
    )
    _check_once(rows)
    return tuple(row for row in rows if row.expert is None or not _is_silent(row))


def _without_shared_factors(
    stacked: Mapping[str, TensorName], tensors: Mapping[str, RawTensor], modules: _Modules
) -> Mapping[str, TensorName]:
    """Add factors of all experts to the experts' modules; return the names of the other tensors.

    Megatron-Bridge saves such a factor [1, rows, columns] under a name without a number, and its
    partners under the numbers of the experts.
    """
    experts: dict[tuple[int | None, str], list[PeftModule]] = defaultdict(list)
    for (layer, module, expert), of_expert in modules.items():
        if expert is not None:
            experts[layer, module].append(of_expert)
    slots = Counter((parsed.layer, parsed.module) for parsed in stacked.values())
    rest = {}
    for name, parsed in stacked.items():
        place, tensor = (parsed.layer, parsed.module), tensors[name]
        if place not in experts or slots[place] > 1 or tensor.shape[:-2] != (1,):
            rest[name] = parsed
            continue
        one = RawTensor(tensor.dtype, tensor.shape[1:], tensor.data)
        for of_expert in experts[place]:
            of_expert.add(parsed.slot, name, one)
    return rest


def _check_once(rows: Sequence[CanonicalRow]) -> None:
    """Refuse an expert's LoRA that is there in two layouts."""
    for one, other in itertools.pairwise(rows):
        places = [(row.layer, row.module, row.expert, row.kind) for row in (one, other)]
        if one.expert is not None and places[0] == places[1]:
            raise InvalidAdapterError(
                f"{one.origin} and {other.origin} are both of expert {one.expert} of {one.module} "
                f"of layer {one.layer}"
            )


def _is_silent(row: CanonicalRow) -> bool:
    """Whether it is LoRA that was never trained, such as that of experts that no token chose."""
    return row.kind is RowKind.LORA and "bias" not in row.tensors and row.tensors["b"].is_zero()


def _check_complete(config: PeftConfig, rows: Sequence[CanonicalRow]) -> None:
    """Refuse an adapter without tensors that its config requires: PEFT cannot load it either."""
    saved = [row.origin for row in rows if row.kind is RowKind.FULL]
    for name in config.modules_to_save:
        if not any(path.endswith(name) for path in saved):
            raise InvalidAdapterError(
                f"{CONFIG_NAME} names {name!r} in modules_to_save, but there is no tensor of it"
            )
    trained = {row.module for row in rows if row.kind is RowKind.TOKENS}
    for module in config.modules_with_tokens:
        if module not in trained:
            raise InvalidAdapterError(
                f"{CONFIG_NAME} names tokens of {module} in trainable_token_indices, but there is "
                "no tensor trainable_tokens_delta of it"
            )


def _check_tensor(name: str, tensor: RawTensor) -> None:
    if not tensor.is_float:
        raise UnsupportedFeatureError(
            f"tensor {name!r} has type {tensor.dtype}; supported: {', '.join(FLOAT_TYPES)}"
        )
    if not tensor.is_finite():
        raise InvalidAdapterError(f"tensor {name!r} holds NaN or infinity")


def foreign_error(
    name: str, others: Sequence[str] = ()
) -> InvalidAdapterError | UnsupportedFeatureError:
    """Return the error about a tensor that cannot be applied, with similar ones."""
    listed = ", ".join(repr(other) for other in others[:_MAX_SHOWN])
    more = f" and {len(others) - _MAX_SHOWN} more" if len(others) > _MAX_SHOWN else ""
    also = f"; nor can be applied {listed}{more}" if others else ""
    for fragment, needed in _FOREIGN.items():
        if fragment in name:
            return UnsupportedFeatureError(
                f"tensor {name!r} needs {needed}, which is not served{also}"
            )
    return InvalidAdapterError(
        f"tensor {name!r} is of no module that an adapter may change; an adapter is applied whole "
        f"or not at all{also}"
    )
