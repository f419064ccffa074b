"""Catalog of base models and adapters: names, tenants' rights, and changes."""

import asyncio
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from loraplex.adapters.fair_turns import FairTurns
from loraplex.adapters.staged import StagedAdapter
from loraplex.adapters.store import (
    AdapterStore,
    AdapterVersion,
    Registration,
    VersionOrigin,
    numbered,
)
from loraplex.core.adapter import AdapterKey, AdapterRef, ByName, Residency
from loraplex.core.errors import (
    AdapterNotFoundError,
    InvalidRequestError,
    LoraplexError,
    ModelNotFoundError,
    NotReadyError,
    cut,
)
from loraplex.core.principal import LOCAL, Principal
from loraplex.serving.adapter_cards import (
    AdapterCard,
    AdapterDetails,
    Unloaded,
    UnloadMode,
    card_fields,
    card_of,
    content_of,
    discovered_card,
    version_card,
    without_sources,
)
from loraplex.serving.backend import ModelCard
from loraplex.serving.served_model import ServedModel
from loraplex.serving.wire_request import current_tenant

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SEPARATORS: Final = (":", "_")
"""Separators of base model and adapter, in the order in which they are tried: Ray Serve and
GPUStack join names with a colon, KubeAI with an underscore."""


class ModelCatalog:
    """Base models and their adapters by name, as each tenant may see and use them.

    Errors and listings never show what a tenant has no right to see. Changes of adapters run one
    after another in a thread, since they wait for a disk and the event loop must not; the engines
    then follow. Tenants take turns: a change waits for two changes of each other tenant at most.
    """

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.models = {model.card.name: model for model in models}
        self._turns = FairTurns(1, num_extra=0)
        self._pinning: set[asyncio.Task[None]] = set()

    def of(self, principal: Principal) -> Mapping[str, ServedModel]:
        """Return the base models that a principal may use, by name."""
        allowed = principal.rights.models
        return {name: model for name, model in self.models.items() if name in allowed}

    def model(self, name: str, principal: Principal = LOCAL) -> ServedModel:
        """Return a base model. Raises ModelNotFoundError."""
        models = self.of(principal)
        if name not in models:
            raise ModelNotFoundError(
                f"there is no model {cut(name)!r} here; there are: {_listing(list(models))}",
                param="model",
            )
        return models[name]

    def adapters(self, principal: Principal, model: str | None = None) -> list[AdapterCard]:
        """Return the adapters of one model, or of all. Raises ModelNotFoundError."""
        models = self.of(principal).values() if model is None else [self.model(model, principal)]
        return [card for one in models for card in _cards(one, principal)]

    def find(self, name: str, principal: Principal) -> tuple[ServedModel, AdapterKey | None]:
        """Find a model or adapter by name. See Backend.find. Raises ModelNotFoundError."""
        models = self.of(principal)
        cards = [model.card for model in models.values()]
        base = next((c.name for c in cards if name in (c.name, *c.served_names)), None)
        if base is not None:
            return models[base], None
        for group in _readings(name, cards):
            matches = [
                (model, adapter)
                for model, adapter in group
                if models[model].adapters_of(principal).knows(ByName(adapter))
            ]
            if len(matches) > 1:
                choices = " or ".join(f"{model}:{adapter}" for model, adapter in matches)
                raise ModelNotFoundError(
                    f"{cut(name)!r} is ambiguous: use {choices}", param="model"
                )
            if matches:
                model, adapter = matches[0]
                return models[model], ByName(adapter)
        raise self._unknown(name, principal)

    async def change(
        self,
        change: Callable[[], T],
        then: Callable[[T], asyncio.Task[None] | None] | None = None,
    ) -> T:
        """Run a change of a store in its turn, then `then` with its result on the event loop.

        Once begun both complete, even if the caller is cancelled, and the caller waits for them. A
        task that `then` returns completes after the turn, also if the caller is cancelled.
        """
        async with self._turns.turn(current_tenant()):
            # In one of the server's own threads: those of a tenant may all be busy, and the changes
            # of all others would wait with its change.
            loop, context = asyncio.get_running_loop(), contextvars.copy_context()
            submit = functools.partial(loop.run_in_executor, None, context.run, change)
            work = contextvars.Context().run(submit)
            cancelled: asyncio.CancelledError | None = None
            while not work.done():
                # A second cancellation must not skip `then`: the store has changed by then, and
                # the engine would not follow.
                try:
                    await asyncio.wait({work})
                except asyncio.CancelledError as error:
                    cancelled = error
            failure = work.exception()
            following = None
            if then is not None and failure is None:
                following = then(work.result())
            if cancelled is not None:
                raise cancelled
        if following is not None:
            await asyncio.shield(following)
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
        """Register a staged adapter. Raises as AdapterStore.register, and then changes nothing."""

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

        def then(
            result: tuple[AdapterVersion | None, Registration],
        ) -> asyncio.Task[None] | None:
            before, registration = result
            apply_version(model, before, registration.version)
            return self._pin_soon(model) if registration.version.is_pinned else None

        _, registration = await self.change(change, then)
        return registration

    async def remove(self, model: ServedModel, ref: AdapterRef, mode: UnloadMode) -> Unloaded:
        """Forget a name, or an alias. Raises AdapterNotFoundError."""
        num_ended = 0

        def requested_name(version: AdapterVersion) -> str:
            return ref.key.name if isinstance(ref.key, ByName) else version.name

        def then(version: AdapterVersion) -> None:
            nonlocal num_ended
            if requested_name(version) != version.name:
                logger.info(
                    "alias %r of adapter %r is forgotten", requested_name(version), version.name
                )
                return
            if mode is UnloadMode.IMMEDIATE:
                unloaded = AdapterNotFoundError(f"adapter {version.name!r} was unloaded meanwhile")
                num_ended = model.engine.requests.fail_labelled(version.label, unloaded)
            release(model, version)
            unpin_others(model)
            logger.info("adapter %r (%s) is unloaded", version.name, version.digest[:12])

        version = await self.change(lambda: model.store.remove(ref), then)
        return Unloaded(
            name=requested_name(version),
            is_alias=requested_name(version) != version.name,
            digest=version.digest,
            version=version.number,
            num_ended=num_ended,
        )

    async def rollback(
        self, model: ServedModel, ref: AdapterRef, number: int | None
    ) -> AdapterVersion:
        """Restore an older version.

        Raises AdapterNotFoundError, AdapterLoadError, or why the model cannot serve it.
        """

        def change() -> tuple[AdapterVersion | None, AdapterVersion]:
            before = model.store.find(ref)
            return before, model.store.rollback(ref, number, model.check_fits)

        def then(result: tuple[AdapterVersion | None, AdapterVersion]) -> asyncio.Task[None]:
            apply_version(model, *result)
            return self._pin_soon(model)

        _, version = await self.change(change, then)
        return version

    async def pin(
        self, model: ServedModel, ref: AdapterRef, number: int | None, *, is_pinned: bool
    ) -> AdapterVersion:
        """Pin or unpin a version: it stays in the history, and on the device if it is present.

        Raises AdapterNotFoundError, and AdapterTooLargeError if other adapters would no longer fit
        on the device; then it is not pinned.
        """
        if not is_pinned:
            return await self.change(
                lambda: model.store.unpin(ref, number), lambda _: unpin_others(model)
            )
        present = model.store.resolve(ref)
        try:
            if number in (None, present.number):
                await model.engine.pin(present.source)
            # Pin again: before the store had the pin, any other change would have unpinned it.
            return await self.change(
                lambda: model.store.pin(ref, number), lambda _: self._pin_soon(model)
            )
        except BaseException:
            unpin_others(model)
            raise

    def _pin_soon(self, model: ServedModel) -> asyncio.Task[None]:
        """Start `pin_on_device`, which the cancellation of a caller does not end."""
        task = asyncio.create_task(pin_on_device(model))
        self._pinning.add(task)  # the event loop alone would not keep it alive
        task.add_done_callback(self._pinning.discard)
        return task

    def check_is_no_base(self, name: str) -> None:
        """Raise InvalidRequestError for a name that means a base model, or an adapter of one."""
        bases = [*self.models, *(n for model in self.models.values() for n in model.card.names)]
        if name in bases:
            raise InvalidRequestError(
                f"{name!r} is the name of a base model: call the adapter something else",
                param="name",
            )
        base = next((base for base in bases if name.startswith(f"{base}:")), None)
        if base is not None:
            raise InvalidRequestError(
                f"{name!r} already means the adapter {name.removeprefix(f'{base}:')!r} of the base "
                f"model {base!r}: leave {base + ':'!r} out of the name",
                param="name",
            )

    def _unknown(self, name: str, principal: Principal) -> LoraplexError:
        known = [*self.of(principal), *(card.name for card in self.adapters(principal))]
        return ModelNotFoundError(
            f"there is no model or adapter {cut(name)!r} here; there are: {_listing(known)}",
            param="model",
        )


