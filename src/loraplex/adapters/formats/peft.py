"""PEFT's LoRA folders: adapter_config.json beside adapter_model.safetensors (or .bin).

Turns their tensors into canonical rows. Every tensor must be applied, or the load is refused with
the tensor's name. Does not know files: it is given a config and tensors.
"""

from collections.abc import Iterable, Mapping, Sequence

from loraplex.adapters.canonical import CanonicalRow, RowKind, sort_rows
from loraplex.adapters.formats.peft_config import CONFIG_NAME, PeftConfig
from loraplex.adapters.formats.peft_module import PeftModule
from loraplex.adapters.formats.peft_names import parse_name
from loraplex.adapters.tensor_file import FLOAT_TYPES, RawTensor
from loraplex.core.errors import InvalidAdapterError, UnsupportedFeatureError

WEIGHTS_NAME = "adapter_model.safetensors"
TORCH_WEIGHTS_NAME = "adapter_model.bin"
WEIGHTS_NAMES = (WEIGHTS_NAME, TORCH_WEIGHTS_NAME)
"""The first that is there is read."""

# What a tensor that has no place in a row would need, by a fragment of its name.
_FOREIGN = {
    ".experts": "LoRA of experts",
    "trainable_tokens": "more than the trained rows of a token embedding",
    "original_module": "a second copy of a module, beside the trained one",
    "lora_": "LoRA of a module that has none here",
    "modules_to_save": "a copy of a module that has no counterpart here",
    "vera_": "VeRA",
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "oft_": "OFT",
    "ia3_": "IA3",
}

_MOST_TOLD = 20


def canonical_rows(
    config: PeftConfig, tensors: Mapping[str, RawTensor]
) -> tuple[CanonicalRow, ...]:
    """The rows of a PEFT adapter.

    Raises InvalidAdapterError for a tensor that is broken, alone, doubled, or not what the config
    says; UnsupportedFeatureError for one that has no place in a row.
    """
    named = {name: parse_name(name) for name in tensors}
    foreign = [name for name, parsed in named.items() if parsed is None]
    if foreign:
        raise _foreign(foreign[0], others=foreign[1:])
    modules: dict[tuple[int | None, str], PeftModule] = {}
    for name, parsed in named.items():
        assert parsed is not None
        _check_tensor(name, tensors[name])
        place = (parsed.layer, parsed.module)
        module = modules.setdefault(place, PeftModule(parsed.path, *place))
        module.add(parsed.slot, name, tensors[name])
    if not modules:
        raise InvalidAdapterError("the adapter has no tensors")
    rows = sort_rows(row for module in modules.values() for row in module.rows(config))
    _check_complete(config, rows)
    return rows


def missing_modules(config: PeftConfig, rows: Iterable[CanonicalRow]) -> list[str]:
    """Entries of a target_modules list that no tensor answers, and that are not excluded again:
    told as a warning.
    """
    if not isinstance(config.target_modules, list):
        return []
    paths = [row.origin for row in rows if row.kind is RowKind.LORA]
    missing = [name for name in config.target_modules if not _answers(paths, name)]
    return [name for name in missing if not any(map(config.excludes, _paths(name)))]


def _check_complete(config: PeftConfig, rows: Sequence[CanonicalRow]) -> None:
    """PEFT cannot load an adapter that lacks what its config says was trained and saved."""
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
    """Of modules that an entry of target_modules may mean, for patterns to be tried on."""
    return (name, *(f"model.layers.0.{parent}.{name}" for parent in ("self_attn", "mlp")))


def _answers(paths: Iterable[str], name: str) -> bool:
    return any(path == name or path.endswith(f".{name}") for path in paths)


def _check_tensor(name: str, tensor: RawTensor) -> None:
    if not tensor.is_float:
        raise UnsupportedFeatureError(
            f"tensor {name!r} has type {tensor.dtype}; served are {', '.join(FLOAT_TYPES)}"
        )
    if not tensor.is_finite():
        raise InvalidAdapterError(f"tensor {name!r} holds NaN or infinity")


def _foreign(name: str, others: list[str]) -> InvalidAdapterError | UnsupportedFeatureError:
    """The error about a tensor that cannot be applied; it names the others like it too."""
    told = ", ".join(repr(other) for other in others[:_MOST_TOLD])
    more = f" and {len(others) - _MOST_TOLD} more" if len(others) > _MOST_TOLD else ""
    also = f"; nor can be applied {told}{more}" if others else ""
    for fragment, needed in _FOREIGN.items():
        if fragment in name:
            return UnsupportedFeatureError(f"tensor {name!r} needs {needed}, not served{also}")
    return InvalidAdapterError(
        f"tensor {name!r} is of no module that an adapter may change; an adapter is applied whole "
        f"or not at all{also}"
    )
