"""Loading of adapters from a source or a request's tensors: stage, check, register, preload."""

import dataclasses
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from loraplex.adapters.base_check import BaseCheck
from loraplex.adapters.sources.reference import shown_source
from loraplex.adapters.staged import REQUEST_TENSORS, UPLOAD, Examination
from loraplex.adapters.staging import OPERATOR, RequestTensor, StagedAdapter, StagingWorker
from loraplex.adapters.store import AdapterVersion, Registration, VersionOrigin
from loraplex.adapters.uploads import is_upload
from loraplex.core.adapter import AdapterKey, AdapterRef, ByDigest, ByName, ByTaskId
from loraplex.core.clock import Clock
from loraplex.core.errors import (
    AdapterExistsError,
    AdapterLoadError,
    AdapterMismatchError,
    AdapterTooLargeError,
    InvalidAdapterError,
    LoraplexError,
    UnsupportedFeatureError,
)
from loraplex.core.gguf import gguf_stem
from loraplex.core.principal import Principal
from loraplex.core.request import RequestId
from loraplex.core.stats import AdapterActivity
from loraplex.models.engine_folder import source_model
from loraplex.models.gguf_config import gguf_of
from loraplex.serving.access.tenant_adapters import ConfiguredAdapter, TenantAdapters
from loraplex.serving.adapter_cards import (
    AdapterState,
    CanaryReport,
    LoadReport,
    ReplacedVersion,
    TrialRefusal,
    TrialReport,
    card_fields,
    content_of,
)
from loraplex.serving.adapters.canary import NoEffectError, run_canary
from loraplex.serving.catalog import ModelCatalog, apply_version, is_present
from loraplex.serving.served_model import ServedModel, check_fits_tiers

logger = logging.getLogger(__name__)

_NUM_NAME_DIGITS = 12
_FETCH = "fetch"
_INLINE = "inline-"
_REFUSALS: Final = (
    *(InvalidAdapterError, AdapterMismatchError, AdapterTooLargeError),
    UnsupportedFeatureError,
)
"""Errors about an adapter itself. Others are about its source or the server."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoad:
    """Load that a client requests. All of it is checked but the adapter itself."""

    name: str
    path: str
    task_id: int | None = None
    replace: bool = False
    upload: Path | None = None
    """What the client sent, which `path` names."""
    canary_id: Callable[[], RequestId] | None = None
    """Returns ids for the canary's requests; None: it runs no canary."""
    register: Callable[[StagedAdapter], Awaitable[Registration]] | None = None
    """Binds the name; None: the catalog of this server does."""


