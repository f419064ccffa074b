"""Periodic upkeep: repairs lost files, deletes unneeded ones, and unregisters unnamed adapters."""

import asyncio
import logging
from collections.abc import Collection

from loraplex.adapters.store import AdapterStore, AdapterVersion
from loraplex.adapters.uploads import Uploads
from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.counts import counted
from loraplex.core.errors import LoraplexError
from loraplex.serving.adapters.loading import CatalogLoader
from loraplex.serving.served_model import ServedModel

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 600.0


class CatalogUpkeep:
    """Worker of the catalog for all models of a server. No failure stops it."""

    def __init__(
        self,
        models: Collection[ServedModel],
        loader: CatalogLoader,
        interval_seconds: float = INTERVAL_SECONDS,
        uploads: Uploads | None = None,
    ) -> None:
        self._models = models
        """It may grow while the server runs."""
        self._loader = loader
        self._uploads = uploads
        self._interval_seconds = interval_seconds
        self._logged: set[str] = set()
        """Digests whose loss was logged."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Run now and once per interval, until close()."""
        self._task = asyncio.create_task(self._run(), name="adapter-upkeep")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def run_once(self) -> None:
        if self._uploads is not None:
            await self._uploads.remove_old()
        for store in {id(model.store): model.store for model in self._models}.values():
            await self._repair(store)
            for model in self._models:
                forget_unnamed(model)
            await self._collect(store)

    async def _run(self) -> None:
        while True:
            try:
                await self.run_once()
            except Exception:
                logger.exception("the upkeep of adapters failed; it is tried again")
            await asyncio.sleep(self._interval_seconds)

    async def _repair(self, store: AdapterStore) -> None:
        models = {model.card.name: model for model in self._models}
        missing = await asyncio.to_thread(store.missing)
        self._logged &= {version.digest for version in missing}
        for version in missing:
            if version.model in models:
                await self._repair_one(models[version.model], version)

    async def _repair_one(self, model: ServedModel, version: AdapterVersion) -> None:
        try:
            is_repaired = await self._loader.repair(model, version)
            reason = "its source has another adapter now"
        except LoraplexError as error:
            is_repaired, reason = False, error.message
        if is_repaired:
            logger.info("adapter %r was staged again: its file was gone", version.name)
        elif version.digest not in self._logged:
            self._logged.add(version.digest)
            logger.warning(
                "adapter %r (%s) cannot be used: its file is gone, and it cannot be restored from "
                "%s: %s",
                version.name,
                version.digest[:12],
                version.shown_path,
                reason,
            )

    async def _collect(self, store: AdapterStore) -> None:
        in_use = {digest for model in self._models for digest in model.engine.registered}
        collected = await asyncio.to_thread(store.collect_garbage, in_use)
        if collected.num_files:
            logger.info(
                "deleted %s that nothing needed: %s",
                counted(collected.num_files, "adapter file"),
                readable_bytes(collected.num_bytes),
            )


def forget_unnamed(model: ServedModel) -> None:
    """Unregister adapters without a name from an engine: a late request may have added them."""
    named = {version.digest for version in model.store.present(model.card.name)}
    for digest in model.engine.registered:
        if digest not in named:
            model.engine.forget_adapter(digest)
