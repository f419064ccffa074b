"""Adapters of a model's configuration: named individually, by folder, or in a list."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path

from loraplex.adapters.base_check import is_about_rounding
from loraplex.adapters.version import check_name
from loraplex.core.config import AdapterConfig, ModelConfig
from loraplex.core.errors import ConfigError, LoraplexError
from loraplex.core.principal import DEFAULT_TENANT
from loraplex.serving.access.tenant_adapters import ConfiguredAdapter, LeftOut
from loraplex.serving.adapters.folders import (
    FolderScan,
    Found,
    find_adapters,
    find_below,
    read_list,
)
from loraplex.serving.adapters.loading import CatalogLoader
from loraplex.serving.catalog import ModelCatalog
from loraplex.serving.served_model import ServedModel

logger = logging.getLogger(__name__)

_MAX_NAMED = 3
"""Maximum number of adapters that a warning names."""
_MAX_AT_ONCE = 16
"""Maximum number of adapters that wait for a staging worker at the start."""


async def load_configured(
    model: ServedModel,
    loader: CatalogLoader,
    catalog: ModelCatalog,
    wanted: Iterable[ConfiguredAdapter],
) -> None:
    """Register the adapters that are named individually, and note the others as discovered.

    The configuration wins over stored adapters. Adapters that only an earlier configuration named
    are forgotten. Raises ConfigError for an adapter that cannot be loaded.
    """
    wanted = list(wanted)
    task_ids = {adapter.name: adapter.task_id for adapter in wanted}
    change = await catalog.change(
        lambda: model.store.apply_configuration(model.card.name, DEFAULT_TENANT, task_ids)
    )
    for version in change.removed:
        logger.info("adapter %r is no longer configured: it is forgotten", version.name)
    for alias in change.aliases:
        logger.warning("alias %r is forgotten: an adapter is configured under this name", alias)
    for version in change.task_ids:
        if task_ids.get(version.name) is None:
            logger.warning(
                "adapter %r lost its task id %s: the configuration gives it to another",
                version.name,
                version.task_id,
            )
    for adapter in wanted:
        if not adapter.is_named:
            model.discovered.put(adapter)
    await _load_named(model, loader, [adapter for adapter in wanted if adapter.is_named])


async def _load_named(
    model: ServedModel, loader: CatalogLoader, named: Sequence[ConfiguredAdapter]
) -> None:
    """Load adapters, several at a time. Raises ConfigError for the first one that cannot be."""
    turns = asyncio.Semaphore(_MAX_AT_ONCE)
    warned: defaultdict[str, list[str]] = defaultdict(list)

    async def load(adapter: ConfiguredAdapter) -> None:
        async with turns:
            try:
                for warning in await loader.register_configured(model, DEFAULT_TENANT, adapter):
                    warned[warning].append(adapter.name)
            except LoraplexError as error:
                if adapter.is_named:
                    raise _not_loaded(adapter, error) from error
                logger.warning("left out adapter %r: %s", adapter.name, error.message)

    tasks = [asyncio.create_task(load(adapter)) for adapter in named]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for warning, names in warned.items():
        log_adapter_warning(names, warning)


def log_adapter_warning(names: Sequence[str], warning: str) -> None:
    """Log what adapters have in common, once; it is information if it is usual."""
    level = logging.INFO if is_about_rounding(warning) else logging.WARNING
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    shown = ", ".join(map(repr, names[:_MAX_NAMED]))
    what = "adapter" if len(names) == 1 else "adapters"
    logger.log(level, "%s %s%s: %s", what, shown, more, warning)


def wanted_adapters(
    config: ModelConfig, catalog: ModelCatalog, scan: FolderScan
) -> list[ConfiguredAdapter]:
    """Return the configured adapters, each name and each task id once.

    The first adapter has it; a later one is an error if it is named individually, else left out.
    Reads folders, which `scan` takes note of; raises ConfigError for an unreadable one.
    """
    wanted: dict[str, ConfiguredAdapter] = {}
    task_ids: dict[int, str] = {}
    for adapter in _configured(config, scan):
        name, task_id = adapter.name, adapter.task_id
        try:
            check_name(name)
            catalog.check_is_no_base(name)
            if name in wanted:
                raise ConfigError(f"the adapter {wanted[name].path} has this name already")
            if task_id is not None and task_ids.setdefault(task_id, name) != name:
                raise ConfigError(f"LoRA task {task_id} already is adapter {task_ids[task_id]!r}")
        except LoraplexError as error:
            if adapter.is_named:
                raise _not_loaded(adapter, error) from error
            scan.left_out.append(LeftOut(adapter.path, f"adapter {name!r}: {error.message}"))
        else:
            wanted[name] = adapter
    return list(wanted.values())


def _configured(config: ModelConfig, scan: FolderScan) -> Iterator[ConfiguredAdapter]:
    for name, adapter in config.adapters.items():
        yield named_adapter(name, adapter)
    if config.multi_lora:
        scan.states.note(Path(config.multi_lora).expanduser())
        for name, path in read_list(Path(config.multi_lora)):
            yield ConfiguredAdapter(name, path, None, is_named=True, is_followed=True)
    found: Found = []
    for folder in config.adapter_dirs:
        found += find_adapters(Path(folder), scan)
    if config.lora_root:
        found += find_below(Path(config.lora_root), scan)
    for name, place in found:
        task_id = task_id_of(name)
        yield ConfiguredAdapter(name, str(place), task_id, is_named=False, is_followed=True)


def log_left_out(left_out: Iterable[LeftOut], reported: Set[str] = frozenset()) -> None:
    """Log why entries of folders are not served. reported: reasons that were logged before."""
    for one in left_out:
        if one.reason not in reported:
            logger.warning("left out %s", one.reason)


def log_empty_folders(config: ModelConfig, wanted: Sequence[ConfiguredAdapter]) -> None:
    """Log the configured folders in which no adapter was found."""
    for folder in (*config.adapter_dirs, *filter(None, (config.lora_root,))):
        place = Path(folder).expanduser()
        if not any(Path(adapter.path).is_relative_to(place) for adapter in wanted):
            logger.warning("no adapter is in %s", place)


def named_adapter(name: str, adapter: AdapterConfig) -> ConfiguredAdapter:
    return ConfiguredAdapter(
        name,
        adapter.path,
        task_id_of(name) if adapter.task_id is None else adapter.task_id,
        is_named=not adapter.optional,
        is_followed=adapter.optional,
    )


def _not_loaded(adapter: ConfiguredAdapter, error: LoraplexError) -> ConfigError:
    return ConfigError(f"adapter {adapter.name!r}: {error.message}")


def task_id_of(name: str) -> int | None:
    """Return the task id of a name of digits, as in TensorRT-LLM's lora_prefetch_dir."""
    return int(name) if name.isascii() and name.isdigit() else None
