"""Adapters come and go during in-flight steps: every step reads the adapters that it requested.

The real adapter cache decides which pages a copy gets; copies, steps and their ends come in any
order, on an accelerator whose copies are late. Each step reads every layer of its adapters twice:
when it is launched, after the waits of the decoder, and as late as it may, just before it is
absorbed. The table on the device holds where the adapters lie.
"""

import dataclasses
import random
from collections import deque

import pytest
import torch

from loraplex.core.adapter import LoraTarget, Residency
from loraplex.core.plan import PageGeometry, PageId
from loraplex.execution.adapters.bank import AdapterBank
from loraplex.execution.adapters.host_adapters import HostAdapter, HostAdapters, HostWeight
from loraplex.execution.adapters.layout import pieces_of, write_piece
from loraplex.kernels.lora import LoraBatch, LoraTable
from loraplex.memory.adapter_cache import AdapterCache
from loraplex.memory.adapter_pages import place
from support.delayed_accelerator import DelayedAccelerator

SHAPES = {"q_proj": (4, 6), "down_proj": (6, 4)}
GEOMETRY = PageGeometry(slot_elements=10, slots_per_page=4)
NUM_LAYERS, NUM_PAGES, MOST_IN_FLIGHT = 4, 14, 2
PAGE_BYTES = GEOMETRY.page_elements * 4


def random_adapter(draws: random.Random, handle: int) -> HostAdapter:
    generator = torch.Generator().manual_seed(handle)
    weights = []
    for layer in range(NUM_LAYERS):
        for module, (num_in, num_out) in SHAPES.items():
            rank = draws.choice([0, 1, 2, 3])
            if rank and draws.random() < 0.8:
                target = LoraTarget(layer, module, rank, num_in, num_out)
                a = torch.rand(rank, num_in, generator=generator)
                b = torch.rand(num_out, rank, generator=generator)
                weights.append(HostWeight(target, a, b, scale=float(handle)))
    if not weights:
        return random_adapter(draws, handle)
    return HostAdapter(f"digest{handle}", tuple(weights))


@dataclasses.dataclass
class Launched:
    handles: tuple[int, ...]
    batch: LoraBatch
    entries: dict[int, int]
    """Entries by handle, as they were named when the step was launched."""


