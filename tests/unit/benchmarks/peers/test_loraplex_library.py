"""The real library in a worker, on a very small model."""

import asyncio
import os

import msgspec
import pytest
from comparison.fixtures import RANK_8, Fixture
from comparison.loraplex_system import LoraplexLibrary
from comparison.shapes import ModelShape

from loraplex.core.errors import ConfigError

MICRO = ModelShape(
    name="micro", hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=96
)


@pytest.fixture
def micro(setup, tmp_path):
    """The setup with a real model and two adapters of rank 8, and a third that it does not have."""
    fixture = Fixture(MICRO, tmp_path / "fixtures")
    fixture.ensure_model()
    *known, late = fixture.adapters(RANK_8, 3)
    changes = {"model": fixture.model, "tokens": fixture.tokens, "adapters": tuple(known)}
    return msgspec.structs.replace(setup, max_lora_rank=8, **changes), late


@pytest.fixture
async def running(micro):
    running = await LoraplexLibrary.with_weights("32-bit", []).start(micro[0])
    yield running
    await running.stop()


@pytest.mark.slow
async def test_a_mixed_batch_says_what_each_says_alone(running, exchange, micro):
    late = await running.add_adapter(micro[1])
    prompts = {None: (300, 301, 302), 0: (400,), 1: (500, 501), late: (300, 301, 302)}
    alone = {}
    for adapter, prompt in prompts.items():
        sent = exchange(adapter, prompt, 8)
        await running.send(sent)
        alone[adapter] = running.read(sent)
    assert all(one.error is None and one.num_output_tokens == 8 for one in alone.values())
    assert all([*one.chunk_ns] == sorted(one.chunk_ns) for one in alone.values())
    assert len({one.text for one in alone.values()}) == 4

    sent = {adapter: exchange(adapter, prompt, 8) for adapter, prompt in prompts.items()}
    await asyncio.gather(*(running.send(one) for one in sent.values()))
    assert {adapter: running.read(one).text for adapter, one in sent.items()} == {
        adapter: one.text for adapter, one in alone.items()
    }

    await running.remove_adapter(late)
    with pytest.raises(ConfigError, match="remove_adapter: AdapterNotFoundError"):
        await running._checked("remove_adapter", name=micro[1].name)
    refused = exchange(None, (), 8)
    await running.send(refused)
    assert "InvalidRequestError" in running.read(refused).error


@pytest.mark.slow
async def test_stop_leaves_neither_process_nor_file(micro, tmp_path, monkeypatch):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    running = await LoraplexLibrary.with_weights("32-bit", []).start(micro[0])
    [pid] = running.process_ids
    assert [*temporary.iterdir()]
    await running.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not [*temporary.iterdir()]
