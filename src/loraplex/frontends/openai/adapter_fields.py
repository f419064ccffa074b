"""Adapters of a request: every way to name one, and which fields exclude each other."""

from typing import Final, NamedTuple, TypeVar

from loraplex.core.adapter import AdapterChoice, AdapterKey, ByName
from loraplex.core.errors import InvalidParameterError
from loraplex.frontends.adapter_choices import read_choices
from loraplex.frontends.openai.schema import AdapterFields
from loraplex.serving.backend import ModelCard

T = TypeVar("T")

ADAPTER_HEADER = "x-lora-adapter"
"""A request header that names an adapter, for clients whose body cannot."""


_FIELDS: Final = frozenset({"lora_model", "adapter_id", "lora_path", "lora_scale", "adapters"})


class ModelTarget(NamedTuple):
    """What `model` named: a base model, and perhaps one of its adapters."""

    model: ModelCard
    key: AdapterKey | None


def adapter_choices(
    body: AdapterFields, target: ModelTarget, header: str, num_prompts: int = 1
) -> tuple[tuple[AdapterChoice, ...], ...]:
    """The adapters of each prompt. `header`: the value of ADAPTER_HEADER, empty if it is absent.

    Several fields may name the one adapter if they agree. Raises InvalidParameterError.
    """
    if not header and body.model_fields_set.isdisjoint(_FIELDS):
        one = () if target.key is None else (AdapterChoice(target.key),)
        return (one,) * num_prompts
    if not isinstance(body.lora_path, list):
        return (_choices(body, target, header, body.lora_path),) * num_prompts
    if len(body.lora_path) != num_prompts:
        raise InvalidParameterError(
            f"lora_path has {len(body.lora_path)} entries for {num_prompts} prompts; give one for "
            "each, null for the base model",
            param="lora_path",
        )
    return tuple(_choices(body, target, header, name) for name in body.lora_path)


def adapter_field(body: AdapterFields, header: str) -> str:
    """Return the field, or header, that names the one adapter; empty if it is `model`."""
    names = _names(body, header, body.lora_path)
    return next((field for field, name in names if name), "")


def _choices(
    body: AdapterFields, target: ModelTarget, header: str, lora_path: str | None
) -> tuple[AdapterChoice, ...]:
    named: list[tuple[str, AdapterKey]] = [] if target.key is None else [("model", target.key)]
    # An empty name is none.
    named += [(field, ByName(name)) for field, name in _names(body, header, lora_path) if name]
    if body.adapters:
        return _several(body, named)
    if not named:
        if body.lora_scale is not None:
            raise InvalidParameterError(
                "lora_scale needs an adapter: name it in model or lora_model", param="lora_scale"
            )
        return ()
    first, key = named[0]
    for other, other_key in named[1:]:
        if other_key != key:
            raise InvalidParameterError(
                f"{first} {_shown(key)} and {other} {_shown(other_key)} name two adapters; give "
                "one of them, or both in adapters",
                param=other,
            )
    return (AdapterChoice(key, 1.0 if body.lora_scale is None else body.lora_scale),)


def _names(
    body: AdapterFields, header: str, lora_path: T
) -> tuple[tuple[str, str | T | None], ...]:
    return (
        ("lora_model", body.lora_model),
        ("adapter_id", body.adapter_id),
        ("lora_path", lora_path),
        (ADAPTER_HEADER, header),
    )


def _several(body: AdapterFields, named: list[tuple[str, AdapterKey]]) -> tuple[AdapterChoice, ...]:
    if named:
        raise InvalidParameterError(
            f"{named[-1][0]} names an adapter, and so does adapters; put all of them into "
            "adapters, and the base model into model",
            param="adapters",
        )
    if body.lora_scale is not None:
        raise InvalidParameterError(
            "lora_scale is for the one adapter of model or lora_model; in adapters, each one has "
            "its scale",
            param="lora_scale",
        )
    return read_choices(body.adapters)


def _shown(key: AdapterKey) -> str:
    return repr(key.name) if isinstance(key, ByName) else str(key)