class Machine:
    def __init__(self, seed: int) -> None:
        self.draws = random.Random(seed)
        self.accelerator = DelayedAccelerator(seed=seed, most_polls=12)
        self.bank = AdapterBank(
            GEOMETRY,
            NUM_PAGES,
            dtype=torch.float32,
            device=torch.device("cpu"),
            layers=[SHAPES] * NUM_LAYERS,
            accelerator=self.accelerator,
        )
        self.adapters = {handle: random_adapter(self.draws, handle) for handle in range(1, 13)}
        self.cache = AdapterCache(18 * PAGE_BYTES, NUM_PAGES, keeps_host_copy=True)
        for handle, adapter in self.adapters.items():
            num_pages = place(pieces_of(adapter), GEOMETRY).num_pages
            self.cache.register(handle, num_pages * PAGE_BYTES, num_pages)
        self.host = HostAdapters()
        self.copying: dict[int, tuple[PageId, ...]] = {}
        self.in_flight: deque[Launched] = deque()
        self.num_read = 0
        self.num_waited = 0

    def run(self, num_actions: int) -> None:
        actions = [
            *(self.load, self.load, self.copy, self.copy, self.copy),
            *(self.launch, self.launch, self.launch, self.absorb, self.absorb, self.absorb),
            *(self.advance, self.fail, self.rest),
        ]
        for _ in range(num_actions):
            self.draws.choice(actions)()
            self.bank.check()
            self.cache.check()
        while self.in_flight:
            self.absorb()

    def load(self) -> None:
        handle = self.draws.choice(list(self.adapters))
        if self.cache.residency(handle) is not Residency.ABSENT:
            return
        dropped = self.cache.begin_load(handle, 0)
        if dropped is None:
            return
        for other in dropped:
            self.host.pop(other, None)
        self.host[handle] = self.bank.prepare(self.adapters[handle])
        self.cache.loaded(handle)

    def copy(self) -> None:
        waiting = [h for h in self.adapters if self.cache.residency(h) is Residency.HOST]
        if waiting:
            handle = self.draws.choice(waiting)
            page_ids = self.cache.begin_copy(handle)
            if page_ids is not None:
                self._start(handle, page_ids)

    def launch(self) -> None:
        ready = [h for h in self.adapters if self.cache.residency(h) is Residency.DEVICE]
        if not ready or len(self.in_flight) == MOST_IN_FLIGHT:
            return
        handles = tuple(self.draws.sample(ready, self.draws.randint(1, min(3, len(ready)))))
        for handle in handles:
            self.cache.acquire(handle)
        rows = tuple((1, ((handle, 1.0),)) for handle in handles)
        batch = self.bank.lora_batch((*rows, (2, ())))
        assert batch is not None
        assert batch.segments is not None
        entries = dict(zip(handles, batch.segments.entries[0].tolist(), strict=False))
        by_token = dict(zip(batch.segments.starts[0].tolist(), entries.values(), strict=False))
        indices = batch.segments.token_indices.tolist()
        entries = {handles[indices[start]]: entry for start, entry in by_token.items()}
        step = Launched(handles, batch, entries)
        with self.accelerator.compute():
            for layer in range(NUM_LAYERS):
                if batch.arrivals is not None:
                    self.num_waited += 1
                    batch.arrivals.wait_for(layer)
                self._read(step, layer)
        self.in_flight.append(step)

    def absorb(self) -> None:
        if self.in_flight:
            step = self.in_flight.popleft()
            for layer in range(NUM_LAYERS):
                self._read(step, layer)
            for handle in step.handles:
                self.cache.release(handle)
            self._report(self.bank.arrived())

    def advance(self) -> None:
        self.accelerator.advance(self.draws.randint(1, 4))

    def fail(self) -> None:
        """A step that started copies fails: they start again, and what was reported is lost."""
        if self.in_flight or not self.copying:
            return
        if self.draws.random() < 0.5:
            self.bank.arrived()
            again = dict(self.copying)
        else:
            again = {h: p for h, p in self.copying.items() if self.draws.random() < 0.7}
        for handle, page_ids in again.items():
            self._start(handle, page_ids)

    def rest(self) -> None:
        """A step without rows."""
        reported = self.bank.arrived(wait=True)
        assert bool(reported) == bool(self.copying)
        self._report(reported)

    def _start(self, handle: int, page_ids: tuple[PageId, ...]) -> None:
        host = self.host.get(handle)
        assert host is not None
        self.copying[handle] = page_ids
        self.bank.copy(handle, host, page_ids)

    def _report(self, handles: tuple[int, ...]) -> None:
        for handle in handles:
            del self.copying[handle]
            for dropped in self.cache.copied(handle):
                self.host.pop(dropped, None)

    def _read(self, step: Launched, layer: int) -> None:
        table = step.batch.table
        assert table.on_device is not None
        for handle, entry in step.entries.items():
            pieces = pieces_of(self.adapters[handle])
            for module in SHAPES:
                cell = (entry, table.cells.by_place[layer, module, 0])
                ranks = int(table.on_device.ranks[cell])
                target = LoraTarget(layer, module, ranks, *SHAPES[module])
                assert bool(ranks) == any((t.layer, t.module) == (layer, module) for t in pieces)
                if ranks:
                    expected = torch.empty(target.num_elements)
                    write_piece(self.adapters[handle], None, pieces[target], expected)
                    assert torch.equal(found(table, entry, target, step.batch.pool), expected)
                    assert float(table.on_device.scales[cell]) == handle
                    self.num_read += 1


def found(table: LoraTable, entry: int, target: LoraTarget, pool: torch.Tensor) -> torch.Tensor:
    assert table.on_device is not None
    cell = (entry, table.cells.by_place[target.layer, target.module, 0])
    first = int(table.on_device.offsets[cell])
    return pool[first : first + target.num_elements]


@pytest.mark.some(5)
@pytest.mark.parametrize("seed", range(12))
def test_a_step_reads_the_adapters_that_it_requested(seed: int) -> None:
    machine = Machine(seed)
    machine.run(500)
    assert machine.num_read > 500
    assert machine.num_waited > 8
    assert machine.cache.stats().device_evictions > 2
    assert machine.cache.stats().host_evictions > 2


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 130))
def test_in_many_more_schedules(seed: int) -> None:
    Machine(seed).run(600)
