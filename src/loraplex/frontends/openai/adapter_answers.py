"""What /v1/adapters answers: the cards of the adapter store, each an object that says its kind."""

from typing import Any, Literal, TypeVar

import msgspec

from loraplex.core.adapter import Residency
from loraplex.serving.adapters.cards import AdapterCard, AdapterDetails, LoadReport

CardT = TypeVar("CardT", bound=AdapterCard)


class ListedAdapter(AdapterCard, frozen=True, kw_only=True):
    object: Literal["adapter"] = "adapter"
    residency: Residency


class AdapterList(msgspec.Struct, frozen=True):
    data: list[ListedAdapter]
    object: Literal["list"] = "list"


class NamedAdapter(AdapterCard, frozen=True, kw_only=True):
    """As it is after a rollback or an alias."""

    object: Literal["adapter"] = "adapter"


class LoadedAdapter(LoadReport, frozen=True, kw_only=True):
    object: Literal["adapter"] = "adapter"


class ShownAdapter(AdapterDetails, frozen=True, kw_only=True):
    object: Literal["adapter"] = "adapter"


def told_as(kind: type[CardT], card: AdapterCard, **fields: Any) -> CardT:
    """The card with what the kind has beside it."""
    known = {name: getattr(card, name) for name in kind.__struct_fields__ if hasattr(card, name)}
    return kind(**known, **fields)
