"""Adapters of a base model as rows of a list, with where they are and how they are used."""

import asyncio
import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from loraplex.adapters.store import AdapterVersion
from loraplex.core.adapter import Residency
from loraplex.core.errors import AdapterTooLargeError
from loraplex.core.principal import Principal
from loraplex.memory.adapter_pages import most_pages
from loraplex.serving.access.tenant_adapters import ConfiguredAdapter, TenantAdapters
from loraplex.serving.adapter_cards import (
    AdapterCard,
    AdapterState,
    card_as,
    card_of,
    discovered_card,
    without_sources,
)
from loraplex.serving.adapter_list import (
    AdapterPage,
    AdapterQuery,
    AdapterRow,
    PagedAdapter,
    page_of,
)
from loraplex.serving.adapter_usage import NO_USE, AdapterUsage, UsageCount, UsedAdapter
from loraplex.serving.served_model import ServedModel


async def listed_page(
    models: Mapping[str, ServedModel],
    principal: Principal,
    usage: AdapterUsage,
    query: AdapterQuery,
) -> AdapterPage:
    """Return a page of the models' adapters. The work of thousands is done in a thread."""
    lists = [
        ModelAdapters(
            model,
            model.adapters_of(principal),
            residency=(await model.adapter_activity()).residency,
            running=model.engine.requests.num_by_label(),
            used_by_all=usage.of_server(),
            used=usage.of_tenant(principal.tenant),
        )
        for model in models.values()
    ]
    return await asyncio.to_thread(
        lambda: page_of((row for one in lists for row in one.rows()), query)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ModelAdapters:
    """The adapters of one model that a principal may see, and what is known of all of them."""

    model: ServedModel
    seen: TenantAdapters
    residency: Mapping[str, Residency]
    """Residency by digest."""
    running: Mapping[Hashable, int]
    """Number of in-flight requests by label."""
    used_by_all: Mapping[UsedAdapter, UsageCount]
    used: Mapping[UsedAdapter, UsageCount]
    """Use by the principal."""
    aliases: dict[str, Mapping[str, Sequence[str]]] = dataclasses.field(default_factory=dict)
    """Aliases by name, of the tenants of which they were needed."""

    def rows(self) -> Iterator[AdapterRow]:
        for version in self.seen.listed():
            yield _VersionRow(self, version)
        for adapter in self.seen.discovered():
            yield _DiscoveredRow(self, adapter)

    def aliases_of(self, version: AdapterVersion) -> Sequence[str]:
        if version.tenant not in self.aliases:
            by_name: dict[str, list[str]] = {}
            of_tenant = self.model.store.aliases(version.tenant, version.model)
            for alias, name in sorted(of_tenant.items()):
                by_name.setdefault(name, []).append(alias)
            self.aliases[version.tenant] = by_name
        return self.aliases[version.tenant].get(version.name, ())

    def use_of(self, adapter: AdapterVersion | ConfiguredAdapter) -> UsageCount:
        used = UsedAdapter(self.model.card.name, adapter.tenant, adapter.name)
        counts = self.used_by_all if self.seen.owns(adapter) else self.used
        return counts.get(used, NO_USE)

    def pages_of(self, version: AdapterVersion) -> int | None:
        if not self.model.engine.has_started:
            return None
        capacity = self.model.engine.capacity
        try:
            return most_pages(capacity.held(version.source.targets), capacity.page_geometry)
        except AdapterTooLargeError:  # stored with larger limits: its state is unfit
            return None

    def paged(
        self, adapter: AdapterVersion | ConfiguredAdapter, card: AdapterCard, **fields: Any
    ) -> PagedAdapter:
        """Return the entry of a card, without what the principal may not see."""
        owns, use = self.seen.owns(adapter), self.use_of(adapter)
        running = self.running.get((adapter.tenant, adapter.name), 0)
        return card_as(
            PagedAdapter,
            card if owns else without_sources(card),
            num_running=running if owns else None,
            requests=use.requests,
            errors=use.errors,
            last_used=use.last_used,
            **fields,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _VersionRow:
    _list: ModelAdapters
    _version: AdapterVersion

    @property
    def name(self) -> str:
        return self._version.name

    @property
    def model(self) -> str:
        return self._version.model

    @property
    def aliases(self) -> Sequence[str]:
        return self._list.aliases_of(self._version)

    @property
    def digest(self) -> str:
        return self._version.digest

    @property
    def num_bytes(self) -> int:
        return self._version.source.num_bytes

    @property
    def rank(self) -> int:
        return self._version.rank

    @property
    def state(self) -> AdapterState:
        return self._list.model.state_of(self._version)

    @property
    def residency(self) -> Residency:
        return self._list.residency.get(self.digest, Residency.ABSENT)

    @property
    def has_warnings(self) -> bool:
        return bool(self._version.remarks.warnings)

    @property
    def use(self) -> UsageCount:
        return self._list.use_of(self._version)

    def shown(self) -> PagedAdapter:
        return self._list.paged(
            self._version,
            card_of(self._version, self.state),
            residency=self.residency,
            pinned=self._version.is_pinned,
            aliases=tuple(self.aliases),
            device_pages=self._list.pages_of(self._version),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _DiscoveredRow:
    _list: ModelAdapters
    _adapter: ConfiguredAdapter
    num_bytes = 0
    rank = 0
    state = AdapterState.UNVALIDATED
    residency = Residency.ABSENT
    has_warnings = False

    @property
    def name(self) -> str:
        return self._adapter.name

    @property
    def model(self) -> str:
        return self._list.model.card.name

    @property
    def aliases(self) -> Sequence[str]:
        return self._adapter.aliases

    @property
    def digest(self) -> str:
        declaration = self._adapter.declaration
        return "" if declaration is None else declaration.digest

    @property
    def use(self) -> UsageCount:
        return self._list.use_of(self._adapter)

    def shown(self) -> PagedAdapter:
        model = self._list.model.card
        return self._list.paged(
            self._adapter,
            discovered_card(self._adapter, model.name, model.created),
            residency=self.residency,
            aliases=tuple(self.aliases),
        )
