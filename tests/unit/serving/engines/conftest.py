"""Engines by script."""

import pytest

from loraplex.serving.engines import async_engine
from loraplex.serving.engines.async_engine import AsyncEngine
from loraplex.testing.fake_clock import FakeClock
from support.scripted_engine import Script


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(async_engine, "_FIRST_PAUSE_SECONDS", 0.0)


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
async def engine(script, clock):
    engine = AsyncEngine("m", script, clock)
    yield engine
    await engine.close()
    assert all(link.is_closed for link in script.links)
