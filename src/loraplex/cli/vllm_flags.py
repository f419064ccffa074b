"""Flags of `vllm serve`, for `loraplex serve`.

The table has what each flag does here. A flag of the same name and meaning as one of our settings
is that setting's. KServe's LLMInferenceService names a model more than once, and gives adapters as
JSON texts whose quotes no shell removes.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from loraplex.cli.settings_flags import FlagTable, flag_of
from loraplex.compat.triton.setting_rows import (
    ENGINE_ARGS,
    Kind,
    SettingRow,
    here,
    is_neutral,
    no_effect,
    read_value,
    refused,
    row_of,
    setting,
)
from loraplex.core.config import SETTINGS
from loraplex.core.config_layers import Layer, field_layers
from loraplex.core.errors import ConfigError
from loraplex.core.setting import SettingField
from loraplex.core.support import Feature, Support

_GIB: Final = 1 << 30
SERVED_MODEL_NAME: Final = "--served-model-name"
LORA_MODULES: Final = "--lora-modules"

SHORT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "http_port": "-p",
        "quantization": "-q",
        "tensor_parallel_size": "-tp",
        "pipeline_parallel_size": "-pp",
    }
)
"""Short flags of settings: those of vLLM, and -p."""
_OWN_FLAGS: Final = {field.flag: field for field in SETTINGS.values()}
_SAME: Final = tuple(
    row
    for row in ENGINE_ARGS
    if row.key.replace("_", "-") in _OWN_FLAGS and row.support is Support.WORKS
)
"""Arguments whose flag is that of a setting."""


def _ignored(kind: Kind, keys: str) -> Iterator[SettingRow]:
    return (dataclasses.replace(row_of(key), kind=kind) for key in keys.split())


_ROWS: Final[tuple[SettingRow, ...]] = (
    here("served_model_name", Kind.TEXT, "names of the model; the first is as --name"),
    here("lora_modules", Kind.TEXT, 'adapters, each as NAME=PATH or {"name": NAME, "path": PATH}'),
    here(
        "api_key",
        Kind.TEXT,
        "a key that clients must send, in addition to the keys of --api-keys-file and "
        "LORAPLEX_API_KEYS; repeatable",
    ),
    setting("port", Kind.TEXT, "http_port"),
    setting("ssl_certfile", Kind.TEXT, "tls_cert"),
    setting("ssl_keyfile", Kind.TEXT, "tls_key"),
    setting("api_server_count", Kind.TEXT, "frontend_processes"),
    setting("shutdown_timeout", Kind.TEXT, "shutdown_seconds"),
    here("allowed_origins", Kind.ANY, "--cors-origins, as a JSON list"),
    no_effect("enable_request_id_headers", "every response has x-request-id", Kind.BOOL),
    no_effect("enable_prompt_tokens_details", "usage always has cached tokens", Kind.BOOL),
    no_effect("enable_ssl_refresh", "a new certificate is always read", Kind.BOOL),
    no_effect("root_path", "routes are at /: a proxy removes its prefix", Kind.TEXT),
    no_effect("uvicorn_log_level", "there is one log: see --log-level", Kind.TEXT),
    here("disable_log_requests", Kind.BOOL, "as --log-requests off"),
    here("disable_uvicorn_access_log", Kind.BOOL, "as --log-requests off"),
    here("enable_log_requests", Kind.BOOL, "as --log-requests all, without prompts"),
    no_effect(
        "enable_auto_tool_choice", "tools are always served: see --tool-call-parser", Kind.BOOL
    ),
    *(
        row
        for row in ENGINE_ARGS
        if row.setting and row not in _SAME and row.kind is not Kind.WHOLES
    ),
    here("enforce_eager", Kind.BOOL, "as --no-cuda-graphs"),
    here("swap_space", Kind.NUMBER, "GiB of --kv-cache-host-memory-bytes"),
    refused("data_parallel_size", "more than one replica (start a server for each)", "1"),
    *_ignored(
        Kind.TEXT,
        "max_loras max_cpu_loras lora_dtype lora_extra_vocab_size seed download_dir "
        "tokenizer_mode code_revision tokenizer_revision max_log_len max_logprobs "
        "distributed_executor_backend generation_config scheduling_policy num_scheduler_steps "
        "max_seq_len_to_capture guided_decoding_backend structured_outputs_config "
        "limit_mm_per_prompt mm_processor_cache_gb compilation_config prefix_caching_hash_algo "
        "config_format model_impl",
    ),
    *_ignored(
        Kind.BOOL,
        "enable_chunked_prefill trust_remote_code fully_sharded_loras disable_custom_all_reduce "
        "enable_expert_parallel language_model_only",
    ),
    row_of("load_format"),
    row_of("task"),
    row_of("runner"),
)
_TABLE: Final = FlagTable(
    "vLLM",
    _ROWS,
    short={"data_parallel_size": "-dp", "api_server_count": "-asc"},
    kinds=dict.fromkeys(("served_model_name", "lora_modules", "api_key"), list[str]),
    has_opposites=True,
)
_MANY_VALUES: Final = (SERVED_MODEL_NAME, LORA_MODULES)
_SETTERS: Final[Mapping[str, Callable[[Any], Mapping[str, Any]]]] = MappingProxyType(
    {
        "disable_log_requests": lambda is_off: {"log_requests": "off"} if is_off else {},
        "disable_uvicorn_access_log": lambda is_off: {"log_requests": "off"} if is_off else {},
        "enable_log_requests": lambda is_on: {"log_requests": "all" if is_on else "off"},
        "enforce_eager": lambda is_eager: {"cuda_graphs": not is_eager},
        "swap_space": lambda gib: {"kv_cache_host_memory_bytes": int(gib * _GIB)},
        "allowed_origins": lambda text: {"cors_origins": _origins(text)},
    }
)
"""Settings of flags whose value has another form here."""
_QUOTES: Final = "'\""


def _own_feature(field: SettingField) -> Feature:
    short = SHORT.get(field.name)
    note = f"the setting `{field.name}`"
    return Feature(f"--{field.flag}", note=note, other_names=(short,) if short else ())


FLAGS: Final = _TABLE.features
"""Flags that the command has in addition to those of the settings."""
OWN_FLAGS: Final[tuple[Feature, ...]] = tuple(
    _own_feature(_OWN_FLAGS[name])
    for name in sorted(
        {row.key.replace("_", "-") for row in _SAME}
        | {"host", "chat-template", "tool-call-parser", "reasoning-parser", "enable-lora"}
    )
)
"""Flags of our settings with vLLM's name and meaning."""


