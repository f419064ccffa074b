"""Changes of the store, one after the other, off the event loop; the engines learn of them."""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from loraplex.adapters.staged import StagedAdapter
from loraplex.adapters.store import AdapterStore, AdapterVersion, Registration, VersionOrigin
from loraplex.core.adapter import AdapterRef, ByName, Residency
from loraplex.core.errors import AdapterNotFoundError, LoraplexError
from loraplex.serving.adapters.cards import (
    AdapterDetails,
    Unloaded,
    UnloadMode,
    card_fields,
    content_of,
    version_card,
)
from loraplex.serving.adapters.holds import hold_pinned, release_unpinned
from loraplex.serving.served_model import ServedModel, label

logger = logging.getLogger(__name__)

T = TypeVar("T")


class AdapterChanges:
    """A change waits for a disk, and the event loop must not: it runs in a thread."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def run(self, change: Callable[[], T], then: Callable[[T], None] | None = None) -> T:
        """Do it when its turn comes, and then what follows from it on the event loop.

        Once begun both are done, even if the caller is cancelled.
        """
        async with self._turn:
            work = asyncio.ensure_future(asyncio.to_thread(change))
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait({work})
                if then is not None and work.exception() is None:
                    then(work.result())
                raise
            if then is not None:
                then(work.result())
            return work.result()

    async def register(
        self,
        model: ServedModel,
        tenant: str,
        name: str,
        staged: StagedAdapter,
        *,
        path: str,
        task_id: int | None = None,
        replace: bool = False,
        origin: VersionOrigin = VersionOrigin.API,
    ) -> Registration:
        """Raises as AdapterStore.register; then nothing has changed."""

        def change() -> tuple[AdapterVersion | None, Registration]:
            ref = AdapterRef(model.card.name, tenant, ByName(name))
            before = model.store.find(ref)
            return before, model.store.register(
                model.card.name,
                tenant,
                name,
                staged,
                path=path,
                task_id=task_id,
                replace=replace,
                origin=origin,
            )

        def then(result: tuple[AdapterVersion | None, Registration]) -> None:
            before, registration = result
            became(model, before, registration.version)

        _, registration = await self.run(change, then)
        if registration.version.is_pinned:
            await hold_pinned(model)
        return registration

    async def remove(self, model: ServedModel, ref: AdapterRef, mode: UnloadMode) -> Unloaded:
        """Forget a name, or an alias. Raises AdapterNotFoundError."""
        num_ended = 0

        def asked_for(version: AdapterVersion) -> str:
            return ref.key.name if isinstance(ref.key, ByName) else version.name

        def then(version: AdapterVersion) -> None:
            nonlocal num_ended
            if asked_for(version) != version.name:
                logger.info("alias %r of adapter %r is forgotten", asked_for(version), version.name)
                return
            if mode is UnloadMode.IMMEDIATE:
                unloaded = AdapterNotFoundError(f"adapter {version.name!r} was unloaded meanwhile")
                num_ended = model.engine.fail_labelled(label(version), unloaded)
            release(model, version)
            release_unpinned(model)
            logger.info("adapter %r (%s) is unloaded", version.name, version.digest[:12])

        version = await self.run(lambda: model.store.remove(ref), then)
        return Unloaded(
            name=asked_for(version),
            is_alias=asked_for(version) != version.name,
            digest=version.digest,
            num_ended=num_ended,
        )

    async def rollback(
        self, model: ServedModel, ref: AdapterRef, number: int | None
    ) -> AdapterVersion:
        """Raises AdapterNotFoundError, AdapterLoadError, or why the model cannot serve it."""

        def change() -> tuple[AdapterVersion | None, AdapterVersion]:
            before = model.store.find(ref)
            return before, model.store.rollback(ref, number, model.check_fits)

        _, version = await self.run(change, lambda result: became(model, *result))
        await hold_pinned(model)
        return version

    async def pin(
        self, model: ServedModel, ref: AdapterRef, number: int | None, *, is_pinned: bool
    ) -> AdapterVersion:
        """Keep a version in the history, or no longer; and on the device if it is the present one.

        Raises AdapterNotFoundError, and AdapterTooLargeError if other adapters would lack room on
        the device; then it is not pinned.
        """
        if not is_pinned:
            version = await self.run(lambda: model.store.unpin(ref, number))
            release_unpinned(model)
            return version
        present = model.store.resolve(ref)
        if number in (None, present.number):
            await model.engine.hold(present.source)
        try:
            version = await self.run(lambda: model.store.pin(ref, number))
        except BaseException:
            release_unpinned(model)
            raise
        # Before the store said so, any other change let go of it.
        await hold_pinned(model)
        return version


def became(model: ServedModel, before: AdapterVersion | None, version: AdapterVersion) -> None:
    """Tell the engine what a name means now. The version has been checked."""
    model.unfit.pop(version.digest, None)
    if before is not None and before.digest != version.digest:
        release(model, before)
    release_unpinned(model)
    logger.info(
        "adapter %r is %s, version %d, rank %d",
        version.name,
        version.digest[:12],
        version.number,
        version.rank,
    )
    if model.engine.is_ready:
        try:
            model.engine.preload(version.source)
        except LoraplexError as error:  # so are its requests
            logger.warning("adapter %r is refused: %s", version.name, error.message)


async def describe(model: ServedModel, ref: AdapterRef) -> AdapterDetails:
    """All that is known of an adapter. Raises AdapterNotFoundError."""
    history = await asyncio.to_thread(model.store.history, ref)
    version = history[0]
    residency = await model.engine.residency()
    aliases = model.store.aliases(version.tenant, version.model)
    return AdapterDetails(
        **card_fields(version, model.state_of(version)),
        aliases=tuple(sorted(a for a, name in aliases.items() if name == version.name)),
        residency=residency.get(version.digest, Residency.ABSENT),
        num_running=model.engine.num_labelled(label(version)),
        content=content_of(version.staged, model.engine.capacity, model.card.dtype),
        versions=tuple(map(version_card, history)),
    )


def release(model: ServedModel, version: AdapterVersion) -> None:
    """Let the engine forget what no name means any longer; its requests end first."""
    if not is_present(model.store, version.model, version.digest):
        model.engine.forget_adapter(version.digest)


def is_present(store: AdapterStore, model: str, digest: str) -> bool:
    """Whether some name of a model means these bytes."""
    return any(version.digest == digest for version in store.present(model))
