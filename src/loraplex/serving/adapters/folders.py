"""Scan of an operator's adapter folders: names of the adapters, and signatures to detect changes.

Only names and sizes are read; staging reads the files. Symbolic links are followed within the
scanned folder and the folders that adapters may be loaded from. What else might be an adapter is
left out, with its reason.
"""

import dataclasses
import itertools
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from loraplex.adapters.sources.policy import SourcePolicy
from loraplex.core.errors import ConfigError
from loraplex.serving.access.tenant_adapters import LeftOut
from loraplex.serving.adapters.path_states import PathStates

PEFT_CONFIG_NAME = "adapter_config.json"
_ADAPTER_FILES = (PEFT_CONFIG_NAME, "model.lora_weights.npy")
_BASE_CONFIG = "config.json"
"""File of a base model's folder, whose .safetensors files are its weights."""
_FILE_SUFFIXES = (".safetensors", ".gguf")
_MAX_DEPTH = 16
_MAX_LIST_BYTES = 16 << 20

Found = list[tuple[str, Path]]
"""Adapters as (name, path), sorted by name."""
Signature = tuple[tuple[str, int, int, int], ...]
"""(name, inode, size, mtime_ns) of each file of an adapter; empty where there are none."""


@dataclasses.dataclass(slots=True)
class FolderScan:
    """One scan of folders: where links may lead, what was read, and what was left out."""

    policy: SourcePolicy = dataclasses.field(default_factory=lambda: SourcePolicy(roots=()))
    """Links may lead where clients may load adapters from."""
    states: PathStates = dataclasses.field(default_factory=PathStates)
    left_out: list[LeftOut] = dataclasses.field(default_factory=list)

    def may_follow(self, link: Path, root: Path) -> bool:
        """Return whether a link stays within a scanned folder, or where adapters may be; note it
        as left out if not. root: the folder, without links."""
        try:
            target = link.resolve(strict=True)
        except (OSError, RuntimeError):
            self._leave_out(link, f"symbolic link {link}: it leads nowhere")
            return False
        if target.is_relative_to(root):
            return True
        problem = self.policy.problem_of(target, f"{target}, where symbolic link {link} leads,")
        if problem:
            self._leave_out(link, problem)
        return not problem

    def _leave_out(self, link: Path, reason: str) -> None:
        self.left_out.append(LeftOut(str(link), reason, is_link=True))


def find_adapters(folder: Path, scan: FolderScan) -> Found:
    """Find every sub-folder with a PEFT adapter or TensorRT-LLM's pair of files.

    Raises ConfigError.
    """
    folder = folder.expanduser()
    found = [
        (entry.name, entry)
        for entry in _entries(folder, scan.states)
        if _is_adapter(entry) or _is_broken_link(entry)
    ]
    return _within(found, folder, scan)


def find_below(root: Path, scan: FolderScan) -> Found:
    """Find every adapter below a folder, at any depth, named by its relative path.

    A .safetensors or .gguf file is named without its suffix: `team/v1.2` is the folder team/v1.2,
    team/v1.2.safetensors or team/v1.2.gguf. The weights of a base model are no adapters.
    Raises ConfigError.
    """
    root = root.expanduser()
    real = Path(os.path.realpath(root))
    return _within(sorted(_Below(real, scan).find(root, "", (real,))), root, scan)


def find_named(root: Path, name: str, policy: SourcePolicy | None = None) -> Path | None:
    """Return the adapter below a folder that find_below would give this name, if any.

    policy: where links may lead (default: nowhere but into the folder).
    """
    root = root.expanduser()
    parts = name.split("/")
    if len(parts) > _MAX_DEPTH or any(not part or part[0] == "." or "\0" in part for part in parts):
        return None
    scan = FolderScan() if policy is None else FolderScan(policy)
    folder = root / name
    files = [root / f"{name}{suffix}" for suffix in _FILE_SUFFIXES]
    try:
        real = root.resolve()
        above = itertools.takewhile(lambda one: one != root, folder.parents)
        if not _may_enter(list(above)[::-1], real, scan):
            return None
        file = next(filter(Path.is_file, files), files[0])
        path = folder if folder.is_dir() and _is_adapter(folder) else file
        is_of_base = path == file and (file.parent / _BASE_CONFIG).is_file()
        is_there = path.is_dir() or (path.is_file() and not is_of_base)
        inside = is_there and _stays(path, real, scan)
    except (OSError, RuntimeError, ValueError):  # includes names that no file can have
        return None
    return path if inside else None