with_vllm_flags = _TABLE.added_to


def repeated(args: Sequence[str]) -> Iterator[str]:
    """Yield `--flag a --flag b` for `--flag a b`, for the flags that take several values."""
    flag = ""
    num_values = 0
    for argument in args:
        if argument.startswith("-"):
            flag, num_values = argument, 0
        elif flag in _MANY_VALUES:
            num_values += 1
            if num_values > 1:
                yield flag
        yield argument


class GivenFlags(NamedTuple):
    """Flags of a command line, with ours in the place of vLLM's."""

    names: list[str]
    """Names of the model, the first of which is its own."""
    adapters: dict[str, dict[str, str]]
    """Table [models.X.adapters]."""
    api_keys: tuple[str, ...]
    settings: dict[str, Any]
    """Our own flags."""
    translated: dict[str, dict[str, Any]]
    """Settings of each flag of vLLM."""
    without_effect: tuple[str, ...]
    """A sentence about each given flag that has no effect."""

    def layers(self, models: Iterable[str]) -> Iterator[Layer]:
        """Return the layers of the flags of vLLM. Raises ConfigError."""
        names = list(models)
        for flag, settings in self.translated.items():
            yield from field_layers(f"flag {flag}", settings, names)


def split_flags(flags: Mapping[str, Any]) -> GivenFlags:
    """Raises ConfigError for a wrong value, and for a flag that is given by both names."""
    theirs, given = _TABLE.split(flags)
    translated: dict[str, dict[str, Any]] = {}
    sources = {name: f"--{name.replace('_', '-')}" for name in given}
    for row in _ROWS:
        if row.key not in theirs:
            continue
        flag = flag_of(row)
        for name, value in _settings(row, theirs[row.key]).items():
            if other := sources.get(name):
                raise ConfigError(f"flags {flag} and {other} are the same: give one of them")
            sources[name] = flag
            translated.setdefault(flag, {})[name] = value
    return GivenFlags(
        theirs.get("served_model_name", []),
        _adapters(theirs.get("lora_modules", [])),
        _api_keys(theirs.get("api_key", [])),
        given,
        translated,
        tuple(_TABLE.without_effect(theirs)),
    )


def _settings(row: SettingRow, value: Any) -> Mapping[str, Any]:
    """Return what a flag sets. Raises ConfigError."""
    if row.support is Support.REFUSED and not is_neutral(row, value):
        raise ConfigError(f"flag {flag_of(row)} {value}: {row.reason}, is not served; leave it out")
    if row.setting:
        return {row.setting: value}
    if row.key not in _SETTERS:
        return {}
    try:
        return _SETTERS[row.key](read_value(row, value))
    except ValueError as error:
        raise ConfigError(f"flag {flag_of(row)}:{str(error).partition(':')[2]}") from None


def _origins(text: str) -> list[str]:
    """Return a JSON list of texts; their form is that of the setting. Raises ValueError."""
    try:
        origins = json.loads(text)
    except json.JSONDecodeError:
        origins = None
    if not isinstance(origins, list) or not all(isinstance(one, str) for one in origins):
        raise ValueError(f'allowed_origins: must be a list as ["https://a.example"], got {text}')
    return origins


def _api_keys(keys: Sequence[str]) -> tuple[str, ...]:
    if not all(key.strip() for key in keys):
        raise ConfigError("flag --api-key is empty: give a key, or leave the flag out")
    return tuple(keys)


def _adapters(modules: Sequence[str]) -> dict[str, dict[str, str]]:
    adapters: dict[str, dict[str, str]] = {}
    for module in modules:
        name, path = _adapter(module)
        if name in adapters:
            raise ConfigError(f"flag {LORA_MODULES} names {name!r} twice")
        adapters[name] = {"path": path}
    return adapters


def _adapter(module: str) -> tuple[str, str]:
    text = module.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in _QUOTES:
        text = text[1:-1]
    name: Any
    path: Any
    if text.startswith("{"):
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"flag {LORA_MODULES}: {module} is not JSON: {error}") from None
        # base_model_name, which vLLM shows as the parent, is the one model of the command.
        unknown = fields.keys() - {"name", "path", "base_model_name"}
        if unknown:
            raise ConfigError(
                f"flag {LORA_MODULES}: {module} has an unknown field {min(unknown)!r}; known: "
                "name, path, base_model_name"
            )
        name, path = fields.get("name"), fields.get("path")
    else:
        name, _, path = text.partition("=")
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise ConfigError(
            f'flag {LORA_MODULES} must be NAME=PATH or {{"name": NAME, "path": PATH}}, got {module}'
        )
    return name, path
