"""Configuration of the library's LLM."""

import os
from collections.abc import Mapping
from typing import Any

from loraplex.core.config import Config
from loraplex.core.config_layers import Layer, resolve
from loraplex.core.errors import ConfigError


def library_config(
    model: str,
    adapters: Mapping[str, str | os.PathLike[str]],
    state_dir: str | os.PathLike[str],
    settings: Mapping[str, Any],
) -> Config:
    """Return the configuration of an LLM from its arguments. Raises ConfigError."""
    if "path" in settings:
        raise ConfigError("path is not a setting of LLM: it is the first argument, model")
    values = {
        **settings,
        "path": model,
        "adapters": {name: {"path": os.fspath(path)} for name, path in adapters.items()},
    }
    return resolve(
        [
            Layer("argument of LLM", {"models": {model: values}}),
            Layer("argument of LLM", {"server": {"state_dir": os.fspath(state_dir)}}),
            Layer("LLM", {"server": {"persist_adapters": False}}),
            # The caller of a library could download the adapter, too.
            Layer("LLM", {"server": {"allowed_adapter_hosts": ["*"]}}),
        ]
    )
