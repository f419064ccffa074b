"""Arguments of the Ray Serve application: the server's settings, and options of its deployments.

They come from `serve run loraplex.deploy.ray:app NAME=VALUE ...` as texts, or from `args` of a YAML
file. `llm_configs`, or the keys of one of them, are Ray Serve LLM's.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from loraplex.app.model_settings import with_device
from loraplex.core.config import Config, ModelConfig
from loraplex.core.config_layers import Layer, field_layers, file_layer, resolve
from loraplex.core.environment import environment_fields
from loraplex.core.errors import ConfigError
from loraplex.core.step_sizes import wanted_step_sizes

logger = logging.getLogger(__name__)

_OWN: Final[tuple[str, ...]] = ("model", "name", "config", "adapters", "adapter_dirs")
_COUNTS: Final[tuple[str, ...]] = (
    "num_replicas",
    "min_replicas",
    "max_replicas",
    "num_ingress_replicas",
)
_DEPLOYMENT: Final = (
    "num_replicas",
    "ray_actor_options",
    "max_ongoing_requests",
    "max_queued_requests",
    "autoscaling_config",
    "health_check_period_s",
    "health_check_timeout_s",
    "graceful_shutdown_wait_loop_s",
    "graceful_shutdown_timeout_s",
    "logging_config",
    "max_replicas_per_node",
)
_PLACEMENT: Final = MappingProxyType(
    {"bundles": "placement_group_bundles", "strategy": "placement_group_strategy"}
)
_LLM: Final = (
    *("model_loading_config", "lora_config", "deployment_config", "placement_group_config"),
    *("engine_kwargs", "llm_engine", "accelerator_type", "log_engine_metrics"),
)
_LOADING: Final = ("model_id", "model_source", "tokenizer_source")
_LORA: Final = ("dynamic_lora_loading_path", "max_num_adapters_per_replica", "download_timeout_s")
_ENGINE: Final = MappingProxyType(
    {
        "kv_cache_dtype": "kv_dtype",
        "gpu_memory_utilization": "kv_cache_fraction",
        "enable_prefix_caching": "enable_prefix_cache",
    }
)
"""vLLM's names of settings in `engine_kwargs`; others are those of loraplex."""
_NO_EFFECT: Final = ("max_loras", "max_cpu_loras", "trust_remote_code")


class Deployment(msgspec.Struct, frozen=True):
    """What is deployed."""

    config: Config
    """Settings of each replica."""
    options: dict[str, Any]
    """Options of the replicas' deployment, as Ray Serve takes them."""
    num_ingress_replicas: int = 1

    @property
    def num_slots(self) -> int:
        """Maximum number of sequences in one step of all models."""
        return sum(map(_num_seqs, self.config.models.values()))

    @property
    def max_ongoing_requests(self) -> int:
        """Requests that a replica may have; further ones wait where they can go to any replica."""
        waiting = sum(m.max_queue_size or _num_seqs(m) for m in self.config.models.values())
        return self.num_slots + waiting

    @property
    def num_devices(self) -> int:
        """GPUs of one replica: one for each rank."""
        return sum(
            model.tensor_parallel_size * model.pipeline_parallel_size
            for model in self.config.models.values()
            if model.device != "cpu"
        )


def _num_seqs(model: ModelConfig) -> int:
    """Return the maximum number of sequences in one step; a replica's memory may allow fewer."""
    return wanted_step_sizes(
        model.device, model.num_threads, model.max_num_seqs, model.max_num_batched_tokens
    ).max_num_seqs


def read_arguments(arguments: Mapping[str, Any]) -> Deployment:
    """Read the application's arguments. Raises ConfigError for each that is unknown."""
    llm_configs = arguments.get("llm_configs")
    if llm_configs is not None:
        _refuse_others("", arguments, ("llm_configs", *_COUNTS))
        if not isinstance(llm_configs, Sequence) or len(llm_configs) != 1:
            raise ConfigError("llm_configs must have one entry: deploy one application per model")
        rest = {key: value for key, value in arguments.items() if key != "llm_configs"}
        arguments = {**_mapping("llm_configs[0]", llm_configs[0]), **rest}
    if "model_loading_config" in arguments:
        arguments = _plain(arguments)
    settings = dict(arguments)
    counts = {name: _count(name, settings.pop(name)) for name in _COUNTS if name in settings}
    options = _options(settings, counts)
    config = _with_devices(_config(settings))
    if any(model.executor != "multiprocess" for model in config.models.values()):
        raise ConfigError(
            "executor must be multiprocess: the ranks of a replica are on its node, and Ray places "
            "the replicas"
        )
    num_ingress = counts.get("num_ingress_replicas", 1)
    return Deployment(config, options, num_ingress)


def _config(settings: dict[str, Any]) -> Config:
    """Join the layers: file, environment, arguments."""
    own = {name: settings.pop(name) for name in _OWN if name in settings}
    file = file_layer(Path(str(own["config"]))) if "config" in own else Layer("no file", {})
    layers, names = [file], list(file.model_names)
    if "model" in own:
        model = str(own["model"])
        name = str(own.get("name") or Path(os.path.abspath(model)).name)
        table = {"path": _absolute(model), **_adapters(own)}
        layers.append(Layer("argument model", {"models": {name: table}}))
        names = list(dict.fromkeys([*names, name]))
    elif "name" in own or "adapters" in own or "adapter_dirs" in own:
        raise ConfigError("name, adapters and adapter_dirs belong to the argument model: give it")
    if not names:
        raise ConfigError(
            "no model: give model=FOLDER_OR_HUB_ID, or config=FILE with [models.NAME]"
        )
    environment = "environment variable LORAPLEX_{variable}"
    return resolve(
        [
            *layers[:1],
            *field_layers(environment, environment_fields(), names),
            *layers[1:],
            *field_layers("argument {name}", settings, names),
        ]
    )


