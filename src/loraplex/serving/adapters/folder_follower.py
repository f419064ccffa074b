"""Follows adapter folders: adapters added, changed or removed there are so on the server.

An adapter is validated when a request names it, or else in the background, one after another: until
then it is listed as unvalidated. A thread scans names, sizes and times periodically. A change is
applied once two scans in a row saw it, so that a file is not read while it is copied. A load that
may succeed later is repeated after one scan, two, four and so on. Only configured adapters are
removed; an adapter that was loaded over the API under the same name stays.
"""

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from loraplex.adapters.base_check import is_about_rounding
from loraplex.adapters.sources.policy import SourcePolicy
from loraplex.adapters.staging import OPERATOR
from loraplex.adapters.version import VersionOrigin
from loraplex.core.adapter import AdapterRef, ByName
from loraplex.core.config import ModelConfig
from loraplex.core.errors import (
    AdapterNotFoundError,
    CapacityError,
    ConfigError,
    LoraplexError,
)
from loraplex.core.principal import DEFAULT_TENANT
from loraplex.serving.access.tenant_adapters import ConfiguredAdapter
from loraplex.serving.adapter_cards import UnloadMode
from loraplex.serving.adapters.configured import (
    load_configured,
    log_adapter_warning,
    log_empty_folders,
    log_left_out,
    named_adapter,
    task_id_of,
    wanted_adapters,
)
from loraplex.serving.adapters.folders import FolderScan, Signature, find_named, signature_of
from loraplex.serving.adapters.loading import CatalogLoader
from loraplex.serving.adapters.path_states import PathStates
from loraplex.serving.catalog import ModelCatalog
from loraplex.serving.served_model import ServedModel

logger = logging.getLogger(__name__)

_MAX_PAUSE = 128
"""Maximum number of scans between two attempts of a load that may succeed later."""
_MAX_REFUSED = 256
_MAX_AT_ONCE = 256
"""Maximum number of adapters that are loaded between two scans."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Seen:
    """Adapter in a folder, as one scan saw it."""

    adapter: ConfiguredAdapter
    signature: Signature


@dataclasses.dataclass(slots=True)
class _Retry:
    """Adapter that could not be loaded for now."""

    seen: _Seen
    pause: int
    """Length in scans."""
    left: int
    """Scans left of the pause."""


@dataclasses.dataclass(slots=True)
class _Followed:
    """Adapters of one model in folders, by name."""

    model: ServedModel
    taken: dict[str, _Seen]
    """Adapters that were loaded, or tried."""
    last: dict[str, _Seen]
    """Adapters that the last scan saw."""
    due: dict[str, _Seen]
    """Adapters that are to be validated, or loaded again."""
    retries: dict[str, _Retry] = dataclasses.field(default_factory=dict)
    refused: dict[str, tuple[_Seen, LoraplexError]] = dataclasses.field(default_factory=dict)
    """Reasons for refused adapters, as long as these have not changed."""
    scan: "_Scan" = dataclasses.field(kw_only=True)
    is_settled: bool = False
    """Whether the result of the last scan is applied, so that the same result changes nothing."""
    validating: dict[str, asyncio.Task[LoraplexError | None]] = dataclasses.field(
        default_factory=dict
    )
    """Loads in progress, which return why the adapter is refused."""

    def is_due(self, name: str, seen: _Seen) -> bool:
        """Whether the adapter should be loaded now."""
        retry = self.retries.get(name)
        is_pausing = retry is not None and retry.seen == seen and retry.left > 0
        return self.taken.get(name) != seen and not is_pausing


class _Scan:
    """Scan of one model's folders and lists. It is cheap while nothing in them has changed."""

    def __init__(
        self, model: ServedModel, catalog: ModelCatalog, policy: SourcePolicy, first: FolderScan
    ) -> None:
        """policy: where links may lead. first: what was reported already."""
        self._model = model
        self._catalog = catalog
        self._policy = policy
        self._reported = {one.reason for one in first.left_out}
        self._found: dict[str, _Seen] = {}
        self._states: PathStates | None = None
        """None: there is no result, or it is not valid any longer."""
        self._bases: tuple[str, ...] = ()

    def look(self) -> dict[str, _Seen]:
        """Return the followed adapters, the same object as before if nothing changed.

        Raises ConfigError.
        """
        bases = tuple(self._catalog.models)
        if self._states is None or bases != self._bases or not self._states.are_unchanged():
            self._states, self._bases = None, bases
            scan = FolderScan(self._policy)
            wanted = wanted_adapters(self._model.config, self._catalog, scan)
            self._found = _followed(wanted, scan.states)
            self._states = scan.states
            self._model.left_out = scan.left_out
            log_left_out(scan.left_out, self._reported)
            self._reported = {one.reason for one in scan.left_out}
        return self._found


