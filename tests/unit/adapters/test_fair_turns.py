import asyncio

import pytest

from loraplex.adapters import fair_turns
from loraplex.adapters.fair_turns import EXTRA_TENANTS, FairTurns
from loraplex.core.errors import QueueFullError
from support.naming import naming


class Loads:
    """Loads that begin in their turn and end when the test ends them."""

    def __init__(self, limit):
        self.turns = FairTurns(limit)
        self.begun = []
        self._ends = {}
        self._tasks = {}

    async def add(self, *names):
        """Add loads; the tenant is the first letter of the name."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._run(name))
            await asyncio.sleep(0)

    async def _run(self, name):
        async with self.turns.turn(name[0]):
            self.begun.append(name)
            await self._ends[name].wait()

    async def end(self, name):
        self._ends[name].set()
        await self._tasks[name]
        await asyncio.sleep(0)

    async def cancel(self, name):
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks[name], return_exceptions=True)
        await asyncio.sleep(0)


async def test_one_tenant_uses_the_whole_limit_in_order():
    loads = Loads(2)
    await loads.add("a1", "a2", "a3", "a4")
    assert loads.begun == ["a1", "a2"]
    await loads.end("a2")
    await loads.end("a1")
    assert loads.begun == ["a1", "a2", "a3", "a4"]


async def test_a_tenant_without_a_load_begins_at_once():
    loads = Loads(2)
    await loads.add("a1", "a2", "a3", "b1", "b2", "c1")
    assert loads.begun == ["a1", "a2", "b1", "c1"]


async def test_the_extra_loads_have_a_limit():
    loads = Loads(1)
    tenants = [chr(ord("a") + i) for i in range(EXTRA_TENANTS + 3)]
    await loads.add(*tenants)
    assert loads.begun == tenants[: EXTRA_TENANTS + 1]
    await loads.end("a")
    assert loads.begun == tenants[: EXTRA_TENANTS + 2]


async def test_the_tenant_with_the_fewest_loads_is_next_and_equals_take_turns():
    loads = Loads(3)
    await loads.add("a1", "a2", "a3", "a4", "b1", "b2", "b3")
    assert loads.begun == ["a1", "a2", "a3", "b1"]
    await loads.end("a1")
    assert loads.begun[4:] == []  # three are in progress, the limit
    await loads.end("a2")
    assert loads.begun[4:] == ["a4"]
    await loads.end("b1")
    assert loads.begun[5:] == ["b2"]


async def test_a_load_that_is_cancelled_while_it_waits_leaves_the_queue():
    loads = Loads(1)
    await loads.add("a1", "a2", "a3")
    await loads.cancel("a2")
    await loads.end("a1")
    assert loads.begun == ["a1", "a3"]


async def test_a_load_that_is_cancelled_as_its_turn_comes_passes_it_on():
    loads = Loads(1)
    await loads.add("a1", "a2", "a3")
    loads._ends["a1"].set()
    await loads._tasks["a1"]
    await loads.cancel("a2")
    await asyncio.sleep(0)
    assert loads.begun[-1] == "a3"


async def test_the_queue_of_a_tenant_has_a_limit(monkeypatch):
    monkeypatch.setattr(fair_turns, "MAX_WAITING", 2)
    loads = Loads(1)
    await loads.add("a1", "a2", "a3")
    with pytest.raises(QueueFullError, match=naming(2)):
        async with loads.turns.turn("a"):
            pass
    await loads.add("b1")
    assert loads.begun == ["a1", "b1"]
