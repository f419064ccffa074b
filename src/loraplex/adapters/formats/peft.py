"""LoRA folders of PEFT: adapter_config.json and adapter_model.safetensors (or .bin).

Converts their tensors into canonical rows. Every tensor must be applied, otherwise the load is
refused with the tensor's name. Files are read elsewhere.
"""

from collections.abc import Iterable, Mapping, Sequence

from loraplex.adapters.canonical import CanonicalRow, RowKind, sort_rows
from loraplex.adapters.formats.peft_config import CONFIG_NAME, PeftConfig
from loraplex.adapters.formats.peft_module import PeftModule
from loraplex.adapters.formats.peft_names import parse_name
from loraplex.adapters.fused_modules import other_layout
from loraplex.adapters.tensor_file import FLOAT_TYPES, RawTensor
from loraplex.core.errors import InvalidAdapterError, UnsupportedFeatureError

WEIGHTS_NAME = "adapter_model.safetensors"
TORCH_WEIGHTS_NAME = "adapter_model.bin"
WEIGHTS_NAMES = (WEIGHTS_NAME, TORCH_WEIGHTS_NAME)
"""Names of the weights file; the first that exists is read."""

# The missing feature of a tensor that no row can represent, by a fragment of its name.
_FOREIGN = {
    ".experts": "another layout of experts than those of docs/adapters.md",
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


def canonical_rows(
    config: PeftConfig, tensors: Mapping[str, RawTensor]
) -> tuple[CanonicalRow, ...]:
    """Return the rows of a PEFT adapter.

    Raises InvalidAdapterError for a tensor that is broken, incomplete, duplicated or contradicts
    the config; UnsupportedFeatureError for one that no row can represent.
    """
    named = {name: parse_name(name) for name in tensors}
    foreign = [name for name, parsed in named.items() if parsed is None]
    if foreign:
        raise _foreign(foreign[0], others=foreign[1:])
    modules: dict[tuple[int | None, str, int | None], PeftModule] = {}
    for name, parsed in named.items():
        assert parsed is not None
        _check_tensor(name, tensors[name])
        place = (parsed.layer, parsed.module, parsed.expert)
        if place not in modules:
            modules[place] = PeftModule(parsed.path, *place)
        modules[place].add(parsed.slot, name, tensors[name])
    if not modules:
        raise InvalidAdapterError("the adapter has no tensors")
    rows = sort_rows(row for module in modules.values() for row in module.rows(config))
    _check_complete(config, rows)
    return rows


def target_warnings(config: PeftConfig, rows: Sequence[CanonicalRow], num_layers: int) -> list[str]:
    """Return what target_modules names and the tensors lack. num_layers: of the base model."""
    warnings = []
    if config.target_modules is None:
        warnings.append(
            f"{CONFIG_NAME} has no target_modules: the modules of the tensors are applied"
        )
    missing = _missing_modules(config, rows)
    if missing:
        names = ", ".join(missing)
        warnings.append(f"target_modules names {names}, but it has no such tensors")
    for module, layers in _missing_layers(config, rows, num_layers).items():
        listed = ", ".join(map(str, layers[:_MAX_SHOWN]))
        more = f" and {len(layers) - _MAX_SHOWN} more" if len(layers) > _MAX_SHOWN else ""
        warnings.append(
            f"{module} is targeted, but there is neither lora_A nor lora_B of it in layers "
            f"{listed}{more}: there the base model's own weights are used"
        )
    return warnings


def _missing_layers(
    config: PeftConfig, rows: Iterable[CanonicalRow], num_layers: int
) -> Mapping[str, list[int]]:
    """Return the layers, by module, that the config targets and that have no LoRA of it."""
    paths: dict[str, str] = {}
    present: dict[str, set[int]] = {}
    for row in rows:
        if row.kind is RowKind.LORA and row.layer is not None:
            paths.setdefault(row.module, row.origin.replace(f".{row.layer}.", ".{}.", 1))
            present.setdefault(row.module, set()).add(row.layer)
    missing = {
        module: [
            layer
            for layer in range(num_layers)
            if layer not in present[module] and config.targets(path.replace("{}", str(layer), 1))
        ]
        for module, path in paths.items()
    }
    return {module: layers for module, layers in missing.items() if layers}


def _missing_modules(config: PeftConfig, rows: Iterable[CanonicalRow]) -> list[str]:
    """Return entries of target_modules that match no tensor and no exclusion."""
    if not isinstance(config.target_modules, list):
        return []
    paths = [
        row.origin.removesuffix(row.module) + name
        for row in rows
        if row.kind is RowKind.LORA
        for name in (row.module, *other_layout(row.module))
    ]
    missing = [name for name in config.target_modules if not _matches(paths, name)]
    return [name for name in missing if not any(map(config.excludes, _paths(name)))]


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


def _paths(name: str) -> tuple[str, ...]:
    """Return paths of modules that an entry of target_modules may mean, to test patterns."""
    return (name, *(f"model.layers.0.{parent}.{name}" for parent in ("self_attn", "mlp")))


def _matches(paths: Iterable[str], name: str) -> bool:
    return any(path == name or path.endswith(f".{name}") for path in paths)


def _check_tensor(name: str, tensor: RawTensor) -> None:
    if not tensor.is_float:
        raise UnsupportedFeatureError(
            f"tensor {name!r} has type {tensor.dtype}; served are {', '.join(FLOAT_TYPES)}"
        )
    if not tensor.is_finite():
        raise InvalidAdapterError(f"tensor {name!r} holds NaN or infinity")


def _foreign(name: str, others: list[str]) -> InvalidAdapterError | UnsupportedFeatureError:
    """Return the error about a tensor that cannot be applied, with similar ones."""
    listed = ", ".join(repr(other) for other in others[:_MAX_SHOWN])
    more = f" and {len(others) - _MAX_SHOWN} more" if len(others) > _MAX_SHOWN else ""
    also = f"; nor can be applied {listed}{more}" if others else ""
    for fragment, needed in _FOREIGN.items():
        if fragment in name:
            return UnsupportedFeatureError(f"tensor {name!r} needs {needed}, not served{also}")
    return InvalidAdapterError(
        f"tensor {name!r} is of no module that an adapter may change; an adapter is applied whole "
        f"or not at all{also}"
    )
