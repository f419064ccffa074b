"""Scan of an operator's adapter folders: names of the adapters, and signatures to detect changes.

Only names and sizes are read; staging reads the files. No name leaves its folder: links are
followed first.
"""

import itertools
import json
import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from loraplex.core.errors import ConfigError
from loraplex.serving.adapters.path_states import PathStates

logger = logging.getLogger(__name__)

PEFT_CONFIG_NAME = "adapter_config.json"
_ADAPTER_FILES = (PEFT_CONFIG_NAME, "model.lora_weights.npy")
_BASE_CONFIG = "config.json"
"""File of a base model's folder, whose .safetensors files are its weights."""
_FILE_SUFFIXES = (".safetensors", ".gguf")
_MAX_DEPTH = 16
_MAX_LIST_BYTES = 16 << 20

Log = Callable[..., None]
"""Method of a logger that reports what was left out."""
Found = list[tuple[str, Path]]
"""Adapters as (name, path), sorted by name."""
Signature = tuple[tuple[str, int, int, int], ...]
"""(name, inode, size, mtime_ns) of each file of an adapter; empty where there are none."""


def find_adapters(
    folder: Path, log: Log = logger.warning, states: PathStates | None = None
) -> Found:
    """Find every sub-folder with a PEFT adapter or TensorRT-LLM's pair of files.

    states: notes what is read. Raises ConfigError.
    """
    folder = folder.expanduser()
    entries = _entries(folder, states or PathStates())
    found = [(entry.name, entry) for entry in entries if _is_adapter(entry)]
    if not found:
        log("no sub-folder of %s has an %s", folder, " or a ".join(_ADAPTER_FILES))
    return _within(found, folder, log)


def find_below(root: Path, log: Log = logger.warning, states: PathStates | None = None) -> Found:
    """Find every adapter below a folder, at any depth, named by its relative path.

    A .safetensors or .gguf file is named without its suffix: `team/v1.2` is the folder team/v1.2,
    team/v1.2.safetensors or team/v1.2.gguf. The weights of a base model are no adapters.
    states: notes what is read. Raises ConfigError.
    """
    root = root.expanduser()
    found = sorted(_below(root, "", 0, log, states or PathStates()))
    if not found:
        log("no adapter is below %s", root)
    return _within(found, root, log)


def find_named(root: Path, name: str) -> Path | None:
    """Return the adapter below a folder that find_below would give this name, if any."""
    root = root.expanduser()
    parts = name.split("/")
    if len(parts) > _MAX_DEPTH or any(not part or part[0] == "." or "\0" in part for part in parts):
        return None
    folder = root / name
    files = [root / f"{name}{suffix}" for suffix in _FILE_SUFFIXES]
    try:
        above = itertools.takewhile(lambda one: one != root, folder.parents)
        if any(one.is_symlink() or _is_adapter(one) for one in above):
            return None  # find_below skips it too: folders inside an adapter are checkpoints
        file = next(filter(Path.is_file, files), files[0])
        path = folder if folder.is_dir() and _is_adapter(folder) else file
        is_of_base = path == file and (file.parent / _BASE_CONFIG).is_file()
        is_there = path.is_dir() or (path.is_file() and not is_of_base)
        inside = path.resolve().is_relative_to(root.resolve()) and _stays(path, root.resolve())
    except (OSError, RuntimeError, ValueError):  # includes names that no file can have
        return None
    return path if is_there and inside else None


def read_list(path: Path) -> list[tuple[str, str]]:
    """Read Triton's multi_lora.json: {NAME: PATH}, paths relative to the working directory.

    Raises ConfigError.
    """
    path = path.expanduser()
    try:
        if path.stat().st_size > _MAX_LIST_BYTES:
            raise ConfigError(f"{path} has more than {_MAX_LIST_BYTES} bytes")
        listed = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read multi_lora {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"multi_lora {path} is not JSON: {error}") from error
    if not isinstance(listed, dict) or not all(isinstance(one, str) for one in listed.values()):
        raise ConfigError(f"multi_lora {path} must be an object of names and paths")
    return sorted(listed.items())


def signature_of(path: Path, states: PathStates | None = None) -> Signature:
    """Return the signature of a folder's files or of a file; it changes when they do.

    states: notes what is read.
    """
    states = states or PathStates()
    status = states.note(path)
    if status is None:
        return ()
    if not stat.S_ISDIR(status.st_mode):
        return (_file_signature(path.name, status),)
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return ()
    found = [(name, states.note(os.path.join(path, name))) for name in names]
    signatures = [_file_signature(name, file) for name, file in found if file is not None]
    return tuple(signatures) if len(signatures) == len(found) else ()


def _file_signature(name: str, status: os.stat_result) -> tuple[str, int, int, int]:
    return name, status.st_ino, status.st_size, status.st_mtime_ns


def _below(
    folder: Path, prefix: str, depth: int, log: Log, states: PathStates
) -> Iterator[tuple[str, Path]]:
    if depth > _MAX_DEPTH:
        log("%s is deeper than %d folders: left out", folder, _MAX_DEPTH)
        return
    try:
        entries = _entries(folder, states)
    except ConfigError as error:
        if not depth:
            raise
        log("%s: left out", error.message)
        return
    has_base = any(entry.name == _BASE_CONFIG for entry in entries)
    for entry in entries:
        name = prefix + entry.name
        if _is_adapter(entry):
            yield name, entry
        elif os.path.isdir(entry):
            if not entry.is_symlink():  # a link may lead back here
                yield from _below(entry, f"{name}/", depth + 1, log, states)
        elif entry.name.endswith(_FILE_SUFFIXES) and not has_base:
            yield name.rpartition(".")[0], entry


def _entries(folder: Path, states: PathStates) -> list[Path]:
    """List a folder by name. Hidden entries are skipped: they may be incomplete."""
    states.note(folder)
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise ConfigError(
            f"cannot look for adapters in the folder {folder}: {error.strerror}"
        ) from error
    entries = [folder / name for name in names]
    for entry in entries:
        states.note(entry)
    return entries


def _within(found: Found, folder: Path, log: Log) -> Found:
    """Drop adapters that leave the folder by a link."""
    root = Path(os.path.realpath(folder))
    staying = []
    for name, path in found:
        if _stays(path, root):
            staying.append((name, path))
        else:
            log("left out adapter %r: %s leads out of %s; name it one by one", name, path, folder)
    return staying


def _stays(path: Path, root: Path) -> bool:
    """Whether no link leads out. Only links are resolved, since there are thousands of folders."""
    try:
        links = [path] if path.is_symlink() else []
        if path.is_dir():
            with os.scandir(path) as entries:
                links += [Path(entry.path) for entry in entries if entry.is_symlink()]
        return all(link.resolve().is_relative_to(root) for link in links)
    except (OSError, RuntimeError):
        return True  # a folder that may not be entered: staging reports its error


def _is_adapter(folder: Path) -> bool:
    try:
        return any((folder / name).is_file() for name in _ADAPTER_FILES)
    except OSError:
        return True  # a folder that may not be entered: staging reports its error
