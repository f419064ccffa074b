"""From a path, or a request's tensors, to an adapter: staged, checked, named, preloaded."""

import asyncio
import logging
from collections.abc import Container
from pathlib import Path

from loraplex.adapters.staging import RequestTensor, StagedAdapter, StagingWorker
from loraplex.adapters.store import AdapterVersion
from loraplex.core.adapter import AdapterKey, AdapterRef, ByDigest, ByTaskId
from loraplex.core.errors import (
    AdapterLoadError,
    AdapterNotFoundError,
    AdapterTooLargeError,
    ConfigError,
    InvalidAdapterError,
    InvalidRequestError,
    LoraplexError,
)
from loraplex.core.principal import DEFAULT_TENANT
from loraplex.memory.adapter_pages import place
from loraplex.serving.backend import AdapterCard
from loraplex.serving.served_model import ServedModel

logger = logging.getLogger(__name__)

PEFT_CONFIG_NAME = "adapter_config.json"
_ADAPTER_FILES = (PEFT_CONFIG_NAME, "model.lora_weights.npy")
_REQUEST_TENSORS = "a request's lora_weights"
_NUM_NAME_DIGITS = 12


class AdapterLoading:
    """Owns the staging worker. One load runs at a time; steps and requests go on beside it."""

    def __init__(self, worker: StagingWorker) -> None:
        self._worker = worker

    async def close(self) -> None:
        await self._worker.close()

    async def load(
        self,
        model: ServedModel,
        tenant: str,
        *,
        name: str,
        path: str,
        task_id: int | None = None,
        replace: bool = False,
    ) -> AdapterCard:
        """Raises before anything changes if the adapter is bad, or would change nothing."""
        model.store.check_free(model.card.name, tenant, name, task_id, replace=replace)
        staged = await self._stage(model, path)
        if staged.changes_nothing:
            raise InvalidAdapterError(
                f"adapter {name!r} changes nothing: every lora_B of {path} is zero (an untrained "
                "adapter?)",
                param="path",
            )
        return self._register(model, tenant, name, staged, path, task_id, replace=replace)

    async def load_tensors(
        self,
        model: ServedModel,
        tenant: str,
        task_id: int | None,
        weights: RequestTensor,
        config: RequestTensor,
        base_names: Container[str] = (),
    ) -> AdapterKey:
        """What a request brings along, as `Backend.add_adapter_tensors` says.

        The name is that of the task id's adapter; a new one is called by its task id or digest.
        """
        staged = await self._worker.stage_tensors(
            weights, config, shapes=model.shapes, max_rank=model.config.max_lora_rank
        )
        if staged.changes_nothing:
            raise InvalidAdapterError(
                "the adapter in the request changes nothing: every B of lora_weights is zero",
                param="lora_weights",
            )
        digest = staged.source.digest
        key = ByDigest(digest) if task_id is None else ByTaskId(task_id)
        # No await from here on: two requests with one new task id must not both find it free.
        present = _present(model, AdapterRef(model.card.name, tenant, key))
        if present is None:
            name = f"inline-{digest[:_NUM_NAME_DIGITS]}" if task_id is None else str(task_id)
            check_is_no_base(name, base_names)
        elif present.digest == digest and not model.store.is_missing(present):
            return key
        else:
            name = present.name
        replace = present is not None
        self._register(model, tenant, name, staged, _REQUEST_TENSORS, task_id, replace=replace)
        return key

    async def load_configured(self, model: ServedModel, base_names: Container[str] = ()) -> None:
        """What the model's configuration names; no adapter may be called as a base is.

        Raises ConfigError for an adapter named one by one; one that was merely found in a folder
        is left out with a warning.
        """
        for name, adapter in model.config.adapters.items():
            try:
                check_is_no_base(name, base_names)
                await self._load_at_start(
                    model, name, adapter.path, _task_id(name, adapter.task_id)
                )
            except LoraplexError as error:
                raise ConfigError(f"adapter {name!r}: {error.message}") from error
        for folder in model.config.adapter_dirs:
            for name, path in await asyncio.to_thread(find_adapters, Path(folder)):
                try:
                    check_is_no_base(name, base_names)
                    await self._load_at_start(model, name, str(path), _task_id(name, None))
                except LoraplexError as error:
                    logger.warning("left out adapter %r: %s", name, error.message)

    async def _load_at_start(
        self, model: ServedModel, name: str, path: str, task_id: int | None
    ) -> None:
        staged = await self._stage(model, path)
        if staged.changes_nothing:
            logger.warning("adapter %r changes nothing: every lora_B of %s is zero", name, path)
        card = self._register(model, DEFAULT_TENANT, name, staged, path, task_id, replace=False)
        for warning in card.warnings:
            logger.warning("adapter %r: %s", name, warning)

    async def _stage(self, model: ServedModel, path: str) -> StagedAdapter:
        return await self._worker.stage(
            path,
            shapes=model.shapes,
            max_rank=model.config.max_lora_rank,
            base_model=_trained_name(model.card.path),
        )

    def _register(
        self,
        model: ServedModel,
        tenant: str,
        name: str,
        staged: StagedAdapter,
        path: str,
        task_id: int | None,
        *,
        replace: bool,
    ) -> AdapterCard:
        _check_fits(model, staged)
        version = model.store.add(
            model.card.name, tenant, name, staged, path=path, task_id=task_id, replace=replace
        )
        if model.engine.is_ready:
            model.engine.preload(version.source)
        card = card_of(version)
        logger.info("adapter %r is %s, rank %d", name, card.digest[:12], card.rank)
        return card


