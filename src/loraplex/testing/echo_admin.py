"""Adapter administration of EchoBackend."""

import asyncio

import msgspec

from loraplex.adapters.staged import Examination, ExaminedTensor
from loraplex.adapters.staging import RequestTensor
from loraplex.core.adapter import AdapterKey, AdapterRef
from loraplex.core.errors import AdapterExistsError, InvalidAdapterError, PermissionDeniedError
from loraplex.core.principal import Principal
from loraplex.serving.adapter_cards import (
    AdapterCard,
    AdapterDetails,
    LoadReport,
    TrialRefusal,
    TrialReport,
    Unloaded,
    UnloadMode,
    VersionCard,
)
from loraplex.serving.backend import Backend
from loraplex.testing.echo_adapters import EchoAdapters
from loraplex.testing.echo_model import EchoState


class EchoAdmin:
    """Implementation of serving.backend.AdapterAdmin, which records its calls."""

    def __init__(self, backend: Backend, state: EchoState) -> None:
        self._backend = backend
        self._state = state

    def register(
        self,
        name: str,
        *,
        model: str | None = None,
        path: str | None = None,
        task_id: int | None = None,
        replace: bool = False,
        canary: bool = False,
    ) -> LoadReport:
        """Register an adapter without awaiting; its digest is the SHA-256 of its path."""
        models = [card.name for card in self._backend.models()]
        base = self._backend.model(model if model is not None else models[0]).card
        if name in models:
            raise AdapterExistsError(f"{name!r} is already served", param="name")
        source = path if path is not None else f"/adapters/{name}"
        return self._state.adapter_registry.add(
            base.name, name, source=source, task_id=task_id, replace=replace, canary=canary
        )

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
        _check_may_manage(principal)
        if self._state.load_faults:
            raise self._state.load_faults.popleft()
        if dry_run:
            self._state.adapter_registry.check_free(model, name, task_id, replace=replace)
            trial = EchoAdapters().add(model, name, source=path, task_id=task_id, canary=canary)
            return msgspec.structs.replace(trial, is_dry_run=True)
        return self.register(
            name, model=model, path=path, task_id=task_id, replace=replace, canary=canary
        )

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
        """Return the trial of an adapter with one tensor, which a planted fault refuses."""
        report, refusal = None, None
        try:
            report = await self.load(
                principal,
                model=model,
                name=name,
                path=path,
                task_id=task_id,
                replace=replace,
                dry_run=True,
                canary=canary,
            )
        except InvalidAdapterError as error:
            refusal = TrialRefusal(error.code, error.message)
        tensor = ExaminedTensor(
            name="q_proj.lora_A.weight",
            shape=(8, 64),
            dtype="F32",
            module="q_proj",
            layer=0,
            expert=None,
            rank=8,
            applied=refusal is None,
            refused=refusal is not None,
            reason=None if refusal is None else refusal.message,
        )
        examined = Examination(
            format="PEFT", tensors=(tensor,), num_tensors=1, num_refused=int(tensor.refused)
        )
        return TrialReport(
            is_ok=refusal is None,
            refusal=refusal,
            examination=examined,
            changes_base=canary or None,
            fits_now=None if report is None else True,
            free_pages=10,
            adapter=report,
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
        _check_may_manage(principal)
        self._state.adapter_tensors.append((weights, config))
        await asyncio.sleep(self._state.delay_seconds)
        if self._state.load_faults:
            raise self._state.load_faults.popleft()
        base = self._backend.model(model).card
        return self._state.adapter_registry.add_tensors(base.name, task_id, weights, config)

    async def unload(
        self, principal: Principal, ref: AdapterRef, mode: UnloadMode = UnloadMode.DRAIN
    ) -> Unloaded:
        _check_may_manage(principal)
        self._state.unload_modes.append(mode)
        return self._state.adapter_registry.remove(ref)

    async def rollback(
        self, principal: Principal, ref: AdapterRef, number: int | None = None
    ) -> AdapterCard:
        _check_may_manage(principal)
        return self._state.adapter_registry.rollback(ref, number)

    async def pin(
        self, principal: Principal, ref: AdapterRef, number: int | None, *, is_pinned: bool
    ) -> VersionCard:
        _check_may_manage(principal)
        return self._state.adapter_registry.pin(ref, number, is_pinned=is_pinned)

    async def alias(
        self, principal: Principal, ref: AdapterRef, alias: str, *, replace: bool = False
    ) -> AdapterCard:
        _check_may_manage(principal)
        return self._state.adapter_registry.alias(ref, alias, replace=replace)

    async def describe(self, principal: Principal, ref: AdapterRef) -> AdapterDetails:
        del principal
        return self._state.adapter_registry.describe(ref, self._state.residency)


def _check_may_manage(principal: Principal) -> None:
    if not principal.rights.manage:
        raise PermissionDeniedError("this key may not load or unload adapters")
