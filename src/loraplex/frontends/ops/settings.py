"""GET /v1/settings: the values in force, with the place that set each; without secrets."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.config import Config, ModelConfig
from loraplex.core.errors import ModelNotFoundError, NotReadyError
from loraplex.core.setting import SettingField, Settings, setting_fields
from loraplex.core.url_secrets import without_url_secrets
from loraplex.frontends.access import Authenticate
from loraplex.frontends.middleware import RecordedRoute
from loraplex.frontends.openapi.operation import OF_KEYS, described, json_of
from loraplex.frontends.ops.responses import for_operators, json_response, responding_to_errors
from loraplex.serving.backend import Backend

MAX_ITEMS: Final = 100
"""Number of items of a list or table that are shown."""
_DEFAULT, _DERIVED = "default", "derived"


class SettingEntry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    group: str
    value: Any
    """Value in force. User names, passwords and queries in addresses are replaced by `***`; of a
    long list or table, the first 100 items."""
    num_items: int | None
    """Length of a list or table."""
    default: str
    """Description of the default."""
    source: str
    """Place that sets it: `default`, a file, a variable, a flag, an argument; `derived`: the server
    found the value at its start."""
    meaning: str
    details: str
    """Sentences in Markdown."""


class SettingList(msgspec.Struct, frozen=True, kw_only=True):
    server: list[SettingEntry]
    models: dict[str, list[SettingEntry]]
    """Settings of each model that was configured at the start."""


def settings_route(backend: Backend, config: Config, authenticate: Authenticate) -> RecordedRoute:
    """Return the route of GET /v1/settings."""

    @described(json_of(SettingList), tag="operations", errors=OF_KEYS)
    async def settings(request: Request) -> Response:
        """The settings in force with their sources. For operators."""
        del request
        models = {
            name: with_found_sizes(backend, name, model) for name, model in config.models.items()
        }
        return json_response(setting_list(msgspec.structs.replace(config, models=models)))

    handler = responding_to_errors(for_operators(settings, authenticate))
    return RecordedRoute("/v1/settings", handler, methods=["GET"])


def with_found_sizes(backend: Backend, name: str, model: ModelConfig) -> ModelConfig:
    """Return the settings, with the sizes that the engine found in place of open ones.

    Until the engine has started once, they are open.
    """
    try:
        served = backend.model(name)
        memory = served.memory()
    except (NotReadyError, ModelNotFoundError):
        return model
    found = {
        "max_num_seqs": memory.max_num_seqs,
        "max_num_batched_tokens": memory.max_num_batched_tokens,
        "max_model_len": served.card.max_model_len,
        "kv_cache_bytes": memory.kv.num_bytes,
        "lora_device_bytes": memory.device.num_bytes,
        "memory_bytes": memory.accelerator and memory.accelerator.total,
    }
    is_open = {key: value for key, value in found.items() if getattr(model, key) is None}
    return msgspec.structs.replace(model, **is_open)


def setting_list(config: Config) -> SettingList:
    """Describe all settings of a configuration."""
    sources = config.sources
    return SettingList(
        server=_entries(config.server, sources.server),
        models={
            name: _entries(model, sources.models.get(name, {}))
            for name, model in config.models.items()
        },
    )


def _entries(settings: Settings, sources: Mapping[str, str]) -> list[SettingEntry]:
    fields = setting_fields(type(settings)).values()
    return [_entry(field, getattr(settings, field.name), sources) for field in fields]


def _entry(field: SettingField, value: Any, sources: Mapping[str, str]) -> SettingEntry:
    plain = msgspec.to_builtins(value)
    unset = _DEFAULT if value == field.value else _DERIVED
    return SettingEntry(
        name=field.name,
        group=field.setting.group,
        value=_shown(plain),
        num_items=len(plain) if isinstance(plain, dict | list | tuple) else None,
        default=field.default,
        source=_shown(sources.get(field.name, unset)),
        meaning=field.setting.summary,
        details=field.setting.details,
    )


def _shown(value: Any) -> Any:
    """Return a value without secrets, and not longer than a page."""
    if isinstance(value, str):
        return without_url_secrets(value)
    if isinstance(value, dict):
        return {key: _shown(value[key]) for key in list(value)[:MAX_ITEMS]}
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value[:MAX_ITEMS]]
    return value
