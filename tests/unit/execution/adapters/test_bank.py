import dataclasses
import itertools

import numpy as np
import pytest
import torch

from loraplex.core.adapter import LoraTarget, TargetPart
from loraplex.core.errors import AdapterMismatchError
from loraplex.core.plan import PageGeometry
from loraplex.execution.adapters.bank import AdapterBank
from loraplex.execution.adapters.entry_tables import EntryTables
from loraplex.execution.adapters.host_adapters import HostAdapter, HostPart, HostWeight
from loraplex.execution.adapters.layout import pieces_of
from loraplex.kernels.lora import LoraPlace, add_lora
from loraplex.memory.adapter_pages import layer_targets, place
from support.naming import naming

SHAPES = {"q_proj": (12, 20), "down_proj": (20, 12)}
GEOMETRY = PageGeometry(slot_elements=32, slots_per_page=10)
NUM_LAYERS = 3


def make_bank(num_pages=6) -> AdapterBank:
    return AdapterBank(
        GEOMETRY,
        num_pages,
        dtype=torch.float32,
        device=torch.device("cpu"),
        layers=[SHAPES] * NUM_LAYERS,
    )


def host_adapter(ranks: dict[tuple[int, str], int], seed=0, dtype=torch.float32) -> HostAdapter:
    generator = torch.Generator().manual_seed(seed)
    weights = []
    for (layer, module), rank in ranks.items():
        num_in, num_out = SHAPES[module]
        a = torch.randn(rank, num_in, generator=generator).to(dtype)
        b = torch.randn(num_out, rank, generator=generator).to(dtype)
        target = LoraTarget(layer, module, rank, num_in, num_out)
        weights.append(HostWeight(target, a, b, scale=0.5 + layer))
    return HostAdapter(f"digest{seed}", tuple(weights))


RANKS = {(0, "q_proj"): 3, (0, "down_proj"): 1, (2, "q_proj"): 8, (1, "down_proj"): 5}


def pages_of(host: HostAdapter) -> int:
    return place(pieces_of(host), GEOMETRY).num_pages


def delta(bank: AdapterBank, rows, x, layer, module) -> torch.Tensor:
    y = torch.zeros(x.shape[0], SHAPES[module][1])
    batch = bank.lora_batch(tuple(rows))
    if batch is not None:
        add_lora(y, x, batch, LoraPlace(layer, (module,), (0,)))
    return y


def expected_delta(host: HostAdapter, x, layer, module) -> torch.Tensor:
    for weight in host.weights:
        if (weight.target.layer, weight.target.module) == (layer, module):
            return weight.scale * x @ weight.a.float().T @ weight.b.float().T
    return torch.zeros(x.shape[0], SHAPES[module][1])


def assert_applies(bank: AdapterBank, handle: int, host: HostAdapter) -> None:
    for module, (num_in, _) in SHAPES.items():
        x = torch.randn(4, num_in, generator=torch.Generator().manual_seed(1))
        for layer in range(NUM_LAYERS):
            got = delta(bank, [(4, ((handle, 1.0),))], x, layer, module)
            torch.testing.assert_close(got, expected_delta(host, x, layer, module))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_adapter_is_applied_from_scattered_pages_in_any_order(dtype):
    bank, host = make_bank(), host_adapter(RANKS, dtype=dtype)
    assert pages_of(host) == 2
    bank.copy(7, host, (5, 2))
    assert bank.holds(7)
    assert_applies(bank, 7, host)
    bank.check()


def test_two_adapters_lie_side_by_side_and_a_replaced_copy_is_the_new_one():
    bank = make_bank()
    first, second, newer = (host_adapter(RANKS, seed) for seed in (1, 2, 3))
    bank.copy(1, first, (0, 3))
    bank.copy(2, second, (2, 1))
    assert_applies(bank, 1, first)
    assert_applies(bank, 2, second)
    bank.copy(1, newer, (4, 0))
    assert_applies(bank, 1, newer)
    assert_applies(bank, 2, second)
    bank.check()


def test_a_copy_into_pages_of_another_forgets_that_one():
    bank = make_bank()
    bank.copy(1, host_adapter(RANKS, 1), (0, 3))
    small = host_adapter({(1, "q_proj"): 2}, 2)
    bank.copy(2, small, (3,))
    assert not bank.holds(1)
    assert_applies(bank, 2, small)
    bank.check()


def test_every_page_can_hold_its_own_adapter_again_and_again():
    bank = make_bank(num_pages=4)
    for handle in range(12):
        host = host_adapter({(handle % 3, "down_proj"): 1 + handle % 4}, handle)
        bank.copy(handle, host, (handle % 4,))
        bank.check()
        assert_applies(bank, handle, host)
    assert [handle for handle in range(12) if bank.holds(handle)] == [8, 9, 10, 11]


