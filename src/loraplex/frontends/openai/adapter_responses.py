"""Responses of /v1/adapters: cards of the adapter store, each an object with its kind."""

from typing import Any, Literal, TypeVar

import msgspec

from loraplex.core.adapter import Residency
from loraplex.serving.adapter_cards import AdapterCard, AdapterDetails, LoadReport

CardT = TypeVar("CardT", bound=AdapterCard)


class ListedAdapter(AdapterCard, frozen=True, kw_only=True):
    object: Literal["adapter"] = "adapter"
    residency: Residency


class AdapterList(msgspec.Struct, frozen=True):
    data: list[ListedAdapter]
    object: Literal["list"] = "list"


class NamedAdapter(AdapterCard, frozen=True, kw_only=True):
    """An adapter after a rollback or an alias."""

    object: Literal["adapter"] = "adapter"


class LoadedAdapter(LoadReport, frozen=True, kw_only=True):
    object: Literal["adapter"] = "adapter"


class ShownAdapter(AdapterDetails, frozen=True, kw_only=True):
    object: Literal["adapter"] = "adapter"


def card_as(kind: type[CardT], card: AdapterCard, **fields: Any) -> CardT:
    """The card, with the further fields of the kind."""
    known = {name: getattr(card, name) for name in kind.__struct_fields__ if hasattr(card, name)}
    return kind(**known, **fields)
