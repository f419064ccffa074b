"""What loraplex keeps on the disk: states of models, packed weights, and downloads from the hub.

This file must stay light: it does not import torch.
"""

import contextlib
import enum
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from loraplex.adapters.database import DATABASE_NAME
from loraplex.adapters.state_files import lock_files
from loraplex.adapters.state_models import models_of
from loraplex.core.config import Config
from loraplex.core.environment import hub_records, weights_cache_directory
from loraplex.core.state_places import GGUF_FOLDERS, MODELS, state_root
from loraplex.execution.weights.file_locks import holders, unused

_STATE_NAME: Final = re.compile(r"(.+)-[0-9a-f]{8}")
_HUB_FOLDER: Final = re.compile(r"models--(.+)")


class DiskItemKind(enum.StrEnum):
    STATE = "state"
    EARLIER_STATE = "earlier state"
    """The one folder for all models that earlier versions had."""
    WEIGHTS = "weights"
    HUB = "hub"
    """A model that loraplex downloaded to the cache of the Hugging Face hub."""


class Cached(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that can be removed as a whole."""

    kind: DiskItemKind
    model: str
    """Name of the model; empty if it is unknown."""
    model_path: str = ""
    """Where the model is, as far as it is known; of several models, the first one."""
    path: str
    num_bytes: int
    last_use: float
    """Unix time of the newest start that used it."""
    is_used: bool
    used_by: tuple[int, ...] = ()
    """Ids of the processes that use it, as far as they are known."""
    parts: tuple[str, ...]
    """Files and folders to remove."""
    locks: tuple[str, ...]
    """Files that are locked while it is used."""

    @property
    def is_state(self) -> bool:
        """Whether adapters that clients loaded are in it."""
        return self.kind in (DiskItemKind.STATE, DiskItemKind.EARLIER_STATE)

    def is_of(self, model: str) -> bool:
        """Return whether it belongs to a model: its name, its path or its hub id."""
        return bool(self.model) and model.rstrip("/") in (self.model, Path(self.model).name)


def find_caches(config: Config) -> list[Cached]:
    """Return all that is kept, by kind and path. config: of one model."""
    found = [*_states(config), *_weights(config), *_downloads()]
    return sorted(found, key=lambda one: (one.kind, one.path))


def remove(cached: Cached) -> bool:
    """Remove it, unless a process uses it. Raises OSError."""
    with unused(map(Path, cached.locks)) as is_unused:
        if is_unused:
            for part in cached.parts:
                _remove(Path(part))
    return is_unused


def _states(config: Config) -> Iterator[Cached]:
    root = state_root(config)
    if config.server.state_dir:
        yield from _state(DiskItemKind.STATE, "", root, [root])
        return
    for folder in _entries(root / MODELS):
        named = _STATE_NAME.fullmatch(folder.name)
        yield from _state(DiskItemKind.STATE, named[1] if named else folder.name, folder, [folder])
    # Servers of GGUF files read their folders again when an engine restarts.
    parts = [entry for entry in _entries(root) if entry.name not in (MODELS, GGUF_FOLDERS)]
    yield from _state(DiskItemKind.EARLIER_STATE, "", root, parts)


def _state(kind: DiskItemKind, model: str, folder: Path, parts: Sequence[Path]) -> Iterator[Cached]:
    locks = [file for file in lock_files(folder) if file.exists()]
    if locks or (folder / DATABASE_NAME).exists():
        found = _cached(kind, model, folder, parts, [*locks, folder / DATABASE_NAME], locks)
        for noted in models_of(folder)[:1]:
            found = msgspec.structs.replace(found, model=model or noted.name, model_path=noted.path)
        yield found


def _weights(config: Config) -> Iterator[Cached]:
    (model,) = config.models.values()
    folder = weights_cache_directory(model.weights_cache_dir, config.server.state_dir)
    for file in [] if folder is None else _entries(folder):
        if file.suffix == ".weights":
            lock = file.with_suffix(".lock")
            used = [one for one in (lock, file) if one.exists()]
            found = _cached(DiskItemKind.WEIGHTS, _model_of(lock), file, [file, lock], [lock], used)
            yield msgspec.structs.replace(found, model_path=_text(lock))


def _downloads() -> Iterator[Cached]:
    for record in _entries(hub_records()):
        folder = Path(_text(record))
        named = _HUB_FOLDER.fullmatch(folder.name)
        if named and folder.is_dir():
            hub_id = named[1].replace("--", "/")
            yield _cached(DiskItemKind.HUB, hub_id, folder, [folder, record], [record], [record])


def _cached(
    kind: DiskItemKind,
    model: str,
    path: Path,
    parts: Sequence[Path],
    used: Sequence[Path],
    locks: Sequence[Path],
) -> Cached:
    """Return an entry. used: files whose time is that of a use."""
    with unused(locks) as is_unused:
        pass
    times = [file.stat().st_mtime for file in (*used, path) if file.exists()]
    return Cached(
        kind=kind,
        model=model,
        path=str(path),
        num_bytes=sum(map(_bytes, parts)),
        last_use=max(times[: len(used)], default=0.0) or times[-1],
        is_used=not is_unused,
        used_by=() if is_unused else holders(locks),
        parts=tuple(map(str, parts)),
        locks=tuple(map(str, locks)),
    )


def _model_of(lock: Path) -> str:
    """Return the name of the model whose weights a lock protects: it contains their folder."""
    folder = Path(_text(lock))
    hub_ids = [named[1] for part in folder.parts if (named := _HUB_FOLDER.fullmatch(part))]
    return hub_ids[-1].replace("--", "/") if hub_ids else folder.name


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _bytes(path: Path) -> int:
    """Return the size of a file or of all files below a folder; links are not followed."""
    total = 0
    with contextlib.suppress(OSError):
        total = path.lstat().st_size if not path.is_dir() or path.is_symlink() else 0
        for folder, _, names in os.walk(path):
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
