"""The library's argument `adapter`: none, one by its name, or several with scales."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

from loraplex.core.adapter import AdapterChoice, ByName
from loraplex.core.errors import InvalidRequestError

Adapter = str | Mapping[str, float]
"""A name, or names with the scales that they are composed with: {"fr": 0.7, "legal": 0.3}."""


def adapter_choices(adapter: Any) -> tuple[AdapterChoice, ...]:
    """Empty for None, the base model. Raises InvalidRequestError."""
    match adapter:
        case None:
            return ()
        case str():
            return (AdapterChoice(ByName(adapter)),)
        case Mapping():
            return tuple(_scaled(name, scale) for name, scale in adapter.items())
    raise _refused(adapter)


def _scaled(name: Any, scale: Any) -> AdapterChoice:
    if not isinstance(name, str) or isinstance(scale, bool) or not isinstance(scale, Real):
        raise _refused({name: scale})
    return AdapterChoice(ByName(name), float(scale))


def _refused(adapter: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"an adapter is a name, or names with scales as {{'fr': 0.7, 'legal': 0.3}}; got "
        f"{adapter!r}",
        param="adapter",
    )
