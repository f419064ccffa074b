"""PEFT's LoRA folders: adapter_config.json beside adapter_model.safetensors (or .bin).

Turns their tensors into normal rows. Every tensor must be applied, or the load is refused with its
name. Does not know files: it is given a config and tensors.
"""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from loraplex.adapters.formats.peft_config import CONFIG_NAME, PeftConfig
from loraplex.adapters.normal import NormalRow, RowKind, sort_rows
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import FLOAT_TYPES, RawTensor
from loraplex.core.errors import (
    AdapterMismatchError,
    AdapterTooLargeError,
    InvalidAdapterError,
    UnsupportedFeatureError,
)

WEIGHTS_NAME = "adapter_model.safetensors"
TORCH_WEIGHTS_NAME = "adapter_model.bin"
WEIGHTS_NAMES = (WEIGHTS_NAME, TORCH_WEIGHTS_NAME)
"""The first that is there is read."""

# PEFT writes base_model.model.<path>.lora_A.weight; <path> begins with "model." for a causal LM.
# Other tools leave the prefix out or keep the adapter's name (lora_A.default.weight).
_KEY = re.compile(
    r"(?:base_model\.model\.)?"
    r"(?P<path>(?:model\.){0,2}layers\.(?P<layer>\d{1,6})\.(?:self_attn|mlp)\.(?P<module>\w+))"
    r"\.lora_(?P<matrix>[AB])(?:\.(?P<adapter>[^.]+))?\.weight"
)

# What a tensor that is not LoRA of a linear layer would need, by a fragment of its name.
_FOREIGN = {
    "lora_magnitude_vector": "DoRA's magnitude vectors",
    "lora_embedding": "LoRA of the token embedding",
    "embed_tokens": "a trained token embedding",
    "lm_head": "a trained output layer",
    "lora_B.bias": "a bias of lora_B",
    ".bias": "trained biases",
    "modules_to_save": "whole modules in place of the base model's",
    "trainable_tokens": "trained token embeddings",
    ".experts.": "LoRA of experts",
}

_MOST_TOLD = 20


@dataclasses.dataclass(slots=True)
class _Module:
    """The tensors of one module while they are collected."""

    path: str
    layer: int
    module: str
    tensors: dict[str, RawTensor] = dataclasses.field(default_factory=dict)
    names: dict[str, str] = dataclasses.field(default_factory=dict)


def normal_rows(config: PeftConfig, tensors: Mapping[str, RawTensor]) -> tuple[NormalRow, ...]:
    """The rows of a PEFT adapter.

    Raises InvalidAdapterError for a tensor that is broken, alone, doubled, or not what the config
    says; UnsupportedFeatureError for one that is more than LoRA of a linear layer.
    """
    foreign = [name for name in tensors if _KEY.fullmatch(name) is None]
    if foreign:
        raise _foreign(foreign[0], others=foreign[1:])
    modules: dict[tuple[int, str], _Module] = {}
    for name, tensor in tensors.items():
        _collect(modules, name, tensor)
    if not modules:
        raise InvalidAdapterError("the adapter has no tensors")
    return sort_rows(_row(config, module) for module in modules.values())


def check_against_base(rows: tuple[NormalRow, ...], shapes: BaseShapes, max_rank: int) -> None:
    """Raises AdapterMismatchError or AdapterTooLargeError, naming tensor, expected and found."""
    for row in rows:
        if row.layer is None or not 0 <= row.layer < shapes.num_layers:
            raise AdapterMismatchError(
                f"tensor {row.origin}.lora_A is of layer {row.layer}; "
                f"the base model has {shapes.num_layers} layers"
            )
        if row.module not in shapes.modules:
            raise AdapterMismatchError(
                f"tensor {row.origin}.lora_A is of module {row.module!r}; the base model can be "
                f"adapted in {', '.join(shapes.modules)}"
            )
        in_features, out_features = shapes.modules[row.module]
        a, b = row.tensors["a"], row.tensors["b"]
        rank = a.shape[0]
        for name, tensor, expected in (
            ("lora_A", a, (rank, in_features)),
            ("lora_B", b, (out_features, rank)),
        ):
            if tensor.shape != expected:
                raise AdapterMismatchError(
                    f"tensor {row.origin}.{name} has shape {list(tensor.shape)}; "
                    f"the base model needs {list(expected)}"
                )
        if rank > max_rank:
            raise AdapterTooLargeError(
                f"{row.origin} has rank {rank}; the server holds ranks up to {max_rank} "
                "(max_lora_rank)"
            )