def _readings(name: str, cards: Sequence[ModelCard]) -> Iterator[list[tuple[str, str]]]:
    """Yield groups of (base model, adapter) that a name can mean, the most exact first.

    The first group with an adapter that exists decides.
    """
    yield [(card.name, name) for card in cards]
    for separator in _SEPARATORS:
        yield [
            (card.name, name.removeprefix(f"{own}{separator}"))
            for card in cards
            for own in card.names
            if name.startswith(f"{own}{separator}")
        ]


def apply_version(
    model: ServedModel, before: AdapterVersion | None, version: AdapterVersion
) -> None:
    """Apply the new present version of a name to the engine. It has been checked."""
    model.unfit.pop(version.digest, None)
    if before is not None and before.digest != version.digest:
        release(model, before)
    unpin_others(model)
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
        except LoraplexError as error:  # its requests are refused, too
            logger.warning("adapter %r is refused: %s", version.name, error.message)


async def pin_on_device(model: ServedModel) -> None:
    """Pin on the device exactly the adapters whose present version is pinned in the store.

    An adapter that does not fit on the device is logged, and served as an unpinned one. An engine
    that does not reply pins it when it can.
    """
    unpin_others(model)
    for version in _pinned(model).values():
        try:
            await model.engine.pin(version.source)
        except NotReadyError:
            model.engine.pin_later(version.source)
        except LoraplexError as error:
            logger.warning(
                "adapter %r is pinned, but cannot stay on the device: %s",
                version.name,
                error.message,
            )


