"""Test the GPU attention kernels, interpreted, against the formula in float64 and bit for bit."""

import copy
import dataclasses

import pytest
import torch

from loraplex.kernels.accelerator import HostAccelerator
from loraplex.kernels.cuda.attention import CudaAttention
from loraplex.kernels.cuda.attention_launch import chunk_keys, tile_queries
from loraplex.kernels.cuda.attention_plan import num_shares
from loraplex.kernels.cuda.graphs import StepGraphs
from loraplex.kernels.ops import AttentionRules, AttentionShape, from_stored, to_stored
from support.dense_attention import relative_error
from support.paged_rows import PagedRows, padded_rows, score_terms, store

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
WINDOWS = {
    "all": AttentionRules(scale=0.2),
    "window": AttentionRules(scale=0.2, window=20),
    "window and sinks": AttentionRules(scale=0.2, window=150, num_sink_tokens=3),
    "small": AttentionRules(scale=0.2, window=1, num_sink_tokens=1),
}
ALL_WINDOWS = pytest.mark.parametrize("rules", WINDOWS.values(), ids=WINDOWS)
STEPS = {
    "decode": ([37, 430, 1], [1, 1, 1]),
    "mixed": ([140, 430, 1, 70], [135, 1, 1, 7]),
}
ALL_STEPS = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)


class ManyShares(CudaAttention):
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


def window(num_tokens: int, num_sinks: int) -> AttentionRules:
    return AttentionRules(scale=0.2, window=num_tokens, num_sink_tokens=num_sinks)


def error(rows: PagedRows, counts: list[int], rules=None, sink_logits=None) -> float:
    queries = rows.queries(counts)
    expected = rows.expected(queries, rules, sink_logits)
    return relative_error(rows.attended(queries, rules, sink_logits), expected)


@pytest.mark.covering(1)
@ALL_SHAPES
@ALL_STEPS
def test_equals_the_formula(shape, step):
    seq_lens, counts = step
    assert error(PagedRows(ManyShares(), shape, seq_lens), counts) < 1e-6


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    "shape", [SHAPE, pytest.param(SHAPES["no groups"], marks=pytest.mark.slow)], ids=["4", "1"]
)
@ALL_WINDOWS
@ALL_STEPS
def test_windows_and_sinks(shape, rules, step):
    seq_lens, counts = step
    assert error(PagedRows(ManyShares(), shape, seq_lens), counts, rules) < 1e-6


@pytest.mark.parametrize("invariant", [False, True], ids=["", "invariant"])
@pytest.mark.parametrize("rules", WINDOWS.values(), ids=WINDOWS)
def test_queries_that_see_later_keys(rules, invariant):
    """Whole rows, of one token, shorter and longer than the windows."""
    rules = dataclasses.replace(rules, is_causal=False)
    rows = PagedRows(ManyShares(batch_invariant=invariant), SHAPE, [140, 1, 23])
    queries = rows.queries(rows.seq_lens)
    output = rows.attended(queries, rules)
    assert relative_error(output, rows.expected(queries, rules)) < 1e-6
    alone = PagedRows(ManyShares(batch_invariant=invariant), SHAPE, [140])
    alone.storage, alone.block_tables = rows.storage, rows.block_tables[:1]
    torch.testing.assert_close(alone.attended(queries[:1], rules), output[:140], rtol=0, atol=0)


def test_queries_may_outnumber_the_keys_of_their_row():
    """Each query sees all of them: in cross attention keys are of another text."""
    rules = AttentionRules(scale=0.2, is_causal=False)
    rows = PagedRows(ManyShares(), SHAPE, [7, 90])
    queries = rows.queries([33, 1])
    assert relative_error(rows.attended(queries, rules), rows.expected(queries, rules)) < 1e-6


