"""Adapters on their way to an accelerator: laid out as on a CPU, reported once, layer by layer."""

import dataclasses
import gc
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.core.adapter import EMBEDDING, LM_HEAD, OUTSIDE_LAYERS, LoraTarget, TargetPart
from loraplex.core.errors import AdapterMismatchError
from loraplex.core.plan import PageGeometry
from loraplex.execution.adapters.bank import AdapterBank, BaseEnds
from loraplex.execution.adapters.entry_tables import head_modules
from loraplex.execution.adapters.host_adapters import HostAdapter, HostPart, HostWeight
from loraplex.execution.adapters.layout import pieces_of
from loraplex.execution.adapters.pinned_pages import PinnedPages
from loraplex.kernels.accelerator import Accelerator, HostAccelerator
from loraplex.kernels.lora import LoraBatch, LoraPlace, add_lora
from loraplex.memory.adapter_pages import place
from support.delayed_accelerator import DelayedAccelerator
from support.naming import naming

HIDDEN, VOCAB = 6, 9
SHAPES = {"q_proj": (HIDDEN, 8), "down_proj": (8, HIDDEN)}
GEOMETRY = PageGeometry(slot_elements=12, slots_per_page=6)
NUM_LAYERS, NUM_PAGES = 3, 20
CPU = torch.device("cpu")


class Base:
    """A base whose linear layers have a bias."""

    def bias(self, layer: int, module: str) -> torch.Tensor:
        return torch.arange(float(VOCAB), dtype=torch.float64)[: SHAPES[module][1]]


def make_bank(accelerator: Accelerator | None, **fields: Any) -> AdapterBank:
    return AdapterBank(
        GEOMETRY,
        NUM_PAGES,
        dtype=torch.float32,
        device=CPU,
        layers=[SHAPES] * NUM_LAYERS,
        ends=BaseEnds(head_modules([SHAPES], HIDDEN, VOCAB), True, Base()),  # type: ignore[arg-type]
        accelerator=accelerator,
        **fields,
    )