class CatalogLoader:
    """Worker of the catalog that loads adapters. Owns the staging worker."""

    def __init__(self, worker: StagingWorker, catalog: ModelCatalog, clock: Clock) -> None:
        self._worker = worker
        self._catalog = catalog
        self._clock = clock

    async def start(self) -> None:
        await self._worker.start()

    async def keep_spare(self) -> None:
        """Start the processes that loads of tenants are to find."""
        await self._worker.keep_spare()

    async def close(self) -> None:
        await self._worker.close()

    async def load(
        self, model: ServedModel, principal: Principal, load: AdapterLoad, *, dry_run: bool = False
    ) -> LoadReport:
        """Load an adapter. Raises before any change if it is bad, or would have no effect."""
        tenant, store, name, path = principal.tenant, model.store, load.name, load.path
        store.check_free(model.card.name, tenant, name, load.task_id, replace=load.replace)
        staged = await self.stage(model, path, tenant=tenant, is_trusted=False, upload=load.upload)
        if staged.changes_nothing:
            shown = UPLOAD if load.upload is not None else shown_source(path)
            raise NoEffectError(
                f"adapter {name!r} changes nothing: every lora_B of {shown} is zero "
                "(an untrained adapter?)",
                param="path",
            )
        check_fits_tiers(staged.source, model.config, model.engine.capacity)
        seconds = dict(staged.seconds)
        canary = None
        if load.canary_id is not None:
            started = time.perf_counter()
            canary = await self._canary(model, principal, staged, load.canary_id)
            seconds["canary"] = time.perf_counter() - started
        started = time.perf_counter()
        if dry_run:
            version, is_unchanged = self._prospect(model, tenant, staged, load)
        else:
            registration = await (
                load.register(staged)
                if load.register is not None
                else self._catalog.register(
                    *(model, tenant, name, staged),
                    path=path,
                    task_id=load.task_id,
                    replace=load.replace,
                )
            )
            version, is_unchanged = registration.version, registration.is_unchanged
            seconds["register"] = time.perf_counter() - started
        return LoadReport(
            **card_fields(version, AdapterState.READY),
            is_unchanged=is_unchanged,
            is_dry_run=dry_run,
            content=content_of(staged, model.engine.capacity, model.card.dtype),
            seconds=seconds,
            canary=canary,
        )

    async def try_out(
        self, model: ServedModel, principal: Principal, load: AdapterLoad
    ) -> TrialReport:
        """Return what a load would do. Raises errors that are not about the adapter."""
        report: LoadReport | None = None
        error: LoraplexError | None = None
        try:
            report = await self.load(model, principal, load, dry_run=True)
        except _REFUSALS as refusal:
            error = refusal
        try:
            examined = await self._worker.examine(
                load.path,
                shapes=model.shapes,
                max_ranks=model.config.rank_limits,
                base_path=model.card.path,
                pool_dtype=model.card.dtype,
                tenant=principal.tenant,
                upload=load.upload,
            )
        except _REFUSALS:  # no tensor can be listed, and the load was refused for the same reason
            examined = Examination()
        engine = model.engine
        free = engine.capacity.num_adapter_pages - engine.stats.adapters.device_pages_used
        pages = free if report is None else report.content.device_pages
        changes_base = None if report is None or report.canary is None else True
        activity = await model.adapter_activity() if pages > free else AdapterActivity()
        return TrialReport(
            is_ok=error is None,
            refusal=None if error is None else TrialRefusal(error.code, error.message),
            examination=examined,
            changes_base=False if isinstance(error, NoEffectError) else changes_base,
            fits_now=None if report is None else pages <= free,
            free_pages=free,
            evicts=_names_of(activity.evicted_for(pages - free), model.adapters_of(principal)),
            replaces=_replaced(model, principal, load.name),
            adapter=report,
        )

    async def load_tensors(
        self,
        model: ServedModel,
        tenant: str,
        task_id: int | None,
        weights: RequestTensor,
        config: RequestTensor,
    ) -> AdapterKey:
        """Load the tensors of a request. See `AdapterAdmin.load_tensors`.

        The name is that of the task id's adapter; a new one is named by its task id or digest.
        """
        staged = await self._worker.stage_tensors(
            weights,
            config,
            shapes=model.shapes,
            max_ranks=model.config.rank_limits,
            pool_dtype=model.card.dtype,
            tenant=tenant,
        )
        model.observe_load("stage", sum(staged.seconds.values()))
        if staged.changes_nothing:
            raise InvalidAdapterError(
                "the adapter in the request changes nothing: every B of lora_weights is zero",
                param="lora_weights",
            )
        check_fits_tiers(staged.source, model.config, model.engine.capacity)
        digest = staged.source.digest
        key = ByDigest(digest) if task_id is None else ByTaskId(task_id)
        ref = AdapterRef(model.card.name, tenant, key)

        def change() -> tuple[AdapterVersion | None, AdapterVersion]:
            # In one change: two requests with one new task id must not both find it free.
            before = model.store.find(ref)
            if (
                before is not None
                and before.digest == digest
                and model.state_of(before) is AdapterState.READY
            ):
                return before, before
            name = self._name_of_tensors(before, digest, task_id)
            registration = model.store.register(
                model.card.name,
                tenant,
                name,
                staged,
                path=REQUEST_TENSORS,
                task_id=task_id,
                replace=before is not None,
            )
            return before, registration.version

        def then(result: tuple[AdapterVersion | None, AdapterVersion]) -> None:
            before, version = result
            if before is not version:
                apply_version(model, before, version)

        await self._catalog.change(change, then)
        return key

    def _name_of_tensors(
        self, before: AdapterVersion | None, digest: str, task_id: int | None
    ) -> str:
        """Return the name of a request's tensors. before: the version that they replace.

        Raises AdapterExistsError if they must not have the name or replace the version.
        """
        if before is None:
            of_digest = f"{_INLINE}{digest[:_NUM_NAME_DIGITS]}"
            name = of_digest if task_id is None else str(task_id)
            self._catalog.check_is_no_base(name)
            return name
        if before.origin is VersionOrigin.DECLARED:
            raise AdapterExistsError(
                f"adapter {before.name!r} is declared for several servers: {REQUEST_TENSORS} "
                "must not replace it on one; use another task id",
                param="task_id",
            )
        return before.name

    async def reload(self, model: ServedModel, version: AdapterVersion) -> bool:
        """Stage a version's source again; return whether it has other bytes, the next version.

        Tensors of a request and uploads have no source to stage, and a declared adapter changes by
        its declaration. Raises the error of the source, if any.
        """
        if _was_sent(version) or version.origin is VersionOrigin.DECLARED:
            return False
        staged = await self._stage_again(model, version, reads_again=True)
        is_same = staged.source.digest == version.digest
        if not is_same or version.digest in model.store.missing_digests:
            check_fits_tiers(staged.source, model.config, model.engine.capacity)
            await self._register_again(model, version, staged)
        return not is_same

    async def repair(self, model: ServedModel, version: AdapterVersion) -> bool:
        """Stage a lost canonical adapter file again; return whether its source has the same bytes.

        With other bytes nothing is registered: the operator decides what they mean. Raises the
        reason why the source cannot be read.
        """
        if _was_sent(version):
            raise AdapterLoadError("its weights came in a request: send them again")
        staged = await self._stage_again(model, version)
        is_same = staged.source.digest == version.digest
        if is_same:
            await self._register_again(model, version, staged)
        return is_same

    async def _stage_again(
        self, model: ServedModel, version: AdapterVersion, *, reads_again: bool = False
    ) -> StagedAdapter:
        is_trusted = version.origin is VersionOrigin.CONFIGURED
        return await self.stage(
            model,
            version.path,
            tenant=OPERATOR if is_trusted else version.tenant,
            reads_again=reads_again,
            is_trusted=is_trusted,
        )

    async def _register_again(
        self, model: ServedModel, version: AdapterVersion, staged: StagedAdapter
    ) -> None:
        await self._catalog.register(
            model,
            version.tenant,
            version.name,
            staged,
            path=version.path,
            replace=True,
            origin=version.origin,
        )

    async def register_configured(
        self, model: ServedModel, tenant: str, adapter: ConfiguredAdapter, turn: str = OPERATOR
    ) -> Sequence[str]:
        """Stage and register a configured adapter, which replaces any other one of its name.

        Returns the warnings about its files. turn: the tenant in whose turn it is staged.
        """
        name, path = adapter.name, adapter.path
        staged = await self.stage(model, path, tenant=turn)
        if staged.changes_nothing:
            source = shown_source(path)
            logger.warning("adapter %r changes nothing: every lora_B of %s is zero", name, source)
        check_fits_tiers(staged.source, model.config, model.engine.capacity)
        await self._catalog.register(
            model,
            tenant,
            name,
            staged,
            path=path,
            task_id=adapter.task_id,
            replace=True,
            origin=VersionOrigin.CONFIGURED,
        )
        return staged.warnings

    async def stage(
        self,
        model: ServedModel,
        path: str,
        *,
        tenant: str = OPERATOR,
        reads_again: bool = False,
        is_trusted: bool = True,
        upload: Path | None = None,
    ) -> StagedAdapter:
        """Stage a source. is_trusted: the operator named the path, not a client. upload: what
        `path` names, if a client sent it."""
        staged = await self._worker.stage(
            path,
            shapes=model.shapes,
            max_ranks=model.config.rank_limits,
            base_model=trained_name(model.card.path),
            base_path=model.card.path,
            base_check=BaseCheck(model.config.adapter_base_check),
            pool_dtype=model.card.dtype,
            reads_again=reads_again,
            is_trusted=is_trusted,
            tenant=tenant,
            upload=upload,
        )
        fetch_seconds = staged.seconds.get(_FETCH)
        if fetch_seconds is not None:
            model.observe_load(_FETCH, fetch_seconds)
        stage_seconds = sum(staged.seconds.values()) - (fetch_seconds or 0.0)
        model.observe_load("stage", stage_seconds)
        return model.with_end_warnings(staged)

    async def _canary(
        self,
        model: ServedModel,
        principal: Principal,
        staged: StagedAdapter,
        new_request_id: Callable[[], RequestId],
    ) -> CanaryReport:
        digest = staged.source.digest
        try:
            return await run_canary(
                model, principal, staged.source, new_request_id, self._clock.now_ns()
            )
        finally:
            # Its registration will bring it back; its copies in the engine stay until then.
            if not is_present(model.store, model.card.name, digest):
                model.engine.forget_adapter(digest)

    def _prospect(
        self, model: ServedModel, tenant: str, staged: StagedAdapter, load: AdapterLoad
    ) -> tuple[AdapterVersion, bool]:
        """Return the version that a load would make, and whether the name has its bytes already."""
        present = model.store.find(AdapterRef(model.card.name, tenant, ByName(load.name)))
        is_unchanged = present is not None and present.digest == staged.source.digest
        version = AdapterVersion(
            model=model.card.name,
            tenant=tenant,
            name=load.name,
            task_id=present.task_id if present and load.task_id is None else load.task_id,
            number=1 if present is None else present.number + (not is_unchanged),
            staged=staged,
            path=load.path,
            created=int(time.time()),
        )
        return version, is_unchanged


