"""Test the GPU attention kernels, interpreted, against the formula in float64 and bit for bit."""

import copy
import dataclasses

import pytest
import torch

from loraplex.core.errors import ConfigError
from loraplex.kernels.accelerator import HostAccelerator
from loraplex.kernels.cuda.attention import AttentionKernel
from loraplex.kernels.cuda.attention_launch import chunk_keys
from loraplex.kernels.cuda.attention_plan import num_shares
from loraplex.kernels.cuda.graphs import StepGraphs
from loraplex.kernels.kv_vectors import from_stored, to_stored
from loraplex.kernels.ops import AttentionShape, KVStorage
from support.dense_attention import relative_error
from support.paged_rows import PagedRows, padded_rows, store, stored_parts

pytestmark = pytest.mark.slow

HOST = torch.device("cpu")
SHAPES = {
    "groups of four": AttentionShape(num_heads=8, num_kv_heads=2, head_dim=32, block_size=16),
    "no groups": AttentionShape(2, 2, 32, 16),
    "groups of seven, odd blocks": AttentionShape(7, 1, 24, 5),
    "groups of 32": AttentionShape(32, 1, 16, 16),
}
SHAPE = SHAPES["groups of four"]
ALL_SHAPES = pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, id=name, marks=[pytest.mark.slow] if "32" in name else [])
        for name, shape in SHAPES.items()
    ],
)
WINDOWS = {"all": (None, 0), "window": (20, 0), "window and sinks": (150, 3), "small": (1, 1)}
ALL_WINDOWS = pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
STEPS = {
    "decode": ([37, 430, 1], [1, 1, 1]),
    "mixed": ([140, 430, 1, 70], [135, 1, 1, 7]),
}
ALL_STEPS = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)


class ManyShares(AttentionKernel):
    """Attention as on a GPU that runs many programs at once."""

    def __init__(self, *, batch_invariant: bool = False) -> None:
        super().__init__(HOST, batch_invariant=batch_invariant)
        self._slots = 64


@pytest.fixture(autouse=True)
def seeded():
    """And what `torch.empty` makes is NaN."""
    torch.default_generator.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def attended(rows: PagedRows, queries: list[torch.Tensor], window=(None, 0)) -> torch.Tensor:
    kernel = rows.kernel
    plan = kernel.plan(rows.layout(queries), rows.shape, *window)
    return kernel.attend(rows.batch(queries), rows.storage, plan)


def error(rows: PagedRows, counts: list[int], window=(None, 0)) -> float:
    queries = rows.queries(counts)
    return relative_error(attended(rows, queries, window), rows.expected(queries, *window))


@ALL_SHAPES
@ALL_STEPS
def test_equals_the_formula(shape, step):
    seq_lens, counts = step
    assert error(PagedRows(ManyShares(), shape, seq_lens), counts) < 1e-6


@pytest.mark.parametrize(
    "shape", [SHAPE, pytest.param(SHAPES["no groups"], marks=pytest.mark.slow)], ids=["4", "1"]
)
@ALL_WINDOWS
@ALL_STEPS
def test_windows_and_sinks(shape, window, step):
    seq_lens, counts = step
    assert error(PagedRows(ManyShares(), shape, seq_lens), counts, window) < 1e-6


@ALL_WINDOWS
@ALL_STEPS
def test_batch_invariant_equals_the_formula(window, step):
    seq_lens, counts = step
    kernel = ManyShares(batch_invariant=True)
    assert error(PagedRows(kernel, SHAPE, seq_lens), counts, window) < 1e-6


