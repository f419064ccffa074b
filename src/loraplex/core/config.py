"""Settings: what they are, and how the layers that set them become one frozen value.

Precedence, lowest first: defaults, configuration file, environment, flags. One name serves all
three: the flag `--http-port` is `LORAPLEX_HTTP_PORT` in the environment and `http_port` under
`[server]` in the file. A flag or variable of a model holds for every served model. Each value
remembers its source, so that an error says where to mend it. Unknown keys are errors.

This is the only file that reads the environment.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from loraplex.core.errors import ConfigError

ENVIRONMENT_PREFIX = "LORAPLEX_"
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

_SLEEPING_THREADS = ("OMP_WAIT_POLICY", "PASSIVE")

KeyPath = tuple[str, ...]


class AdapterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One adapter to load at the start."""

    path: str
    task_id: int | None = None


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One served base model and its engine."""

    path: str
    """A Hugging Face folder or hub id."""
    revision: str | None = None
    dtype: str = "auto"
    """auto (the checkpoint's), float32, float16 or bfloat16."""
    device: str = "cpu"
    max_model_len: int | None = None
    """Prompt and output together; None: what the model was made for."""
    max_num_seqs: int = 64
    """Sequences in one step."""
    max_num_batched_tokens: int = 512
    """Tokens in one step, prompts and outputs together."""
    block_size: int = 16
    kv_cache_bytes: int | None = None
    """None: room for max_num_seqs sequences of max_model_len, at most 2 GiB."""
    enable_prefix_cache: bool = True
    max_queue_size: int = 0
    """Waiting requests; 0 is no limit."""
    max_queue_delay_microseconds: int = 0
    """How long an idle engine waits for more requests to join the first."""
    max_lora_rank: int = 64
    lora_device_bytes: int | None = None
    """The device pool; None: 256 MiB, and never less than one adapter of max_lora_rank."""
    lora_host_bytes: int = 1 << 30
    num_threads: int | None = None
    """Of the engine's arithmetic; None: torch's choice."""
    chat_template: str | None = None
    """A jinja file that replaces the folder's own."""
    adapters: dict[str, AdapterConfig] = {}
    adapter_dirs: tuple[str, ...] = ()
    """Every sub-folder with an adapter_config.json is an adapter of that name."""


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The serving process: addresses and limits."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    max_body_bytes: int = 64 << 20
    state_dir: str = ""
    """Staged adapters; empty: the user's state directory."""
    log_level: str = "info"
    shutdown_seconds: float = 30.0
    """How long running requests may finish after a stop was asked for."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    server: ServerConfig = ServerConfig()
    models: dict[str, ModelConfig] = {}


class Layer:
    """Values from one place. A key path ends at a value that is not a table."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source = source
        self.values = values

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

    `source` names a field for people, e.g. "flag --{field}". Raises ConfigError for a name that
    is no setting.
    """
    names = list(model_names)
    layers = []
    for field, value in fields.items():
        label = source.format(
            field=field.replace("_", "-") if "--" in source else field, FIELD=field.upper()
        )
        if field in ServerConfig.__struct_fields__:
            layers.append(Layer(label, {"server": {field: value}}))
        elif field in ModelConfig.__struct_fields__:
            layers.append(Layer(label, {"models": {name: {field: value} for name in names}}))
        else:
            raise ConfigError(f"{label} is not a setting of loraplex")
    return layers


def environment_fields(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The LORAPLEX_* variables by field name."""
    variables = os.environ if environment is None else environment
    return {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in variables.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }


def resolve(layers: Iterable[Layer]) -> Config:
    """Merge the layers, later ones winning. Raises ConfigError that names the source."""
    values: dict[str, Any] = {}
    sources: dict[KeyPath, str] = {}
    for layer in layers:
        for path, value in layer.leaves():
            _put(values, path, _parse_bytes(value, path, layer.source))
            sources[path] = layer.source
    try:
        config = msgspec.convert(values, Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), sources)) from error
    _validate(config, sources)
    return config


def state_directory(configured: str) -> Path:
    """Where staged adapters live: as configured, or by the XDG rule."""
    if configured:
        return Path(configured).expanduser()
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "loraplex"


