"""Bodies and responses of the routes that manage adapters: cards of the store, each an object with
its kind.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import AliasChoices, Field

from loraplex.adapters.staged import ExaminedTensor
from loraplex.core.adapter import Residency
from loraplex.frontends.openai.schema import ClosedBody, JsonBody
from loraplex.serving.adapter_cards import (
    AdapterCard,
    AdapterDetails,
    LoadReport,
    ReplacedVersion,
    TrialRefusal,
    TrialReport,
    card_as,
)
from loraplex.serving.adapter_list import AdapterPage
from loraplex.serving.adapter_usage import UsageCount, UsageMinute


class LoadLoraBody(JsonBody):
    """vLLM's."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool | None = None


class UnloadLoraBody(JsonBody):
    lora_name: str
    lora_int_id: int | None = None
    """vLLM's own number: taken, and of no use here."""


class DynamoSource(JsonBody):
    uri: str
    """Source, like `source` of POST /v1/adapters; Dynamo sends file, s3 and hf addresses."""


class DynamoLoadBody(JsonBody):
    """Dynamo's."""

    lora_name: str
    source: DynamoSource


class AdapterBody(ClosedBody):
    """POST /v1/adapters."""

    name: str
    source: Annotated[str, Field(validation_alias=AliasChoices("source", "path"))]
    """Folder or file on the server, address, or upload. `path` is another name of the field."""
    model: str | None = None
    """The base model; None is the default one."""
    task_id: int | None = None
    replace: bool | None = None
    dry_run: bool | None = None
    canary: bool | None = None
    details: bool | None = None
    """Report every tensor and a refusal of a dry run, instead of raising the refusal."""


class RollbackBody(ClosedBody):
    version: int | None = None
    """None: the one before the present."""


class PinBody(ClosedBody):
    version: int | None = None
    """None: the present one."""
    pinned: bool | None = None
    """False takes the pin away."""


class AliasBody(ClosedBody):
    alias: str
    replace: bool | None = None
    """Turn an alias of another adapter over to this one."""


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
    series: list[UsageMinute] | UnsetType = UNSET
    """The last 60 minutes, the present one last; only with `series=minute`."""


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
    declared_base: str | None
    """Base model that its files name; null: they name none."""
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
    evicts: tuple[str, ...]
    """Names of the adapters that would leave the device for it now, in the order of eviction; of
    those that the caller may see."""
    replaces: ReplacedVersion | None
    """What the name has now; null: it is new."""
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
        declared_base=examined.trained_on,
        tensors=examined.tensors,
        num_tensors=examined.num_tensors,
        num_refused=examined.num_refused,
        changes_base=report.changes_base,
        fits_now=report.fits_now,
        free_pages=report.free_pages,
        evicts=report.evicts,
        replaces=report.replaces,
        adapter=None if report.adapter is None else card_as(LoadedAdapter, report.adapter),
    )
