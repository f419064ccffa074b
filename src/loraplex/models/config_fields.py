"""Typed access to the fields of a Hugging Face JSON file, with errors that name file and field."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from loraplex.core.errors import ConfigError, UnsupportedModelError

_MAX_FILE_BYTES = 64 << 20
"""The index of a large checkpoint has some millions."""
_MAX_LAYERS = 4096
"""Models of 2026 have up to some hundreds."""


class ConfigFields:
    """JSON object. A field that is null counts as absent, as Hugging Face treats it."""

    def __init__(
        self,
        values: Mapping[str, Any],
        source: str,
        own_names: Mapping[str, str] | None = None,
        reads: set[str] | None = None,
    ) -> None:
        """source: name of the object in errors, such as the path of its file.

        own_names: what the object calls fields that have another name here. reads: set to add the
        names of fields to that are read.
        """
        self.reads: set[str] = set() if reads is None else reads
        """Fields that were read, in this object, its tables, and objects derived from it."""
        self._values = {name: value for name, value in values.items() if value is not None}
        self._nulls = frozenset(values.keys() - self._values.keys())
        self.source = source
        self._own_names = own_names or {}

    def renamed(self, own_names: Mapping[str, str], defaults: Mapping[str, Any]) -> "ConfigFields":
        """Return the fields under other names, with defaults for those that are absent.

        own_names: the present names by the new ones, for errors too; an empty one: the file has no
        such field. A field that has a new name already is of another family, and not read.
        """
        renamed = {
            name: self._values[own] for name, own in own_names.items() if own in self._values
        }
        kept = {name: value for name, value in self._values.items() if name not in own_names}
        nulls = dict.fromkeys(self._nulls)
        values = {**nulls, **defaults, **kept, **renamed}
        own_names = {**self._own_names, **own_names}
        return ConfigFields(values, self.source, own_names, self.reads)

    def with_values(self, values: Mapping[str, Any]) -> "ConfigFields":
        """Return the fields with other values."""
        values = {**self.values_and_nulls, **values}
        return ConfigFields(values, self.source, self._own_names, self.reads)

    def own_name(self, name: str) -> str:
        """Return what the file calls a field."""
        return self._own_names.get(name, name)

    def __contains__(self, name: str) -> bool:
        self.reads.add(self.own_name(name))
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    @property
    def values(self) -> Mapping[str, Any]:
        """The fields as they are, without those that are null."""
        return self._values

    @property
    def values_and_nulls(self) -> Mapping[str, Any]:
        """The fields as they are: a null may mean something else than an absent field."""
        return {**dict.fromkeys(self._nulls), **self._values}

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer of at least 1. Without a default the field is required."""
        value = self.optional_integer(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.source}: {self.own_name(name)} is missing")
        if value < 1:
            raise ConfigError(
                f"{self.source}: {self.own_name(name)} must be at least 1, got {value}"
            )
        return value

    @property
    def num_layers(self) -> int:
        """num_hidden_layers, which is required. A number far off would make a description of each.

        Raises ConfigError.
        """
        count = self.integer("num_hidden_layers")
        if count > _MAX_LAYERS:
            name = self.own_name("num_hidden_layers")
            raise ConfigError(f"{self.source}: {name} must be at most {_MAX_LAYERS}, got {count}")
        return count

    def optional_integer(self, name: str) -> int | None:
        value: int | None = self._read(name)
        if value is not None and not _is_integer(value):
            raise self._wrong(name, "an integer")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """Return one integer or a list of them; empty if absent."""
        value = self._read(name, [])
        values = value if isinstance(value, list) else [value]
        if not all(map(_is_integer, values)):
            raise self._wrong(name, "an integer or a list of integers")
        return tuple(values)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number. Without a default the field is required."""
        value = self.optional_number(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.source}: {self.own_name(name)} is missing")
        return value

    def optional_number(self, name: str) -> float | None:
        value = self._read(name)
        if value is None:
            return None
        if not _is_number(value):
            raise self._wrong(name, "a number")
        return float(value)

    def positive(self, name: str, default: float) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise self._wrong(name, "a positive number")
        return value

    def positive_or_null(self, name: str, default: float | None = None) -> float | None:
        """Return a positive number, None for null, the default if absent."""
        if name in self._nulls:
            return None
        return self.positive(name, 1.0) if name in self else default

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a required list."""
        value = self._read(name)
        if not isinstance(value, list) or not all(map(_is_number, value)):
            raise self._wrong(name, "a list of numbers")
        return tuple(float(number) for number in value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._read(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._read(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list; empty if absent."""
        value = self._read(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, "a list of strings")
        return tuple(value)

    def layer_types(self, known: Collection[str], name: str = "layer_types") -> tuple[str, ...]:
        """Return the type of each layer; empty if the field is absent.

        Raises ConfigError for another number of them than num_hidden_layers, and
        UnsupportedModelError for one that is not known.
        """
        types = self.texts(name)
        if types and len(types) != self.num_layers:
            raise ConfigError(
                f"{self.source}: {self.own_name(name)} has {len(types)} entries, "
                f"{self.own_name('num_hidden_layers')} is {self.num_layers}"
            )
        for each in types:
            if each not in known:
                raise UnsupportedModelError(
                    f"{self.source}: layer type {each!r} is not supported; "
                    f"supported: {', '.join(known)}"
                )
        return types

    def table(self, name: str) -> "ConfigFields | None":
        """Return a nested object; None if absent or empty."""
        value = self._read(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return ConfigFields(value, f"{self.source}: {name}", reads=self.reads) if value else None

    def tables(self) -> tuple[str, ...]:
        """Return the names of the fields that are objects."""
        return tuple(name for name, value in self._values.items() if isinstance(value, dict))

    def _read(self, name: str, default: object = None) -> Any:
        self.reads.add(self.own_name(name))
        return self._values.get(name, default)

    def _wrong(self, name: str, wanted: str) -> ConfigError:
        got = json.dumps(self._values.get(name))
        return ConfigError(f"{self.source}: {self.own_name(name)} must be {wanted}, got {got}")


def read_fields(path: Path) -> ConfigFields:
    """Read a file that holds one JSON object. Raises ConfigError."""
    return ConfigFields(read_object(path), str(path))


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object of a file. Raises ConfigError."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} has more than {_MAX_FILE_BYTES} bytes")
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must be a JSON object")
    return values


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