@pytest.mark.covering(2)
@pytest.mark.parametrize("invariant", [False, True], ids=["", "invariant"])
@pytest.mark.parametrize("shape", [SHAPE, SHAPES["no groups"]], ids=["grouped", "single"])
@pytest.mark.parametrize("kind", ["cap", "slopes", "sinks", "all, in a window"])
@ALL_STEPS
def test_terms_of_scores(kind, shape, step, invariant):
    """One share of a row's keys has the sink, where there are several."""
    seq_lens, counts = step
    rules, sink_logits = score_terms(kind, shape)
    rows = PagedRows(ManyShares(batch_invariant=invariant), shape, seq_lens)
    queries = rows.queries(counts)
    output = rows.attended(queries, rules, sink_logits)
    assert relative_error(output, rows.expected(queries, rules, sink_logits)) < 2e-6
    assert relative_error(output, rows.expected(queries, AttentionRules(scale=0.3))) > 1e-3


@pytest.mark.covering(2)
@pytest.mark.parametrize("invariant", [False, True], ids=["", "invariant"])
@pytest.mark.parametrize(
    "shape", [SHAPE, SHAPES["no groups"], SHAPES["groups of seven, odd blocks"]]
)
@pytest.mark.parametrize("is_causal", [True, False], ids=["decoder", "encoder"])
@ALL_STEPS
def test_biases_by_distance(is_causal, shape, step, invariant):
    """Distances beyond the table have its first or last number, on either side of a query."""
    seq_lens, counts = step
    rules = AttentionRules(scale=1.0, is_causal=is_causal)
    position_bias = torch.randn(shape.num_heads, 2 * 50 + 1) * 2
    rows = PagedRows(ManyShares(batch_invariant=invariant), shape, seq_lens)
    queries = rows.queries(counts)
    output = rows.attended(queries, rules, None, position_bias)
    expected = rows.expected(queries, rules, None, position_bias)
    assert relative_error(output, expected) < 2e-6
    assert relative_error(output, rows.expected(queries, rules)) > 1e-2


def test_biases_by_distance_of_queries_that_outnumber_the_keys():
    rules = AttentionRules(scale=1.0, is_causal=False)
    position_bias = torch.randn(SHAPE.num_heads, 2 * 9 + 1)
    rows = PagedRows(ManyShares(), SHAPE, [7, 90])
    queries = rows.queries([33, 1])
    output = rows.attended(queries, rules, None, position_bias)
    assert relative_error(output, rows.expected(queries, rules, None, position_bias)) < 2e-6


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float16, torch.float16), (torch.float32, torch.int8), (torch.float32, torch.float16)],
    ids=str,
)
def test_terms_of_scores_in_narrow_types(dtype, kv_dtype):
    rules, sink_logits = score_terms("all, in a window", SHAPE)
    rows = PagedRows(ManyShares(), SHAPE, [40, 190], dtype=dtype, kv_dtype=kv_dtype)
    for vectors in (rows.keys, rows.values):
        vectors[:] = [from_stored(to_stored(each, kv_dtype)) for each in vectors]
    assert error(rows, [6, 1], rules, sink_logits) < 2e-3


def test_a_sink_that_outweighs_all_keys_leaves_nothing():
    rows = PagedRows(ManyShares(), SHAPE, [300, 20])
    queries = rows.queries([1, 5])
    sink_logits = torch.full((8,), 300.0)
    assert not rows.attended(queries, sink_logits=sink_logits).any()
    assert (
        relative_error(rows.attended(queries, sink_logits=-sink_logits), rows.expected(queries))
        < 1e-6
    )


@pytest.mark.covering(1)
@ALL_WINDOWS
@ALL_STEPS
def test_batch_invariant_equals_the_formula(rules, step):
    seq_lens, counts = step
    kernel = ManyShares(batch_invariant=True)
    assert error(PagedRows(kernel, SHAPE, seq_lens), counts, rules) < 1e-6