def _trained_name(model_path: str) -> str:
    """What adapters are likely to call this base: its folder's name, or its hub id."""
    folder = Path(model_path).resolve()
    if folder.parent.name == "snapshots":  # the hub's cache: models--OWNER--NAME/snapshots/COMMIT
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name


def find_adapters(folder: Path) -> list[tuple[str, Path]]:
    """(name, path) of every sub-folder that holds a PEFT adapter or TensorRT-LLM's pair of files,
    by name. Raises ConfigError.
    """
    try:
        entries = sorted(folder.expanduser().iterdir())
    except OSError as error:
        raise ConfigError(
            f"cannot look for adapters in the folder {folder}: {error.strerror}"
        ) from error
    found = [(entry.name, entry) for entry in entries if _is_adapter(entry)]
    if not found:
        logger.warning("no sub-folder of %s has an %s", folder, " or a ".join(_ADAPTER_FILES))
    return found


def check_is_no_base(name: str, base_names: Container[str]) -> None:
    """Raise InvalidRequestError for a name that means a base model."""
    if name in base_names:
        raise InvalidRequestError(
            f"{name!r} is the name of a base model: call the adapter something else", param="name"
        )


def card_of(version: AdapterVersion) -> AdapterCard:
    return AdapterCard(
        name=version.name,
        model=version.model,
        task_id=version.task_id,
        digest=version.digest,
        created=version.created,
        rank=version.rank,
        num_bytes=version.source.num_bytes,
        source=version.path,
        warnings=version.warnings,
    )


def _is_adapter(folder: Path) -> bool:
    try:
        return any((folder / name).is_file() for name in _ADAPTER_FILES)
    except OSError:
        return True  # a folder that may not be entered: staging says what is wrong with it


def _present(model: ServedModel, ref: AdapterRef) -> AdapterVersion | None:
    """What the key means now, whether its file is there or gone."""
    try:
        return model.store.resolve(ref)
    except AdapterNotFoundError:
        return None
    except AdapterLoadError:
        versions = model.store.list(ref.tenant, ref.model)
        return next(version for version in versions if _is_meant(version, ref.key))


def _is_meant(version: AdapterVersion, key: AdapterKey) -> bool:
    if isinstance(key, ByTaskId):
        return version.task_id == key.task_id
    return isinstance(key, ByDigest) and version.digest == key.digest


def _task_id(name: str, configured: int | None) -> int | None:
    """A name of digits is its task id, as in TensorRT-LLM's lora_prefetch_dir."""
    if configured is None and name.isascii() and name.isdigit():
        return int(name)
    return configured


def _check_fits(model: ServedModel, staged: StagedAdapter) -> None:
    source, capacity = staged.source, model.engine.capacity
    host_bytes = model.config.lora_host_bytes
    if source.num_bytes > host_bytes:
        raise AdapterTooLargeError(
            f"the adapter has {source.num_bytes} bytes, the host cache for adapters {host_bytes}; "
            "raise lora_host_bytes"
        )
    num_pages = place(source.targets, capacity.page_geometry).num_pages
    if num_pages > capacity.num_adapter_pages:
        raise AdapterTooLargeError(
            f"the adapter needs {num_pages} pages of {capacity.adapter_page_bytes} bytes on the "
            f"device, whose pool has {capacity.num_adapter_pages}; raise lora_device_bytes"
        )
