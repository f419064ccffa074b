"""Rows of the flags of a command that are the parameters of its function."""

import inspect
import typing
from collections.abc import Callable
from typing import Any, Final

from typer.models import OptionInfo, ParameterInfo

from loraplex.core.support import Feature

_OWN: Final = frozenset({"--force", "--model-dir"})


def command_features(function: Callable[..., Any]) -> tuple[Feature, ...]:
    """function: typer makes the command from its annotations. Flags that it has for all settings
    are left out."""
    hints = typing.get_type_hints(function, include_extras=True)
    names = inspect.signature(function).parameters
    declared = {name: typing.get_args(hints[name])[1:] for name in names if name in hints}
    return tuple(_feature(name, *info) for name, info in declared.items() if info)


def _feature(parameter: str, info: ParameterInfo) -> Feature:
    note = (info.help or "").rstrip(".")
    if not isinstance(info, OptionInfo):
        return Feature(parameter, note=note)
    # In an annotation typer takes the first name as a default, which it is not.
    words = map(str, (info.default, *(info.param_decls or ())))
    declared = [word for word in words if word.startswith("-")]
    *others, name = sorted(declared or [f"--{parameter.replace('_', '-')}"], key=len)
    return Feature(name, note=note, other_names=tuple(others), is_ours=name in _OWN)