def test_batch_invariant_skips_chunks_behind_the_window():
    kernel = ManyShares(batch_invariant=True)
    rows = PagedRows(kernel, AttentionShape(2, 1, 16, 16), [700, 600])
    assert error(rows, [1, 2], (40, 3)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("invariant", [False, True])
def test_many_shares_equal_the_formula(invariant):
    """Also more than are merged at once."""
    kernel = ManyShares(batch_invariant=invariant)
    kernel._slots = 40
    shape = AttentionShape(4, 1, 16, 16)
    rows = PagedRows(kernel, shape, [2700, 400])
    assert error(rows, [1, 1]) < 1e-6
    assert error(rows, [1, 1], (1000, 20)) < 1e-6


@pytest.mark.parametrize("head_dim", [6, 16, 80])
@pytest.mark.parametrize("num_heads", [1, 2])
def test_any_head_size(head_dim, num_heads):
    shape = AttentionShape(num_heads, 1, head_dim, 3)
    assert error(PagedRows(ManyShares(), shape, [20, 9]), [5, 1]) < 1e-6


@ALL_SHAPES
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float16, torch.float16),
        (torch.float32, torch.float16),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
def test_narrow_types(shape, dtype, kv_dtype):
    rows = PagedRows(ManyShares(), shape, [40, 90], dtype=dtype, kv_dtype=kv_dtype)
    assert error(rows, [1, 1]) < 2e-3
    assert error(rows, [6, 1]) < 2e-3


@ALL_SHAPES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_int8_equals_what_is_stored(shape, dtype):
    if shape.block_size * shape.num_kv_heads * shape.head_dim % 4:
        pytest.skip("scales would not be aligned")
    rows = PagedRows(ManyShares(), shape, [40, 90], dtype=dtype, kv_dtype=torch.int8)
    for vectors in (rows.keys, rows.values):
        vectors[:] = [from_stored(to_stored(each, torch.int8)) for each in vectors]
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    assert error(rows, [1, 1]) < tolerance
    assert error(rows, [6, 1], (30, 2)) < tolerance


