"""The tiers that a comparison configures for a server hold the stated number of adapters."""

from pathlib import Path

import pytest
from comparison.adapter_bytes import AdapterBytes, adapter_bytes
from comparison.fixture_tokenizer import FIRST_WORD_ID
from comparison.fixtures import RANK_8, Fixture
from comparison.shapes import ModelShape

from loraplex.app.plan import plan_memory
from loraplex.core.config import ModelConfig
from loraplex.core.errors import ConfigError
from support.naming import naming

MIDGET = ModelShape(
    name="midget",
    hidden_size=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    vocab_size=FIRST_WORD_ID + 700,
)


@pytest.fixture
def fixture(tmp_path: Path) -> Fixture:
    fixture = Fixture(MIDGET, tmp_path)
    fixture.ensure_model()
    return fixture


@pytest.mark.slow
async def test_so_many_and_no_more(fixture: Fixture) -> None:
    adapters = fixture.adapters(RANK_8, 12)
    flags = ["--dtype", "float32", "--max-lora-rank", "8"]
    capacity = await adapter_bytes(fixture.model, adapters[0].path, flags, fixture.model / "log")
    config = ModelConfig(
        path=str(fixture.model),
        dtype="float32",
        max_lora_rank=8,
        **capacity.settings(9),
    )
    plan = plan_memory(config, [str(adapter.path) for adapter in adapters])
    assert (plan.adapters.fit_device, plan.adapters.fit_host) == (9, 9)


async def test_what_cannot_be_planned_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=naming("--no-such-flag")):
        await adapter_bytes(tmp_path, tmp_path, ["--no-such-flag"], tmp_path / "log")


def test_a_server_takes_one_of_the_largest_rank_at_least() -> None:
    capacity = AdapterBytes(device_bytes=10, host_bytes=3, least_device_bytes=25)
    assert capacity.settings(2) == {"lora_device_bytes": 25, "lora_host_bytes": 6}
    assert capacity.settings(4) == {"lora_device_bytes": 40, "lora_host_bytes": 12}
