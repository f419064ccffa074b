"""Responses of /v1/adapters: cards of the adapter store, each an object with its kind."""

from typing import Literal

import msgspec

from loraplex.core.adapter import Residency
from loraplex.serving.adapter_cards import AdapterCard, AdapterDetails, LoadReport
from loraplex.serving.adapter_list import AdapterPage
from loraplex.serving.adapter_usage import UsageCount


class ListedAdapter(AdapterCard, frozen=True, kw_only=True):
    object: Literal["adapter"] = "adapter"
    residency: Residency


class AdapterList(msgspec.Struct, frozen=True):
    data: list[ListedAdapter]
    object: Literal["list"] = "list"


class ListPage(AdapterPage, frozen=True, kw_only=True):
    """Part of the list, if the query has any of its parameters."""

    object: Literal["list"] = "list"


class UsageEntry(UsageCount):
    """Use of an adapter, or of a base model without one, by a tenant."""

    tenant: str = ""
    model: str = ""
    owner: str | None = None
    """Tenant that has the adapter; null for a base model."""
    adapter: str | None = None


class UsageList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[UsageEntry]
    other: UsageCount
    """Adapters that are not counted separately, together: the least recently used ones."""
    since: int
    """Time from which requests are counted, in Unix seconds."""
    next: str | None
    """Cursor of the next page; null: there is none."""


class NamedAdapter(AdapterCard, frozen=True, kw_only=True):
    """An adapter after a rollback or an alias."""

    object: Literal["adapter"] = "adapter"


class LoadedAdapter(LoadReport, frozen=True, kw_only=True):
    object: Literal["adapter"] = "adapter"


class ShownAdapter(AdapterDetails, frozen=True, kw_only=True):
    object: Literal["adapter"] = "adapter"
