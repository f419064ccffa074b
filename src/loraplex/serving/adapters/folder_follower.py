"""Follows adapter folders: adapters added, changed or removed there are so on the server.

A thread scans names, sizes and times periodically. A change is applied once two scans in a row saw
it, so that a file is not read while it is copied. A load that may succeed later is repeated after
one scan, two, four and so on. Only configured adapters are removed; an adapter that was loaded over
the API under the same name stays.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path

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
from loraplex.serving.adapter_cards import UnloadMode
from loraplex.serving.adapters.configured import (
    ConfiguredAdapter,
    load_configured,
    named_adapter,
    task_id_of,
    wanted_adapters,
)
from loraplex.serving.adapters.folders import Signature, find_named, signature_of
from loraplex.serving.adapters.loading import CatalogLoader
from loraplex.serving.catalog import ModelCatalog
from loraplex.serving.served_model import ServedModel

logger = logging.getLogger(__name__)

_MAX_PAUSE = 128
"""Maximum number of scans between two attempts of a load that may succeed later."""
_MAX_REFUSED = 256


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
    retries: dict[str, _Retry] = dataclasses.field(default_factory=dict)
    refused: dict[str, tuple[_Seen, LoraplexError]] = dataclasses.field(default_factory=dict)
    """Reasons for refused adapters, as long as these have not changed."""
    loading: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)

    @classmethod
    def after_start(
        cls, model: ServedModel, seen: dict[str, _Seen], left_out: Mapping[str, LoraplexError]
    ) -> "_Followed":
        """left_out: reasons by name; a load that may succeed later is repeated."""
        refused = {
            name: (seen[name], error)
            for name, error in left_out.items()
            if name in seen and not isinstance(error, CapacityError)
        }
        taken = {name: one for name, one in seen.items() if name in refused or name not in left_out}
        return cls(model, taken, seen, refused=refused)

    def is_due(self, name: str, seen: _Seen) -> bool:
        """Whether the adapter should be loaded now."""
        retry = self.retries.get(name)
        is_pausing = retry is not None and retry.seen == seen and retry.left > 0
        return self.taken.get(name) != seen and not is_pausing


class FolderFollower:
    """Follower of the adapter folders of all models. No failure stops it."""

    def __init__(
        self, loader: CatalogLoader, catalog: ModelCatalog, interval_seconds: float
    ) -> None:
        """interval_seconds: time between scans; 0: only the first scan."""
        self._loader = loader
        self._catalog = catalog
        self._interval_seconds = interval_seconds
        self._followed: list[_Followed] = []
        self._task: asyncio.Task[None] | None = None
        self._problem = ""
        """Reason why the last scan failed, which is logged once."""

    async def load(self, model: ServedModel) -> None:
        """Load the configured adapters of a model, and follow them from then on.

        Raises ConfigError.
        """
        # Scanned before the files are read, so that the next scan detects changes meanwhile.
        seen = await asyncio.to_thread(_look, model.config, self._catalog)
        left_out = await load_configured(model, self._loader, self._catalog)
        if _is_followed(model.config):
            self._followed.append(_Followed.after_start(model, seen, left_out))

    def start(self) -> None:
        """Follow the folders until close(). Idempotent."""
        if self._task is None and self._followed and self._interval_seconds:
            self._task = asyncio.create_task(self._run(), name="folder-follower")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def take_named(self, model: ServedModel, name: str) -> None:
        """Load at once an adapter that a request names: a new one of lora_root, or an optional one.

        Does nothing if there is none; raises the reason if it cannot be served.
        """
        followed = next((f for f in self._followed if f.model is model), None)
        is_optional = _is_optional(model.config, name)
        if followed is None or not (model.config.lora_root or is_optional):
            return
        async with followed.loading:
            seen = await asyncio.to_thread(_look_for, model.config, name)
            if seen is None:
                return
            before, error = followed.refused.get(name, (None, None))
            if before == seen and error is not None:
                raise _as_not_found(name, error) if is_optional else error
            if followed.taken.get(name) == seen:
                return
            self._catalog.check_is_no_base(name)
            try:
                await self._loader.register_configured(
                    model, DEFAULT_TENANT, name, seen.adapter.path, seen.adapter.task_id
                )
            except CapacityError:
                raise
            except LoraplexError as error:
                _remember(followed.refused, name, (seen, error))
                raise (_as_not_found(name, error) if is_optional else error) from None
            followed.refused.pop(name, None)
            followed.taken[name] = seen

    async def run_once(self) -> None:
        for followed in self._followed:
            try:
                seen = await asyncio.to_thread(_look, followed.model.config, self._catalog)
            except ConfigError as error:
                # The folder may be unmounted for a moment: its adapters stay.
                self._report(error.message)
            else:
                self._report("")
                await self._follow(followed, seen)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_seconds)
            try:
                await self.run_once()
            except Exception:
                logger.exception("following adapter folders failed; it is tried again")

    async def _follow(self, followed: _Followed, seen: dict[str, _Seen]) -> None:
        still = {
            name for name in (*seen, *followed.taken) if seen.get(name) == followed.last.get(name)
        }
        followed.last = seen
        gone = [name for name in followed.taken if name not in seen and name in still]
        for name in gone:  # first, which frees their names and task ids
            await self._remove(followed, name)
        followed.retries = {name: r for name, r in followed.retries.items() if name in seen}
        for retry in followed.retries.values():
            retry.left -= 1
        for name, one in seen.items():
            if name in still and followed.is_due(name, one):
                await self._take(followed, name, one)

    async def _take(self, followed: _Followed, name: str, seen: _Seen) -> None:
        adapter = seen.adapter
        try:
            await self._loader.register_configured(
                followed.model, DEFAULT_TENANT, name, adapter.path, adapter.task_id
            )
        except CapacityError as error:
            logger.warning("adapter %r: %s; it is tried again", name, error.message)
            pause = 1
            before = followed.retries.get(name)
            if before is not None and before.seen == seen:
                pause = min(2 * before.pause, _MAX_PAUSE)
            followed.retries[name] = _Retry(seen, pause, pause)
            return
        except LoraplexError as error:  # final until the files change
            logger.warning("left out adapter %r: %s", name, error.message)
            _remember(followed.refused, name, (seen, error))
        else:
            followed.refused.pop(name, None)
        followed.taken[name] = seen
        followed.retries.pop(name, None)

    async def _remove(self, followed: _Followed, name: str) -> None:
        path = followed.taken.pop(name).adapter.path
        model = followed.model
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


def _look_for(config: ModelConfig, name: str) -> _Seen | None:
    if _is_optional(config, name):
        adapter = named_adapter(name, config.adapters[name])
        return _Seen(adapter, signature_of(Path(adapter.path).expanduser()))
    path = find_named(Path(config.lora_root), name)
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


def _look(config: ModelConfig, catalog: ModelCatalog) -> dict[str, _Seen]:
    """Scan folders and lists. Raises ConfigError."""
    wanted = wanted_adapters(config, catalog, is_following=True)
    return {
        adapter.name: _Seen(adapter, signature_of(Path(adapter.path).expanduser()))
        for adapter in wanted
        if adapter.is_followed
    }
