"""Multi-LoRA at the sizes of Llama-3.1-8B: against float64, by CUDA graphs, and bit for bit."""

import dataclasses
import functools

import pytest
import torch

from loraplex.kernels.accelerator import CudaAccelerator
from loraplex.kernels.cuda.graphs import StepGraphs
from loraplex.kernels.cuda.lora import CudaLora
from loraplex.kernels.lora import LoraPlace, LoraUse, ModuleShapes
from support.pooled_adapters import BASE, PooledAdapters, token_uses, users

pytestmark = pytest.mark.gpu

SHAPES = {"q_proj": (4096, 4096), "k_proj": (4096, 1024), "v_proj": (4096, 1024)}
OFFSETS = (0, 4096, 5120)
DOWN = {"down_proj": (14336, 4096)}
ODD = {"q_proj": (1003, 250), "k_proj": (1003, 33), "v_proj": (1003, 33)}
ODD_OFFSETS = (0, 250, 283)
MIXED = (1, 64, 3, 0, 16, 8, 17)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
# Relative to the largest output: a few roundings of the output dtype.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}


@functools.cache
def pooled(kind: str, dtype: torch.dtype, ranks=MIXED, num_adapters=64) -> PooledAdapters:
    torch.manual_seed(0)
    shapes = {"qkv": SHAPES, "down": DOWN, "odd": ODD}[kind]
    alignment = 1 if kind == "odd" else 1024
    device = torch.device("cuda")
    return PooledAdapters(num_adapters, ranks, shapes, dtype, device, alignment=alignment)


def modules_of(adapters: PooledAdapters) -> ModuleShapes:
    return adapters.table.cells.layers[1]


def inputs(adapters: PooledAdapters, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, x)"""
    shapes, like = list(modules_of(adapters).values()), adapters.pool
    y = torch.randn(num_tokens, sum(out for _, out in shapes), device="cuda").to(like.dtype)
    return y, torch.randn(num_tokens, shapes[0][0], device="cuda").to(like.dtype)


def offsets_of(adapters: PooledAdapters) -> tuple[int, ...]:
    sizes = [out for _, out in modules_of(adapters).values()]
    return tuple(sum(sizes[:index]) for index in range(len(sizes)))


def added(adapters, y, x, batch, *, batch_invariant=False):
    kernel = CudaLora(y.device, batch_invariant=batch_invariant)
    result = y.clone()
    kernel.add(result, x, batch, LoraPlace(1, tuple(modules_of(adapters)), offsets_of(adapters)))
    return result


def check(adapters, uses, num_tokens, longest=None) -> None:
    y, x = inputs(adapters, num_tokens)
    expected = adapters.expected(y, x, uses, 1, tuple(modules_of(adapters)), offsets_of(adapters))
    result = added(adapters, y, x, adapters.batch(uses, num_tokens, longest))
    error = (result.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[y.dtype]


@DTYPES
@pytest.mark.parametrize("popularity", ["identical", "distinct", "skewed"])
@pytest.mark.parametrize("num_tokens", [1, 32, 64])
@pytest.mark.parametrize("longest", [4, 16, 64])
@pytest.mark.parametrize("kind", ["qkv", "odd"])
def test_equals_float64(kind, popularity, num_tokens, dtype, longest):
    adapters = pooled(kind, dtype)
    check(adapters, token_uses(users(popularity, num_tokens)), num_tokens, longest)


@DTYPES
@pytest.mark.parametrize("rank", [1, 3, 8, 16, 64, 256])
def test_ranks(rank, dtype):
    adapters = pooled("qkv", dtype, (rank,), 4)
    check(adapters, token_uses([0, 1, 2, 3, BASE]), 5, 4)
    check(adapters, [LoraUse(0, 1, 0, 100, 1.0), LoraUse(0, 2, 100, 300, 0.5)], 400)


@DTYPES
@pytest.mark.parametrize("longest", [4, 64])
def test_many_inputs(dtype, longest):
    adapters = pooled("down", dtype)
    check(adapters, token_uses(users("skewed", 20)), 20, longest)


@DTYPES
def test_a_long_prompt_among_rows_that_decode_and_two_adapters(dtype):
    uses = [LoraUse(0, 5, 0, 1500, 1.0), LoraUse(1, 6, 0, 1500, 0.5)]
    uses += [LoraUse(0, 10 + row, 1500 + row, 1, 2.0) for row in range(31)]
    check(pooled("qkv", dtype), uses, 1531)


@DTYPES
def test_a_token_s_bits_do_not_depend_on_its_company(dtype):
    adapters = pooled("qkv", dtype)
    uses = [LoraUse(0, 1, 0, 300, 1.0), LoraUse(0, 4, 300, 1, 0.5), LoraUse(1, 3, 4, 2, 1.0)]
    y, x = inputs(adapters, 301)
    # Then what is left is the rounding of the sums.
    y = -added(adapters, torch.zeros_like(y), x, adapters.batch(uses, 301))
    together = added(adapters, y, x, adapters.batch(uses, 301), batch_invariant=True)
    for token in (0, 4, 299, 300):
        own = [
            LoraUse(use.wave, use.entry, 0, 1, use.scale)
            for use in uses
            if use.first_token <= token < use.first_token + use.num_tokens
        ]
        row = slice(token, token + 1)
        alone = added(adapters, y[row], x[row], adapters.batch(own, 1), batch_invariant=True)
        assert torch.equal(alone[0], together[token])


@DTYPES
def test_a_graph_computes_other_batches_of_its_size(dtype):
    adapters = pooled("qkv", dtype)
    accelerator = CudaAccelerator(torch.device("cuda"))
    graphs = StepGraphs(accelerator)
    kernel = CudaLora(accelerator.device, batch_invariant=False)
    y, x = inputs(adapters, 32)
    accelerator.synchronize()

    def step(batch):
        def compute():
            result = y.clone()
            kernel.add(result, x, batch, LoraPlace(1, tuple(modules_of(adapters)), OFFSETS))
            return result

        return graphs.repeat(32, batch.segments.tensors, compute)

    with accelerator.compute():
        graphs.is_recording = True
        step(adapters.batch(token_uses([0]), 32))
        graphs.is_recording = False
        for popularity in ("distinct", "identical", "skewed"):
            batch = adapters.batch(token_uses(users(popularity, 32)), 32)
            replayed = step(batch).clone()
            assert torch.equal(replayed, added(adapters, y, x, batch))
        accelerator.synchronize()


def test_addresses_beyond_two_billion_elements():
    """The pool of a large card: offsets do not fit into 32 bits."""
    adapters = pooled("qkv", torch.bfloat16, (8,), 2)
    shift = 2**31 + 1024
    pool = torch.empty(shift + len(adapters.pool), dtype=torch.bfloat16, device="cuda")
    pool[shift:] = adapters.pool
    batch = adapters.batch(token_uses([1, 0]), 2)
    table = dataclasses.replace(
        batch.table,
        on_device=dataclasses.replace(
            batch.table.on_device, offsets=batch.table.on_device.offsets + shift
        ),
    )
    y, x = inputs(adapters, 2)
    far = added(adapters, y, x, dataclasses.replace(batch, pool=pool, table=table))
    assert torch.equal(far, added(adapters, y, x, batch))
