"""The adapters that a model's configuration names, one by one or by their folder."""

import asyncio
import dataclasses
import logging
from collections.abc import Container
from pathlib import Path

from loraplex.core.config import ModelConfig
from loraplex.core.errors import ConfigError, LoraplexError
from loraplex.core.principal import DEFAULT_TENANT
from loraplex.serving.adapter_changes import AdapterChanges
from loraplex.serving.adapter_loading import AdapterLoading, check_is_no_base
from loraplex.serving.served_model import ServedModel

logger = logging.getLogger(__name__)

PEFT_CONFIG_NAME = "adapter_config.json"
_ADAPTER_FILES = (PEFT_CONFIG_NAME, "model.lora_weights.npy")


@dataclasses.dataclass(frozen=True, slots=True)
class ConfiguredAdapter:
    name: str
    path: str
    task_id: int | None
    is_named: bool
    """One by one; otherwise it was found in a folder, and may be left out."""


async def load_configured(
    model: ServedModel,
    loading: AdapterLoading,
    changes: AdapterChanges,
    base_names: Container[str] = (),
) -> None:
    """Register what the configuration names; no adapter may be called as a base is.

    It wins over what was stored. What only an earlier configuration named is forgotten. Raises
    ConfigError for an adapter named one by one; one that was merely found in a folder is left out
    with a warning, and what was stored under its name goes on.
    """
    wanted = await _wanted(model.config, base_names)
    task_ids = {adapter.name: adapter.task_id for adapter in wanted}
    change = await changes.run(
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
        try:
            await loading.register_configured(
                model, DEFAULT_TENANT, adapter.name, adapter.path, adapter.task_id
            )
        except LoraplexError as error:
            _cannot_load(adapter.name, error, is_named=adapter.is_named)


async def _wanted(config: ModelConfig, base_names: Container[str]) -> list[ConfiguredAdapter]:
    """Each name and each task id once: the first one has it."""
    wanted: dict[str, ConfiguredAdapter] = {}
    task_ids: dict[int, str] = {}
    for adapter in await _configured(config):
        name, task_id = adapter.name, adapter.task_id
        try:
            check_is_no_base(name, base_names)
            if name in wanted:
                raise ConfigError(f"{wanted[name].path} has this name already")
            if task_id is not None and task_ids.setdefault(task_id, name) != name:
                raise ConfigError(f"LoRA task {task_id} already is adapter {task_ids[task_id]!r}")
        except LoraplexError as error:
            _cannot_load(name, error, is_named=adapter.is_named)
        else:
            wanted[name] = adapter
    return list(wanted.values())


async def _configured(config: ModelConfig) -> list[ConfiguredAdapter]:
    named = [
        ConfiguredAdapter(name, adapter.path, _task_id(name, adapter.task_id), is_named=True)
        for name, adapter in config.adapters.items()
    ]
    found = [
        ConfiguredAdapter(name, str(path), _task_id(name, None), is_named=False)
        for folder in config.adapter_dirs
        for name, path in await asyncio.to_thread(find_adapters, Path(folder))
    ]
    return named + found


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


def _is_adapter(folder: Path) -> bool:
    try:
        return any((folder / name).is_file() for name in _ADAPTER_FILES)
    except OSError:
        return True  # a folder that may not be entered: staging says what is wrong with it


def _cannot_load(name: str, error: LoraplexError, *, is_named: bool) -> None:
    if is_named:
        raise ConfigError(f"adapter {name!r}: {error.message}") from error
    logger.warning("left out adapter %r: %s", name, error.message)


def _task_id(name: str, configured: int | None) -> int | None:
    """A name of digits is its task id, as in TensorRT-LLM's lora_prefetch_dir."""
    if configured is None and name.isascii() and name.isdigit():
        return int(name)
    return configured
