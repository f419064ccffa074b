"""Changes of adapters by clients, as their rights allow."""

from collections.abc import Awaitable, Callable

from loraplex.adapters.staging import RequestTensor
from loraplex.adapters.uploads import UPLOADS_ARE_OFF, Uploads, is_upload
from loraplex.core.adapter import AdapterKey, AdapterRef, ByName, ByTaskId
from loraplex.core.errors import LoraplexError, UnsupportedFeatureError
from loraplex.core.principal import Principal
from loraplex.core.request import RequestId
from loraplex.serving.access.tenant_adapters import ConfiguredAdapter
from loraplex.serving.adapter_cards import (
    AdapterCard,
    AdapterDetails,
    LoadReport,
    TrialReport,
    Unloaded,
    UnloadMode,
    VersionCard,
    card_of,
    version_card,
    without_sources,
)
from loraplex.serving.adapters.declared_changes import DeclaredChanges, check_may_roll_back
from loraplex.serving.adapters.loading import AdapterLoad, CatalogLoader, inline_name
from loraplex.serving.catalog import ModelCatalog, describe
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.served_model import ServedModel
from loraplex.serving.wire_request import note_subject

Validate = Callable[[ServedModel, ConfiguredAdapter, str], Awaitable[LoraplexError | None]]
"""Validates an adapter in a tenant's turn; returns why it cannot be served."""