def inline_name(model: ServedModel, principal: Principal, task_id: int | None) -> str:
    """Return the name of an adapter from a request, or the beginning of the name."""
    if task_id is None:
        return _INLINE
    own = model.store.find(AdapterRef(model.card.name, principal.tenant, ByTaskId(task_id)))
    return str(task_id) if own is None else own.name


def _was_sent(version: AdapterVersion) -> bool:
    """Whether a client sent the adapter itself: it has no source."""
    return version.path == REQUEST_TENSORS or is_upload(version.path)


@functools.cache
def trained_name(model_path: str) -> str:
    """Return the likely name of a served base in adapters: its folder's name, or its hub id."""
    folder = source_model(Path(model_path)).resolve()
    gguf = gguf_of(folder)
    if gguf and gguf[0].is_symlink():  # the folder stands for a file
        return gguf_stem(gguf[0].readlink())
    if folder.parent.name == "snapshots":  # the hub's cache: models--OWNER--NAME/snapshots/COMMIT
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name


def _replaced(model: ServedModel, principal: Principal, name: str) -> ReplacedVersion | None:
    """Return the version that a load of this name would replace."""
    present = model.store.find(AdapterRef(model.card.name, principal.tenant, ByName(name)))
    if present is None:
        return None
    running = model.engine.requests.num_by_label().get(present.label, 0)
    return ReplacedVersion(present.number, present.rank, running)


def _names_of(digests: Sequence[str], seen: TenantAdapters) -> tuple[str, ...]:
    """Return a name of each adapter that is seen, in the same order."""
    if not digests:
        return ()
    names = {version.digest: version.name for version in seen.listed()}
    return tuple(names[digest] for digest in digests if digest in names)