def unpin_others(model: ServedModel) -> None:
    """Unpin on the device what no present version pins any longer."""
    pinned = model.engine.pinned
    for digest in pinned and pinned - _pinned(model).keys():
        model.engine.unpin(digest)


def _pinned(model: ServedModel) -> dict[str, AdapterVersion]:
    """Return the pinned present versions by digest, without those that no request can use."""
    present = model.store.present(model.card.name)
    return {
        version.digest: version
        for version in present
        if version.is_pinned and version.digest not in model.unfit
    }


def release(model: ServedModel, version: AdapterVersion) -> None:
    """Unregister an adapter without a name from the engine, after its requests end."""
    if not is_present(model.store, version.model, version.digest):
        model.engine.forget_adapter(version.digest)


def release_kept(model: ServedModel, version: AdapterVersion) -> None:
    """Let the engine forget a version of the past when the requests that name it have ended."""
    if model.store.is_kept_only(version):
        release(model, version)


def is_present(store: AdapterStore, model: str, digest: str) -> bool:
    """Whether a name of the model has this digest."""
    return any(version.digest == digest for version in store.present(model))


async def describe(
    model: ServedModel, ref: AdapterRef, number: int | None = None
) -> AdapterDetails:
    """Return the details of an adapter, as it is at present or as it was with a kept version.

    Raises AdapterNotFoundError.
    """
    history = await asyncio.to_thread(model.store.history, ref)
    version = history[0] if number is None else numbered(history, number)
    residency = await model.engine.residency()
    aliases = model.store.aliases(version.tenant, version.model)
    return AdapterDetails(
        **card_fields(version, model.state_of(version)),
        aliases=tuple(sorted(a for a, name in aliases.items() if name == version.name)),
        residency=residency.get(version.digest, Residency.ABSENT),
        num_running=model.engine.requests.num_by_label().get(version.label, 0),
        content=content_of(version.staged, model.engine.capacity, model.card.dtype),
        versions=tuple(map(version_card, history)),
    )


def _cards(model: ServedModel, principal: Principal) -> Iterator[AdapterCard]:
    seen = model.adapters_of(principal)
    cards = []
    for version in seen.listed():
        card = card_of(version, model.state_of(version))
        cards.append(card if seen.owns(version) else without_sources(card))
    for adapter in seen.discovered():
        card = discovered_card(adapter, model.card.name, model.card.created)
        cards.append(card if principal.tenant == adapter.tenant else without_sources(card))
    yield from sorted(cards, key=lambda card: card.name)


def _listing(names: list[str], max_names: int = 20) -> str:
    shown = ", ".join(repr(name) for name in names[:max_names]) or "none"
    return shown if len(names) <= max_names else f"{shown} and {len(names) - max_names} more"
