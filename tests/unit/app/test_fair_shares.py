"""Default of the fair shares: tenants where API keys distinguish them, otherwise adapters."""

import pytest

from loraplex.app.model_settings import with_fair_shares
from loraplex.core.config import Config, ModelConfig
from loraplex.core.scheduler_settings import FairShare, SchedulerSettings
from loraplex.core.server_config import ServerConfig


def kind_of(config: Config, given_keys: tuple[str, ...] = ()) -> FairShare | None:
    return with_fair_shares(config, given_keys).models["m"].fair_share


def config(fair_share: FairShare | None = None, keys_file: str = "") -> Config:
    model = ModelConfig(path="/m", fair_share=fair_share)
    return Config(server=ServerConfig(api_keys_file=keys_file), models={"m": model})


def test_tenants_share_where_there_are_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORAPLEX_API_KEYS", raising=False)
    assert kind_of(config()) is FairShare.ADAPTER
    assert kind_of(config(keys_file="keys.toml")) is FairShare.TENANT
    assert kind_of(config(), ("key",)) is FairShare.TENANT
    monkeypatch.setenv("LORAPLEX_API_KEYS", "a" * 40)
    assert kind_of(config()) is FairShare.TENANT


@pytest.mark.parametrize("chosen", FairShare)
def test_the_operators_choice_stays(chosen: FairShare) -> None:
    assert kind_of(config(chosen, "keys.toml")) is chosen
    assert kind_of(config(chosen)) is chosen


def test_a_scheduler_without_a_server_shares_by_adapter() -> None:
    assert SchedulerSettings().share_kind is FairShare.ADAPTER
