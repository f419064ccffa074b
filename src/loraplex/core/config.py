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
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from loraplex.core.errors import ConfigError
from loraplex.core.weight_precision import WeightPrecision

ENVIRONMENT_PREFIX = "LORAPLEX_"
NO_CACHE = "none"
"""As weights_cache_dir; a folder of that name is ./none."""
_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_INT64_MAX = 2**63 - 1

_SLEEPING_THREADS = ("OMP_WAIT_POLICY", "PASSIVE")

_OF_ONE_MODEL = ("path", "adapters", "adapter_dirs")
_LISTS = ("allowed_adapter_roots", "allowed_adapter_hosts")
_CHOICES = {
    "dtype": ("auto", "float32", "float16", "bfloat16"),
    "kv_dtype": ("auto", "float32", "float16", "bfloat16", "int8"),
    "quantization": tuple(WeightPrecision),
    "adapter_base_check": ("warn", "error"),
    "lora_eviction_policy": ("lru", "lfu", "cost"),
    "log_level": ("debug", "info", "warning", "error"),
}
_DEVICE = re.compile(r"cpu|cuda(:[0-9]+)?")
_MINIMUM = {
    "max_model_len": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "block_size": 1,
    "kv_cache_bytes": 1,
    "memory_bytes": 1,
    "max_queue_size": 0,
    "max_queue_delay_microseconds": 0,
    "max_lora_rank": 1,
    "optimal_lora_rank": 1,
    "lora_device_bytes": 1,
    "lora_host_bytes": 1,
    "lora_ttl_seconds": 1,
    "weights_cache_bytes": 1,
    "num_threads": 1,
    "max_body_bytes": 1,
    "max_adapter_bytes": 1,
    "fetched_adapters_bytes": 0,
    "adapter_watch_seconds": 0,
    "shutdown_seconds": 0,
}

ALIASES = {
    "memory": "memory_bytes",
    "kv_cache_free_gpu_mem_fraction": "kv_cache_fraction",
    "lora_cache_max_adapter_size": "max_lora_rank",
    "lora_cache_optimal_adapter_size": "optimal_lora_rank",
    "lora_cache_gpu_memory_fraction": "lora_device_fraction",
    "lora_cache_host_memory_bytes": "lora_host_bytes",
}
"""Other names of a model's settings: TensorRT-LLM's, and a short one."""

