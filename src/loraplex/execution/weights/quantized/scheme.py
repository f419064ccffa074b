"""What a format's tensors are called, and the function that joins those of one layer."""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from loraplex.core.errors import ConfigError
from loraplex.execution.weights.quantized.stored_weight import StoredWeight
from loraplex.models.config_fields import ConfigFields

Tensors = Mapping[str, torch.Tensor]
"""Tensors of one layer by the ends of their names."""
Decode = Callable[[str, Tensors], StoredWeight]
"""Joins the tensors of the layer with this name. Raises ConfigError."""


class Scheme(NamedTuple):
    markers: tuple[str, ...]
    """Ends of names that only a quantised layer has."""
    parts: tuple[str, ...]
    """Ends of the names of all its tensors, markers too."""
    decode: Decode
    ignored: tuple[str, ...] = ()
    """Ends of names that concern activations and the KV cache, which are not rounded."""
    weight: str = ".weight"
    """End of the name of what the tensors stand for."""
    is_transposed: bool = False
    """Whether that name means a weight [..., in, out]."""


_SKIP_LISTS = (
    "modules_to_not_convert",
    "ignored_layers",
    "llm_int8_skip_modules",
    "exclude_modules",
    "ignore",
)
"""Fields that list layers which are not quantised; each program has its own."""


def refuse_skipped(fields: ConfigFields, modules: Sequence[str]) -> None:
    """Raise ConfigError if a module is quantised, but a list of the configuration excludes it.

    An entry is a name, its begin or its end, or a pattern with `*`.
    """
    for skip_list in _SKIP_LISTS:
        for entry in fields.texts(skip_list):
            found = next((module for module in modules if _is_listed(entry, module)), None)
            if found is not None:
                raise ConfigError(
                    f"{found} is quantised, but {fields.source} lists {entry!r} under {skip_list}"
                )


def _is_listed(entry: str, module: str) -> bool:
    if "*" in entry:
        return fnmatch.fnmatchcase(module, entry)
    return f".{entry.strip('.')}." in f".{module}."


def require(name: str, tensors: Tensors, *parts: str) -> list[torch.Tensor]:
    """Return these tensors. Raises ConfigError if one is missing."""
    for part in parts:
        if part not in tensors:
            raise ConfigError(f"{name} is quantised but has no {part.lstrip('._')}")
    return [tensors[part] for part in parts]


def require_type(
    name: str, part: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], num_axes: int
) -> None:
    """Raise ConfigError for a tensor of another type or number of axes."""
    if tensor.dtype not in dtypes or tensor.dim() != num_axes:
        raise ConfigError(
            f"{name}{part} is {tensor.dtype} of shape {list(tensor.shape)}; "
            f"{' or '.join(map(str, dtypes))} with {num_axes} axes is meant"
        )