def test_rows_are_grouped_by_adapter_with_their_own_scales():
    bank = make_bank()
    bank.copy(1, host_adapter(RANKS, 1), (0, 3))
    bank.copy(2, host_adapter(RANKS, 2), (2, 1))
    batch = bank.lora_batch(((2, ((2, 0.5),)), (1, ()), (3, ((1, 1.0),)), (1, ((2, 2.0),))))
    assert batch is not None
    groups = {tuple(group.token_indices.tolist()): group for group in batch.groups()}
    assert groups.keys() == {(0, 1, 6), (3, 4, 5)}
    assert groups[0, 1, 6].token_scales.tolist() == [0.5, 0.5, 2.0]
    assert groups[3, 4, 5].token_scales.tolist() == [1.0, 1.0, 1.0]
    assert len({group.entry for group in groups.values()}) == 2


def test_the_next_step_of_the_same_rows_has_the_same_batch_until_an_adapter_is_copied():
    bank = make_bank()
    bank.copy(1, host_adapter(RANKS, 1), (0, 3))
    rows = ((1, ((1, 0.5),)), (1, ()))
    batch = bank.lora_batch(rows)
    assert bank.lora_batch(((1, ((1, 0.5),)), (1, ()))) is batch
    assert bank.lora_batch(((1, ((1, 0.25),)), (1, ()))) is not batch
    bank.copy(2, host_adapter(RANKS, 2), (1, 2))
    newer = host_adapter(RANKS, 3)
    assert bank.lora_batch(rows) is not batch
    bank.copy(1, newer, (4, 5))
    assert_applies(bank, 1, newer)
    bank.copy(3, host_adapter(RANKS, 4), (5, 0))
    assert not bank.holds(1)
    with pytest.raises(KeyError):
        bank.lora_batch(((4, ((1, 1.0),)),))


def test_the_adapters_of_a_row_add_up_in_the_row_s_own_order():
    bank = make_bank()
    hosts = {1: host_adapter(RANKS, 1), 2: host_adapter(RANKS, 2)}
    bank.copy(1, hosts[1], (0, 3))
    bank.copy(2, hosts[2], (2, 1))
    x = torch.randn(3, 12, generator=torch.Generator().manual_seed(4))
    composed = ((2, 0.25), (1, 1.0), (2, 2.0))
    got = delta(bank, [(2, ((1, 1.0),)), (1, composed)], x, 2, "q_proj")
    parts = [
        scale * expected_delta(hosts[handle], x[2:], 2, "q_proj") for handle, scale in composed
    ]
    torch.testing.assert_close(got[2:], sum(parts))
    alone = delta(bank, [(1, composed)], x[2:], 2, "q_proj")
    assert torch.equal(alone, got[2:])


@pytest.mark.parametrize("rows", [(), ((3, ()),), ((1, ((1, 0.0),)),), ((0, ((1, 1.0),)),)])
def test_rows_without_an_adapter_give_no_batch(rows):
    bank = make_bank()
    bank.copy(1, host_adapter(RANKS, 1), (0, 3))
    assert bank.lora_batch(rows) is None


@pytest.mark.parametrize(
    ("target", "named"),
    [
        (LoraTarget(3, "q_proj", 1, 12, 20), "layer 3"),
        (LoraTarget(0, "o_proj", 1, 12, 20), "o_proj"),
        (LoraTarget(0, "q_proj", 1, 12, 21), r"\(12, 21\)"),
    ],
)
def test_an_adapter_of_another_model_is_refused_before_anything_changes(target, named):
    bank, host = make_bank(), host_adapter(RANKS, 1)
    bank.copy(1, host, (0, 3))
    weight = HostWeight(
        target, torch.zeros(1, target.in_features), torch.zeros(target.out_features, 1), 1.0
    )
    with pytest.raises(AdapterMismatchError, match=named):
        bank.copy(2, HostAdapter("other", (weight,)), (0,))
    assert_applies(bank, 1, host)
    bank.check()


def test_a_copy_that_breaks_off_leaves_nothing_behind():
    bank, host = make_bank(), host_adapter(RANKS, 1)
    bank.copy(1, host, (0, 3))
    weight = host_adapter({(1, "q_proj"): 2}).weights[0]
    broken = HostAdapter("broken", (dataclasses.replace(weight, b=torch.zeros(7, 2)),))
    for _ in range(7):  # more often than there are entries
        with pytest.raises(RuntimeError, match="size"):
            bank.copy(2, broken, (5,))
        assert not bank.holds(2)
        bank.check()
    bank.copy(2, host_adapter({(1, "q_proj"): 2}), (5,))
    assert_applies(bank, 1, host)