class CatalogAdmin:
    """Implementation of `serving.backend.AdapterAdmin`: checks rights, then changes the catalog."""

    def __init__(
        self,
        catalog: ModelCatalog,
        loader: CatalogLoader,
        metrics: RequestMetrics,
        require_open: Callable[[], None],
        new_request_id: Callable[[], RequestId],
        validate: Validate,
        declared: DeclaredChanges | None = None,
        uploads: Uploads | None = None,
    ) -> None:
        """`require_open` raises while the server starts or drains.

        validate: validates an adapter that is known by name only. declared: makes the changes that
        other servers share. uploads: what clients sent; None: they may not.
        """
        self._validate = validate
        self._uploads = uploads
        self._declared = declared
        self._catalog = catalog
        self._loader = loader
        self._metrics = metrics
        self._require_open = require_open
        self._new_request_id = new_request_id
        self._refusal = ""

    def refuse_changes(self, reason: str) -> None:
        """Refuse changes of adapters by clients, with this reason, from now on.

        Adapters in requests (`load_tensors`) are not changes of what other requests get.
        """
        self._refusal = reason

    async def load(
        self,
        principal: Principal,
        *,
        model: str,
        name: str,
        path: str,
        task_id: int | None = None,
        replace: bool = False,
        dry_run: bool = False,
        canary: bool = False,
    ) -> LoadReport:
        served, order = await self._begin(
            *(principal, model, name, path, task_id), replace=replace, canary=canary
        )
        report = await self._loader.load(served, principal, order, dry_run=dry_run)
        if self._uploads is not None and order.upload is not None and not dry_run:
            await self._uploads.discard(path)
        return report

    async def try_out(
        self,
        principal: Principal,
        *,
        model: str,
        name: str,
        path: str,
        task_id: int | None = None,
        replace: bool = False,
        canary: bool = False,
    ) -> TrialReport:
        served, order = await self._begin(
            *(principal, model, name, path, task_id), replace=replace, canary=canary
        )
        return await self._loader.try_out(served, principal, order)

    async def _begin(
        self,
        principal: Principal,
        model: str,
        name: str,
        path: str,
        task_id: int | None,
        *,
        replace: bool,
        canary: bool,
    ) -> tuple[ServedModel, AdapterLoad]:
        """Check all of a load but the adapter itself."""
        note_subject(model, name, is_change=True)
        served = self._managed_model(principal, model, is_change=True)
        served.adapters_of(principal).check_manages(name)
        self._catalog.check_is_no_base(name)
        upload = None
        if is_upload(path):
            if self._uploads is None:
                raise UnsupportedFeatureError(UPLOADS_ARE_OFF, param="path")
            upload = self._uploads.place(path, principal.tenant)
        register = None
        if self._declared is not None:
            register = await self._declared.begin_load(
                served, principal.tenant, name, path=path, task_id=task_id, replace=replace
            )
        else:
            await self._settle(served, principal, ByName(name))
        if task_id is not None:
            await self._settle(served, principal, ByTaskId(task_id))
        return served, AdapterLoad(
            name=name,
            path=path,
            task_id=task_id,
            replace=replace,
            upload=upload,
            canary_id=self._new_request_id if canary else None,
            register=register,
        )

    async def load_tensors(
        self,
        principal: Principal,
        *,
        model: str,
        task_id: int | None,
        weights: RequestTensor,
        config: RequestTensor,
    ) -> AdapterKey:
        try:
            served = self._managed_model(principal, model)
            if task_id is not None:
                await self._settle(served, principal, ByTaskId(task_id))
            served.adapters_of(principal).check_manages(inline_name(served, principal, task_id))
            return await self._loader.load_tensors(
                served, principal.tenant, task_id, weights, config
            )
        except LoraplexError as error:  # the request that contains the tensors fails with it
            self._metrics.observe_error(model, error)
            raise

    async def unload(
        self, principal: Principal, ref: AdapterRef, mode: UnloadMode = UnloadMode.DRAIN
    ) -> Unloaded:
        _note(ref)
        if self._declared is not None:
            served = self._managed_model(principal, ref.model)
            unloaded = await self._declared.unload(served, principal, ref.key, mode)
            if unloaded is not None:
                return unloaded
        model, ref = await self._managed(principal, ref)
        return await self._catalog.remove(model, ref, mode)

    async def rollback(
        self, principal: Principal, ref: AdapterRef, number: int | None = None
    ) -> AdapterCard:
        model, ref = await self._managed(principal, ref)
        check_may_roll_back(model.store.find(ref))
        version = await self._catalog.rollback(model, ref, number)
        return card_of(version, model.state_of(version))

    async def pin(
        self, principal: Principal, ref: AdapterRef, number: int | None, *, is_pinned: bool
    ) -> VersionCard:
        model, ref = await self._managed(principal, ref)
        return version_card(await self._catalog.pin(model, ref, number, is_pinned=is_pinned))

    async def alias(
        self, principal: Principal, ref: AdapterRef, alias: str, *, replace: bool = False
    ) -> AdapterCard:
        model, ref = await self._managed(principal, ref)
        model.adapters_of(principal).check_manages(alias)
        await self._settle(model, principal, ByName(alias))
        self._catalog.check_is_no_base(alias)
        if self._declared is not None:
            version = model.store.resolve(ref)
            version = await self._declared.alias(model, ref.tenant, version, alias)
            return card_of(version, model.state_of(version))
        version = await self._catalog.change(lambda: model.store.alias(ref, alias, replace=replace))
        return card_of(version, model.state_of(version))

    async def describe(
        self, principal: Principal, ref: AdapterRef, number: int | None = None
    ) -> AdapterDetails:
        _note(ref, is_change=False)
        self._require_open()
        model = self._catalog.model(ref.model, principal)
        await self._settle(model, principal, ref.key)
        ref = model.adapters_of(principal).described(ref.key)
        details = await describe(model, ref, number)
        return details if ref.tenant == principal.tenant else without_sources(details)

    async def _settle(self, model: ServedModel, principal: Principal, key: AdapterKey) -> None:
        """Validate what a key means, so that a change meets an adapter or none."""
        adapter = model.adapters_of(principal).unvalidated(key)
        if adapter is not None:
            await self._validate(model, adapter, principal.tenant)

    async def _managed(
        self, principal: Principal, ref: AdapterRef
    ) -> tuple[ServedModel, AdapterRef]:
        """Return the model and the adapter to change; raise if the principal may not."""
        _note(ref)
        model = self._managed_model(principal, ref.model, is_change=True)
        await self._settle(model, principal, ref.key)
        return model, model.adapters_of(principal).managed(ref.key)

    def _managed_model(
        self, principal: Principal, model: str, *, is_change: bool = False
    ) -> ServedModel:
        """Return the model whose adapters are to change; raise if the principal may not.

        is_change: of what other requests get, which may be refused.
        """
        principal.require_manages()
        self._require_open()
        served = self._catalog.model(model, principal)
        if is_change and self._refusal:
            raise UnsupportedFeatureError(self._refusal)
        return served


def _note(ref: AdapterRef, *, is_change: bool = True) -> None:
    name = ref.key.name if isinstance(ref.key, ByName) else ""
    note_subject(ref.model, name, is_change=is_change)
