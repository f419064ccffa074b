"""Multi-LoRA of a GPU, interpreted: against float64 over ranks, popularity and variants."""

import dataclasses

import pytest
import torch

from loraplex.kernels.accelerator import HostAccelerator
from loraplex.kernels.adapter_parts import FACTOR, SHIFT, AdapterParts, OutputVector, PartsUse
from loraplex.kernels.cuda import lora as launcher
from loraplex.kernels.cuda.graphs import StepGraphs
from loraplex.kernels.cuda.lora import CudaLora
from loraplex.kernels.lora import LoraPlace, LoraUse, add_lora, batch_of_rows, head_place
from loraplex.kernels.sizes import ProgramSizes
from support.pooled_adapters import BASE, PooledAdapters, token_uses, users

pytestmark = pytest.mark.slow

HOST = torch.device("cpu")
SHAPES = {
    "q_proj": (96, 80),
    "other": (40, 8),
    "k_proj": (96, 16),
    "v_proj": (96, 16),
}
FUSED = ("q_proj", "k_proj", "v_proj")
OFFSETS = (0, 80, 96)
WIDTH = 112
ODD = {"q_proj": (37, 50), "k_proj": (37, 3), "v_proj": (37, 19)}
ODD_OFFSETS = (0, 50, 53)
MIXED = (1, 64, 3, 0, 16, 8, 17)

# Relative to the largest output: a few roundings of the output dtype.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1.5e-3}
BOTH = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def slow(*values, **options):
    return pytest.param(*values, marks=pytest.mark.slow, **options)