def test_batch_invariant_skips_chunks_behind_the_window():
    kernel = ManyShares(batch_invariant=True)
    rows = PagedRows(kernel, AttentionShape(2, 1, 16, 16), [700, 600])
    assert error(rows, [1, 2], window(40, 3)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("invariant", [False, True])
def test_many_shares_equal_the_formula(invariant):
    """Also more than are merged at once."""
    kernel = ManyShares(batch_invariant=invariant)
    kernel._slots = 40
    shape = AttentionShape(4, 1, 16, 16)
    rows = PagedRows(kernel, shape, [2700, 400])
    assert error(rows, [1, 1]) < 1e-6
    assert error(rows, [1, 1], window(1000, 20)) < 1e-6


@pytest.mark.covering(2)
@pytest.mark.parametrize("head_dim", [6, 16, 64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("invariant", [False, True], ids=["", "invariant"])
def test_any_head_size(head_dim, num_heads, invariant):
    shape = AttentionShape(num_heads, 1, head_dim, 3)
    kernel = ManyShares(batch_invariant=invariant)
    assert error(PagedRows(kernel, shape, [70, 9]), [66, 1]) < 1e-6
    rows = PagedRows(kernel, shape, [20, 300], dtype=torch.float16, kv_dtype=torch.float16)
    assert error(rows, [5, 1]) < 2e-3


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
    assert error(rows, [6, 1], window(30, 2)) < tolerance


def test_small_int8_values_keep_their_digits_in_float16():
    rows = PagedRows(ManyShares(), SHAPE, [40], dtype=torch.float16, kv_dtype=torch.float16)
    storage = rows.kernel.allocate(len(rows.storage.tensors[0]), SHAPE, torch.int8)
    value = (torch.cat(rows.values) * 1e-3).half()
    positions = torch.arange(40)
    slots = rows.block_tables[0, positions // 16] * 16 + positions % 16
    store(storage.tensors[0], torch.cat(rows.keys), slots, SHAPE)
    store(storage.tensors[1], value, slots, SHAPE)
    rows.storage = storage
    rows.values = [from_stored(to_stored(value, torch.int8))]
    assert error(rows, [1]) < 2e-2


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("length", [100, 300], ids=["one share", "several"])
@pytest.mark.parametrize("shape", [SHAPE, SHAPES["no groups"]], ids=["grouped", "single"])
def test_rows_without_tokens_give_zeros(shape, length, invariant):
    rows = PagedRows(ManyShares(batch_invariant=invariant), shape, [length, 20])
    queries = rows.queries([1, 1])
    layout = rows.layout(queries)
    layout = dataclasses.replace(layout, on_device=padded_rows(layout, 2))
    plan = rows.kernel.plan(layout, shape, rows.rules)
    output = rows.kernel.attend(rows.batch(queries, 2), rows.storage, plan)
    assert relative_error(output[:2], rows.expected(queries)) < 1e-6
    assert torch.equal(output[2:], torch.zeros_like(output[2:]))


def test_tokens_of_no_row_give_zeros_in_mixed_steps():
    rows = PagedRows(ManyShares(), SHAPE, [30, 20])
    queries = rows.queries([7, 1])
    plan = rows.kernel.plan(rows.layout(queries), SHAPE, rows.rules)
    output = rows.kernel.attend(rows.batch(queries, 3), rows.storage, plan)
    assert relative_error(output[:8], rows.expected(queries)) < 1e-6
    assert torch.equal(output[8:], torch.zeros_like(output[8:]))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("shape", [SHAPE, SHAPES["no groups"]], ids=["grouped", "single"])
def test_blocks_before_the_window_are_not_read(shape, invariant):
    """They were freed: now they hold another sequence's keys, or nothing."""
    rows = PagedRows(ManyShares(batch_invariant=invariant), shape, [300, 260])
    rows.block_tables[0, 1:16] = 10**6  # the first query sees 257 and up
    rows.block_tables[1, 1:13] = 10**6
    assert error(rows, [4, 1], window(40, 3)) < 1e-6


@pytest.mark.parametrize(
    "invariant", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "invariant"]
)
@pytest.mark.parametrize("kind", ["cap", "all, in a window"])
def test_recorded_step_attends_for_other_rows(invariant, kind):
    shape = AttentionShape(4, 1, 16, 16)
    rows = PagedRows(ManyShares(batch_invariant=invariant), shape, [270, 20, 33], table_width=20)
    queries = rows.queries([1, 1, 1])
    rules = score_terms(kind, shape)
    expected = rows.expected(queries, *rules)
    graphs = StepGraphs(HostAccelerator())
    graphs.is_recording = True
    for chosen in ([], [1], [0, 2], [2, 0, 1]):
        step = copy.copy(rows)
        step.seq_lens = [rows.seq_lens[row] for row in chosen]
        step.block_tables = rows.block_tables[chosen]
        found = repeated(graphs, step, [queries[row] for row in chosen], 4, *rules)
        if chosen:
            assert relative_error(found[: len(chosen)], expected[chosen]) < 1e-6
        assert torch.equal(found[len(chosen) :], torch.zeros_like(found[len(chosen) :]))
    assert len(graphs) == 1


def repeated(
    graphs: StepGraphs, rows: PagedRows, queries, num_rows: int, rules, sink_logits
) -> torch.Tensor:
    """A step that only decodes, recorded for num_rows."""
    num_padding = num_rows - len(queries)
    layout = rows.layout(queries)
    tables = torch.zeros(num_rows, layout.block_tables.shape[1], dtype=torch.int32)
    tables[: len(queries)] = layout.block_tables
    on_device = dataclasses.replace(padded_rows(layout, num_padding), block_tables=tables)
    plan = rows.kernel.plan(dataclasses.replace(layout, on_device=on_device), rows.shape, rules)
    query = rows.batch(queries, num_padding)
    return graphs.repeat(
        num_rows,
        (query, *plan.tensors),
        lambda: rows.kernel.attend(query, rows.storage, plan, sink_logits),
    )


@pytest.mark.covering(1)
@pytest.mark.slow
@ALL_WINDOWS
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8], ids=str)
def test_batch_invariant_bits(rules, kv_dtype):
    check_bits(rules, kv_dtype, counts=(1, 3, 17, 64), ends=(1, 16, 255, 257))


def test_batch_invariant_bits_briefly():
    check_bits(window(150, 3), torch.float32, counts=(1,), ends=(257,))


@pytest.mark.slow
def test_batch_invariant_bits_with_terms_of_scores():
    rules, sink_logits = score_terms("all, in a window", AttentionShape(4, 1, 16, 16))
    check_bits(rules, torch.float32, counts=(1, 17), ends=(16, 255, 257), sink_logits=sink_logits)


def test_batch_invariant_tiles_of_large_heads_hold_the_queries_of_a_plan():
    for head_dim, num_queries in ((128, 64), (256, 32), (512, 16)):
        assert tile_queries(AttentionShape(1, 1, head_dim, 16), batch_invariant=True) == num_queries


def check_bits(rules, kv_dtype, *, counts, ends, sink_logits=None):
    """Compare the bits of a prompt whole, in chunks and token by token, alone and in a batch."""
    length = 270
    kernel = ManyShares(batch_invariant=True)
    shape = AttentionShape(4, 1, 16, 16)
    rows = PagedRows(kernel, shape, [length, 50, 265], kv_dtype=kv_dtype, table_width=20)
    query, other, third = rows.queries([length, 1, 9])
    whole = rows.attended([query, other, third], rules, sink_logits)[:length]
    for count in counts:
        together = rows.attended([query[-count:], other, third], rules, sink_logits)
        assert torch.equal(together[:count], whole[length - count :])
    alone = copy.copy(rows)
    for end in ends:
        alone.seq_lens, alone.block_tables = [end], rows.block_tables[:1]
        for count in {1, min(end, 2), min(end, 33)}:
            found = alone.attended([query[end - count : end]], rules, sink_logits)
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
    plan = rows.kernel.plan(rows.layout(rows.queries([30, 1, 1, 70])), SHAPE, rows.rules)
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
    plan = rows.kernel.plan(rows.layout(rows.queries([30, 1])), SHAPE, rows.rules)
    assert plan.decode_rows.data_ptr() % 16 == plan.tiles.data_ptr() % 16 == 0
