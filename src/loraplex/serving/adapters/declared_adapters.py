"""Adapters that declarations shared with other servers name: followed, and staged on first use.

A declared name is listed at once. Its adapter is staged when a request names it; where an older
version is bound to the name, the new one replaces it as soon as it is complete. The private store
is a cache: what is declared no longer is removed from it.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import msgspec

from loraplex.adapters.declaration import Declaration, DeclaredName
from loraplex.adapters.shared_declarations import SharedDeclarations
from loraplex.adapters.staging import StagedAdapter
from loraplex.adapters.version import AdapterVersion, VersionOrigin
from loraplex.core.adapter import AdapterRef, ByName
from loraplex.core.clock import Clock
from loraplex.core.counts import counted
from loraplex.core.errors import (
    AdapterExistsError,
    AdapterLoadError,
    LoraplexError,
)
from loraplex.serving.adapters.declared_bindings import (
    NO_DECLARATIONS,
    DeclaredBindings,
    is_bound,
    own_version,
)
from loraplex.serving.adapters.loading import CatalogLoader
from loraplex.serving.adapters.look_ups import LookUps
from loraplex.serving.catalog import ModelCatalog
from loraplex.serving.discovered_adapters import ConfiguredAdapter
from loraplex.serving.served_model import ServedModel

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_SECONDS: Final = 30.0
"""Maximum time that one use of the place of the declarations may take."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeclarationStatus:
    """State of the followed declarations, for metrics."""

    num_adapters: int
    num_outdated: int
    num_failing: int
    age_seconds: float
    """Time since the last complete reading, or since the start."""


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
        self._look_ups = LookUps(clock)
        self._bindings = DeclaredBindings(loader, catalog, clock)
        self._unreconciled: set[str] = set()
        """Models whose stored adapters have not been compared with the declarations yet."""
        self._turn = asyncio.Lock()
        # A thread of its own: a place that hangs must not take those of other work.
        self._thread = ThreadPoolExecutor(1, "declarations")
        self._num_begun = self._num_done = 0
        """Readings: the last one that began, and the last one that ended."""
        self._problem = ""
        """Why the last reading failed."""
        self._declared = NO_DECLARATIONS
        """Declarations as they were read, those of removed adapters included."""
        self._left: set[DeclaredName] = set()
        """Changed names that could not be followed, to be tried again."""
        self._updating: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    async def load(self, model: ServedModel) -> None:
        """Follow the declarations of a model, too; without a result its stored adapters stay."""
        self._bindings.models[model.card.name] = model
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
        tasks = [task for task in (self._task, self._updating) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self._bindings.close()
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
        await self._bindings.update()

    async def validate(self, key: DeclaredName, turn: str) -> LoraplexError | None:
        """Load a declared adapter in a tenant's turn; return why it cannot be served."""
        return await self._bindings.take(key, turn)

    def status(self) -> DeclarationStatus:
        bindings = self._bindings
        return DeclarationStatus(
            len(bindings.wanted),
            len(bindings.due),
            bindings.num_failing,
            (self._clock.now_ns() - self._read_ns) / 1e9,
        )

    def declared(self, key: DeclaredName) -> Declaration | None:
        """Return the present declaration of a name, also of a removed adapter."""
        return self._declared.get(key)

    def wanted(self) -> Mapping[DeclaredName, Declaration]:
        """Return what each name shall mean; an alias is only with the adapter that has it."""
        return self._bindings.wanted

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
        wanted = self._bindings.wanted.get(key)
        if wanted is not None and staged is not None:
            await self._bindings.bind(key, wanted, turn, staged)
        error = await self._bindings.take(key, turn)
        if error is not None:
            raise error
        model, tenant, name = key
        version = self._bindings.models[model].store.find(AdapterRef(model, tenant, ByName(name)))
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
            if self._bindings.due and (self._updating is None or self._updating.done()):
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
        default = next(iter(self._bindings.models)) if len(self._bindings.models) == 1 else ""
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
        if self._declared is NO_DECLARATIONS:
            logger.info("%s declares %s", self._shared.what, counted(len(declared), "adapter"))
        wanted, changed = await asyncio.to_thread(_changes, self._bindings.wanted, declared)
        self._declared, self._bindings.wanted = declared, wanted
        for name in self._unreconciled:
            changed |= {key for key in wanted if key[0] == name}
            changed |= {
                (name, version.tenant, version.name)
                for version in self._bindings.models[name].store.present(name)
                if version.origin is VersionOrigin.DECLARED
            }
        self._unreconciled.clear()
        for key in sorted(changed | self._left):
            model = self._bindings.models.get(key[0])
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
        wanted = self._bindings.wanted.get(key)
        self._bindings.due.pop(key, None)
        if wanted is None:
            await self._bindings.unbind(model, key)
            return ""
        version = own_version(model, key)
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
        elif not is_bound(model, version, wanted):
            self._bindings.due[key] = None
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
        found = model.discovered.of(tenant, name)
        is_configured = version is not None and version.origin is VersionOrigin.CONFIGURED
        if is_configured or (found is not None and found.declaration is None):
            return "the configuration of this server has an adapter of this name"
        return ""


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
