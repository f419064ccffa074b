"""The torch reference against a slow loop in float64, over who uses which adapter and how large."""

import dataclasses

import numpy as np
import pytest
import torch

from loraplex.kernels.lora import (
    LoraBatch,
    LoraCells,
    LoraPlace,
    LoraTable,
    LoraUse,
    add_lora,
    lora_batch,
)

HIDDEN = 40
SHAPES = {"q_proj": (HIDDEN, 48), "k_proj": (HIDDEN, 16), "v_proj": (HIDDEN, 16)}
MODULES = tuple(SHAPES)
OUT_OFFSETS = (0, 48, 64)
NUM_LAYERS = 2

# Relative to the largest absolute output: a few roundings of the output dtype.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}

MIXED = (1, 64, 3, 8, 16)


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for a busy core make small matmuls slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclasses.dataclass
class Adapters:
    """A pool with random adapters, laid out one after another, and what is in it."""

    pool: torch.Tensor
    table: LoraTable

    def matrices(self, entry: int, layer: int, module: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A [rank, in], B [rank, out], read by hand in float64."""
        (num_in, num_out) = SHAPES[MODULES[module]]
        cell = (entry, self.table.cells.by_place[layer, MODULES[module], 0])
        rank = int(self.table.ranks[cell])
        start = int(self.table.offsets[cell])
        flat = self.pool[start : start + rank * (num_in + num_out)].double()
        return flat[: rank * num_in].view(rank, num_in), flat[rank * num_in :].view(rank, num_out)


def make_adapters(num_adapters, ranks, dtype, *, modules=MODULES) -> Adapters:
    generator = torch.Generator().manual_seed(5)
    cells = LoraCells([SHAPES] * NUM_LAYERS)
    shape = (num_adapters, len(cells))
    table = LoraTable(
        cells,
        np.zeros(shape, np.int64),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.float32),
    )
    pieces, used = [torch.zeros(7)], 7
    for place in np.ndindex(num_adapters, NUM_LAYERS, len(MODULES)):
        entry, layer, module = place
        name = MODULES[module]
        if name not in modules:
            continue
        rank = ranks[sum(place) % len(ranks)]
        size = rank * sum(SHAPES[name])
        cell = (entry, cells.by_place[layer, name, 0])
        table.offsets[cell], table.ranks[cell] = used, rank
        table.scales[cell] = 0.25 + 0.5 * entry
        pieces.append(torch.randn(size, generator=generator) / HIDDEN**0.5)
        used += size
    return Adapters(torch.cat(pieces).to(dtype), table)


def popularity(kind: str, num_tokens: int) -> list[int]:
    """The adapter of each token; -1 is the base model."""
    rng = np.random.default_rng(17)
    match kind:
        case "distinct":
            return list(range(num_tokens))
        case "uniform":
            return rng.integers(0, max(1, int(num_tokens**0.5)), num_tokens).tolist()
        case "zipf:1.5":
            return (np.minimum(rng.zipf(1.5, num_tokens), num_tokens) - 1).tolist()
        case "identical":
            return [0] * num_tokens
        case "skewed":
            return [-1 if i % 5 == 4 else (0 if i % 5 else 1 + i // 5) for i in range(num_tokens)]
    raise AssertionError(kind)


def batch_of(adapters: Adapters, users: list[int], scales=None) -> LoraBatch:
    scales = scales or [1.0] * len(users)
    uses = [
        LoraUse(0, user, token, 1, scale)
        for token, (user, scale) in enumerate(zip(users, scales, strict=True))
        if user >= 0
    ]
    return lora_batch(adapters.pool, adapters.table, uses)


def oracle(y, x, adapters: Adapters, users, scales, layer) -> torch.Tensor:
    """One token and one module at a time, without a matmul."""
    expected = y.double()
    for token, entry in enumerate(users):
        if entry < 0:
            continue
        for module, first in enumerate(OUT_OFFSETS):
            scale = (
                float(adapters.table.scales[entry, layer * len(MODULES) + module]) * scales[token]
            )
            a, b = adapters.matrices(entry, layer, module)
            reduced = scale * (a * x[token].double()).sum(-1)
            expected[token, first : first + b.shape[1]] += (reduced[:, None] * b).sum(0)
    return expected


def inputs(num_tokens, dtype):
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    y = torch.randn(num_tokens, sum(out for _, out in SHAPES.values()), generator=generator)
    return y.to(dtype), x


@pytest.mark.covering(2)
@pytest.mark.some(60)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 17, 40])
@pytest.mark.parametrize("ranks", [(1,), (3,), (8,), (16,), (64,), MIXED], ids=str)
@pytest.mark.parametrize("kind", ["distinct", "uniform", "zipf:1.5", "identical", "skewed"])
def test_the_reference_equals_the_slow_loop(kind, ranks, num_tokens, dtype):
    users = popularity(kind, num_tokens)
    adapters = make_adapters(max(users) + 1 if max(users) >= 0 else 1, ranks, dtype)
    scales = [1.0 + 0.25 * (i % 3) for i in range(num_tokens)]
    y, x = inputs(num_tokens, dtype)
    expected = oracle(y, x, adapters, users, scales, layer=1)
    add_lora(y, x, batch_of(adapters, users, scales), LoraPlace(1, MODULES, OUT_OFFSETS))
    error = (y.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_token_s_bits_do_not_depend_on_its_company(dtype):
    users = popularity("zipf:1.5", 200)
    adapters = make_adapters(max(users) + 1, MIXED, dtype)
    y, x = inputs(200, dtype)
    together = y.clone()
    add_lora(together, x, batch_of(adapters, users), LoraPlace(0, MODULES, OUT_OFFSETS))
    for token in range(0, 200, 7):
        alone, row = y[token : token + 1].clone(), x[token : token + 1]
        add_lora(alone, row, batch_of(adapters, [users[token]]), LoraPlace(0, MODULES, OUT_OFFSETS))
        assert torch.equal(alone[0], together[token])


def test_uses_are_grouped_by_adapter_wave_by_wave():
    adapters = make_adapters(3, (4,), torch.float32)
    uses = [
        LoraUse(0, 2, 0, 3, 1.0),
        LoraUse(1, 0, 0, 3, 0.5),
        LoraUse(0, 0, 4, 1, 2.0),
        LoraUse(0, 2, 6, 2, 0.25),
        LoraUse(1, 2, 8, 1, 4.0),
        LoraUse(0, 1, 8, 1, 8.0),
    ]
    batch = lora_batch(adapters.pool, adapters.table, uses)
    groups = [(g.entry, g.token_indices.tolist(), g.token_scales.tolist()) for g in batch.groups()]
    assert groups == [
        (0, [4], [2.0]),
        (1, [8], [8.0]),
        (2, [0, 1, 2, 6, 7], [1.0, 1.0, 1.0, 0.25, 0.25]),
        (0, [0, 1, 2], [0.5, 0.5, 0.5]),
        (2, [8], [4.0]),
    ]
    assert batch.wave_starts.tolist() == [0, 3, 5]


def test_several_adapters_of_a_token_add_up():
    adapters = make_adapters(2, (4,), torch.float32)
    y, x = inputs(3, torch.float32)
    expected = oracle(y, x, adapters, [0, -1, 0], [1.0, 1.0, 0.5], layer=0)
    expected = oracle(expected, x, adapters, [1, -1, -1], [2.0, 1.0, 1.0], layer=0)
    uses = [LoraUse(0, 0, 0, 1, 1.0), LoraUse(1, 1, 0, 1, 2.0), LoraUse(0, 0, 2, 1, 0.5)]
    batch = lora_batch(adapters.pool, adapters.table, uses)
    add_lora(y, x, batch, LoraPlace(0, MODULES, OUT_OFFSETS))
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_module_that_is_not_adapted_is_left_alone():
    adapters = make_adapters(1, (4,), torch.float32, modules=("k_proj",))
    y, x = inputs(3, torch.float32)
    before = y.clone()
    add_lora(y, x, batch_of(adapters, [0, 0, -1]), LoraPlace(0, MODULES, OUT_OFFSETS))
    assert torch.equal(y[:, :48], before[:, :48])
    assert torch.equal(y[:, 64:], before[:, 64:])
    assert torch.equal(y[2], before[2])
    assert not torch.equal(y[:2, 48:64], before[:2, 48:64])


def test_modules_may_be_applied_one_by_one_into_their_own_output():
    adapters = make_adapters(1, (4,), torch.float32)
    y, x = inputs(3, torch.float32)
    fused, single = torch.zeros_like(y), torch.zeros(3, 16)
    batch = batch_of(adapters, [0, 0, -1])
    add_lora(fused, x, batch, LoraPlace(1, MODULES, OUT_OFFSETS))
    add_lora(single, x, batch, LoraPlace(1, ("v_proj",), (0,)))
    assert torch.equal(single, fused[:, 64:])