class FolderFollower:
    """Follower of the adapter folders of all models. No failure stops it."""

    def __init__(
        self,
        loader: CatalogLoader,
        catalog: ModelCatalog,
        interval_seconds: float,
        policy: SourcePolicy,
    ) -> None:
        """interval_seconds: time between scans; 0: only the first scan.

        policy: links of folders may lead where it lets clients load adapters from.
        """
        self._policy = policy
        self._loader = loader
        self._catalog = catalog
        self._interval_seconds = interval_seconds
        self._followed: list[_Followed] = []
        self._task: asyncio.Task[None] | None = None
        self._problem = ""
        """Reason why the last scan failed, which is logged once."""

    async def load(self, model: ServedModel) -> None:
        """Load the adapters that are named individually, and follow the others from then on.

        Raises ConfigError.
        """
        first = FolderScan(self._policy)
        wanted = await asyncio.to_thread(wanted_adapters, model.config, self._catalog, first)
        model.left_out = first.left_out
        log_left_out(first.left_out)
        log_empty_folders(model.config, wanted)
        # Scanned before the files are read, so that the next scan detects changes meanwhile.
        seen = await asyncio.to_thread(_followed, wanted)
        await load_configured(model, self._loader, self._catalog, wanted)
        if _is_followed(model.config):
            taken = {name: one for name, one in seen.items() if one.adapter.is_named}
            due = {name: one for name, one in seen.items() if name not in taken}
            scan = _Scan(model, self._catalog, self._policy, first)
            self._followed.append(_Followed(model, taken, seen, due, scan=scan))

    def start(self) -> None:
        """Validate what the folders hold, and follow them until close(). Idempotent."""
        if (self._task is None or self._task.done()) and self._followed:
            self._task = asyncio.create_task(self._run(), name="folder-follower")

    async def close(self) -> None:
        tasks = [task for followed in self._followed for task in followed.validating.values()]
        if self._task is not None:
            tasks.append(self._task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def validate(self) -> None:
        """Load what is due, one adapter after another, a limited number of them."""
        num_left = _MAX_AT_ONCE
        for followed in self._followed:
            for name, seen in itertools.islice(list(followed.due.items()), num_left):
                num_left -= 1
                if followed.is_due(name, seen):
                    await self._take(followed, seen)
                followed.due.pop(name, None)

    async def validate_named(
        self, model: ServedModel, name: str, tenant: str
    ) -> LoraplexError | None:
        """Validate a discovered adapter in a tenant's turn; return why it cannot be served."""
        followed = self._followed_of(model)
        seen = None if followed is None else followed.last.get(name)
        if followed is None or seen is None:
            return None
        error = await self._take(followed, seen, tenant)
        if error is None or isinstance(error, CapacityError):
            return error
        return _as_not_found(name, error)

    async def take_named(self, model: ServedModel, name: str, tenant: str = OPERATOR) -> None:
        """Load at once an adapter that a request names: a new one of lora_root, or an optional one.

        Does nothing if there is none; raises the reason if it cannot be served.
        """
        followed = self._followed_of(model)
        is_optional = _is_optional(model.config, name)
        if followed is None or not (model.config.lora_root or is_optional):
            return
        seen = await asyncio.to_thread(_look_for, model.config, name, self._policy)
        if seen is None:
            return
        before, error = followed.refused.get(name, (None, None))
        if before != seen:
            if followed.taken.get(name) == seen:
                return
            self._catalog.check_is_no_base(name)
            error = await self._take(followed, seen, tenant)
        if error is not None:
            is_passing = isinstance(error, CapacityError)
            raise _as_not_found(name, error) if is_optional and not is_passing else error

    def _followed_of(self, model: ServedModel) -> _Followed | None:
        return next((f for f in self._followed if f.model is model), None)

    async def run_once(self) -> None:
        for followed in self._followed:
            try:
                seen = await asyncio.to_thread(followed.scan.look)
            except ConfigError as error:
                # The folder may be unmounted for a moment: its adapters stay.
                self._report(error.message)
            else:
                self._report("")
                await self._follow(followed, seen)
        await self.validate()

    async def _run(self) -> None:
        await self._without_failure(self.validate)
        while (is_due := any(followed.due for followed in self._followed)) or (
            self._interval_seconds
        ):
            # A change is noticed while thousands are validated, too.
            if not is_due:
                await asyncio.sleep(self._interval_seconds)
            await self._without_failure(self.run_once if self._interval_seconds else self.validate)

    async def _without_failure(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception:
            logger.exception("following adapter folders failed; it is tried again")
            await asyncio.sleep(self._interval_seconds or 1.0)

    async def _follow(self, followed: _Followed, seen: dict[str, _Seen]) -> None:
        is_same = seen is followed.last
        if is_same and followed.is_settled and not followed.retries:
            return
        discovered = followed.model.discovered
        found = (adapter.name for adapter in discovered if adapter.declaration is None)
        known = {*followed.taken, *found}
        still = {name for name in (*seen, *known) if seen.get(name) == followed.last.get(name)}
        followed.last = seen
        for name in known:  # first, which frees their names and task ids
            if name not in seen and name in still:
                await self._remove(followed, name)
        followed.retries = {name: r for name, r in followed.retries.items() if name in seen}
        for retry in followed.retries.values():
            retry.left -= 1
        followed.due = {
            name: one for name, one in seen.items() if name in still and followed.is_due(name, one)
        }
        followed.is_settled = is_same and not followed.due
        for name, one in followed.due.items():
            if name not in followed.taken:
                discovered.put(one.adapter)

    async def _take(
        self, followed: _Followed, seen: _Seen, tenant: str = OPERATOR
    ) -> LoraplexError | None:
        """Load an adapter, once for all that wait for it; return why it cannot be served."""
        name = seen.adapter.name
        task = followed.validating.get(name)
        if task is None:
            task = asyncio.create_task(self._load(followed, seen, tenant))
            followed.validating[name] = task
            task.add_done_callback(lambda _: followed.validating.pop(name))
        return await asyncio.shield(task)  # a client that leaves must not end it for the others

    async def _load(self, followed: _Followed, seen: _Seen, tenant: str) -> LoraplexError | None:
        adapter, model = seen.adapter, followed.model
        name, failure = adapter.name, None
        try:
            warnings = await self._loader.register_configured(
                model, DEFAULT_TENANT, adapter, tenant
            )
            for warning in warnings:
                if not is_about_rounding(warning):
                    log_adapter_warning([name], warning)
        except CapacityError as error:
            logger.warning("adapter %r: %s; it is tried again", name, error.message)
            pause = 1
            before = followed.retries.get(name)
            if before is not None and before.seen == seen:
                pause = min(2 * before.pause, _MAX_PAUSE)
            followed.retries[name] = _Retry(seen, pause, pause)
            return error
        except LoraplexError as error:  # final until the files change
            logger.warning("left out adapter %r: %s", name, error.message)
            _remember(followed.refused, name, (seen, error))
            failure = error
        else:
            followed.refused.pop(name, None)
        followed.taken[name] = seen
        followed.retries.pop(name, None)
        model.discovered.drop(name)
        return failure

    async def _remove(self, followed: _Followed, name: str) -> None:
        model = followed.model
        discovered, taken = model.discovered.drop(name), followed.taken.pop(name, None)
        path = taken.adapter.path if taken is not None else discovered and discovered.path
        ref = AdapterRef(model.card.name, DEFAULT_TENANT, ByName(name))
        version = model.store.find(ref)
        if version is None or version.name != name:
            return
        if version.origin is not VersionOrigin.CONFIGURED or version.path != path:
            logger.info("adapter %r left its folder; what the API loaded stays", name)
            return
        try:
            await self._catalog.remove(model, ref, UnloadMode.DRAIN)
        except LoraplexError as error:  # removed meanwhile
            logger.info("adapter %r: %s", name, error.message)

    def _report(self, problem: str) -> None:
        if problem and problem != self._problem:
            logger.warning("adapter folders are not followed for now: %s", problem)
        self._problem = problem


def _is_followed(config: ModelConfig) -> bool:
    has_optional = any(adapter.optional for adapter in config.adapters.values())
    return bool(config.adapter_dirs or config.lora_root or config.multi_lora or has_optional)


def _is_optional(config: ModelConfig, name: str) -> bool:
    return name in config.adapters and config.adapters[name].optional


def _as_not_found(name: str, error: LoraplexError) -> AdapterNotFoundError:
    """Return one kind of error for all reasons: it is configured, and absent."""
    text = f"adapter {name!r} could not be loaded: {error.message}"
    return AdapterNotFoundError(text, param="adapter", reason=error.message)


def _look_for(config: ModelConfig, name: str, policy: SourcePolicy) -> _Seen | None:
    if _is_optional(config, name):
        adapter = named_adapter(name, config.adapters[name])
        return _Seen(adapter, signature_of(Path(adapter.path).expanduser()))
    path = find_named(Path(config.lora_root), name, policy)
    if path is None:
        return None
    adapter = ConfiguredAdapter(name, str(path), task_id_of(name), is_named=False, is_followed=True)
    return _Seen(adapter, signature_of(path))


def _remember(
    refused: dict[str, tuple[_Seen, LoraplexError]],
    name: str,
    why: tuple[_Seen, LoraplexError],
) -> None:
    refused.pop(name, None)
    refused[name] = why
    while len(refused) > _MAX_REFUSED:
        refused.pop(next(iter(refused)))


def _followed(
    wanted: Iterable[ConfiguredAdapter], states: PathStates | None = None
) -> dict[str, _Seen]:
    return {
        adapter.name: _Seen(adapter, signature_of(Path(adapter.path).expanduser(), states))
        for adapter in wanted
        if adapter.is_followed
    }
