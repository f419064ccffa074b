"""Row layers of several ranks: the bits of one rank that has all the blocks.

Ranks are threads here, each with a backend and an end of the channel of its own.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.pooled_adapters import PooledAdapters, token_uses
from tests.support.routed_pairs import routes_by

from loraplex.core.errors import DeviceLost, InternalError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.channel import tree_sum
from loraplex.kernels.lora import LoraPlace
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.channel import SLOT_BYTES, Segment, SharedMemoryChannel
from loraplex.kernels.native.library import (
    NativeLibraryError,
    available_instruction_sets,
    load_library,
)
from support.naming import naming

try:
    INSTRUCTION_SETS = available_instruction_sets()
except NativeLibraryError as error:
    pytest.skip(f"the native kernels are not built: {error}", allow_module_level=True)

NATIVE, INT8, INT4, _ = WeightPrecision
KINDS = pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (torch.float32, NATIVE),
        (torch.bfloat16, NATIVE),
        (torch.float16, NATIVE),
        (torch.bfloat16, INT8),
        (torch.float32, INT4),
    ],
    ids=str,
)
SIZES = pytest.mark.parametrize("size", [2, 4])
SLOTS = pytest.mark.parametrize("slot_bytes", [1600, SLOT_BYTES])
"""Few rows of the layers here, or all of them."""
BLOCKS, BLOCK_INPUTS, OUTPUTS = 4, 160, 130
IN_FEATURES = BLOCKS * BLOCK_INPUTS
RANKS = (8, 1, 64, 3)

Body = Callable[[NativeKernels, int], Any]
"""What a rank computes with its kernels."""


@pytest.fixture(params=INSTRUCTION_SETS)
def library(request):
    torch.default_generator.manual_seed(0)
    return load_library([request.param])


def run_ranks(library, size: int, body: Body, slot_bytes: int = SLOT_BYTES) -> list[Any]:
    """Return what the body returned on each rank."""
    with Segment(library, size, slot_bytes) as segment:
        channels = [SharedMemoryChannel(library, segment.address, rank) for rank in range(size)]

    def run(channel: SharedMemoryChannel) -> Any:
        try:
            return body(NativeKernels(library, 2, channel), channel.rank)
        except BaseException as error:
            channel.abort(str(error))
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, channels))


def share(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """This rank's inputs, contiguous as its layers give them."""
    return x.chunk(size, -1)[rank].contiguous()


def all_equal(results: list[torch.Tensor], expected: torch.Tensor) -> bool:
    return all(torch.equal(result, expected) for result in results)


