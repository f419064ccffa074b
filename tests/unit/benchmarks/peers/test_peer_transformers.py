"""The real library, which the tests have, on a very small model."""

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest
from comparison.fixtures import RANK_8, RANK_64, Fixture
from comparison.peers.transformers import TransformersPeft
from comparison.shapes import ModelShape

MICRO = ModelShape(
    name="micro", hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=96
)


@pytest.fixture
async def running(setup, tmp_path):
    fixture = Fixture(MICRO, tmp_path / "fixtures")
    fixture.ensure_model()
    adapters = fixture.adapters(RANK_8, 2) + fixture.adapters(RANK_64, 1)
    setup = msgspec.structs.replace(
        setup, model=fixture.model, tokens=fixture.tokens, adapters=adapters
    )
    running = await TransformersPeft(Path(sys.executable)).start(setup)
    yield running
    await running.stop()


@pytest.mark.slow
async def test_a_padded_mixed_batch_says_what_each_says_alone(running, exchange):
    prompts = {None: (300, 301, 302), 0: (400,), 1: (500, 501), 2: (300, 301, 302)}
    alone = {}
    for adapter, prompt in prompts.items():
        sent = exchange(adapter, prompt, 8)
        await running.send(sent)
        alone[adapter] = running.read(sent)
    assert all(received.error is None for received in alone.values())
    assert len({received.text for received in alone.values()}) == 4

    sent = {adapter: exchange(adapter, prompt, 8) for adapter, prompt in prompts.items()}
    await asyncio.gather(*(running.send(one) for one in sent.values()))
    for adapter, one in sent.items():
        assert running.read(one).text == alone[adapter].text


@pytest.mark.slow
async def test_rows_end_at_their_own_length(running, exchange):
    sent = [exchange(None, (300, 301), count) for count in (1, 7, 3)]
    await asyncio.gather(*(running.send(one) for one in sent))
    all_received = [running.read(one) for one in sent]
    assert [received.num_output_tokens for received in all_received] == [1, 7, 3]
    assert all_received[1].text.startswith(all_received[2].text)
    assert (
        all_received[0].chunk_ns[-1] < all_received[2].chunk_ns[-1] < all_received[1].chunk_ns[-1]
    )