def child_environment() -> dict[str, str]:
    """The environment for our own processes: settings reach them by message, not by variable."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ENVIRONMENT_PREFIX)
    }
    environment.setdefault(*_SLEEPING_THREADS)
    return environment


def let_threads_sleep() -> None:
    """For this process, unless the operator decided otherwise: call it before torch is imported.

    OpenMP's threads spin at barriers by default. Beside any other busy process a spinning thread
    keeps its partner off the processor: steps of a small model then take a hundred times longer.
    """
    os.environ.setdefault(*_SLEEPING_THREADS)


def parse_bytes(text: str) -> int:
    """`1048576`, `1MiB`, `1.5 GB`: KB is 1000 bytes and KiB 1024. Raises ValueError."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number of bytes, such as 512MiB")
    number, power, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[power.lower()])


def _leaves(values: Mapping[str, Any], path: KeyPath) -> Iterable[tuple[KeyPath, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _put(values: dict[str, Any], path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        values = values.setdefault(key, {})
    values[path[-1]] = value


def _parse_bytes(value: Any, path: KeyPath, source: str) -> Any:
    if isinstance(value, str) and path[-1].endswith("_bytes"):
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise ConfigError(f"{source}: {'.'.join(path)}: {error}") from error
    return value


def _explain(message: str, sources: Mapping[KeyPath, str]) -> str:
    """Turn msgspec's `... - at `$.models[...].dtype`` into a sentence with the source."""
    text, _, where = message.partition(" - at `$")
    # msgspec writes [...] for a dictionary's key, such as a model's name.
    pattern = [part for part in where.rstrip("`").replace("[...]", ".*").split(".") if part]
    unknown = re.search(r"unknown field `(.+)`", text)
    if unknown:
        text = f"unknown setting {unknown[1]!r}; known: {_known(pattern)}"
        pattern.append(unknown[1])
    for keys, source in sources.items():
        if len(keys) >= len(pattern) and all(map(_matches, pattern, keys)):
            return f"{source}: {'.'.join(keys[: len(pattern)])}: {text}"
    return f"{'.'.join(pattern)}: {text}"


def _matches(part: str, key: str) -> bool:
    return part in ("*", key)


def _known(pattern: list[str]) -> str:
    section: type[msgspec.Struct] = Config
    if pattern[:1] == ["server"]:
        section = ServerConfig
    elif pattern[:1] == ["models"]:
        section = AdapterConfig if "adapters" in pattern else ModelConfig
    return ", ".join(section.__struct_fields__)


_CHOICES = {"dtype": ("auto", "float32", "float16", "bfloat16")}
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_MINIMUM = {
    "max_model_len": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "block_size": 1,
    "kv_cache_bytes": 1,
    "max_queue_size": 0,
    "max_queue_delay_microseconds": 0,
    "max_lora_rank": 1,
    "lora_device_bytes": 1,
    "lora_host_bytes": 1,
    "num_threads": 1,
    "max_body_bytes": 1,
    "shutdown_seconds": 0,
}


def _validate(config: Config, sources: Mapping[KeyPath, str]) -> None:
    for name, model in config.models.items():
        _validate_fields(model, ("models", name), sources)
    _validate_fields(config.server, ("server",), sources)


def _validate_fields(
    section: msgspec.Struct, path: KeyPath, sources: Mapping[KeyPath, str]
) -> None:
    for field, value in msgspec.structs.asdict(section).items():
        problem = _problem(field, value)
        if problem:
            source = sources.get((*path, field), "default")
            raise ConfigError(f"{source}: {'.'.join((*path, field))} {problem}, got {value!r}")


def _problem(field: str, value: Any) -> str | None:
    if value is None:
        return None
    if field in _CHOICES and value not in _CHOICES[field]:
        return f"must be one of {', '.join(_CHOICES[field])}"
    if field == "device" and not _DEVICE.fullmatch(value):
        return "must be cpu, cuda or cuda:N"
    if field in _MINIMUM and value < _MINIMUM[field]:
        return f"must be at least {_MINIMUM[field]}"
    if field.endswith("_port") and not 0 <= value <= 65535:
        return "must be a port from 0 (any free one) to 65535"
    return None
