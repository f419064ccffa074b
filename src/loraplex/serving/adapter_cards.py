"""Descriptions of adapters for listings, load reports and details. Plain values."""

import enum
from typing import Any, TypeVar

import msgspec

from loraplex.adapters.base_check import WarningCode
from loraplex.adapters.sources.reference import shown_source
from loraplex.adapters.staged import Examination, StagedAdapter
from loraplex.adapters.version import AdapterVersion
from loraplex.core.adapter import Residency
from loraplex.core.plan import Capacity
from loraplex.memory.adapter_pages import most_pages
from loraplex.serving.access.tenant_adapters import ConfiguredAdapter
from loraplex.serving.expert_use import ExpertUse, expert_use

CardT = TypeVar("CardT", bound="AdapterCard")


class AdapterState(enum.StrEnum):
    """Whether requests may use the adapter now."""

    READY = "ready"
    MISSING = "missing"
    """Its canonical adapter file is gone, and its source does not have the same bytes (yet)."""
    UNVALIDATED = "unvalidated"
    """Found in a folder, and not read yet: the first request that names it reads it."""
    UNFIT = "unfit"
    """Stored for another base model of this name, or for larger limits."""


class UnloadMode(enum.StrEnum):
    """Treatment of the requests that run with an adapter which is unloaded."""

    DRAIN = "drain"
    """They end normally; the engine forgets the adapter after the last of them."""
    IMMEDIATE = "immediate"
    """They end now, with an error."""


class AdapterCard(msgspec.Struct, frozen=True, kw_only=True):
    """Registered adapter as shown in listings."""

    name: str
    model: str
    """Base model, which is its parent."""
    task_id: int | None
    digest: str
    """Empty until it was validated."""
    version: int = 1
    created: int
    """Time at which this version was registered, in Unix seconds."""
    rank: int
    """Largest of its ranks."""
    num_bytes: int
    """Size in host memory."""
    num_labels: int = 0
    """Labels of its own classification head; 0: it has none."""
    source: str
    """Source; empty for tenants which do not own the adapter."""
    state: AdapterState = AdapterState.READY
    warnings: tuple[str, ...] = ()
    """Remarks that need a decision, such as another base model or tensors that are left out."""
    warning_codes: tuple[WarningCode, ...] = ()
    """Code of each of `warnings`, in their order."""
    notes: tuple[str, ...] = ()
    """Remarks that need none, such as the rounding of its tensors."""
    declared_base: str | None = None
    """Base model that its files name; null: they name none, or it was staged by an older version.
    """


class AdapterContent(msgspec.Struct, frozen=True, kw_only=True):
    """Applied parts of an adapter, and their memory."""

    ranks: dict[str, tuple[int, int]]
    """Smallest and largest rank by module."""
    layers: tuple[int, ...]
    """Layers with at least one adapted module."""
    module_layers: dict[str, tuple[int, ...]]
    """Layers by adapted module; -1 is outside the layers."""
    experts: dict[str, ExpertUse] = {}
    """Changed experts by module, of modules that have experts."""
    num_tensors: int
    """Number of all tensors in the source: one that cannot be applied is an error."""
    dtypes: tuple[str, ...]
    """Types of the tensors in the source."""
    device_dtype: str
    """Type to which they are cast when they are loaded."""
    host_bytes: int
    device_bytes: int
    """Size on the device, in whole pages."""
    device_pages: int


class CanaryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Absolute differences of log probabilities between a pass with the adapter and one without.

    They cover the tokens of a fixed prompt, and the likeliest next tokens after it.
    """

    num_compared: int
    largest_difference: float
    mean_difference: float
    base_token_id: int
    """Likeliest next token of the base model."""
    adapter_token_id: int


class LoadReport(
    AdapterCard,
    frozen=True,
    kw_only=True,
    rename={"is_unchanged": "unchanged", "is_dry_run": "dry_run"},
):
    """Response to a load."""

    is_unchanged: bool
    """Whether the name had the same bytes before."""
    is_dry_run: bool
    """Whether nothing was registered."""
    content: AdapterContent
    seconds: dict[str, float]
    """Duration of each stage."""
    canary: CanaryReport | None = None


class TrialRefusal(msgspec.Struct, frozen=True):
    """Why an adapter would not be loaded."""

    code: str
    message: str


class ReplacedVersion(msgspec.Struct, frozen=True):
    """The present version of a name that a load would give another one."""

    version: int
    rank: int
    num_running: int
    """In-flight requests that named it, which end with the version that they began with."""


class TrialReport(msgspec.Struct, frozen=True, kw_only=True):
    """Dry run in detail: what a load would do, and what it would refuse."""

    is_ok: bool
    """Whether a load would succeed."""
    refusal: TrialRefusal | None
    examination: Examination
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
    adapter: LoadReport | None
    """Report of the dry run; null if it is refused."""


class VersionCard(msgspec.Struct, frozen=True, kw_only=True, rename={"is_pinned": "pinned"}):
    """Version in the history of a name."""

    version: int
    digest: str
    created: int
    source: str
    origin: str
    restored: int | None
    """Number of the older version that a rollback restored as this one."""
    is_pinned: bool


class AdapterDetails(AdapterCard, frozen=True, kw_only=True):
    """All details of one adapter."""

    aliases: tuple[str, ...]
    residency: Residency
    num_running: int | None
    """In-flight requests that named it, with any version; null for tenants which do not own it."""
    content: AdapterContent
    versions: tuple[VersionCard, ...]
    """Versions in its history, the present one first."""


class Unloaded(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an unload."""

    name: str
    is_alias: bool
    """Whether only an alias was removed and the adapter stays."""
    digest: str
    version: int
    """Version that the unload has in shared declarations, else the one that was unloaded."""
    num_ended: int
    """Number of requests that ended with an error."""


def card_of(version: AdapterVersion, state: AdapterState = AdapterState.READY) -> AdapterCard:
    return AdapterCard(**card_fields(version, state))


def discovered_card(adapter: ConfiguredAdapter, model: str, created: int) -> AdapterCard:
    """Describe an adapter of which only name and place are known, or its declaration."""
    declaration = adapter.declaration
    return AdapterCard(
        name=adapter.name,
        model=model,
        task_id=adapter.task_id,
        digest="" if declaration is None else declaration.digest,
        version=0 if declaration is None else declaration.version,
        created=created,
        rank=0,
        num_bytes=0,
        source=shown_source(adapter.path),
        state=AdapterState.UNVALIDATED,
    )


def card_fields(version: AdapterVersion, state: AdapterState) -> dict[str, Any]:
    """Return the fields of an AdapterCard, for its subclasses."""
    remarks = version.remarks
    return {
        "name": version.name,
        "model": version.model,
        "task_id": version.task_id,
        "digest": version.digest,
        "version": version.number,
        "created": version.created,
        "rank": version.rank,
        "num_bytes": version.source.num_bytes,
        "num_labels": version.source.num_labels,
        "source": version.shown_path,
        "state": state,
        "warnings": remarks.warnings,
        "warning_codes": remarks.codes,
        "notes": remarks.notes,
        "declared_base": version.staged.trained_on,
    }


def card_as(kind: type[CardT], card: AdapterCard, **fields: Any) -> CardT:
    """Return the card with the further fields of the kind."""
    known = {name: getattr(card, name) for name in kind.__struct_fields__ if hasattr(card, name)}
    return kind(**known, **fields)


def without_sources(card: CardT) -> CardT:
    """Remove source and usage, for tenants which do not own the adapter."""
    shown = msgspec.structs.replace(card, source="")
    if isinstance(shown, AdapterDetails):
        versions = tuple(msgspec.structs.replace(each, source="") for each in shown.versions)
        return msgspec.structs.replace(shown, num_running=None, versions=versions)
    return shown


def content_of(staged: StagedAdapter, capacity: Capacity, device_dtype: str) -> AdapterContent:
    """Describe the content, with the engine's own arithmetic of pages."""
    source = staged.source
    pages = most_pages(capacity.held(source.targets), capacity.page_geometry)
    return AdapterContent(
        ranks=source.ranks,
        layers=tuple(sorted({target.layer for target in source.targets})),
        module_layers=source.module_layers,
        experts=expert_use(source.targets),
        num_tensors=staged.num_tensors,
        dtypes=staged.dtypes,
        device_dtype=device_dtype,
        host_bytes=source.num_bytes,
        device_bytes=pages * capacity.adapter_page_bytes,
        device_pages=pages,
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
