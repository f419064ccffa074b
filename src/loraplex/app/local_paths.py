"""Settings of models with every path in a local folder: hub ids are downloaded."""

import logging
import os

import msgspec

from loraplex.app.build_limits import within_build
from loraplex.core.config import Config, ModelConfig
from loraplex.core.devices import find_device
from loraplex.core.engine_settings import AUTO_DEVICE, NO_CACHE
from loraplex.core.environment import weights_cache_directory
from loraplex.core.state_places import state_name
from loraplex.execution.weights.hub import resolve_model, resolve_tokenizer

logger = logging.getLogger(__name__)


def with_local_paths(config: Config) -> Config:
    """Return the configuration with every model in a local folder. Raises ConfigError."""
    state_dir = config.server.state_dir
    models = {
        name: with_local_path(name, model, state_dir) for name, model in config.models.items()
    }
    # The state belongs to the model as the operator names it, not to one commit of it.
    return msgspec.structs.replace(config, models=models, state_name=state_name(config))


def with_local_path(name: str, model: ModelConfig, state_dir: str) -> ModelConfig:
    """Return the settings of a model in a local folder. Raises ConfigError.

    Its weights cache is then a folder, too, or none, its device is chosen, and the limits of a
    built engine folder are applied.
    """
    folder = resolve_model(model.path, model.revision, state_dir)
    cache = weights_cache_directory(model.weights_cache_dir, state_dir)
    return msgspec.structs.replace(
        within_build(name, with_device(name, model), folder),
        path=str(folder),
        tokenizer=model.tokenizer and str(resolve_tokenizer(model.tokenizer)),
        weights_cache_dir=NO_CACHE if cache is None else os.path.abspath(cache),
    )


def with_device(name: str, model: ModelConfig) -> ModelConfig:
    """Return the settings of a model with a device in place of `auto`, and log the reason."""
    if model.device != AUTO_DEVICE:
        return model
    found = find_device()
    logger.info("model %r: device %s: %s", name, found.name, found.reason)
    return msgspec.structs.replace(model, device=found.name)