def random_of(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight(layer: int, module: str, rank: int, seed: int = 0) -> HostWeight:
    num_in, num_out = SHAPES[module]
    target = LoraTarget(layer, module, rank, num_in, num_out)
    a, b = random_of(rank, num_in, seed=seed), random_of(num_out, rank, seed=seed + 1)
    return HostWeight(target, a, b, scale=0.5 + layer)


def lora_of(seed: int, num_layers: int = NUM_LAYERS) -> HostAdapter:
    weights = [weight(i, module, 3, seed) for i in range(num_layers) for module in SHAPES]
    return HostAdapter(f"digest{seed}", tuple(weights))


def with_everything(seed: int) -> HostAdapter:
    def part(kind: TargetPart, module: str, *shape: int, layer: int, **fields: Any) -> HostPart:
        rank, outputs = shape if len(shape) == 2 else (1, shape[0])
        target = LoraTarget(layer, module, rank, 0, outputs, kind)
        return HostPart(target, random_of(*shape, seed=seed + len(shape) + rank), **fields)

    parts = (
        part(TargetPart.BIAS, "q_proj", 8, layer=1),
        part(TargetPart.SHIFT, "down_proj", HIDDEN, layer=2, scale=0.25),
        part(TargetPart.TOKENS, EMBEDDING, 3, HIDDEN, layer=-1, indices=torch.tensor([7, 2, 5])),
        part(TargetPart.ROWS, LM_HEAD, VOCAB, HIDDEN, layer=-1),
        part(TargetPart.EMBEDDING_A, EMBEDDING, VOCAB, 2, layer=-1, scale=3.0),
        part(TargetPart.EMBEDDING_B, EMBEDDING, 2, HIDDEN, layer=-1),
    )
    target = LoraTarget(OUTSIDE_LAYERS, LM_HEAD, 1, HIDDEN, 8)
    head = HostWeight(target, random_of(1, HIDDEN, seed=1), random_of(8, 1, seed=2), 2.0)
    return HostAdapter("all", (head, *lora_of(seed).weights), parts)


def put(bank: AdapterBank, handle: int, host: HostAdapter, first_page: int) -> None:
    num_pages = place(pieces_of(host), GEOMETRY).num_pages
    bank.copy(handle, bank.prepare(host), list(range(first_page, first_page + num_pages))[::-1])


def batch_of(bank: AdapterBank, *handles: int) -> LoraBatch:
    batch = bank.lora_batch(tuple((2, ((handle, 1.0),)) for handle in handles))
    assert batch is not None
    return batch


def arrive(batch: LoraBatch, accelerator: Accelerator | None) -> None:
    if accelerator is not None and batch.arrivals is not None:
        with accelerator.compute():
            for layer in range(OUTSIDE_LAYERS, NUM_LAYERS):
                batch.arrivals.wait_for(layer)


@pytest.mark.parametrize("accelerator", [HostAccelerator(), DelayedAccelerator()], ids=["", "late"])
def test_all_of_an_adapter_lies_where_it_would_on_a_cpu(accelerator: Accelerator) -> None:
    banks = {None: make_bank(None), accelerator: make_bank(accelerator)}
    found = {}
    for where, bank in banks.items():
        put(bank, 1, lora_of(1), 0)
        put(bank, 2, with_everything(2), 8)
        batch = batch_of(bank, 1, 2)
        arrive(batch, where)
        found[where] = batch
    ours, theirs = found[accelerator], found[None]
    for name in ("offsets", "ranks", "scales"):
        for mine, other in ((ours.table, theirs.table), (ours.head_table, theirs.head_table)):
            assert mine is not None
            assert other is not None
            assert mine.on_device is not None
            assert np.array_equal(getattr(mine, name), getattr(other, name))
            assert np.array_equal(getattr(mine.on_device, name).numpy(), getattr(other, name))
    for layer in range(NUM_LAYERS):
        for module, (num_in, num_out) in SHAPES.items():
            x, sums = random_of(4, num_in, seed=3), []
            for batch in (ours, theirs):
                y = random_of(4, num_out, seed=4)
                add_lora(y, x, batch, LoraPlace(layer, (module,), (0,)))
                sums.append(y)
            assert torch.equal(*sums)
    (our_use,), (their_use,) = ours.parts, theirs.parts
    assert our_use.token_indices.tolist() == their_use.token_indices.tolist() == [2, 3]
    for ends in ("weights", "tokens", "embedding_lora"):
        assert flat(getattr(our_use.parts, ends)) == flat(getattr(their_use.parts, ends)) != []
    assert our_use.parts.has_head_lora


def flat(value: Any) -> list[Any]:
    """All numbers of nested containers of tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return [(key, flat(value[key])) for key in sorted(value)]
    return [flat(part) for part in value] if isinstance(value, tuple) else [value]


def test_the_end_of_a_copy_is_reported_once_and_only_when_its_first_layers_are_there() -> None:
    accelerator = DelayedAccelerator(most_polls=0)
    bank = make_bank(accelerator)
    assert bank.arrived(wait=True) == ()
    put(bank, 1, lora_of(1), 0)
    put(bank, 2, lora_of(2), 8)
    assert accelerator.num_outstanding > 2
    reported = bank.arrived()
    assert reported == (1, 2)
    assert bank.arrived(wait=True) == ()


def test_a_step_without_rows_waits_for_one_copy_and_not_for_all() -> None:
    accelerator = DelayedAccelerator(most_polls=10**9)
    bank = make_bank(accelerator)
    put(bank, 1, lora_of(1), 0)
    put(bank, 2, lora_of(2), 8)
    assert bank.arrived() == ()
    assert bank.arrived(wait=True) == (1,)
    assert accelerator.num_outstanding > 0
    assert bank.arrived(wait=True) == (2,)


def test_one_of_several_ranks_reports_a_copy_when_all_of_it_is_there() -> None:
    """No step waits for layers of it: another rank could have recorded what this one computes."""
    accelerator = DelayedAccelerator(most_polls=10**9)
    bank = make_bank(accelerator, is_alone=False)
    host = bank.prepare(lora_of(0))
    num_pages = place(pieces_of(host), GEOMETRY).num_pages
    assert num_pages > 1
    bank.copy(1, host, range(num_pages))
    assert bank.arrived() == ()
    assert bank.arrived(wait=True) == (1,)
    batch = bank.lora_batch(((1, ((1, 1.0),)),))
    assert batch is not None
    assert batch.arrivals is None


def test_a_copy_that_is_replaced_or_overwritten_is_not_reported() -> None:
    accelerator = DelayedAccelerator()
    bank = make_bank(accelerator)
    put(bank, 1, lora_of(1), 0)
    put(bank, 1, lora_of(1), 0)
    put(bank, 2, lora_of(2), 8)
    put(bank, 3, lora_of(3), 8)
    reported: list[int] = []
    while more := bank.arrived(wait=True):
        reported += more
    assert sorted(reported) == [1, 3]
    assert not bank.holds(2)
    accelerator.synchronize()
    bank.check()


def test_a_batch_waits_while_its_adapters_arrive_and_is_kept_once_they_have() -> None:
    accelerator = DelayedAccelerator(most_polls=10**9)
    bank = make_bank(accelerator)
    put(bank, 1, lora_of(1), 0)
    batch = batch_of(bank, 1)
    assert batch.arrivals is not None
    assert batch_of(bank, 1) is not batch
    seen = []
    with accelerator.compute():
        for layer in range(NUM_LAYERS):
            seen.append(accelerator.num_outstanding)
            batch.arrivals.wait_for(layer)
    assert seen == sorted(seen, reverse=True)
    assert seen[0] > seen[-1] > 0, "layer by layer"
    accelerator.synchronize()
    whole = batch_of(bank, 1)
    assert whole.arrivals is None
    assert batch_of(bank, 1) is whole


def test_a_recorded_step_finds_its_pieces_at_one_address() -> None:
    bank = make_bank(HostAccelerator())
    blank = bank.blank_batch(4)
    assert blank is not None
    assert blank.segments is not None
    assert blank.num_waves == 1
    assert (blank.segments.entries == -1).all()
    put(bank, 1, lora_of(1), 0)
    batch = bank.lora_batch(((1, ((1, 1.0),)), (1, ()), (2, ())))
    assert batch is not None
    assert batch.segments is not None
    for mine, fixed in zip(batch.segments.tensors, blank.segments.tensors, strict=True):
        assert (mine.data_ptr(), mine.shape) == (fixed.data_ptr(), fixed.shape)


def test_what_cannot_be_served_is_refused_as_it_is_loaded() -> None:
    bank = make_bank(HostAccelerator(), max_rank=2)
    with pytest.raises(AdapterMismatchError, match=naming(3, "q_proj", 2)):
        bank.prepare(lora_of(1))
    deeper = HostAdapter("deep", (weight(NUM_LAYERS, "q_proj", 1),))
    with pytest.raises(AdapterMismatchError, match=f"layer {NUM_LAYERS}"):
        bank.prepare(deeper)


def test_a_packed_adapter_is_its_pages_and_keeps_no_tensor_of_its_file() -> None:
    bank = make_bank(HostAccelerator())
    host = lora_of(1)
    ready = bank.prepare(host)
    assert ready.packed is not None
    num_pages = place(pieces_of(host), GEOMETRY).num_pages
    assert ready.num_bytes == num_pages * GEOMETRY.page_elements * 4
    assert all(w.a.numel() == w.b.numel() == 0 for w in ready.weights)
    assert pieces_of(ready).keys() == pieces_of(host).keys()


def test_pages_are_used_again_once_nothing_refers_to_them() -> None:
    pages = PinnedPages(HostAccelerator(), 100, torch.float32)
    first = pages.take(3)
    pinned = pages.num_bytes
    addresses = {page.data_ptr() for page in first.pages}
    others = pages.take(200)
    assert addresses.isdisjoint(page.data_ptr() for page in others.pages)
    assert pages.num_bytes == pinned, "one chunk holds both"
    del first
    gc.collect()
    assert {page.data_ptr() for page in pages.take(3).pages} == addresses


@pytest.mark.parametrize("page_elements", [1, 100, 3000, 1 << 20, 5_000_001])
def test_little_is_pinned_beside_what_is_in_use(page_elements: int) -> None:
    class Counted(HostAccelerator):
        def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype)

    pages = PinnedPages(Counted(), page_elements, torch.bfloat16)
    lease = pages.take(300)
    chunk = max(1 << 26, 16 * page_elements * 2)
    assert pages.num_bytes <= lease.num_bytes * 8 / 7 + chunk
    if page_elements > 1000:
        assert pages.num_bytes.bit_count() <= 9, "whole chunks, each a power of two"


def test_a_handle_may_be_copied_anew_with_other_values_while_it_arrives() -> None:
    accelerator = DelayedAccelerator()
    bank = make_bank(accelerator)
    put(bank, 1, lora_of(1), 0)
    newer = dataclasses.replace(lora_of(9), digest="newer")
    put(bank, 1, newer, 0)
    batch = batch_of(bank, 1)
    arrive(batch, accelerator)
    start = int(batch.table.offsets[batch.entries[0], 0])
    assert torch.equal(batch.pool[start : start + 3 * HIDDEN].view(3, HIDDEN), newer.weights[0].a)
