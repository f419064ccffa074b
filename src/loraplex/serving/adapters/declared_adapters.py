"""Adapters that declarations shared with other servers name: followed, and staged on first use.

A declared name is listed at once. Its adapter is staged when a request names it; where an older
version is bound to the name, the new one replaces it as soon as it is complete, and a load that
failed is tried again. The private store is a cache: what is declared no longer is removed from it.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import msgspec

from loraplex.adapters.declaration import Declaration, DeclaredName
from loraplex.adapters.shared_declarations import SharedDeclarations
from loraplex.adapters.staging import OPERATOR, StagedAdapter
from loraplex.adapters.version import AdapterVersion, VersionOrigin
from loraplex.core.adapter import AdapterRef, ByName
from loraplex.core.clock import Clock
from loraplex.core.counts import counted
from loraplex.core.errors import (
    AdapterExistsError,
    AdapterLoadError,
    CapacityError,
    InvalidAdapterError,
    LoraplexError,
    RateLimitedError,
)
from loraplex.serving.access.tenant_adapters import ConfiguredAdapter
from loraplex.serving.adapters.loading import CatalogLoader
from loraplex.serving.catalog import ModelCatalog, apply_version, release, unpin_others
from loraplex.serving.served_model import ServedModel, check_fits_tiers

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_SECONDS: Final = 30.0
"""Maximum time that one use of the place of the declarations may take."""
_NS: Final = 1_000_000_000
_FIRST_PAUSE_NS: Final = 5 * _NS
_LONGEST_PAUSE_NS: Final = 600 * _NS
"""Pauses between two attempts of a load that failed: each is twice the one before."""
MAX_PER_SECOND: Final = 32
"""Maximum number of look-ups of unknown names by one tenant in a second."""
_MAX_REMEMBERED: Final = 4096

_NO_DECLARATIONS: Final[Mapping[DeclaredName, Declaration]] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class DeclarationStatus:
    """State of the followed declarations, for metrics."""

    num_adapters: int
    num_outdated: int
    num_failing: int
    age_seconds: float
    """Time since the last complete reading, or since the start."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Failure:
    wanted: Declaration
    error: LoraplexError
    pause_ns: int
    until_ns: int


class _LookUps:
    """Names that were looked up in the last second, and the number of look-ups by tenant."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended: dict[tuple[str, str], int] = {}
        """Time of the last look-up, the oldest first."""
        self._begun: dict[str, tuple[int, int]] = {}
        """Begin of a tenant's present second, and the look-ups in it; the oldest first."""

    def begin(self, tenant: str, name: str) -> bool:
        """Whether to look up a name now: not if that was done in the last second.

        Raises RateLimitedError for a tenant which looks up too many names.
        """
        now_ns = self._clock.now_ns()
        ended_ns = self._ended.get((tenant, name))
        if ended_ns is not None and now_ns - ended_ns < _NS:
            return False
        began_ns, num_begun = self._begun.get(tenant, (now_ns, 0))
        if now_ns - began_ns >= _NS:
            began_ns, num_begun = now_ns, 0
        if num_begun >= MAX_PER_SECOND:
            raise RateLimitedError(
                f"tenant {tenant!r} named more than {MAX_PER_SECOND} unknown adapters in a second; "
                "name adapters that exist, or try again later",
                param="model",
                retry_after_seconds=1.0,
            )
        self._begun.pop(tenant, None)
        self._begun[tenant] = began_ns, num_begun + 1
        if len(self._begun) > _MAX_REMEMBERED:
            del self._begun[next(iter(self._begun))]
        return True

    def end(self, tenant: str, name: str) -> None:
        """Remember a look-up that has ended."""
        self._ended.pop((tenant, name), None)
        self._ended[tenant, name] = self._clock.now_ns()
        if len(self._ended) > _MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]