def _with_devices(config: Config) -> Config:
    """Choose the devices here: Ray has to know how many GPUs a replica needs."""
    models = {name: with_device(name, model) for name, model in config.models.items()}
    return msgspec.structs.replace(config, models=models)


def _adapters(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the adapters: a mapping of names to paths, or NAME=PATH,NAME=PATH."""
    found: dict[str, Any] = {}
    if adapters := own.get("adapters"):
        if isinstance(adapters, str):
            pairs = [text.partition("=") for text in adapters.split(",")]
            if not all(name and path for name, _, path in pairs):
                raise ConfigError(f"adapters must be NAME=PATH,NAME=PATH, got {adapters!r}")
            adapters = {name: path for name, _, path in pairs}
        adapters = _mapping("adapters", adapters)
        found["adapters"] = {
            name: value if isinstance(value, Mapping) else {"path": _absolute(str(value))}
            for name, value in adapters.items()
        }
    if folders := own.get("adapter_dirs"):
        listed = [folders] if isinstance(folders, str) else folders
        found["adapter_dirs"] = [_absolute(str(folder)) for folder in listed]
    return found


def _absolute(path: str) -> str:
    """Return a path that means the same in another working folder; a hub id or URL stays."""
    return os.path.abspath(path) if os.path.exists(path) else path


def _options(settings: dict[str, Any], counts: Mapping[str, int]) -> dict[str, Any]:
    """Take the options of the deployment out of the arguments."""
    options = dict(_mapping("deployment_config", settings.pop("deployment_config", {})))
    _refuse_others("deployment_config", options, _DEPLOYMENT)
    placement = _mapping("placement_group_config", settings.pop("placement_group_config", {}))
    _refuse_others("placement_group_config", placement, tuple(_PLACEMENT))
    options |= {_PLACEMENT[key]: value for key, value in placement.items()}
    if accelerator := settings.pop("accelerator_type", None):
        actor = {**options.get("ray_actor_options", {}), "accelerator_type": accelerator}
        options["ray_actor_options"] = actor
    if "num_replicas" in counts:
        options["num_replicas"] = counts["num_replicas"]
    bounds = {name: counts[name] for name in ("min_replicas", "max_replicas") if name in counts}
    if bounds:
        options["autoscaling_config"] = {**options.get("autoscaling_config", {}), **bounds}
    if "num_replicas" in options and "autoscaling_config" in options:
        raise ConfigError("give num_replicas, or min_replicas and max_replicas, not both")
    return options


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Translate an entry of Ray Serve LLM's `llm_configs`."""
    _refuse_others("", arguments, (*_LLM, *_COUNTS))
    engine = str(arguments.get("llm_engine", "vLLM"))
    if engine not in ("vLLM", "loraplex"):
        raise ConfigError(f"llm_engine must be vLLM or loraplex, got {engine!r}")
    loading = _mapping("model_loading_config", arguments["model_loading_config"])
    _refuse_others("model_loading_config", loading, _LOADING)
    if "model_id" not in loading:
        raise ConfigError("model_loading_config has no model_id: the model's name in requests")
    source = loading.get("model_source") or loading["model_id"]
    if not isinstance(source, str):
        raise ConfigError("model_source must be a folder or a hub id; mirrors are not supported")
    plain: dict[str, Any] = {"model": source, "name": loading["model_id"]}
    if tokenizer := loading.get("tokenizer_source"):
        plain["tokenizer"] = tokenizer
    plain |= _engine_settings(_mapping("engine_kwargs", arguments.get("engine_kwargs", {})))
    plain |= _lora_settings(_mapping("lora_config", arguments.get("lora_config") or {}))
    kept = ("deployment_config", "placement_group_config", "accelerator_type", *_COUNTS)
    return plain | {key: arguments[key] for key in kept if arguments.get(key)}


def _engine_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    for name in _NO_EFFECT:
        if name in given:
            logger.info("engine_kwargs.%s has no effect: see docs/ray.md", name)
    return {_ENGINE.get(key, key): value for key, value in given.items() if key not in _NO_EFFECT}


def _lora_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_others("lora_config", given, _LORA)
    found: dict[str, Any] = {}
    if path := given.get("dynamic_lora_loading_path"):
        if "://" in path:
            raise ConfigError(
                f"dynamic_lora_loading_path {path!r} must be a folder that all replicas see; "
                "adapters of object stores are declared in adapter_declarations"
            )
        found["lora_root"] = path
    if "max_num_adapters_per_replica" in given:
        logger.info(
            "max_num_adapters_per_replica has no effect: adapters are kept as far as "
            "lora_device_bytes and lora_host_bytes go"
        )
    if seconds := given.get("download_timeout_s"):
        found["adapter_load_seconds"] = seconds
    return found


def _refuse_others(table: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = [key for key in given if key not in known]
    if unknown:
        where = f" of {table}" if table else ""
        raise ConfigError(
            f"{', '.join(unknown)}{where} is not supported; supported are {', '.join(known)}"
        )


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a mapping, got {value!r}")
    return value


def _count(name: str, value: Any) -> int:
    text = str(value)
    if not (text.isascii() and text.isdigit() and int(text) >= (name != "min_replicas")):
        raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(text)
