"""The adapters of an EchoBackend: a real AdapterStore in memory, whose adapters hold no weights."""

import hashlib
from collections.abc import Mapping

from loraplex.adapters.staged import REQUEST_TENSORS, StagedAdapter
from loraplex.adapters.staging import RequestTensor
from loraplex.adapters.store import AdapterStore, AdapterVersion
from loraplex.core.adapter import (
    AdapterKey,
    AdapterRef,
    AdapterSource,
    ByDigest,
    ByName,
    ByTaskId,
    LoraTarget,
    Residency,
)
from loraplex.core.principal import DEFAULT_TENANT
from loraplex.serving.adapter_cards import (
    AdapterCard,
    AdapterContent,
    AdapterDetails,
    AdapterState,
    CanaryReport,
    LoadReport,
    Unloaded,
    VersionCard,
    card_as,
    card_fields,
    card_of,
    version_card,
)
from loraplex.serving.adapter_list import AdapterRow, PagedAdapter
from loraplex.serving.adapter_usage import NO_USE

CREATED = 1_700_000_000
"""Unix seconds: when every model and adapter of an EchoBackend was made."""

CONTENT = AdapterContent(
    ranks={"q_proj": (8, 8)},
    layers=(0,),
    module_layers={"q_proj": (0,)},
    num_tensors=2,
    dtypes=("F32",),
    device_dtype="float32",
    host_bytes=1024,
    device_bytes=2048,
    device_pages=1,
)
CANARY = CanaryReport(
    num_compared=40,
    largest_difference=0.5,
    mean_difference=0.25,
    base_token_id=65,
    adapter_token_id=66,
)


class EchoAdapters:
    """Adapters of an EchoBackend, all of the default tenant. Raises as AdapterStore does."""

    def __init__(self) -> None:
        self._store = AdapterStore(lambda: CREATED)

    def cards(self, model: str | None = None) -> list[AdapterCard]:
        return [card_of(version) for version in self._store.list(DEFAULT_TENANT, model)]

    def rows(self, residency: Mapping[str, Residency]) -> list[AdapterRow]:
        return [_EchoRow(each, residency) for each in self._store.list(DEFAULT_TENANT)]

    def find(self, model: str, name: str) -> AdapterVersion | None:
        """Return the version of a name or an alias."""
        return self._store.find(AdapterRef(model, DEFAULT_TENANT, ByName(name)))

    def check_free(self, model: str, name: str, task_id: int | None, *, replace: bool) -> None:
        self._store.check_free(model, DEFAULT_TENANT, name, task_id, replace=replace)

    def add(
        self,
        model: str,
        name: str,
        *,
        source: str,
        digest: str = "",
        task_id: int | None = None,
        replace: bool = False,
        canary: bool = False,
    ) -> LoadReport:
        """Add a version. The default digest is the SHA-256 of the source."""
        staged = _staged(digest or hashlib.sha256(source.encode()).hexdigest())
        registration = self._store.register(
            model, DEFAULT_TENANT, name, staged, path=source, task_id=task_id, replace=replace
        )
        return LoadReport(
            **card_fields(registration.version, AdapterState.READY),
            is_unchanged=registration.is_unchanged,
            is_dry_run=False,
            content=CONTENT,
            seconds={"read": 0.5},
            canary=CANARY if canary else None,
        )

    def add_tensors(
        self, model: str, task_id: int | None, weights: RequestTensor, config: RequestTensor
    ) -> AdapterKey:
        """Any tensors are an adapter; its digest is the SHA-256 of their bytes."""
        digest = hashlib.sha256(bytes(weights.view) + bytes(config.view)).hexdigest()
        key = ByDigest(digest) if task_id is None else ByTaskId(task_id)
        present = self._store.find(AdapterRef(model, DEFAULT_TENANT, key))
        if present is not None:
            name = present.name
        else:
            name = f"inline-{digest[:12]}" if task_id is None else str(task_id)
        if present is None or present.digest != digest:
            self.add(
                model, name, source=REQUEST_TENSORS, digest=digest, task_id=task_id, replace=True
            )
        return key

    def resolve(self, model: str, key: AdapterKey) -> AdapterVersion:
        return self._store.resolve(AdapterRef(model, DEFAULT_TENANT, key))

    def remove(self, ref: AdapterRef) -> Unloaded:
        version = self._store.remove(_ours(ref))
        name = ref.key.name if isinstance(ref.key, ByName) else version.name
        return Unloaded(
            name=name,
            is_alias=name != version.name,
            digest=version.digest,
            version=version.number,
            num_ended=0,
        )

    def rollback(self, ref: AdapterRef, number: int | None) -> AdapterCard:
        return card_of(self._store.rollback(_ours(ref), number))

    def pin(self, ref: AdapterRef, number: int | None, *, is_pinned: bool) -> VersionCard:
        change = self._store.pin if is_pinned else self._store.unpin
        return version_card(change(_ours(ref), number))

    def alias(self, ref: AdapterRef, alias: str, *, replace: bool) -> AdapterCard:
        return card_of(self._store.alias(_ours(ref), alias, replace=replace))

    def describe(self, ref: AdapterRef, residency: Mapping[str, Residency]) -> AdapterDetails:
        history = self._store.history(_ours(ref))
        version = history[0]
        aliases = self._store.aliases(DEFAULT_TENANT, ref.model)
        return AdapterDetails(
            **card_fields(version, AdapterState.READY),
            aliases=tuple(sorted(a for a, name in aliases.items() if name == version.name)),
            residency=residency.get(version.digest, Residency.ABSENT),
            num_running=0,
            content=CONTENT,
            versions=tuple(map(version_card, history)),
        )


class _EchoRow:
    aliases = ()
    state = AdapterState.READY
    use = NO_USE

    def __init__(self, version: AdapterVersion, residency: Mapping[str, Residency]) -> None:
        self._version = version
        self.name, self.model, self.digest = version.name, version.model, version.digest
        self.num_bytes, self.rank = version.source.num_bytes, version.rank
        self.residency = residency.get(version.digest, Residency.ABSENT)

    def shown(self) -> PagedAdapter:
        return card_as(
            PagedAdapter,
            card_of(self._version),
            residency=self.residency,
            pinned=self._version.is_pinned,
            num_running=0,
            device_pages=CONTENT.device_pages,
        )


def _ours(ref: AdapterRef) -> AdapterRef:
    return AdapterRef(ref.model, DEFAULT_TENANT, ref.key)


def _staged(digest: str) -> StagedAdapter:
    targets = (LoraTarget(0, "q_proj", 8, 64, 64),)
    source = AdapterSource(digest, f"/normal/{digest}", CONTENT.host_bytes, targets)
    return StagedAdapter(source=source, dtypes=CONTENT.dtypes, num_tensors=CONTENT.num_tensors)