class DeclaredAdapters:
    """Follower of shared declarations for the models of a server. No failure stops it."""

    def __init__(
        self,
        shared: SharedDeclarations,
        loader: CatalogLoader,
        catalog: ModelCatalog,
        clock: Clock,
        interval_seconds: float,
    ) -> None:
        """interval_seconds: time between two readings; 0: only when a request needs one."""
        self._shared = shared
        self._catalog = catalog
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._read_ns = clock.now_ns()
        """Time of the last complete reading."""
        self._look_ups = _LookUps(clock)
        self._loader = loader
        self._models: dict[str, ServedModel] = {}
        self.wanted = _NO_DECLARATIONS
        """What names shall mean: not removed, each alias with the one adapter that has it."""
        self._due: dict[DeclaredName, None] = {}
        """Names bound to another version than the declared one."""
        self._failures: dict[DeclaredName, _Failure] = {}
        self._loads: dict[DeclaredName, asyncio.Task[LoraplexError | None]] = {}
        self._unreconciled: set[str] = set()
        """Models whose stored adapters have not been compared with the declarations yet."""
        self._turn = asyncio.Lock()
        # A thread of its own: a place that hangs must not take those of other work.
        self._thread = ThreadPoolExecutor(1, "declarations")
        self._num_begun = self._num_done = 0
        """Readings: the last one that began, and the last one that ended."""
        self._problem = ""
        """Why the last reading failed."""
        self._declared = _NO_DECLARATIONS
        """Declarations as they were read, those of removed adapters included."""
        self._left: set[DeclaredName] = set()
        """Changed names that could not be followed, to be tried again."""
        self._updating: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    async def load(self, model: ServedModel) -> None:
        """Follow the declarations of a model, too; without a result its stored adapters stay."""
        self._models[model.card.name] = model
        self._unreconciled.add(model.card.name)
        try:
            await self.refresh()
        except AdapterLoadError:
            logger.warning("model %r is served with the adapters that it knows", model.card.name)

    def start(self) -> None:
        """Follow the declarations until close(). Idempotent."""
        if self._task is None and self._interval_seconds:
            self._task = asyncio.create_task(self._run(), name="declared-adapters")

    async def close(self) -> None:
        try:
            await _end(task for task in (self._task, self._updating) if task)
            await _end(self._loads.values())
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def refresh(self) -> None:
        """Read the declarations and follow their changes.

        One reading that began after the calls serves all callers. Raises AdapterLoadError.
        """
        needed = self._num_begun + 1
        async with self._turn:
            if self._num_done < needed:
                self._num_begun += 1
                await self._read()
                self._num_done = self._num_begun
            if self._problem:
                raise AdapterLoadError(self._problem)

    async def look_up(self, tenant: str, name: str) -> None:
        """Read the declarations because a request names an adapter that is unknown here.

        Does nothing for a name that was looked up in the last second. Raises RateLimitedError for
        a tenant which names too many, AdapterLoadError if the declarations cannot be read.
        """
        if self._look_ups.begin(tenant, name):
            await self.refresh()
            self._look_ups.end(tenant, name)

    async def update(self) -> None:
        """Replace outdated versions, one after another."""
        for key in list(self._due):
            await self.validate(key, OPERATOR)

    async def validate(self, key: DeclaredName, turn: str) -> LoraplexError | None:
        """Load a declared adapter in a tenant's turn, once for all that wait for it.

        Returns why it cannot be served.
        """
        task = self._loads.get(key)
        if task is None:
            task = asyncio.create_task(self._load(key, turn))
            self._loads[key] = task
            task.add_done_callback(lambda _: self._loads.pop(key))
        return await asyncio.shield(task)  # a client that leaves must not end it for the others

    def status(self) -> DeclarationStatus:
        return DeclarationStatus(
            len(self.wanted),
            len(self._due),
            len(self._failures),
            (self._clock.now_ns() - self._read_ns) / 1e9,
        )

    def declared(self, key: DeclaredName) -> Declaration | None:
        """Return the present declaration of a name, also of a removed adapter."""
        return self._declared.get(key)

    async def declare(
        self, declaration: Declaration, locally: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """Write a version, change this server by `locally`, then follow the change.

        Raises as SharedDeclarations.write, and then nothing has changed.
        """
        async with self._turn:
            declared = await self._in_thread(lambda: self._shared.write(declaration))
            self._problem = ""
            try:
                if locally is not None:
                    await locally()
            finally:
                await self._follow(declared)

    async def bind(
        self, key: DeclaredName, turn: str, staged: StagedAdapter | None = None
    ) -> AdapterVersion:
        """Bind a name to its declared version, staged if given.

        Raises why it cannot be bound, or AdapterExistsError if the name means no adapter any more.
        """
        wanted = self.wanted.get(key)
        if wanted is not None and staged is not None:
            await self._bind(key, wanted, turn, staged)
        error = await self.validate(key, turn)
        if error is not None:
            raise error
        model, tenant, name = key
        version = self._models[model].store.find(AdapterRef(model, tenant, ByName(name)))
        if version is None or version.name != name:
            raise AdapterExistsError(
                f"adapter {name!r} was removed by another server meanwhile", param="name"
            )
        return version

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_seconds)
            try:
                await self.refresh()
            except AdapterLoadError:
                pass  # logged once
            except Exception:
                logger.exception("following adapter declarations failed; it is tried again")
            if self._due and (self._updating is None or self._updating.done()):
                # A download must not delay the next reading.
                self._updating = asyncio.create_task(self.update(), name="declared-updates")

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Use the place. Raises AdapterLoadError if it does not respond in time."""
        try:
            async with asyncio.timeout(MAX_SECONDS):
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except TimeoutError:
            raise AdapterLoadError(
                f"{self._shared.what} did not respond within {MAX_SECONDS:g} s; look whether a "
                "change was declared before you repeat it"
            ) from None

    async def _read(self) -> None:
        default = next(iter(self._models)) if len(self._models) == 1 else ""
        try:
            declared = await self._in_thread(lambda: self._shared.read(default))
        except AdapterLoadError as error:
            if error.message != self._problem:
                logger.warning("%s; the adapters stay as they are", error.message)
            self._problem = error.message
        else:
            self._problem, self._read_ns = "", self._clock.now_ns()
            await self._follow(declared)

    async def _follow(self, declared: Mapping[DeclaredName, Declaration]) -> None:
        if declared is self._declared and not self._unreconciled and not self._left:
            return
        if self._declared is _NO_DECLARATIONS:
            logger.info("%s declares %s", self._shared.what, counted(len(declared), "adapter"))
        wanted, changed = await asyncio.to_thread(_changes, self.wanted, declared)
        self._declared, self.wanted = declared, wanted
        for name in self._unreconciled:
            changed |= {key for key in wanted if key[0] == name}
            changed |= {
                (name, version.tenant, version.name)
                for version in self._models[name].store.present(name)
                if version.origin is VersionOrigin.DECLARED
            }
        self._unreconciled.clear()
        for key in sorted(changed | self._left):
            model = self._models.get(key[0])
            if model is None:
                continue
            try:
                problem = await self._follow_one(model, key)
            except LoraplexError as error:
                problem = error.message
            if problem and key not in self._left:
                logger.warning("left out the declared adapter %r: %s", key[2], problem)
            (self._left.add if problem else self._left.discard)(key)

    async def _follow_one(self, model: ServedModel, key: DeclaredName) -> str:
        """Follow a changed declaration; return why that is not possible, if so."""
        _, tenant, name = key
        wanted = self.wanted.get(key)
        self._due.pop(key, None)
        if wanted is None:
            await self._unbind(model, key)
            return ""
        version = _own_version(model, key)
        problem = self._problem_of(model, key, version)
        if problem:
            return problem
        if version is None:
            model.discovered.put(
                ConfiguredAdapter(
                    name,
                    wanted.uri,
                    wanted.task_id,
                    is_named=False,
                    tenant=tenant,
                    declaration=wanted,
                )
            )
        elif not _is_bound(model, version, wanted):
            self._due[key] = None
        return ""

    def _problem_of(
        self, model: ServedModel, key: DeclaredName, version: AdapterVersion | None
    ) -> str:
        """Return why a declared name cannot be used here, if so."""
        _, tenant, name = key
        try:
            self._catalog.check_is_no_base(name)
        except LoraplexError as error:
            return error.message
        found = model.discovered.by_name.get((tenant, name))
        is_configured = version is not None and version.origin is VersionOrigin.CONFIGURED
        if is_configured or (found is not None and found.declaration is None):
            return "the configuration of this server has an adapter of this name"
        return ""

    async def _load(self, key: DeclaredName, turn: str) -> LoraplexError | None:
        while (wanted := self.wanted.get(key)) is not None:
            failure = self._failures.get(key)
            if failure is not None and failure.wanted != wanted:
                failure = None
            if failure is not None and self._clock.now_ns() < failure.until_ns:
                return failure.error
            try:
                if await self._bind(key, wanted, turn):
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

    async def _bind(
        self,
        key: DeclaredName,
        wanted: Declaration,
        turn: str,
        staged: StagedAdapter | None = None,
    ) -> bool:
        """Bind a name to a declared version; return False if another one is declared meanwhile."""
        model = self._models[key[0]]
        present = _own_version(model, key)
        if present is not None and _is_bound(model, present, wanted):
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
            and present.digest not in model.store.missing_digests
        )
        if present is not None and is_known:
            return present.staged
        return await self._loader.stage(model, wanted.uri, tenant=turn, is_trusted=False)

    def _settle(self, model: ServedModel, key: DeclaredName) -> None:
        self._due.pop(key, None)
        self._failures.pop(key, None)
        model.discovered.drop_declared(key[1], key[2])

    async def _unbind(self, model: ServedModel, key: DeclaredName) -> None:
        """Unload an adapter that is declared no longer."""
        self._failures.pop(key, None)
        model.discovered.drop_declared(key[1], key[2])

        def change() -> AdapterVersion | None:
            version = _own_version(model, key)
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


def _changes(
    before: Mapping[DeclaredName, Declaration], declared: Mapping[DeclaredName, Declaration]
) -> tuple[dict[DeclaredName, Declaration], set[DeclaredName]]:
    """Return what names shall mean, and those of which that has changed.

    Of several adapters with one alias, the one whose name sorts first has it; an adapter's own name
    is never an alias.
    """
    wanted: dict[DeclaredName, Declaration] = {}
    taken: set[DeclaredName] = set()
    live = {key for key, one in declared.items() if not one.is_removed}
    for key in sorted(live):
        model, tenant, _ = key
        free = tuple(
            alias
            for alias in dict.fromkeys(declared[key].aliases)
            if (model, tenant, alias) not in taken and (model, tenant, alias) not in live
        )
        taken.update((model, tenant, alias) for alias in free)
        one = declared[key]
        wanted[key] = one if free == one.aliases else msgspec.structs.replace(one, aliases=free)
    changed = {key for key in wanted.keys() | before.keys() if wanted.get(key) != before.get(key)}
    return wanted, changed


def _own_version(model: ServedModel, key: DeclaredName) -> AdapterVersion | None:
    """Return the version that has a name itself, not as an alias."""
    _, tenant, name = key
    version = model.store.find(AdapterRef(model.card.name, tenant, ByName(name)))
    return version if version is not None and version.name == name else None


def _is_bound(model: ServedModel, version: AdapterVersion, wanted: Declaration) -> bool:
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


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait for them."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