def _may_enter(above: list[Path], root: Path, scan: FolderScan) -> bool:
    """Return whether find_below enters these folders, of which each is in the one before."""
    chain: tuple[Path, ...] = (root,)
    for folder in above:
        if _is_adapter(folder):
            return False  # folders inside an adapter are checkpoints
        real = folder.resolve()
        if folder.is_symlink() and (_is_circle(real, chain) or not scan.may_follow(folder, root)):
            return False
        chain = (*chain, real)
    return True


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


class _Below:
    """Search below a folder, which is `root` without links."""

    def __init__(self, root: Path, scan: FolderScan) -> None:
        self._root = root
        self._scan = scan

    def find(
        self, folder: Path, prefix: str, chain: tuple[Path, ...]
    ) -> Iterator[tuple[str, Path]]:
        """Yield adapters. chain: the folders that were entered, without links, down to `folder`."""
        if len(chain) > _MAX_DEPTH + 1:
            self._leave_out(folder, f"{folder} is deeper than {_MAX_DEPTH} folders")
            return
        try:
            entries = _entries(folder, self._scan.states)
        except ConfigError as error:
            if not prefix:
                raise
            self._leave_out(folder, error.message)
            return
        has_base = any(entry.name == _BASE_CONFIG for entry in entries)
        for entry in entries:
            name = prefix + entry.name
            if _is_adapter(entry):
                yield name, entry
            elif os.path.isdir(entry):
                if (real := self._entered(entry, chain)) is not None:
                    yield from self.find(entry, f"{name}/", (*chain, real))
            elif _is_broken_link(entry) or (entry.name.endswith(_FILE_SUFFIXES) and not has_base):
                yield name.rpartition(".")[0] or name, entry

    def _entered(self, folder: Path, chain: tuple[Path, ...]) -> Path | None:
        """Return a folder without links; None: what it links to is not searched."""
        if not folder.is_symlink():
            return chain[-1] / folder.name
        real = Path(os.path.realpath(folder))
        # The adapters of a circle are found under their own names.
        if _is_circle(real, chain) or not self._scan.may_follow(folder, self._root):
            return None
        return real

    def _leave_out(self, folder: Path, reason: str) -> None:
        self._scan.left_out.append(LeftOut(str(folder), reason))


def _is_circle(real: Path, chain: tuple[Path, ...]) -> bool:
    """Return whether a folder contains one of those through which it was reached."""
    return any(folder.is_relative_to(real) for folder in chain)


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


def _within(found: Found, folder: Path, scan: FolderScan) -> Found:
    """Drop adapters with a link that may not be followed."""
    root = Path(os.path.realpath(folder))
    return [(name, path) for name, path in found if _stays(path, root, scan)]


def _stays(path: Path, root: Path, scan: FolderScan) -> bool:
    """Return whether all links may be followed.

    Only links are resolved, since there are thousands of folders.
    """
    try:
        links = [path] if path.is_symlink() else []
        if path.is_dir():
            with os.scandir(path) as entries:
                links += [Path(entry.path) for entry in entries if entry.is_symlink()]
    except (OSError, RuntimeError):
        return True  # a folder that may not be entered: staging reports its error
    return all(scan.may_follow(link, root) for link in links)


def _is_broken_link(path: Path) -> bool:
    return os.path.islink(path) and not os.path.exists(path)


def _is_adapter(folder: Path) -> bool:
    try:
        return any((folder / name).is_file() for name in _ADAPTER_FILES)
    except OSError:
        return True  # a folder that may not be entered: staging reports its error
