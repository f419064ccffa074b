"""What is told of an adapter: in a listing, after a load, and whole. Plain values."""

import enum
from typing import Any, TypeVar

import msgspec

from loraplex.adapters.staged import StagedAdapter
from loraplex.adapters.version import AdapterVersion
from loraplex.core.adapter import Residency
from loraplex.core.plan import Capacity
from loraplex.memory.adapter_pages import place

CardT = TypeVar("CardT", bound="AdapterCard")


class AdapterState(enum.StrEnum):
    """Whether a request may name it now."""

    READY = "ready"
    MISSING = "missing"
    """Its canonical adapter file is gone, and its source does not give the same bytes (yet)."""
    UNFIT = "unfit"
    """Stored for another base model of this name, or for larger limits."""


class UnloadMode(enum.StrEnum):
    """What becomes of the requests that run with an adapter whose name is forgotten."""

    DRAIN = "drain"
    """They end normally; the engine lets go of the adapter after the last of them."""
    IMMEDIATE = "immediate"
    """They end now, with an error."""


class AdapterCard(msgspec.Struct, frozen=True, kw_only=True):
    """A registered adapter, as a listing shows it."""

    name: str
    model: str
    """The base model: its parent."""
    task_id: int | None
    digest: str
    version: int = 1
    created: int
    """Unix seconds: when this version was registered."""
    rank: int
    """The largest of its ranks."""
    num_bytes: int
    """In host memory."""
    source: str
    """Empty for tenants that the adapter does not belong to."""
    state: AdapterState = AdapterState.READY
    warnings: tuple[str, ...] = ()


class AdapterContent(msgspec.Struct, frozen=True, kw_only=True):
    """What is applied of an adapter, and what room it takes."""

    ranks: dict[str, tuple[int, int]]
    """(smallest, largest) rank by module."""
    layers: tuple[int, ...]
    """Those with at least one adapted module."""
    num_tensors: int
    """All of the source's: a tensor that cannot be applied is an error."""
    dtypes: tuple[str, ...]
    """Of the tensors in the source."""
    device_dtype: str
    """What they are cast to when they are loaded."""
    host_bytes: int
    device_bytes: int
    """Whole pages."""
    device_pages: int


class CanaryReport(msgspec.Struct, frozen=True, kw_only=True):
    """One forward with the adapter beside one without: absolute differences of log probabilities.

    Over the tokens of a fixed prompt, and over the likeliest next tokens after it.
    """

    num_compared: int
    largest_difference: float
    mean_difference: float
    base_token_id: int
    """The likeliest next token of the base model."""
    adapter_token_id: int


class LoadReport(
    AdapterCard,
    frozen=True,
    kw_only=True,
    rename={"is_unchanged": "unchanged", "is_dry_run": "dry_run"},
):
    """The answer to a load."""

    is_unchanged: bool
    """The name meant these very bytes already."""
    is_dry_run: bool
    """Nothing was registered."""
    content: AdapterContent
    seconds: dict[str, float]
    """By stage."""
    canary: CanaryReport | None = None


class VersionCard(msgspec.Struct, frozen=True, kw_only=True, rename={"is_pinned": "pinned"}):
    """One version in the history of a name."""

    version: int
    digest: str
    created: int
    source: str
    origin: str
    restored: int | None
    """The older version whose bytes a rollback brought back as this one."""
    is_pinned: bool


class AdapterDetails(AdapterCard, frozen=True, kw_only=True):
    """All that is known of one adapter."""

    aliases: tuple[str, ...]
    residency: Residency
    num_running: int | None
    """Requests in work that named it, whatever version they run with; None: not told, to tenants
    that it does not belong to."""
    content: AdapterContent
    versions: tuple[VersionCard, ...]
    """The present one first."""


class Unloaded(msgspec.Struct, frozen=True, kw_only=True):
    """What was forgotten."""

    name: str
    is_alias: bool
    """Only this alias was: the adapter itself stays."""
    digest: str
    num_ended: int
    """Requests that were ended with an error."""


def card_of(version: AdapterVersion, state: AdapterState = AdapterState.READY) -> AdapterCard:
    return AdapterCard(**card_fields(version, state))


def card_fields(version: AdapterVersion, state: AdapterState) -> dict[str, Any]:
    """The fields of an AdapterCard, for what is more than one."""
    return {
        "name": version.name,
        "model": version.model,
        "task_id": version.task_id,
        "digest": version.digest,
        "version": version.number,
        "created": version.created,
        "rank": version.rank,
        "num_bytes": version.source.num_bytes,
        "source": version.shown_path,
        "state": state,
        "warnings": version.warnings,
    }


def without_sources(card: CardT) -> CardT:
    """For tenants that an adapter does not belong to: not where it came from, nor who uses it."""
    shown = msgspec.structs.replace(card, source="")
    if isinstance(shown, AdapterDetails):
        versions = tuple(msgspec.structs.replace(each, source="") for each in shown.versions)
        return msgspec.structs.replace(shown, num_running=None, versions=versions)
    return shown


def content_of(staged: StagedAdapter, capacity: Capacity, device_dtype: str) -> AdapterContent:
    """By the arithmetic that the engine allocates with."""
    source = staged.source
    num_pages = place(source.targets, capacity.page_geometry).num_pages
    return AdapterContent(
        ranks=source.ranks,
        layers=tuple(sorted({target.layer for target in source.targets})),
        num_tensors=staged.num_tensors,
        dtypes=staged.dtypes,
        device_dtype=device_dtype,
        host_bytes=source.num_bytes,
        device_bytes=num_pages * capacity.adapter_page_bytes,
        device_pages=num_pages,
    )


def version_card(version: AdapterVersion) -> VersionCard:
    return VersionCard(
        version=version.number,
        digest=version.digest,
        created=version.created,
        source=version.shown_path,
        origin=version.origin.value,
        restored=version.restored,
        is_pinned=version.is_pinned,
    )