@pytest.mark.covering(2)
@pytest.mark.some(20)
@KINDS
@SIZES
@SLOTS
def test_a_row_layer(library, dtype, precision, size, slot_bytes):
    weight, bias = torch.randn(OUTPUTS, IN_FEATURES).to(dtype), torch.randn(OUTPUTS).to(dtype)
    x = torch.randn(40, IN_FEATURES).to(dtype)
    one = NativeKernels(library, 1)
    packed = one.pack_linear(weight, bias, precision, BLOCKS)

    def body(kernels, rank):
        own = kernels.pack_linear(share(weight, rank, size), bias, precision, BLOCKS // size)
        return [kernels.linear(share(x[:n], rank, size), own) for n in (1, 3, 40)]

    for results in run_ranks(library, size, body, slot_bytes):
        for y in results:
            assert torch.equal(y, one.linear(x[: len(y)], packed))


@pytest.mark.covering(2)
@pytest.mark.some(20)
@KINDS
@SIZES
@SLOTS
def test_experts(library, dtype, precision, size, slot_bytes):
    weight = torch.randn(5, OUTPUTS, IN_FEATURES).to(dtype)
    bias = torch.randn(5, OUTPUTS).to(dtype)
    routes = routes_by("skewed", 20, 2, 5)
    x = torch.randn(40, IN_FEATURES).to(dtype)
    one = NativeKernels(library, 1)
    expected = one.grouped_linear(x, one.pack_linear(weight, bias, precision, BLOCKS), routes)

    def body(kernels, rank):
        own = kernels.pack_linear(share(weight, rank, size), bias, precision, BLOCKS // size)
        return kernels.grouped_linear(share(x, rank, size), own, routes)

    assert all_equal(run_ranks(library, size, body, slot_bytes), expected)


def adapters_of_rank(all_of: PooledAdapters, rank: int, size: int) -> PooledAdapters:
    """The same adapters with the rank's columns of each A."""
    cells = all_of.table.cells
    shapes = {module: (n // size, out) for module, (n, out) in cells.layers[0].items()}
    own = PooledAdapters(
        len(all_of.table.ranks), RANKS, shapes, all_of.pool.dtype, num_experts=cells.num_experts[0]
    )
    for place, offset in np.ndenumerate(own.table.offsets):
        source = int(all_of.table.offsets[place])
        lora_rank = int(own.table.ranks[place])
        in_features, out_features = cells.shapes[place[1]]
        middle = source + lora_rank * in_features
        a = all_of.pool[source:middle].view(lora_rank, in_features)
        b = all_of.pool[middle : middle + lora_rank * out_features]
        matrices = torch.cat([share(a, rank, size).flatten(), b])
        own.pool[offset : offset + len(matrices)] = matrices
    return own


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@SIZES
@SLOTS
def test_lora(library, dtype, size, slot_bytes):
    adapters = PooledAdapters(5, RANKS, {"o_proj": (IN_FEATURES, OUTPUTS)}, dtype)
    users = [token % 5 for token in range(17)]
    uses = [*token_uses(users), *token_uses(users[2:], wave=1)]
    x, y = torch.randn(17, IN_FEATURES).to(dtype), torch.randn(17, OUTPUTS).to(dtype)
    expected = y.clone()
    one = NativeKernels(library, 1)
    one.add_lora(expected, x, adapters.batch(uses, 17), LoraPlace(1, ("o_proj",), (0,), BLOCKS))
    shares = [adapters_of_rank(adapters, rank, size) for rank in range(size)]

    def body(kernels, rank):
        result, batch = y.clone(), shares[rank].batch(uses, 17)
        kernels.add_lora(
            result, share(x, rank, size), batch, LoraPlace(1, ("o_proj",), (0,), BLOCKS // size)
        )
        return result

    assert all_equal(run_ranks(library, size, body, slot_bytes), expected)


@pytest.mark.covering(2)
@SIZES
@SLOTS
def test_lora_of_experts(library, size, slot_bytes):
    module = "experts.down_proj"
    adapters = PooledAdapters(
        3, RANKS, {module: (IN_FEATURES, 19)}, torch.float32, num_experts={module: 5}
    )
    routes = routes_by("skewed", 12, 2, 5)
    uses = token_uses([token % 3 for token in range(12)])
    x, y = torch.randn(24, IN_FEATURES), torch.randn(24, 19)
    expected = y.clone()
    one = NativeKernels(library, 1)
    one.add_expert_lora(
        expected, x, adapters.batch(uses, 12), routes, LoraPlace(1, (module,), (0,), BLOCKS)
    )
    shares = [adapters_of_rank(adapters, rank, size) for rank in range(size)]

    def body(kernels, rank):
        result, batch = y.clone(), shares[rank].batch(uses, 12)
        blocks = BLOCKS // size
        kernels.add_expert_lora(
            result, share(x, rank, size), batch, routes, LoraPlace(1, (module,), (0,), blocks)
        )
        return result

    assert all_equal(run_ranks(library, size, body, slot_bytes), expected)


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", [1, 2, 3])
@SLOTS
def test_columns_of_all_ranks(library, size, slot_bytes):
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.randn(33, 301).to(dtype)

        def body(kernels, rank, whole=whole):
            own = whole[:, 301 * rank // size : 301 * (rank + 1) // size]
            return kernels.gather_columns(own, 301)

        assert all_equal(run_ranks(library, size, body, slot_bytes), whole)


def test_one_rank_has_all_columns(library):
    x = torch.randn(2, 5)
    assert NativeKernels(library, 1).gather_columns(x, 5) is x


class Step:
    """A row layer with adapters, and what follows it: columns that ranks have a share of."""

    def __init__(self, weight: torch.Tensor, head: torch.Tensor, adapters: PooledAdapters) -> None:
        self.weight, self.head, self.adapters = weight, head, adapters

    def run(self, kernels: NativeKernels, inputs: list[torch.Tensor], blocks: int) -> list[Any]:
        row = kernels.pack_linear(self.weight, None, num_blocks=blocks)
        column = kernels.pack_linear(self.head, None)

        def compute() -> torch.Tensor:
            y = kernels.linear(x, row)
            kernels.add_lora(y, x, batch, LoraPlace(1, ("o_proj",), (0,), blocks))
            return kernels.gather_columns(kernels.linear(y, column), 12)

        results = []
        for x in inputs:
            batch = self.adapters.batch(token_uses([0, 1, 2]), 3)
            results.append(kernels.repeat("step", [x, batch], compute).clone())
        assert kernels._programs["step"] is not None
        return results


@SIZES
def test_a_recorded_step_exchanges_again(library, size):
    weight, head = torch.randn(OUTPUTS, IN_FEATURES), torch.randn(12, OUTPUTS)
    adapters = PooledAdapters(3, RANKS, {"o_proj": (IN_FEATURES, OUTPUTS)}, torch.float32)
    inputs = [torch.randn(3, IN_FEATURES) for _ in range(3)]
    expected = Step(weight, head, adapters).run(NativeKernels(library, 1), inputs, BLOCKS)

    def body(kernels, rank):
        own = adapters_of_rank(adapters, rank, size)
        step = Step(share(weight, rank, size), head.chunk(size)[rank], own)
        return step.run(kernels, [share(x, rank, size) for x in inputs], BLOCKS // size)

    for results in run_ranks(library, size, body):
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@SIZES
def test_a_layer_apart_is_a_share_without_the_bias(library, size):
    weight, bias = torch.randn(OUTPUTS, IN_FEATURES), torch.randn(OUTPUTS)
    x = torch.randn(4, IN_FEATURES)
    one = NativeKernels(library, 1)
    packed = one.pack_linear(weight, bias, num_blocks=BLOCKS)

    def body(kernels, rank):
        own = kernels.pack_linear(share(weight, rank, size), bias, num_blocks=BLOCKS // size)
        apart = kernels.linear_apart(share(x, rank, size), own, torch.float32)
        return apart, kernels.squared_row_norms(own)

    sums, norms = zip(*run_ranks(library, size, body), strict=True)
    assert torch.equal(tree_sum(sums), one.linear_apart(x, packed, torch.float32))
    assert torch.equal(tree_sum(norms), one.squared_row_norms(packed))


def test_another_layer_is_not_added(library):
    weight, x = torch.randn(OUTPUTS, 64), torch.randn(4, 64)
    expected = NativeKernels(library, 1)
    y = expected.linear(x, expected.pack_linear(weight, None))
    results = run_ranks(library, 2, lambda k, _: k.linear(x, k.pack_linear(weight, None)))
    assert all_equal(results, y)


def test_a_slot_that_takes_no_row(library):
    weight = torch.randn(OUTPUTS, 64)

    def body(kernels, _):
        packed = kernels.pack_linear(weight, None, num_blocks=1)
        with pytest.raises(InternalError, match=naming("loraplex_linear")):
            kernels.linear(torch.randn(1, 64), packed)
        with pytest.raises(InternalError, match=naming("loraplex_gather_columns")):
            kernels.gather_columns(torch.randn(1, 65), 130)

    run_ranks(library, 2, body, slot_bytes=128)


def test_an_abort_ends_the_wait_of_a_layer(library):
    def body(kernels, rank):
        packed = kernels.pack_linear(torch.randn(5, 64), None, num_blocks=1)
        if rank == 1:
            raise ValueError("this rank has failed")
        with pytest.raises(DeviceLost):
            kernels.linear(torch.randn(1, 64), packed)

    with pytest.raises(ValueError, match="this rank has failed"):
        run_ranks(library, 2, body)
