"""JSON5 files of an operator, several of them merged in order: later ones win.

Objects are merged at any depth, other values are replaced; a null is a value like any other.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import json5

from loraplex.core.errors import ConfigError

MAX_FILE_BYTES = 16 << 20

KeyPath = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class MergedFiles:
    """The values of all files, and which file said each of them."""

    values: Mapping[str, Any]
    _sources: Mapping[KeyPath, Path]

    def source(self, path: KeyPath) -> Path:
        """The last file that set the value at `path`, or something in it."""
        found = [file for key, file in self._sources.items() if key[: len(path)] == path]
        return found[-1] if found else self._sources[path[:-1]]


def read_json5(path: Path) -> dict[str, Any]:
    """The object in a JSON5 file. Raises ConfigError that names the file, and the place in it."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    try:
        value = _parse(text)
    except (ValueError, RecursionError) as error:
        is_deep = isinstance(error, RecursionError)
        reason = "it is nested too deep" if is_deep else str(error).replace("<string>:", "line ")
        raise ConfigError(f"{path} is not JSON5: {reason}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold an object, got {type(value).__name__}")
    return value


def merge_files(paths: Sequence[Path]) -> MergedFiles:
    """Raises ConfigError."""
    values: dict[str, Any] = {}
    sources: dict[KeyPath, Path] = {}
    for path in paths:
        _merge(values, read_json5(path), (), path, sources)
    return MergedFiles(values, sources)


def _parse(text: str) -> Any:
    try:
        # The reader of JSON5 is Python: a tokenizer's whole configuration would take it seconds.
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_number)
    except json.JSONDecodeError:
        return json5.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_number)


def _unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    entries = list(pairs)
    found = dict(entries)
    if len(found) < len(entries):
        names = [name for name, _ in entries]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number that a setting can have")


def _merge(
    into: dict[str, Any],
    values: Mapping[str, Any],
    path: KeyPath,
    file: Path,
    sources: dict[KeyPath, Path],
) -> None:
    for key, value in values.items():
        own_path = (*path, key)
        # Said anew, it comes last.
        sources.pop(own_path, None)
        sources[own_path] = file
        if not isinstance(value, dict):
            into[key] = value
            continue
        if not isinstance(into.get(key), dict):
            into[key] = {}
        _merge(into[key], value, own_path, file, sources)