def test_the_pool_is_allocated_once():
    bank = make_bank(num_pages=6)
    assert bank.num_bytes == 6 * GEOMETRY.page_elements * 4
    bank.copy(1, host_adapter(RANKS), (0, 1))
    batch = bank.lora_batch(((1, ((1, 1.0),)),))
    assert batch is not None
    assert batch.pool.nbytes == bank.num_bytes
    assert batch.table.ranks.dtype == np.int32


def test_a_bank_of_layers_alone_takes_only_lora():
    host = host_adapter(RANKS)
    assert make_bank().prepare(host).weights is host.weights
    bias = HostPart(LoraTarget(0, "q_proj", 1, 0, 20, TargetPart.BIAS), torch.ones(20))
    with pytest.raises(AdapterMismatchError, match=naming("q_proj", "LoRA", "down_proj")):
        make_bank().prepare(dataclasses.replace(host, parts=(bias,)))


def test_a_copy_of_a_prepared_adapter_does_not_go_through_its_targets(monkeypatch):
    """Adapters of experts have thousands, and the engine would wait."""
    bank = make_bank()
    host = bank.prepare(host_adapter(RANKS))
    monkeypatch.setattr(EntryTables, "check", lambda *_: pytest.fail("checked again"))
    monkeypatch.setattr("loraplex.execution.adapters.bank.place", lambda *_: pytest.fail("placed"))
    bank.copy(1, host, [4, 1])
    assert_applies(bank, 1, host)


def test_layers_may_have_other_numbers_of_experts():
    shapes = {"experts.up_proj": (12, 20)}
    numbers = [{"experts.up_proj": 2}, {"experts.up_proj": 3}, {}]
    bank = AdapterBank(
        GEOMETRY,
        6,
        dtype=torch.float32,
        device=torch.device("cpu"),
        layers=[shapes] * 3,
        num_experts=numbers,
    )
    for layer, expert, is_there in ((0, 1, True), (0, 2, False), (1, 2, True), (2, 1, False)):
        target = LoraTarget(layer, "experts.up_proj", 2, 12, 20, expert=expert)
        weight = HostWeight(target, torch.randn(2, 12), torch.randn(20, 2), 1.0)
        adapter = HostAdapter("a", (weight,))
        if is_there:
            bank.prepare(adapter)
        else:
            with pytest.raises(AdapterMismatchError, match=f"expert {expert}"):
                bank.prepare(adapter)
    targets = layer_targets([shapes] * 3, num_experts=numbers)
    assert [target.num_experts for target in targets] == [2, 3, 1]


def test_each_expert_has_its_own_cell():
    layers = [{"experts.up_proj": (12, 20)}, {"q_proj": (12, 20), "experts.up_proj": (12, 20)}]
    bank = AdapterBank(
        GEOMETRY,
        6,
        dtype=torch.float32,
        device=torch.device("cpu"),
        layers=layers,
        num_experts=[{"experts.up_proj": 3}] * 2,
    )
    ranks = {(0, 2): 4, (1, 0): 9, (1, 1): 2}
    weights = [
        HostWeight(
            LoraTarget(layer, "experts.up_proj", rank, 12, 20, expert=expert),
            torch.full((rank, 12), float(10 * layer + expert + 1)),
            torch.ones(20, rank),
            scale=rank / 2,
        )
        for (layer, expert), rank in ranks.items()
    ]
    bank.copy(1, bank.prepare(host_adapter_of(weights)), [5, 2])
    (entry,) = bank.lora_batch(((1, ((1, 1.0),)),)).entries
    table, pool = bank._tables.layers, bank._pool
    for layer, expert in itertools.product(range(2), range(3)):
        cell = table.cells.by_place[layer, "experts.up_proj", expert]
        rank = ranks.get((layer, expert), 0)
        assert table.ranks[entry, cell] == rank
        if rank:
            first = table.offsets[entry, cell]
            assert (pool[first : first + 12 * rank] == 10 * layer + expert + 1).all()
            assert (pool[first + 12 * rank : first + 32 * rank] == 1).all()
            assert table.scales[entry, cell] == rank / 2
    assert table.ranks[entry, table.cells.by_place[1, "q_proj", 0]] == 0


def host_adapter_of(weights: list[HostWeight]) -> HostAdapter:
    return HostAdapter("experts", tuple(sorted(weights, key=lambda weight: weight.target)))
