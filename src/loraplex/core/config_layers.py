"""How the layers that set settings become one frozen Config.

Precedence, lowest first: defaults, configuration file, environment, flags. One name serves all
three: the flag `--http-port` is `LORAPLEX_HTTP_PORT` in the environment and `http_port` under
`[server]` in the file. A flag or variable of a model holds for every served model. Each value
remembers its source, so that an error says where to mend it. Unknown keys are errors.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from loraplex.core.config import (
    ALIASES,
    VALUE_ALIASES,
    AdapterConfig,
    Config,
    ModelConfig,
    problem,
)
from loraplex.core.errors import ConfigError
from loraplex.core.server_config import ServerConfig

_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

_OF_ONE_MODEL = (
    *("path", "adapters", "adapter_dirs", "fair_weights"),
    *("tokenizer_config", "grammar_limits"),
)
_LISTS = (
    *("allowed_adapter_roots", "allowed_adapter_hosts", "cors_origins", "trusted_proxies"),
    *("max_attention_window_size", "cuda_graph_batch_sizes", "lora_target_modules"),
)

KeyPath = tuple[str, ...]
Section = TypeVar("Section", bound=msgspec.Struct)


class Layer:
    """Values from one place. A key path ends at a value that is not a table, or an empty one."""

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
    """A TOML file with [server] and [models.NAME] tables."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    return Layer(str(path), values)


def field_layers(source: str, fields: Mapping[str, Any], model_names: Iterable[str]) -> list[Layer]:
    """Flags or variables, by field name, put where they belong; one layer each, for its source.

    `source` names a field for people: "flag --{flag}" or "variable LORAPLEX_{variable}". Raises
    ConfigError for a name that is no setting.
    """
    names = list(model_names)
    layers = []
    for field, value in fields.items():
        label = source.format(flag=field.replace("_", "-"), variable=field.upper())
        field = ALIASES.get(field, field)
        if field in ServerConfig.__struct_fields__:
            layers.append(Layer(label, {"server": {field: value}}))
        elif field in _OF_ONE_MODEL:
            raise ConfigError(f"{label}: {field} belongs to one model; set it under [models.NAME]")
        elif field in ModelConfig.__struct_fields__:
            layers.append(Layer(label, {"models": {name: {field: value} for name in names}}))
        else:
            raise ConfigError(f"{label} is not a setting of loraplex")
    return layers


def resolve(layers: Iterable[Layer]) -> Config:
    """Merge the layers, later ones winning. Raises ConfigError that names key and source."""
    merged = _MergedLayers()
    for layer in layers:
        for path, value in layer.leaves():
            merged.put(path, value, layer.source)
    return merged.config()


def parse_bytes(text: str) -> int:
    """`1048576`, `1MiB`, `1.5 GB`: KB is 1000 bytes and KiB 1024. Raises ValueError."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number of bytes, such as 512MiB")
    number, power, binary = match.groups(default="")
    return int(Decimal(number) * (1024 if binary else 1000) ** _POWERS[power.lower()])


def _leaves(values: Mapping[str, Any], path: KeyPath) -> Iterable[tuple[KeyPath, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


class _MergedLayers:
    """One tree of values, and where each of them came from."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._sources: dict[KeyPath, str] = {}

    def put(self, path: KeyPath, value: Any, source: str) -> None:
        asked = path
        if len(path) == 3 and path[0] == "models":
            path = (*path[:2], ALIASES.get(path[2], path[2]))
        if path != asked and self._sources.get(path) == source:
            raise ConfigError(f"{source}: {'.'.join(asked)} is another name of {path[2]}: say one")
        table = self._values
        for depth, key in enumerate(path[:-1], start=1):
            inner = table.setdefault(key, {})
            self._require_table(inner, path[:depth])
            table = inner
        self._sources[path] = source
        if isinstance(value, Mapping):  # an empty one takes nothing away
            table.setdefault(path[-1], {})
        else:
            table[path[-1]] = self._parse_bytes(path, _written(path[-1], value))

    def config(self) -> Config:
        # Table by table: msgspec does not say which entry of a dictionary is wrong.
        server = self._section(ServerConfig, self._values.get("server", {}), ("server",))
        models = self._values.get("models", {})
        self._require_table(models, ("models",))
        config = self._section(Config, {**self._values, "server": server, "models": {}}, ())
        return msgspec.structs.replace(
            config,
            models={name: self._model(table, ("models", name)) for name, table in models.items()},
        )

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
        for key in table:
            if key not in kind.__struct_fields__:
                known = ", ".join(kind.__struct_fields__)
                raise self._error((*path, key), f"unknown setting; known: {known}")
        try:
            section = msgspec.convert(table, kind, strict=False)
        except msgspec.ValidationError as error:
            text, _, where = str(error).partition(" - at `$.")
            field = re.match(r"\w*", where)
            raise self._error((*path, field[0]) if field and field[0] else path, text) from error
        for field_name in kind.__struct_fields__:
            value = getattr(section, field_name)
            wrong = problem(field_name, value)
            if wrong:
                got = ", ".join(map(str, value)) if isinstance(value, tuple) else repr(value)
                raise self._error((*path, field_name), f"{wrong}, got {got}")
        return section

    def _parse_bytes(self, path: KeyPath, value: Any) -> Any:
        if isinstance(value, str) and path[-1].endswith("_bytes"):
            try:
                return parse_bytes(value)
            except ValueError as error:
                raise self._error(path, str(error)) from error
        return value

    def _require_table(self, value: Any, path: KeyPath) -> None:
        if not isinstance(value, Mapping):
            raise self._error(path, f"must be a table, got {value!r}")

    def _error(self, path: KeyPath, text: str) -> ConfigError:
        """What is missing in a table is missed where the table is written."""
        below = (source for keys, source in self._sources.items() if keys[: len(path)] == path)
        source = self._sources.get(path) or next(below, "configuration")
        return ConfigError(f"{source}: {'.'.join(path)}: {text}")


def _written(field: str, value: Any) -> Any:
    """In our words: TensorRT-LLM's values have other names; a variable tells a list with commas,
    and a list of one number may be the number."""
    if field in _LISTS and isinstance(value, int):
        return [value]
    if isinstance(value, str):
        value = VALUE_ALIASES.get(field, {}).get(value, value)
    if field in _LISTS and isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    return value