def missing_modules(config: PeftConfig, rows: tuple[NormalRow, ...]) -> list[str]:
    """Entries of a target_modules list that no tensor answers: told as a warning."""
    if not isinstance(config.target_modules, list):
        return []
    paths = [row.origin for row in rows]
    return [
        name
        for name in config.target_modules
        if not any(path == name or path.endswith(f".{name}") for path in paths)
    ]


def _collect(modules: dict[tuple[int, str], _Module], name: str, tensor: RawTensor) -> None:
    match = _KEY.fullmatch(name)
    assert match is not None
    layer, module_name, matrix = int(match["layer"]), match["module"], match["matrix"]
    module = modules.setdefault((layer, module_name), _Module(match["path"], layer, module_name))
    if matrix in module.tensors:
        raise InvalidAdapterError(
            f"tensors {module.names[matrix]!r} and {name!r} are both lora_{matrix} of one module"
        )
    if not tensor.is_float:
        raise UnsupportedFeatureError(
            f"tensor {name!r} has type {tensor.dtype}; served are {', '.join(FLOAT_TYPES)}"
        )
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise InvalidAdapterError(
            f"tensor {name!r} has shape {list(tensor.shape)}; a matrix with at least one row and "
            "one column is needed"
        )
    if not tensor.is_finite():
        raise InvalidAdapterError(f"tensor {name!r} holds NaN or infinity")
    module.tensors[matrix], module.names[matrix] = tensor, name


def _foreign(name: str, others: list[str]) -> InvalidAdapterError | UnsupportedFeatureError:
    """The error about a tensor that cannot be applied; it names the others like it too."""
    told = ", ".join(repr(other) for other in others[:_MOST_TOLD])
    more = f" and {len(others) - _MOST_TOLD} more" if len(others) > _MOST_TOLD else ""
    also = f"; nor can be applied {told}{more}" if others else ""
    for fragment, needed in _FOREIGN.items():
        if fragment in name:
            return UnsupportedFeatureError(f"tensor {name!r} needs {needed}, not served yet{also}")
    return InvalidAdapterError(
        f"tensor {name!r} is not lora_A or lora_B of a decoder layer's linear layer; an adapter is "
        f"applied whole or not at all{also}"
    )


def _row(config: PeftConfig, module: _Module) -> NormalRow:
    if len(module.tensors) != 2:
        (name,) = module.names.values()
        missing = "B" if "A" in module.tensors else "A"
        raise InvalidAdapterError(f"tensor {name!r} has no lora_{missing} beside it")
    a, b = module.tensors["A"], module.tensors["B"]
    if a.shape[0] != b.shape[1]:
        raise InvalidAdapterError(
            f"tensors {module.names['A']!r} {list(a.shape)} and {module.names['B']!r} "
            f"{list(b.shape)} have different ranks: {a.shape[0]} and {b.shape[1]}"
        )
    if not config.targets(module.path):
        raise InvalidAdapterError(
            f"tensor {module.names['A']!r} is of a module that {CONFIG_NAME} does not target"
        )
    if config.rank(module.path) != a.shape[0]:
        raise InvalidAdapterError(
            f"tensor {module.names['A']!r} has rank {a.shape[0]}; {CONFIG_NAME} says "
            f"{config.rank(module.path)}"
        )
    return NormalRow(
        layer=module.layer,
        module=module.module,
        expert=None,
        kind=RowKind.LORA,
        scale=float(np.float32(config.scale(module.path))),
        tensors={"a": a, "b": b},
        origin=module.path,
    )
