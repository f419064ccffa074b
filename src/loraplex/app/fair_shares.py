"""Default of the fair shares: tenants where API keys distinguish them, otherwise adapters."""

from collections.abc import Sequence

import msgspec

from loraplex.core.config import Config, ModelConfig
from loraplex.core.environment import server_api_keys
from loraplex.core.scheduler_settings import FairShare


def with_fair_shares(config: Config, given_keys: Sequence[str] = ()) -> Config:
    """Return the configuration with a share for each model. given_keys: keys of a flag."""
    has_keys = bool(config.server.api_keys_file or server_api_keys() or given_keys)
    models = {
        name: with_fair_share(model, has_keys=has_keys) for name, model in config.models.items()
    }
    return msgspec.structs.replace(config, models=models)


def with_fair_share(model: ModelConfig, *, has_keys: bool) -> ModelConfig:
    """Return the settings of one model; has_keys: API keys distinguish tenants."""
    if model.fair_share is not None:
        return model
    # A tenant could take all shares by naming many adapters, or one by many requests for a base.
    kind = FairShare.TENANT if has_keys else FairShare.ADAPTER
    return msgspec.structs.replace(model, fair_share=kind)