# Pieces of few tokens, and matrices.
VARIANTS = pytest.mark.parametrize(
    ("dtype", "longest"),
    [
        pytest.param(torch.float32, 4, id="fp32-few"),
        slow(torch.float16, 4, id="fp16-few"),
        pytest.param(torch.float16, 16, id="fp16-many"),
        slow(torch.float16, 32, id="fp16-more"),
    ],
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.default_generator.manual_seed(0)


def inputs(num_tokens, dtype, in_features=96, width=WIDTH):
    """(y, x)"""
    y, x = torch.randn(num_tokens, width), torch.randn(num_tokens, in_features)
    return y.to(dtype), x.to(dtype)


def added(y, x, batch, layer=1, modules=FUSED, offsets=OFFSETS, **options):
    kernel = CudaLora(HOST, **{"batch_invariant": False} | options)
    result = y.clone()
    kernel.add(result, x, batch, LoraPlace(layer, modules, offsets))
    return result


def error(result, expected) -> float:
    assert not result.isnan().any()
    return float((result.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.covering(2)
@VARIANTS
@pytest.mark.parametrize("popularity", ["identical", "distinct", "skewed"])
@pytest.mark.parametrize("ranks", [slow((1,)), slow((8,)), MIXED], ids=str)
def test_equals_float64(popularity, ranks, dtype, longest):
    num_tokens = 5
    adapters = PooledAdapters(num_tokens, ranks, SHAPES, dtype)
    uses = token_uses(users(popularity, num_tokens))
    y, x = inputs(num_tokens, dtype)
    expected = adapters.expected(y, x, uses, 1, FUSED, OFFSETS)
    result = added(y, x, adapters.batch(uses, num_tokens, longest))
    assert error(result, expected) < TOLERANCE[dtype]
    for token in set(range(num_tokens)) - {use.first_token for use in uses}:
        assert torch.equal(result[token], y[token])


@VARIANTS
def test_a_group_of_several_pieces(dtype, longest):
    adapters = PooledAdapters(2, (5, 33), SHAPES, dtype)
    group = longest + 3
    uses = [LoraUse(0, 1, 2, group, 0.5), LoraUse(0, 0, group + 2, 3, 2.0)]
    y, x = inputs(group + 5, dtype)
    expected = adapters.expected(y, x, uses, 0, FUSED, OFFSETS)
    result = added(y, x, adapters.batch(uses, group + 5, longest), layer=0)
    assert error(result, expected) < TOLERANCE[dtype]
    assert torch.equal(result[:2], y[:2])


@VARIANTS
def test_sizes_that_no_tile_divides(dtype, longest):
    adapters = PooledAdapters(3, (2, 7), ODD, dtype)
    uses = token_uses([2, BASE, 0, 1, 1, 1, 1, 1, 1])
    y, x = inputs(9, dtype, 37, 72)
    expected = adapters.expected(y, x, uses, 1, FUSED, ODD_OFFSETS)
    result = added(y, x, adapters.batch(uses, 9, longest), offsets=ODD_OFFSETS)
    assert error(result, expected) < TOLERANCE[dtype]


@BOTH
def test_many_splits_and_tiles(dtype, monkeypatch):
    """Splits and tiles of a large layer, by narrow tiles."""
    monkeypatch.setattr(launcher, "_WIDTH_BYTES", 64)
    adapters = PooledAdapters(2, (5, 20), SHAPES, dtype)
    uses = token_uses([1, BASE, 0])
    y, x = inputs(3, dtype)
    expected = adapters.expected(y, x, uses, 1, FUSED, OFFSETS)
    result = added(y, x, adapters.batch(uses, 3), sizes=ProgramSizes(lora_splits=3))
    assert error(result, expected) < TOLERANCE[dtype]


def test_many_splits_for_matrices(monkeypatch):
    monkeypatch.setattr(launcher, "MATRIX_INPUTS", 16)
    monkeypatch.setattr(launcher, "MATRIX_OUTPUTS", 16)
    adapters = PooledAdapters(2, (5, 40), SHAPES, torch.float16)
    uses = [LoraUse(0, 1, 0, 17, 0.5), LoraUse(0, 0, 18, 2, 2.0)]
    y, x = inputs(20, torch.float16)
    expected = adapters.expected(y, x, uses, 1, FUSED, OFFSETS)
    result = added(y, x, adapters.batch(uses, 20, 16))
    assert error(result, expected) < TOLERANCE[torch.float16]


@VARIANTS
def test_a_second_adapter_is_added_to_what_the_first_one_left(dtype, longest):
    adapters = PooledAdapters(4, MIXED, SHAPES, dtype)
    uses = token_uses([0, 1, 1, BASE, 3]) + token_uses([2, BASE, 0, BASE, 2], wave=1)
    y, x = inputs(5, dtype)
    expected = adapters.expected(y, x, uses, 1, FUSED, OFFSETS)
    result = added(y, x, adapters.batch(uses, 5, longest))
    assert error(result, expected) < TOLERANCE[dtype]
    reference = y.clone()
    add_lora(reference, x, adapters.batch(uses, 5, longest), LoraPlace(1, FUSED, OFFSETS))
    torch.testing.assert_close(result, reference, rtol=2e-3, atol=2e-3)


@VARIANTS
def test_a_module_that_is_not_adapted_is_left_alone(dtype, longest):
    adapters = PooledAdapters(1, (0, 0, 3), SHAPES, dtype, num_layers=1)
    y, x = inputs(3, dtype)
    result = added(y, x, adapters.batch(token_uses([0, 0, BASE]), 3, longest), layer=0)
    assert torch.equal(result[:, :80], y[:, :80])
    assert torch.equal(result[:, 96:], y[:, 96:])
    assert not torch.equal(result[:2, 80:96], y[:2, 80:96])


@VARIANTS
def test_tokens_that_fill_a_step_up_are_left_alone(dtype, longest):
    adapters = PooledAdapters(2, (4,), SHAPES, dtype)
    uses = token_uses([1, 0])
    y, x = inputs(6, dtype)
    result = added(y, x, adapters.batch(uses, 6, longest))
    assert torch.equal(result[2:], y[2:])
    expected = adapters.expected(y, x, uses, 1, FUSED, OFFSETS)
    assert error(result, expected) < TOLERANCE[dtype]


def test_one_module_and_a_part_of_a_wider_output():
    adapters = PooledAdapters(2, (4,), SHAPES, torch.float32)
    batch = adapters.batch(token_uses([1, 0]), 2)
    y, x = inputs(2, torch.float32)
    wide = torch.zeros(2, 300)
    CudaLora(HOST, batch_invariant=False).add(
        wide[:, 100:212], x, batch, LoraPlace(1, FUSED[1:], OFFSETS[1:])
    )
    whole = added(torch.zeros_like(y), x, batch)
    assert torch.equal(wide[:, 180:212], whole[:, 80:])
    assert not wide[:, :180].any()


def test_of_a_large_rank_vector_in_a_small_range_nothing_is_lost():
    """x A^T is beyond the range of float16, what is added is not."""
    adapters = PooledAdapters(1, (4,), {"q_proj": (64, 32)}, torch.float16, num_layers=1)
    y, x = inputs(3, torch.float16, 64, 32)
    uses = [LoraUse(0, 0, 0, 3, 1e8)]
    adapters.pool *= 0.02
    expected = adapters.expected(y, x, uses, 0, ("q_proj",), (0,))
    result = added(y, x, adapters.batch(uses, 3, 16), 0, ("q_proj",), (0,))
    assert error(result, expected) < TOLERANCE[torch.float16]


@BOTH
def test_a_token_s_bits_do_not_depend_on_its_company(dtype):
    adapters = PooledAdapters(4, (3, 20), SHAPES, dtype)
    uses = [LoraUse(0, 1, 0, 6, 1.0), LoraUse(0, 2, 6, 1, 0.5), LoraUse(1, 3, 4, 2, 1.0)]
    y, x = inputs(7, dtype)
    # Then what is left is the rounding of the sums.
    y = -added(torch.zeros_like(y), x, adapters.batch(uses, 7, 16))
    together = added(y, x, adapters.batch(uses, 7, 16), batch_invariant=True)
    for token in (0, 4, 6):
        own = [
            LoraUse(use.wave, use.entry, 0, 1, use.scale)
            for use in uses
            if use.first_token <= token < use.first_token + use.num_tokens
        ]
        batch = adapters.batch(own, 1, 4)
        alone = added(y[token : token + 1], x[token : token + 1], batch, batch_invariant=True)
        assert torch.equal(alone[0], together[token])


def test_what_an_adapter_changes_of_the_outputs_comes_first():
    adapters = PooledAdapters(1, (4,), SHAPES, torch.float32)
    batch = adapters.batch(token_uses([0, BASE]), 2)
    parts = AdapterParts({(1, "k_proj"): [OutputVector(0, torch.full((16,), 2.0), None)]})
    changed = PartsUse(parts, batch.token_indices, batch.token_scales)
    batch = dataclasses.replace(batch, parts=(changed,))
    y, x = inputs(2, torch.float32)
    reference = y.clone()
    add_lora(reference, x, batch, LoraPlace(1, FUSED, OFFSETS))
    torch.testing.assert_close(added(y, x, batch), reference)


@VARIANTS
@pytest.mark.parametrize("second", [[], [2, BASE, 0]], ids=["one wave", "two waves"])
def test_vectors_of_the_table_have_the_bits_of_the_reference(dtype, longest, second):
    """A step of one wave and few tokens applies them without a launch of their own."""
    adapters = PooledAdapters(3, (0,), SHAPES, dtype, alignment=16)
    adapters = adapters.with_vectors((1, "k_proj"), SHIFT, FACTOR)
    adapters = adapters.with_vectors((1, "q_proj"), SHIFT, SHIFT, FACTOR | SHIFT)
    adapters = adapters.with_vectors((0, "q_proj"), FACTOR)
    uses = token_uses([1, 1, 0, BASE]) + token_uses(second, wave=1)
    batch = dataclasses.replace(adapters.batch(uses, 4, longest), has_vectors=True)
    y, x = inputs(4, dtype)
    reference = y.clone()
    add_lora(reference, x, batch, LoraPlace(1, FUSED, OFFSETS))
    result = added(y, x, batch)
    assert not torch.equal(reference, y)
    assert torch.equal(result, reference)
    assert torch.equal(result[3], y[3])


@BOTH
def test_vectors_come_before_lora_of_the_same_module(dtype):
    adapters = PooledAdapters(3, MIXED, SHAPES, dtype).with_vectors((1, "k_proj"), FACTOR | SHIFT)
    batch = dataclasses.replace(adapters.batch(token_uses([2, BASE, 0]), 3), has_vectors=True)
    y, x = inputs(3, dtype)
    reference = y.clone()
    add_lora(reference, x, batch, LoraPlace(1, FUSED, OFFSETS))
    torch.testing.assert_close(added(y, x, batch), reference, rtol=2e-3, atol=2e-3)


def test_vectors_in_and_outside_the_table_are_shares_of_the_same_outputs():
    adapters = PooledAdapters(2, (0,), SHAPES, torch.float32).with_vectors((1, "k_proj"), FACTOR)
    batch = adapters.batch(token_uses([0, 1]) + token_uses([1], wave=1), 2)
    parts = AdapterParts({(1, "k_proj"): [OutputVector(4, torch.full((5,), 2.0), None)]})
    changed = (PartsUse(parts, batch.token_indices[:1], batch.token_scales[:1]),)
    batch = dataclasses.replace(batch, parts=changed, has_vectors=True)
    y, x = inputs(2, torch.float32)
    reference = y.clone()
    add_lora(reference, x, batch, LoraPlace(1, FUSED, OFFSETS))
    assert torch.equal(added(y, x, batch), reference)


def test_lm_head_in_blocks_and_segments_that_are_not_made_yet():
    blocks = {"lm_head.0": (24, 32), "lm_head.32": (24, 32), "lm_head.64": (24, 9)}
    adapters = PooledAdapters(3, (5,), blocks, torch.float32, num_layers=1)
    step = adapters.batch([LoraUse(0, 2, 0, 3, 2.0), LoraUse(0, 1, 4, 1, 1.0)], 5)
    step = dataclasses.replace(step, head_table=adapters.table)
    batch = batch_of_rows(step, torch.tensor([2, 3, 4]), 5)
    y, x = inputs(3, torch.float32, 24, 73)
    _, modules, firsts, _ = head_place(adapters.table)
    uses = [LoraUse(0, 2, 0, 1, 2.0), LoraUse(0, 1, 2, 1, 1.0)]
    expected = adapters.expected(y, x, uses, 0, modules, firsts)
    result = added(y, x, batch, 0, modules, firsts)
    assert error(result, expected) < TOLERANCE[torch.float32]


def test_a_table_that_is_on_the_host_alone_is_read_there():
    adapters = PooledAdapters(2, (4,), SHAPES, torch.float32)
    batch = adapters.batch(token_uses([1, 0]), 2)
    y, x = inputs(2, torch.float32)
    host = dataclasses.replace(batch, table=dataclasses.replace(batch.table, on_device=None))
    assert torch.equal(added(y, x, host), added(y, x, batch))


@BOTH
def test_a_recorded_step_computes_other_batches_of_its_size(dtype):
    """One graph: no adapters at first, then other adapters, other scales, fewer tokens."""
    adapters = PooledAdapters(5, MIXED, SHAPES, dtype)
    kernel = CudaLora(HOST, batch_invariant=False)
    graphs = StepGraphs(HostAccelerator())
    calls = []

    def step(batch, y, x):
        def compute():
            calls.append(batch)
            result = y.clone()
            kernel.add(result, x, batch, LoraPlace(1, FUSED, OFFSETS))
            return result

        return graphs.repeat("4 tokens", (y, x, *batch.segments.tensors), compute)

    graphs.is_recording = True
    step(adapters.batch(token_uses([1]), 4), *inputs(4, dtype))
    graphs.is_recording = False
    recorded = calls[0]
    for chosen in ([4, 3, 2, 1], [BASE, 0, 0, 0], [2], [2, BASE, BASE, 4]):
        uses = token_uses(chosen)
        y, x = inputs(4, dtype)
        result = step(adapters.batch(uses, 4), y, x)
        expected = adapters.expected(y, x, uses, 1, FUSED, OFFSETS)
        assert error(result, expected) < TOLERANCE[dtype]
    assert all(batch is recorded for batch in calls), "the recorded work alone was done"