def test_small_int8_values_keep_their_digits_in_float16():
    rows = PagedRows(ManyShares(), SHAPE, [40], dtype=torch.float16, kv_dtype=torch.float16)
    storage = rows.kernel.allocate(len(rows.storage.key), SHAPE, torch.int8)
    value = (torch.cat(rows.values) * 1e-3).half()
    positions = torch.arange(40)
    slots = rows.block_tables[0, positions // 16] * 16 + positions % 16
    store(storage.key, torch.cat(rows.keys), slots, SHAPE)
    store(storage.value, value, slots, SHAPE)
    rows.storage = storage
    rows.values = [from_stored(to_stored(value, torch.int8))]
    assert error(rows, [1]) < 2e-2


def stored_as_int8(storage: KVStorage, shape: AttentionShape) -> list[torch.Tensor]:
    """Keys and values, [slots, K, D + 4], as `to_stored` has them."""
    parts = [stored_parts(tensor, shape) for tensor in (storage.key, storage.value)]
    return [torch.cat(each, -1).flatten(0, 1) for each in parts]


@pytest.mark.parametrize("shape", [SHAPE, AttentionShape(4, 4, 24, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_int8_is_rounded_as_the_reference_rounds(shape, dtype):
    kernel = AttentionKernel(HOST, batch_invariant=False)
    storage = kernel.allocate(4, shape, torch.int8)
    key, value = torch.randn(2, 9, shape.num_kv_heads, shape.head_dim).to(dtype)
    key[0] = 0
    key[1, 0, 3], key[2, 0, 3], value[3, 0, 0] = torch.nan, torch.inf, -torch.inf
    value[4] = torch.arange(shape.head_dim) - 12.5  # ties, where the scale is 1/2 or 1/4 or so
    value[4, :, 0] = 127 / 4
    key[5] *= 1e-6
    if dtype == torch.float32:
        key[6] *= 1e-40  # the scale is no normal number
    slots = torch.randperm(4 * shape.block_size)[:9]
    kernel.write(storage, key, value, slots)
    stored = stored_as_int8(storage, shape)
    for found, vectors in zip(stored, (key, value), strict=True):
        assert torch.equal(found[slots], to_stored(vectors, torch.int8))


def test_int8_refuses_scales_that_are_not_aligned():
    with pytest.raises(ConfigError):
        AttentionKernel(HOST, batch_invariant=False).allocate(
            2, AttentionShape(1, 1, 6, 1), torch.int8
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
def test_storage_has_the_bytes_of_its_shape(dtype):
    storage = AttentionKernel(HOST, batch_invariant=False).allocate(3, SHAPE, dtype)
    assert storage.num_bytes == 3 * SHAPE.block_bytes(dtype)


def test_write_takes_slices_and_skips_padding():
    kernel = AttentionKernel(HOST, batch_invariant=False)
    storage = kernel.allocate(2, SHAPE, torch.float32)
    fused = torch.randn(4, 8 + 2 + 2, 32)
    _, key, value = fused.split([8, 2, 2], 1)
    kernel.write(storage, key, value, torch.tensor([17, -1, 0, 31]))
    for tensor, given in ((storage.key, key), (storage.value, value)):
        expected = torch.zeros(32, 2, 32)
        expected[[17, 0, 31]] = given[[0, 2, 3]]
        assert torch.equal(tensor.view(32, 2, 32), expected)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("length", [100, 300], ids=["one share", "several"])
@pytest.mark.parametrize("shape", [SHAPE, SHAPES["no groups"]], ids=["grouped", "single"])
def test_rows_without_tokens_give_zeros(shape, length, invariant):
    rows = PagedRows(ManyShares(batch_invariant=invariant), shape, [length, 20])
    queries = rows.queries([1, 1])
    layout = rows.layout(queries)
    layout = dataclasses.replace(layout, on_device=padded_rows(layout, 2))
    plan = rows.kernel.plan(layout, shape, None)
    output = rows.kernel.attend(rows.batch(queries, 2), rows.storage, plan)
    assert relative_error(output[:2], rows.expected(queries)) < 1e-6
    assert torch.equal(output[2:], torch.zeros_like(output[2:]))


def test_tokens_of_no_row_give_zeros_in_mixed_steps():
    rows = PagedRows(ManyShares(), SHAPE, [30, 20])
    queries = rows.queries([7, 1])
    plan = rows.kernel.plan(rows.layout(queries), SHAPE, None)
    output = rows.kernel.attend(rows.batch(queries, 3), rows.storage, plan)
    assert relative_error(output[:8], rows.expected(queries)) < 1e-6
    assert torch.equal(output[8:], torch.zeros_like(output[8:]))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("shape", [SHAPE, SHAPES["no groups"]], ids=["grouped", "single"])
def test_blocks_before_the_window_are_not_read(shape, invariant):
    """They were freed: now they hold another sequence's keys, or nothing."""
    window = (40, 3)
    rows = PagedRows(ManyShares(batch_invariant=invariant), shape, [300, 260])
    rows.block_tables[0, 1:16] = 10**6  # the first query sees 257 and up
    rows.block_tables[1, 1:13] = 10**6
    assert error(rows, [4, 1], window) < 1e-6


@pytest.mark.parametrize(
    "invariant", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "invariant"]
)
def test_recorded_step_attends_for_other_rows(invariant):
    shape = AttentionShape(4, 1, 16, 16)
    rows = PagedRows(ManyShares(batch_invariant=invariant), shape, [270, 20, 33], table_width=20)
    queries = rows.queries([1, 1, 1])
    expected = rows.expected(queries)
    graphs = StepGraphs(HostAccelerator())
    graphs.is_recording = True
    for chosen in ([], [1], [0, 2], [2, 0, 1]):
        step = copy.copy(rows)
        step.seq_lens = [rows.seq_lens[row] for row in chosen]
        step.block_tables = rows.block_tables[chosen]
        found = repeated(graphs, step, [queries[row] for row in chosen], 4)
        if chosen:
            assert relative_error(found[: len(chosen)], expected[chosen]) < 1e-6
        assert torch.equal(found[len(chosen) :], torch.zeros_like(found[len(chosen) :]))
    assert len(graphs) == 1


def repeated(graphs: StepGraphs, rows: PagedRows, queries, num_rows: int) -> torch.Tensor:
    """A step that only decodes, recorded for num_rows."""
    num_padding = num_rows - len(queries)
    layout = rows.layout(queries)
    tables = torch.zeros(num_rows, layout.block_tables.shape[1], dtype=torch.int32)
    tables[: len(queries)] = layout.block_tables
    on_device = dataclasses.replace(padded_rows(layout, num_padding), block_tables=tables)
    plan = rows.kernel.plan(dataclasses.replace(layout, on_device=on_device), rows.shape, None)
    query = rows.batch(queries, num_padding)
    return graphs.repeat(
        num_rows, (query, *plan.tensors), lambda: rows.kernel.attend(query, rows.storage, plan)
    )


@pytest.mark.slow
@ALL_WINDOWS
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8], ids=str)
def test_batch_invariant_bits(window, kv_dtype):
    check_bits(window, kv_dtype, counts=(1, 3, 17, 64), ends=(1, 16, 255, 257))


def test_batch_invariant_bits_briefly():
    check_bits((150, 3), torch.float32, counts=(1,), ends=(257,))


def check_bits(window, kv_dtype, *, counts, ends):
    """Compare the bits of a prompt whole, in chunks and token by token, alone and in a batch."""
    length = 270
    kernel = ManyShares(batch_invariant=True)
    shape = AttentionShape(4, 1, 16, 16)
    rows = PagedRows(kernel, shape, [length, 50, 265], kv_dtype=kv_dtype, table_width=20)
    query, other, third = rows.queries([length, 1, 9])
    whole = attended(rows, [query, other, third], window)[:length]
    for count in counts:
        together = attended(rows, [query[-count:], other, third], window)
        assert torch.equal(together[:count], whole[length - count :])
    alone = copy.copy(rows)
    for end in ends:
        alone.seq_lens, alone.block_tables = [end], rows.block_tables[:1]
        for count in {1, min(end, 2), min(end, 33)}:
            found = attended(alone, [query[end - count : end]], window)
            assert torch.equal(found, whole[end - count : end])


def test_batch_invariant_chunks_grow_with_the_tables_only_beyond_8192_positions():
    assert {chunk_keys(length) for length in (1, 100, 4096, 8192)} == {256}
    assert chunk_keys(131_072) == 4096


def test_shares_fill_the_card():
    assert num_shares(512, 264, 64) == 1  # two waves
    assert num_shares(256, 264, 64) == 1  # one
    assert num_shares(8, 264, 64) == 29
    assert num_shares(8, 264, 4) == 4  # so few keys
    assert num_shares(320, 264, 64) == 3
    assert num_shares(4, 264, 0) == 1


def test_drafts_are_tiles_and_single_tokens_are_listed():
    rows = PagedRows(ManyShares(), SHAPE, [37, 300, 1, 70])
    plan = rows.kernel.plan(rows.layout(rows.queries([30, 1, 1, 70])), SHAPE, None)
    assert plan.decode_rows.tolist() == [[1, 30], [2, 31]]
    # Groups of four: 32 queries; those with the most keys come first.
    assert plan.tiles.tolist() == [
        [3, 96, 6, 6],
        [3, 64, 32, 38],
        [0, 0, 30, 30],
        [3, 32, 32, 70],
    ]


def test_lists_are_aligned():
    rows = PagedRows(ManyShares(), SHAPE, [37, 300])
    plan = rows.kernel.plan(rows.layout(rows.queries([30, 1])), SHAPE, None)
    assert plan.decode_rows.data_ptr() % 16 == plan.tiles.data_ptr() % 16 == 0
