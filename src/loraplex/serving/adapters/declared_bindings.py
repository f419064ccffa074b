"""Binds names to their declared versions: stages, checks, registers, and tries again."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from loraplex.adapters.declaration import Declaration, DeclaredName
from loraplex.adapters.staging import OPERATOR, StagedAdapter
from loraplex.adapters.version import AdapterVersion, VersionOrigin
from loraplex.core.adapter import AdapterRef, ByName
from loraplex.core.clock import Clock
from loraplex.core.errors import CapacityError, InvalidAdapterError, LoraplexError
from loraplex.serving.adapter_fit import check_fits_tiers
from loraplex.serving.adapters.loading import CatalogLoader
from loraplex.serving.catalog import ModelCatalog, apply_version, release, unpin_others
from loraplex.serving.served_model import ServedModel

logger = logging.getLogger(__name__)

_NS: Final = 1_000_000_000
_FIRST_PAUSE_NS: Final = 5 * _NS
_LONGEST_PAUSE_NS: Final = 600 * _NS
"""Pauses between two attempts of a load that failed: each is twice the one before."""

NO_DECLARATIONS: Final[Mapping[DeclaredName, Declaration]] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True)
class _Failure:
    wanted: Declaration
    error: LoraplexError
    pause_ns: int
    until_ns: int


class DeclaredBindings:
    """Bindings of declared names in the stores of a server's models."""

    def __init__(self, loader: CatalogLoader, catalog: ModelCatalog, clock: Clock) -> None:
        self._loader = loader
        self._catalog = catalog
        self._clock = clock
        self.models: dict[str, ServedModel] = {}
        self.wanted = NO_DECLARATIONS
        """What names shall mean: not removed, each alias with one adapter only."""
        self.due: dict[DeclaredName, None] = {}
        """Names bound to another version than the declared one."""
        self._failures: dict[DeclaredName, _Failure] = {}
        self._loads: dict[DeclaredName, asyncio.Task[LoraplexError | None]] = {}

    @property
    def num_failing(self) -> int:
        """Number of adapters whose last load failed."""
        return len(self._failures)

    async def close(self) -> None:
        loads = list(self._loads.values())
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)

    async def update(self) -> None:
        """Replace outdated versions, one after another."""
        for key in list(self.due):
            await self.take(key, OPERATOR)

    async def take(self, key: DeclaredName, turn: str) -> LoraplexError | None:
        """Load an adapter, once for all that wait for it; return why it cannot be served."""
        task = self._loads.get(key)
        if task is None:
            task = asyncio.create_task(self._load(key, turn))
            self._loads[key] = task
            task.add_done_callback(lambda _: self._loads.pop(key))
        return await asyncio.shield(task)  # a client that leaves must not end it for the others

    async def _load(self, key: DeclaredName, turn: str) -> LoraplexError | None:
        while (wanted := self.wanted.get(key)) is not None:
            failure = self._failures.get(key)
            if failure is not None and failure.wanted != wanted:
                failure = None
            if failure is not None and self._clock.now_ns() < failure.until_ns:
                return failure.error
            try:
                if await self.bind(key, wanted, turn):
                    return None
            except LoraplexError as error:
                self._note_failure(key, wanted, error, failure)
                return error
        return None

    def _note_failure(
        self,
        key: DeclaredName,
        wanted: Declaration,
        error: LoraplexError,
        before: _Failure | None,
    ) -> None:
        logger.warning(
            "declared adapter %r, version %d: %s", wanted.name, wanted.version, error.message
        )
        pause_ns = _FIRST_PAUSE_NS if before is None else 2 * before.pause_ns
        if not isinstance(error, CapacityError):
            pause_ns = _LONGEST_PAUSE_NS
        pause_ns = min(pause_ns, _LONGEST_PAUSE_NS)
        until_ns = self._clock.now_ns() + pause_ns
        self._failures[key] = _Failure(wanted, error, pause_ns, until_ns)

    async def bind(
        self,
        key: DeclaredName,
        wanted: Declaration,
        turn: str,
        staged: StagedAdapter | None = None,
    ) -> bool:
        """Bind a name to a declared version; return False if another one is declared meanwhile."""
        model = self.models[key[0]]
        present = own_version(model, key)
        if present is not None and is_bound(model, present, wanted):
            self._settle(model, key)
            return True
        if staged is None:
            staged = await self._stage(model, wanted, present, turn)
        if wanted.digest and staged.source.digest != wanted.digest:
            raise InvalidAdapterError(
                f"the declaration of adapter {wanted.name!r}, version {wanted.version}, has digest "
                f"{wanted.digest}; its source has {staged.source.digest}",
                param="path",
            )
        check_fits_tiers(staged.source, model.config, model.engine.capacity)
        is_same = present is not None and present.digest == staged.source.digest
        version = AdapterVersion(
            model=key[0],
            tenant=wanted.tenant,
            name=wanted.name,
            task_id=wanted.task_id,
            number=wanted.version,
            staged=msgspec.structs.replace(staged, seconds={}, was_known=False),
            path=wanted.uri,
            created=wanted.created or int(time.time()),
            origin=VersionOrigin.DECLARED,
            is_pinned=present is not None and is_same and present.is_pinned,
        )

        def change() -> tuple[AdapterVersion | None, AdapterVersion] | None:
            # In the turn of changes: a version that was declared meanwhile must not be undone.
            if self.wanted.get(key) != wanted:
                return None
            return model.store.declare(version, wanted.aliases), version

        def then(result: tuple[AdapterVersion | None, AdapterVersion] | None) -> None:
            if result is not None:
                self._settle(model, key)
                apply_version(model, *result)

        return await self._catalog.change(change, then) is not None

    async def _stage(
        self,
        model: ServedModel,
        wanted: Declaration,
        present: AdapterVersion | None,
        turn: str,
    ) -> StagedAdapter:
        """Stage the source; not again if only the version or the aliases differ."""
        is_known = (
            present is not None
            and bool(wanted.digest)
            and present.digest == wanted.digest
            and not model.store.is_missing(present)
        )
        if present is not None and is_known:
            return present.staged
        return await self._loader.stage(model, wanted.uri, tenant=turn, is_trusted=False)

    def _settle(self, model: ServedModel, key: DeclaredName) -> None:
        self.due.pop(key, None)
        self._failures.pop(key, None)
        model.discovered.drop_declared(key[1], key[2])

    async def unbind(self, model: ServedModel, key: DeclaredName) -> None:
        """Unload an adapter that is declared no longer."""
        self._failures.pop(key, None)
        model.discovered.drop_declared(key[1], key[2])

        def change() -> AdapterVersion | None:
            version = own_version(model, key)
            is_other = version is None or version.origin is not VersionOrigin.DECLARED
            if is_other or self.wanted.get(key) is not None:
                return None
            return model.store.remove(AdapterRef(*key[:2], ByName(key[2])))

        def then(version: AdapterVersion | None) -> None:
            if version is not None:
                release(model, version)
                unpin_others(model)
                logger.info("adapter %r is declared no longer: it is unloaded", version.name)

        await self._catalog.change(change, then)


def own_version(model: ServedModel, key: DeclaredName) -> AdapterVersion | None:
    """Return the version that has a name itself, not as an alias."""
    _, tenant, name = key
    version = model.store.find(AdapterRef(model.card.name, tenant, ByName(name)))
    return version if version is not None and version.name == name else None


def is_bound(model: ServedModel, version: AdapterVersion, wanted: Declaration) -> bool:
    """Whether a stored version is the declared one. Aliases count where they can be bound."""
    aliases = model.store.aliases(version.tenant, version.model)
    return (
        version.origin is VersionOrigin.DECLARED
        and version.number == wanted.version
        and version.path == wanted.uri
        and version.task_id == wanted.task_id
        and wanted.digest in ("", version.digest)
        and all(aliases.get(alias, version.name) == version.name for alias in wanted.aliases)
        and {alias for alias, name in aliases.items() if name == version.name}
        == set(wanted.aliases)
    )