KeyPath = tuple[str, ...]
Section = TypeVar("Section", bound=msgspec.Struct)


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
    kv_dtype: str = "auto"
    """Of stored keys and values: auto (the model's), float32, float16, bfloat16 or int8."""
    quantization: str = "none"
    """Of the linear layers' weights, when they are loaded: none, int8 or int4."""
    weights_cache_dir: str = ""
    """Packed weights, for a fast next start; none: no cache; empty: beside the staged adapters if
    state_dir is set, else the user's cache directory."""
    weights_cache_bytes: int = 64 << 30
    """All models together; those used longest ago go first."""
    device: str = "cpu"
    max_model_len: int | None = None
    """Prompt and output together; None: what the model was made for."""
    max_num_seqs: int = 64
    """Sequences in one step."""
    max_num_batched_tokens: int = 512
    """Tokens in one step, prompts and outputs together."""
    block_size: int = 16
    kv_cache_bytes: int | None = None
    """None: kv_cache_fraction, if the device's memory is known; else room for max_num_seqs
    sequences of max_model_len, at most 2 GiB."""
    memory_bytes: int | None = None
    """What the device may hold: weights, KV cache, adapters; None: on a CPU unknown, else all."""
    kv_cache_fraction: float = 0.9
    """Of the device's memory that the weights leave."""
    enable_prefix_cache: bool = True
    max_queue_size: int = 0
    """Waiting requests; 0 is no limit."""
    max_queue_delay_microseconds: int = 0
    """How long an idle engine waits for more requests to join the first."""
    max_lora_rank: int = 64
    optimal_lora_rank: int = 8
    """An adapter of this rank on every module fills whole pages of the device pool."""
    lora_device_bytes: int | None = None
    """The device pool; None: lora_device_fraction, if the device's memory is known; else 256 MiB.
    Never less than one adapter of max_lora_rank."""
    lora_device_fraction: float = 0.05
    """Of the device's memory that weights and KV cache leave; on a CPU of memory_bytes."""
    lora_host_bytes: int = 1 << 30
    lora_eviction_policy: str = "lru"
    """Who leaves a full tier first: lru, lfu or cost (bytes times load time by use)."""
    lora_ttl_seconds: float | None = None
    """An adapter that was idle for so long leaves both tiers; None: only for others."""
    adapter_base_check: str = "warn"
    """What an adapter that says that it was trained on another base leads to: warn or error."""
    num_threads: int | None = None
    """Of the engine's arithmetic; None: torch's choice."""
    chat_template: str | None = None
    """A jinja file that replaces the folder's own."""
    adapters: dict[str, AdapterConfig] = {}
    adapter_dirs: tuple[str, ...] = ()
    """Every sub-folder that holds an adapter is one of that name."""
    lora_root: str = ""
    """A folder whose adapters, at any depth, are called by their path in it, as llgtrt has it."""
    multi_lora: str = ""
    """A JSON file of names and paths, as Triton's vLLM backend has it (multi_lora.json)."""


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The serving process: addresses and limits."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    max_body_bytes: int = 64 << 20
    state_dir: str = ""
    """Staged adapters, and which names they have; empty: the user's state directory."""
    persist_adapters: bool = True
    """Adapters that were loaded over the API are there after a restart."""
    allowed_adapter_roots: tuple[str, ...] = ()
    """Folders that clients may load adapters from, beside the configured ones; empty: on loopback
    all, elsewhere no more."""
    allowed_adapter_hosts: tuple[str, ...] = ()
    """Hosts that clients may load adapters from: huggingface.co, *.example.org, s3://bucket, *."""
    allow_private_addresses: bool = False
    """Adapters may come from hosts at loopback and private addresses."""
    max_adapter_bytes: int = 4 << 30
    fetched_adapters_bytes: int = 16 << 30
    """Kept of what was fetched; what was used longest ago goes first."""
    adapter_watch_seconds: float = 5.0
    """How often configured folders are looked at for changes; 0: only at the start."""
    log_level: str = "info"
    shutdown_seconds: float = 30.0
    """How long running requests may finish after a stop was asked for."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    server: ServerConfig = ServerConfig()
    models: dict[str, ModelConfig] = {}


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


def environment_fields(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The LORAPLEX_* variables by field name."""
    variables = os.environ if environment is None else environment
    return {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in variables.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }


def resolve(layers: Iterable[Layer]) -> Config:
    """Merge the layers, later ones winning. Raises ConfigError that names key and source."""
    merged = _MergedLayers()
    for layer in layers:
        for path, value in layer.leaves():
            merged.put(path, value, layer.source)
    return merged.config()


def state_directory(configured: str) -> Path:
    """Where staged adapters live: as configured, or by the XDG rule."""
    if configured:
        return Path(configured).expanduser()
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "loraplex"


def weights_cache_directory(configured: str, state_dir: str) -> Path | None:
    """Where packed weights live; None: nowhere. state_dir: as configured."""
    if configured == NO_CACHE:
        return None
    if configured:
        return Path(configured).expanduser()
    if state_dir:
        return state_directory(state_dir) / "weights"
    return cache_directory() / "weights"


def cache_directory() -> Path:
    """What can be made again lives here, by the XDG rule."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "loraplex"


def child_environment() -> dict[str, str]:
    """The environment for our own processes: settings reach them by message, not by variable."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)
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
            table[path[-1]] = self._parse_bytes(path, _listed(path[-1], value))

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
            problem = _problem(field_name, value)
            if problem:
                raise self._error((*path, field_name), f"{problem}, got {value!r}")
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


def _listed(field: str, value: Any) -> Any:
    """A variable tells a list with commas."""
    if field in _LISTS and isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    return value


def _problem(field: str, value: Any) -> str | None:
    """What is wrong with the value of a setting, as the end of a sentence."""
    if value is None:
        return None
    if field in _CHOICES and value not in _CHOICES[field]:
        return f"must be one of {', '.join(_CHOICES[field])}"
    if field == "device" and not _DEVICE.fullmatch(value):
        return "must be cpu, cuda or cuda:N"
    if field.endswith("_fraction") and not 0 < value <= 1:
        return "must be more than 0 and at most 1"
    if field.endswith("_port") and not 0 <= value <= 65535:
        return "must be a port from 0 (any free one) to 65535"
    if field in _MINIMUM and not value >= _MINIMUM[field]:  # true for NaN, too
        return f"must be at least {_MINIMUM[field]}"
    if field in _MINIMUM and value > _INT64_MAX:
        return f"must be at most {_INT64_MAX}"
    return None
