"""Row layers over ranks on GPUs, interpreted: as one rank's, and the same on every rank."""

import pytest
import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.accelerator import HostAccelerator
from loraplex.kernels.channel import tree_sum
from loraplex.kernels.cuda import ranks
from loraplex.kernels.cuda.backend import CudaKernels
from loraplex.kernels.lora import LoraPlace, LoraUse
from support.pooled_adapters import BASE, PooledAdapters, token_uses
from support.ranks_in_turns import UNINITIALISED, TurnsChannel, ranks_in_turns
from support.routed_pairs import routes_by

pytestmark = [pytest.mark.slow, *UNINITIALISED]

NATIVE = WeightPrecision.NATIVE
NUM_EXPERTS = 3
IN, OUT = 256, 48
# Relative to the largest output: a few roundings of the output dtype.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
FP32 = torch.float32


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.default_generator.manual_seed(0)


def kernels_of(channel: TurnsChannel | None) -> CudaKernels:
    return CudaKernels(HostAccelerator(), channel=channel)


def share(channel: TurnsChannel, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's inputs: a part of the last axis."""
    size = tensor.shape[-1] // channel.size
    return tensor[..., channel.rank * size : (channel.rank + 1) * size].contiguous()


def check(results, expected, dtype) -> None:
    for result in results:
        assert torch.equal(result, results[0]), "the ranks differ"
    error = (results[0].double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (FP32, NATIVE),
        (torch.float16, NATIVE),
        (torch.float16, WeightPrecision.INT8),
        (torch.float16, WeightPrecision.INT4),
    ],
)
def test_row_layers_equal_one_rank(size, dtype, precision):
    weight, bias = torch.randn(OUT, IN) / 16, torch.randn(OUT)
    weight, bias, x = weight.to(dtype), bias.to(dtype), torch.randn(5, IN).to(dtype)
    if precision is not NATIVE:
        # Ranks have groups of their own; these numbers are the same in any group.
        weight = torch.randint(-7, 8, (OUT, IN)).to(dtype) / 64
        weight[:, ::32] = -8 / 64
    one = kernels_of(None)
    expected = one.linear(x, one.pack_linear(weight, bias, precision, num_blocks=4))

    def body(channel):
        kernels = kernels_of(channel)
        packed = kernels.pack_linear(share(channel, weight), bias, precision, num_blocks=4 // size)
        packed = kernels.join_linear(kernels.linear_parts(packed))
        return kernels.linear(share(channel, x), packed)

    check(ranks_in_turns(size, body), expected, dtype)


def test_fp8_rows_are_scaled_by_rank():
    weight, x = torch.randn(OUT, IN).half() / 16, torch.randn(3, IN).half()
    one = kernels_of(None)
    expected = one.linear(x, one.pack_linear(weight, None, WeightPrecision.FP8))

    def body(channel):
        kernels = kernels_of(channel)
        packed = kernels.pack_linear(share(channel, weight), None, WeightPrecision.FP8, 2)
        return kernels.linear(share(channel, x), packed)

    results = ranks_in_turns(2, body)
    assert torch.equal(*results)
    # float8 has 3 bits after the first.
    assert float((results[0] - expected).abs().max() / expected.abs().max()) < 0.05


@pytest.mark.parametrize("size", [3, 4])
def test_many_rows_are_added_apart_to_the_same_bits(size, monkeypatch):
    """Each rank adds its own rows, which costs fewer bytes."""
    num_rows = 10  # which no size divides
    shares = torch.randn(size, num_rows, OUT)
    bias = torch.randn(OUT).half()

    def body(channel):
        total = ranks.RankSums(channel).total(shares[channel.rank], bias, torch.float16)
        return total, channel.num_bytes

    few = ranks_in_turns(size, body)
    monkeypatch.setattr(ranks, "_FEW_BYTES", 0)
    many = ranks_in_turns(size, body)
    expected = (tree_sum(list(shares)) + bias.float()).half()
    for total, _ in few + many:
        assert torch.equal(total, expected)
    assert many[0][1] < few[0][1]


@pytest.mark.parametrize("num_shares", range(1, 9))
def test_shares_are_added_as_a_tree(num_shares):
    shares = torch.randn(num_shares, 3, 70)
    total = ranks.sum_of_shares(shares, None, FP32)
    assert torch.equal(total, tree_sum(list(shares)))


def test_columns_of_uneven_shares():
    whole = torch.randn(3, 11)

    def body(channel):
        first, end = (11 * rank // 4 for rank in (channel.rank, channel.rank + 1))
        return kernels_of(channel).gather_columns(whole[:, first:end], 11)

    for result in ranks_in_turns(4, body):
        assert torch.equal(result, whole)


def cut_inputs(channel: TurnsChannel, whole: PooledAdapters, shapes, num_experts=None):
    """Return this rank's share of adapters: columns of A, all of B."""
    size = channel.size
    own_shapes = {name: (num_in // size, num_out) for name, (num_in, num_out) in shapes.items()}
    table = whole.table
    own = PooledAdapters(
        *(len(table.ranks), (int(table.ranks.max()),), own_shapes, whole.pool.dtype),
        num_experts=num_experts,
    )
    own.table.ranks[:] = table.ranks
    own.table.scales[:] = table.scales
    own.pool.fill_(torch.nan)
    for entry, cell in ((e, c) for e in range(len(table.ranks)) for c in range(len(table.cells))):
        a, b = whole._matrices(entry, cell)
        content = torch.cat((share(channel, a).flatten(), b.flatten())).to(own.pool.dtype)
        first = int(own.table.offsets[entry, cell])
        own.pool[first : first + len(content)] = content
    return own


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "longest"), [(FP32, 4), (torch.float16, 4), (torch.float16, 16)], ids=str
)
def test_adapters_of_mixed_ranks(size, dtype, longest):
    shapes = {"down_proj": (IN, OUT)}
    adapters = PooledAdapters(4, (1, 40, 0, 16), shapes, dtype)
    uses = [
        *token_uses([0, 1, 2, BASE, 3]),
        LoraUse(0, 1, 5, 6, 0.5),
        *token_uses([3, 2, BASE, BASE, 1], wave=1),
    ]
    y, x = torch.randn(11, OUT).to(dtype), torch.randn(11, IN).to(dtype)
    expected = adapters.expected(y, x, uses, 1, ("down_proj",), (0,))

    def body(channel):
        result, own = y.clone(), cut_inputs(channel, adapters, shapes)
        batch = own.batch(uses, 11, longest)
        inputs = share(channel, x)
        kernels_of(channel).add_lora(
            result, inputs, batch, LoraPlace(1, ("down_proj",), (0,), 4 // size)
        )
        return result

    check(ranks_in_turns(size, body), expected, dtype)


@pytest.mark.parametrize(("dtype", "longest"), [(FP32, 4), (torch.float16, 16)], ids=str)
def test_experts_with_biases_and_adapters(dtype, longest):
    size, name, num_tokens = 2, "experts.down_proj", 5
    shapes = {name: (64, OUT)}
    routes = routes_by("skewed", num_tokens, 2, NUM_EXPERTS)
    weight = (torch.randn(NUM_EXPERTS, OUT, 64) / 8).to(dtype)
    bias, x = torch.randn(NUM_EXPERTS, OUT).to(dtype), torch.randn(2 * num_tokens, 64).to(dtype)
    experts = {name: NUM_EXPERTS}
    adapters = PooledAdapters(3, (5, 0, 17), shapes, dtype, num_experts=experts)
    uses = token_uses([0, 1, BASE, 2, 0])
    one = kernels_of(None)
    base = one.grouped_linear(x, one.pack_linear(weight, bias), routes)
    expected = adapters.expected_of_experts(base, x, uses, routes, 1, (name,), (0,))

    def body(channel):
        kernels, own = kernels_of(channel), cut_inputs(channel, adapters, shapes, experts)
        packed = kernels.pack_linear(share(channel, weight), bias, num_blocks=2)
        inputs = share(channel, x)
        y = kernels.grouped_linear(inputs, packed, routes)
        batch = own.batch(uses, num_tokens, longest)
        kernels.add_expert_lora(y, inputs, batch, routes, LoraPlace(1, (name,), (0,), 2))
        return y

    check(ranks_in_turns(size, body), expected, dtype)


def test_a_recorded_step_replays():
    weight, first, second = torch.randn(OUT, IN) / 16, torch.randn(2, IN), torch.randn(2, IN)

    def body(channel):
        kernels = kernels_of(channel)
        packed = kernels.pack_linear(share(channel, weight), None, num_blocks=2)
        fixed = share(channel, first).clone()

        def step(x):
            return kernels.repeat("step", (x,), lambda: kernels.linear(fixed, packed)).clone()

        with kernels.recording():
            step(fixed)
        num_before = channel.num_exchanges
        return step(share(channel, second)), channel.num_exchanges - num_before

    for result, num_exchanges in ranks_in_turns(2, body):
        torch.testing.assert_close(result, second @ weight.t(), rtol=1e-5, atol=1e-5)
        assert num_exchanges == 1
