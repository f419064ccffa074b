"""Responses of /v1/adapters: cards of the adapter store, each an object with its kind."""

from typing import Literal

import msgspec

from loraplex.adapters.staged import ExaminedTensor
from loraplex.core.adapter import Residency
from loraplex.serving.adapter_cards import (
    AdapterCard,
    AdapterDetails,
    LoadReport,
    TrialRefusal,
    TrialReport,
    card_as,
)
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


class AdapterTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Dry run in detail: what a load would do, and what it would refuse."""

    object: Literal["adapter.trial"] = "adapter.trial"
    ok: bool
    """Whether a load would succeed."""
    error: TrialRefusal | None
    """Why it would not."""
    format: str
    tensors: tuple[ExaminedTensor, ...]
    """First 10000 tensors; the refused ones come first."""
    num_tensors: int
    num_refused: int
    changes_base: bool | None
    """Whether outputs differ from the base model's; null if a canary did not find out."""
    fits_now: bool | None
    """Whether its pages are free on the device, without an eviction; null if it is refused."""
    free_pages: int
    """Pages of the device that no adapter has."""
    adapter: LoadedAdapter | None
    """Report of the dry run; null if it is refused."""


class ShownAdapter(AdapterDetails, frozen=True, kw_only=True):
    object: Literal["adapter"] = "adapter"


def trial_of(report: TrialReport) -> AdapterTrial:
    examined = report.examination
    return AdapterTrial(
        ok=report.is_ok,
        error=report.refusal,
        format=examined.format,
        tensors=examined.tensors,
        num_tensors=examined.num_tensors,
        num_refused=examined.num_refused,
        changes_base=report.changes_base,
        fits_now=report.fits_now,
        free_pages=report.free_pages,
        adapter=None if report.adapter is None else card_as(LoadedAdapter, report.adapter),
    )
