"""Layers of settings, and how they become one frozen Config.

Precedence, lowest first: defaults, configuration file, environment, flags. One name serves all
three: the flag `--http-port` is `LORAPLEX_HTTP_PORT` in the environment and `http_port` under
`[server]` in the file. A flag or variable of a model holds for every served model. Each value
remembers its source, so that an error names the place to correct. Unknown keys are errors.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from loraplex.core.byte_sizes import parse_bytes
from loraplex.core.config import ALIASES, SETTINGS, AdapterConfig, Config, ModelConfig, Sources
from loraplex.core.errors import ConfigError
from loraplex.core.server_config import ServerConfig
from loraplex.core.setting import SettingField, setting_fields

KeyPath = tuple[str, ...]
_TABLES: Final = ("server", "models")
Section = TypeVar("Section", bound=msgspec.Struct)


class Layer:
    """Values from one source. A key path ends at a value that is not a table, or an empty one."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source = source
        self.values = values

    @property
    def model_names(self) -> list[str]:
        models = self.values.get("models")
        return list(models) if isinstance(models, Mapping) else []

    def leaves(self) -> Iterable[tuple[KeyPath, Any]]:
        return _leaves(self.values, ())


def file_layer(path: Path) -> Layer:
    """Read a TOML file with [server] and [models.NAME] tables. Raises ConfigError."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    return Layer(str(path), values)


def field_layers(source: str, fields: Mapping[str, Any], model_names: Iterable[str]) -> list[Layer]:
    """Return one layer for each flag or variable, with its value where the setting belongs.

    fields: values by field name. source: the name of a layer for messages, "flag --{flag}",
    "variable LORAPLEX_{variable}" or "argument {name}". Raises ConfigError for a name that is not
    a setting.
    """
    models = list(model_names)
    layers = []
    for field, value in fields.items():
        name = source.format(flag=field.replace("_", "-"), variable=field.upper(), name=field)
        field = ALIASES.get(field, field)
        if field in ServerConfig.__struct_fields__:
            layers.append(Layer(name, {"server": {field: value}}))
        elif field in SETTINGS and SETTINGS[field].setting.is_file_only:
            raise ConfigError(f"{name}: {field} belongs to one model; set it under [models.NAME]")
        elif field in ModelConfig.__struct_fields__:
            layers.append(Layer(name, {"models": {model: {field: value} for model in models}}))
        else:
            raise ConfigError(f"{name} is not a setting of loraplex{_hint(field, SETTINGS)}")
    return layers


def resolve(layers: Iterable[Layer]) -> Config:
    """Merge the layers, later ones winning. Raises ConfigError that names key and source."""
    merged = _MergedLayers()
    for layer in layers:
        for path, value in layer.leaves():
            merged.put(path, value, layer.source)
    return merged.config()


def _hint(name: str, known: Iterable[str]) -> str:
    similar = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {similar[0]}?" if similar else ""


def _leaves(values: Mapping[str, Any], path: KeyPath) -> Iterable[tuple[KeyPath, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


class _MergedLayers:
    """One tree of values, with the source of each."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._sources: dict[KeyPath, str] = {}

    def put(self, path: KeyPath, value: Any, source: str) -> None:
        given = path
        if len(path) == 3 and path[0] == "models":
            path = (*path[:2], ALIASES.get(path[2], path[2]))
        if path != given and self._sources.get(path) == source:
            raise ConfigError(
                f"{source}: {'.'.join(given)} is another name of {path[2]}: set one of them"
            )
        table = self._values
        for depth, key in enumerate(path[:-1], start=1):
            inner = table.setdefault(key, {})
            self._require_table(inner, path[:depth])
            table = inner
        self._sources[path] = source
        if isinstance(value, Mapping):  # an empty one removes nothing
            table.setdefault(path[-1], {})
        elif path[-1] in SETTINGS:
            table[path[-1]] = self._parsed(path, value, SETTINGS[path[-1]])
        else:
            table[path[-1]] = value

    def config(self) -> Config:
        # Table by table: msgspec does not report which entry of a dictionary is wrong.
        server = self._section(ServerConfig, self._values.get("server", {}), ("server",))
        models = self._values.get("models", {})
        self._require_table(models, ("models",))
        self._require_known(self._values, _TABLES, ())
        parsed = {name: self._model(table, ("models", name)) for name, table in models.items()}
        return Config(server=server, models=parsed, sources=self._shown_sources())

    def _shown_sources(self) -> Sources:
        """Return the sources by setting; a table's entries may have several."""
        found = Sources({}, {})
        for (kind, *keys), source in self._sources.items():
            if kind == "models" and len(keys) > 1:
                sources, name = found.models.setdefault(keys[0], {}), keys[1]
            elif kind == "server" and keys:
                sources, name = found.server, keys[0]
            else:
                continue
            others = sources.get(name, source).split(", ")
            sources[name] = ", ".join(dict.fromkeys([*others, source]))
        return found

    def _model(self, table: Any, path: KeyPath) -> ModelConfig:
        self._require_table(table, path)
        adapters = table.get("adapters", {})
        self._require_table(adapters, (*path, "adapters"))
        parsed = {
            name: self._section(AdapterConfig, adapter, (*path, "adapters", name))
            for name, adapter in adapters.items()
        }
        return self._section(ModelConfig, {**table, "adapters": parsed}, path)

    def _section(self, kind: type[Section], table: Any, path: KeyPath) -> Section:
        self._require_table(table, path)
        self._require_known(table, kind.__struct_fields__, path)
        try:
            return msgspec.convert(table, kind, strict=False)
        except msgspec.ValidationError as error:
            text, _, where = str(error).partition(" - at `$.")
            match = re.match(r"\w*", where)
            name = match[0] if match else ""
            field = setting_fields(kind).get(name)
            if field and field.choices and isinstance(table[name], str):
                text = f"{field.problem(table[name])}, got {table[name]!r}"
            raise self._error((*path, name) if name else path, text) from error
        except ConfigError as error:
            field_path = (*path, error.param) if error.param else path
            text = error.message.removeprefix(f"{error.param} ")
            raise self._error(field_path, text) from error

    def _parsed(self, path: KeyPath, value: Any, field: SettingField) -> Any:
        """Return a value in the setting's own terms: with units and commas read, and other
        systems' words replaced."""
        if field.is_list and field.setting.has_commas:
            if isinstance(value, str):
                return [item.strip() for item in value.split(",") if item.strip()]
            return [value] if isinstance(value, int) else value
        if isinstance(value, str) and field.is_mapping:
            pairs = [item.partition("=") for item in value.split(",") if item.strip()]
            if not all(equals for _, equals, _ in pairs):
                raise self._error(path, f"must be NAME=VALUE,NAME=VALUE, got {value!r}")
            return {name.strip(): number.strip() for name, _, number in pairs}
        if isinstance(value, str) and field.is_bytes:
            try:
                return parse_bytes(value)
            except ValueError as error:
                raise self._error(path, str(error)) from error
        return field.setting.value_aliases.get(value, value) if isinstance(value, str) else value

    def _require_known(
        self, table: Mapping[str, Any], known: tuple[str, ...], path: KeyPath
    ) -> None:
        for key in table:
            if key not in known:
                hint = _hint(key, known)
                text = f"unknown setting{hint}; known: {', '.join(known)}"
                raise self._error((*path, key), text)

    def _require_table(self, value: Any, path: KeyPath) -> None:
        if not isinstance(value, Mapping):
            raise self._error(path, f"must be a table, got {value!r}")

    def _error(self, path: KeyPath, text: str) -> ConfigError:
        """Return an error that names the source of the value, or of the table that lacks it."""
        below = (source for keys, source in self._sources.items() if keys[: len(path)] == path)
        source = self._sources.get(path) or next(below, "configuration")
        return ConfigError(f"{source}: {'.'.join(path)}: {text}")
