"""Native attention against a dense loop in float64; and the same bits however a step is cut."""

import itertools

import pytest
import torch

from loraplex.core.errors import InternalError
from loraplex.kernels.native.attention import NativeAttention
from loraplex.kernels.native.library import (
    NativeLibraryError,
    ThreadPool,
    available_instruction_sets,
    load_library,
)
from loraplex.kernels.ops import (
    AttentionRules,
    AttentionShape,
    RowLayout,
    Storage,
    from_stored,
    to_stored,
)
from support.cases_in_turn import in_turn
from support.dense_attention import dense_attention, random_queries, relative_error
from support.naming import naming

try:
    INSTRUCTION_SETS = available_instruction_sets()
except NativeLibraryError as error:
    pytest.skip(f"the native kernels are not built: {error}", allow_module_level=True)

SHAPE = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=64, block_size=16)
SHAPES = {
    "grouped": SHAPE,
    "one query head per key head": AttentionShape(3, 3, 16, 16),
    "one key head": AttentionShape(7, 1, 128, 16),
    "many heads share": AttentionShape(31, 1, 8, 16),
    "odd sizes": AttentionShape(6, 2, 22, 5),
    "small blocks": AttentionShape(4, 2, 20, 8),
    "one position per block": AttentionShape(4, 4, 6, 1),
    "large blocks": AttentionShape(4, 1, 80, 128),
    "blocks across tiles": AttentionShape(4, 2, 24, 48),
    "small heads": AttentionShape(5, 5, 4, 16),
    "large heads": AttentionShape(10, 2, 256, 16),
    "largest heads": AttentionShape(3, 1, 512, 16),
}
# Relative to the largest output. The queries and the result are rounded to the dtype.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
WINDOWS = in_turn(
    "window, sinks",
    [(None, 0), (1, 0), (70, 0), (600, 0), (1, 3), (40, 20), (70, 64), (30, 530)],
)
DTYPES = in_turn("dtype", TOLERANCE)
RULES = {
    "scale": {"scale": 0.1},
    "soft cap": {"soft_cap": 1.5},
    "slopes": {"has_slopes": True},
    "sink logits": {"has_sink_logits": True},
    "all, in a window": {
        "window": 70,
        "sinks": 3,
        "scale": 0.15,
        "soft_cap": 2.5,
        "has_slopes": True,
        "has_sink_logits": True,
    },
}


@pytest.fixture(params=INSTRUCTION_SETS)
def library(request):
    torch.default_generator.manual_seed(0)
    return load_library([request.param])


def kernel_of(library, num_threads=1) -> NativeAttention:
    return NativeAttention(library, ThreadPool(library, num_threads))


def rules_of(shape, window=None, sinks=0, scale=None, **rules) -> AttentionRules:
    scale = shape.head_dim**-0.5 if scale is None else scale
    return AttentionRules(window=window, num_sink_tokens=sinks, scale=scale, **rules)


def for_heads(shape, *, has_slopes=False, has_sink_logits=False, **rules):
    """The arguments of attention for a kind of RULES."""
    if has_slopes:
        rules["alibi_slopes"] = tuple(2.0**-i for i in range(shape.num_heads))
    if has_sink_logits:
        rules["sink_logits"] = torch.linspace(-3, 3, shape.num_heads)
    return rules


class PagedRows:
    """Rows with known keys and values, in shuffled blocks; whatever was not written is NaN."""

    def __init__(self, kernel, seq_lens, *, shape=SHAPE, dtype=torch.float32, kv_dtype=None):
        self.kernel, self.shape = kernel, shape
        num_blocks = [-(-length // shape.block_size) for length in seq_lens]
        self.storage: Storage = kernel.allocate(sum(num_blocks) + 3, shape, kv_dtype or dtype)
        if kv_dtype != torch.int8:
            self.storage.tensors[0].fill_(torch.nan)
            self.storage.tensors[1].fill_(torch.nan)
        order = torch.randperm(sum(num_blocks) + 3)
        self.tables = torch.zeros(len(seq_lens), max(num_blocks), dtype=torch.int64)
        self.keys, self.values = [], []
        for row, (length, count) in enumerate(zip(seq_lens, num_blocks, strict=True)):
            self.tables[row, :count] = order[sum(num_blocks[:row]) :][:count]
            key, value = torch.randn(2, length, shape.num_kv_heads, shape.head_dim).to(dtype)
            kernel.write(self.storage, key, value, self.slots(row, torch.arange(length)))
            self.keys.append(key)
            self.values.append(value)

    def slots(self, row, positions):
        size = self.shape.block_size
        return self.tables[row, positions // size] * size + positions % size

    def attend(
        self, queries, seq_lens, rows=None, *, kernel=None, sink_logits=None, window=None, **rules
    ):
        """queries [n, H, D] of each row: the last n of seq_lens positions."""
        counts = [len(query) for query in queries]
        rows = list(range(len(queries))) if rows is None else rows
        layout = RowLayout(
            list(itertools.accumulate(counts, initial=0)), seq_lens, self.tables[rows]
        )
        kernel = kernel or self.kernel
        plan = kernel.plan(layout, self.shape, rules_of(self.shape, window, **rules))
        output = kernel.attend(torch.cat(queries), self.storage, plan, sink_logits)
        return list(output.split(counts))


@pytest.mark.some(12)
@DTYPES
@WINDOWS
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_ragged_rows(library, shape, window, sinks, dtype):
    """Decoding rows, whole prompts, later chunks."""
    seq_lens, counts = [1, 7, 130, 65, 600], [1, 7, 33, 1, 3]
    rows = PagedRows(kernel_of(library, 2), seq_lens, shape=shape, dtype=dtype)
    queries = random_queries(counts, shape, dtype)
    outputs = rows.attend(queries, seq_lens, window=window, sinks=sinks)
    for query, key, value, output in zip(queries, rows.keys, rows.values, outputs, strict=True):
        assert output.dtype == dtype
        expected = dense_attention(query, key, value, window, sinks)
        assert relative_error(output, expected) < TOLERANCE[dtype]


@pytest.mark.covering(2)
@pytest.mark.some(20)
@DTYPES
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (1, 0), (70, 3), (600, 0)])
@pytest.mark.parametrize("name", ["grouped", "odd sizes", "blocks across tiles"])
def test_queries_that_see_later_keys(library, name, window, sinks, dtype):
    """Whole rows of one split and of several, with the same bits alone and in other threads."""
    shape, lens = SHAPES[name], [1, 33, 700]
    rules = {"window": window, "sinks": sinks, "is_causal": False}
    rows = PagedRows(kernel_of(library, 2), lens, shape=shape, dtype=dtype)
    queries = random_queries(lens, shape, dtype)
    outputs = rows.attend(queries, lens, **rules)
    for row, output in enumerate(outputs):
        expected = dense_attention(queries[row], rows.keys[row], rows.values[row], **rules)
        assert relative_error(output, expected) < TOLERANCE[dtype]
        (alone,) = rows.attend(
            [queries[row]], [lens[row]], [row], kernel=kernel_of(library, 5), **rules
        )
        assert torch.equal(alone, output)


@pytest.mark.covering(2)
@pytest.mark.some(20)
@DTYPES
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", ["grouped", "odd sizes", "small heads", "large heads"])
def test_rules_of_scores(library, name, rules, dtype):
    shape, seq_lens, counts = SHAPES[name], [1, 7, 130, 65, 600], [1, 7, 33, 1, 3]
    rules = for_heads(shape, **rules)
    rows = PagedRows(kernel_of(library, 2), seq_lens, shape=shape, dtype=dtype)
    queries = random_queries(counts, shape, dtype)
    outputs = rows.attend(queries, seq_lens, **rules)
    for query, key, value, output in zip(queries, rows.keys, rows.values, outputs, strict=True):
        expected = dense_attention(query, key, value, **rules)
        assert relative_error(output, expected) < 2 * TOLERANCE[dtype]


@pytest.mark.covering(2)
@pytest.mark.some(15)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_rules_of_scores_for_keys_of_another_dtype(library, rules, kv_dtype):
    shape = SHAPES["odd sizes"]
    rules = for_heads(shape, **rules)
    rows = PagedRows(kernel_of(library), [90], shape=shape, kv_dtype=kv_dtype)
    queries = random_queries([40], shape)
    (output,) = rows.attend(queries, [90], **rules)
    stored = [from_stored(to_stored(part, kv_dtype)) for part in (rows.keys[0], rows.values[0])]
    assert relative_error(output, dense_attention(queries[0], *stored, **rules)) < 5e-6


def test_a_sink_logit_may_outweigh_every_score(library):
    rows = PagedRows(kernel_of(library), [700])
    queries = random_queries([60], SHAPE)
    sink_logits = torch.tensor([-torch.inf, -1e4, -100.0, 0.0, 10.0, 80.0, 150.0, 1e4])
    (output,) = rows.attend(queries, [700], sink_logits=sink_logits)
    (without,) = rows.attend(queries, [700])
    expected = dense_attention(queries[0], rows.keys[0], rows.values[0], sink_logits=sink_logits)
    assert torch.equal(output[:, :2], without[:, :2])
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-7)


def test_scores_far_beyond_the_cap(library):
    rows = PagedRows(kernel_of(library), [300])
    queries = [1e4 * random_queries([60], SHAPE)[0]]
    (output,) = rows.attend(queries, [300], soft_cap=5.0)
    expected = dense_attention(queries[0], rows.keys[0], rows.values[0], soft_cap=5.0)
    assert relative_error(output, expected) < 1e-4


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, torch.float16), (torch.bfloat16, torch.float32)],
    ids=str,
)
def test_storage_may_have_its_own_dtype(library, dtype, kv_dtype):
    rows = PagedRows(kernel_of(library), [90], dtype=dtype, kv_dtype=kv_dtype)
    queries = random_queries([90], SHAPE, dtype=dtype)
    (output,) = rows.attend(queries, [90])
    stored = [part.to(kv_dtype) for part in (rows.keys[0], rows.values[0])]
    assert relative_error(output, dense_attention(queries[0], *stored)) < TOLERANCE[dtype]


def test_inputs_may_be_views_of_a_fused_projection(library):
    rows = PagedRows(kernel_of(library), [40])
    fused = torch.randn(40, 12 * 64 + 3)
    query, key, value = (
        fused[:, first : first + heads * 64].view(40, heads, 64)
        for first, heads in ((0, 8), (512, 2), (640, 2))
    )
    rows.kernel.write(rows.storage, key, value, rows.slots(0, torch.arange(40)))
    plan = rows.kernel.plan(RowLayout([0, 40], [40], rows.tables), SHAPE, rules_of(SHAPE))
    output = rows.kernel.attend(query, rows.storage, plan)
    assert relative_error(output, dense_attention(query, key, value)) < TOLERANCE[torch.float32]


def test_large_scores(library):
    """The largest score comes late, and everything before it vanishes."""
    rows = PagedRows(kernel_of(library), [700])
    rows.keys[0][650] *= 100
    rows.kernel.write(rows.storage, rows.keys[0], rows.values[0], rows.slots(0, torch.arange(700)))
    queries = [50 * random_queries([60], SHAPE)[0]]
    (output,) = rows.attend(queries, [700])
    assert relative_error(output, dense_attention(queries[0], rows.keys[0], rows.values[0])) < 1e-4


def test_a_later_token_that_is_not_finite_is_not_seen(library):
    rows = PagedRows(kernel_of(library), [100])
    queries = random_queries([100], SHAPE)
    (expected,) = rows.attend(queries, [100])
    rows.keys[0][70:] = torch.inf
    rows.values[0][70:] = torch.nan
    rows.kernel.write(rows.storage, rows.keys[0], rows.values[0], rows.slots(0, torch.arange(100)))
    (output,) = rows.attend(queries, [100])
    assert torch.equal(output[:70], expected[:70])


@pytest.mark.covering(2)
@pytest.mark.some(3)
@DTYPES
@pytest.mark.parametrize(
    ("window", "sinks"),
    [
        *((None, 0), (40, 0), (5, 70)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((600, 0), (40, 3), (300, 600))),
    ],
)
@pytest.mark.parametrize("shape", [SHAPE, SHAPES["odd sizes"]], ids=str)
def test_bits_do_not_depend_on_company_chunks_or_threads(library, shape, window, sinks, dtype):
    seq_lens = [1, 64, 65, 513, 1100]
    rows = PagedRows(kernel_of(library, 2), seq_lens, shape=shape, dtype=dtype)
    queries = random_queries(seq_lens, shape, dtype)
    seen = {"window": window, "sinks": sinks}
    together = rows.attend(queries, seq_lens, **seen)
    one_thread = kernel_of(library, 1)
    many_threads = kernel_of(library, 7)
    for row, length in enumerate(seq_lens):
        whole, query = together[row], queries[row]
        alone = rows.attend([query], [length], [row], **seen, kernel=one_thread)
        assert torch.equal(alone[0], whole)
        for start, end in ((0, 1), (0, 13), (60, 68), (127, 129), (400, 513), (1097, 1100)):
            if end <= length:
                for kernel in (rows.kernel, one_thread, many_threads):
                    chunk = query[start:end]
                    (output,) = rows.attend([chunk], [end], [row], **seen, kernel=kernel)
                    assert torch.equal(output, whole[start:end])


@pytest.mark.covering(2)
@pytest.mark.some(16)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        *((torch.float32, stored) for stored in (*TOLERANCE, torch.int8)),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_bits_under_rules_do_not_depend_on_company_chunks_or_threads(
    library, rules, dtype, kv_dtype
):
    shape, seq_lens = SHAPES["odd sizes"], [1, 65, 600]
    rules = for_heads(shape, **rules)
    rows = PagedRows(kernel_of(library, 2), seq_lens, shape=shape, dtype=dtype, kv_dtype=kv_dtype)
    queries = random_queries(seq_lens, shape, dtype)
    together = rows.attend(queries, seq_lens, **rules)
    kernels = [rows.kernel, kernel_of(library, 1), kernel_of(library, 7)]
    for kernel, (start, end) in itertools.product(kernels, ((0, 1), (60, 68), (597, 600))):
        (output,) = rows.attend([queries[2][start:end]], [end], [2], kernel=kernel, **rules)
        assert torch.equal(output, together[2][start:end])
    (alone,) = rows.attend([queries[1]], [65], [1], kernel=kernels[1], **rules)
    assert torch.equal(alone, together[1])


@DTYPES
def test_weights_are_one_together_however_they_are_rounded(library, dtype):
    rows = PagedRows(kernel_of(library), [300], dtype=dtype)
    positions = rows.slots(0, torch.arange(300))
    rows.kernel.write(rows.storage, rows.keys[0], torch.ones_like(rows.keys[0]), positions)
    (output,) = rows.attend(random_queries([300], SHAPE, dtype), [300])
    assert (output - 1).abs().max() <= (1e-6 if dtype == torch.float32 else 0)


def test_bits_of_decoding_rows_do_not_depend_on_other_long_rows(library):
    """The splits of a long row among few become units of work of their own."""
    seq_lens = [5000, 20, 3000]
    rows = PagedRows(kernel_of(library, 3), seq_lens)
    queries = random_queries([1, 1, 1], SHAPE)
    together = rows.attend(queries, seq_lens)
    for row, length in enumerate(seq_lens):
        (alone,) = rows.attend([queries[row]], [length], [row])
        (serial,) = rows.attend([queries[row]], [length], [row], kernel=kernel_of(library, 1))
        assert torch.equal(alone, together[row])
        assert torch.equal(serial, together[row])


@pytest.mark.parametrize(("window", "sinks"), [(20, 0), (20, 18), (1, 33)])
def test_blocks_that_no_query_sees_are_not_read(library, window, sinks):
    """They were freed: their entries of the block table name no block."""
    rows = PagedRows(kernel_of(library), [1100])
    queries = random_queries([3], SHAPE)
    (expected,) = rows.attend(queries, [1100], window=window, sinks=sinks)
    first_seen = 1100 - 3 - window + 1
    rows.tables[0, -(-sinks // 16) : first_seen // 16] = -(1 << 40)
    (output,) = rows.attend(queries, [1100], window=window, sinks=sinks)
    assert torch.equal(output, expected)


def test_a_step_of_no_rows(library):
    rows = PagedRows(kernel_of(library), [3])
    plan = rows.kernel.plan(
        RowLayout([0], [], torch.zeros(0, 1, dtype=torch.int64)), SHAPE, rules_of(SHAPE)
    )
    assert rows.kernel.attend(torch.empty(0, 8, 64), rows.storage, plan).shape == (0, 8, 64)


@pytest.mark.parametrize(
    "rules", [{"scale": float("nan")}, {"soft_cap": -1.0}, {"soft_cap": float("inf")}], ids=str
)
def test_rules_that_are_no_numbers_are_refused(library, rules):
    rows = PagedRows(kernel_of(library), [3])
    with pytest.raises(InternalError, match=naming("loraplex_paged_attention")):
        rows.attend(random_queries([1], SHAPE), [3], **rules)


def test_head_counts_that_do_not_divide_are_refused(library):
    kernel = kernel_of(library)
    shape = AttentionShape(5, 2, 8, 16)
    storage = kernel.allocate(1, shape, torch.float32)
    layout = RowLayout([0, 1], [1], torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(InternalError, match=naming("loraplex_paged_attention")):
        kernel.attend(torch.zeros(1, 5, 8), storage, kernel.plan(layout, shape, rules_of(shape)))


def test_rows_that_decode_keep_their_plan(library):
    kernel = kernel_of(library)
    rows = PagedRows(kernel, [40, 90])
    query = torch.randn(2, SHAPE.num_heads, SHAPE.head_dim)
    rules = rules_of(SHAPE)

    def attend(kernel, seq_lens, tables, starts):
        plan = kernel.plan(RowLayout(starts, seq_lens, tables), SHAPE, rules)
        return plan, kernel.attend(query, rows.storage, plan)

    kept, _ = attend(kernel, [20, 70], rows.tables, [0, 1, 2])
    for seq_lens in ([21, 71], [22, 72], [40, 90]):
        plan, output = attend(kernel, seq_lens, rows.tables, [0, 1, 2])
        assert plan is kept
        _, expected = attend(kernel_of(library), seq_lens, rows.tables, [0, 1, 2])
        assert torch.equal(output, expected)
    others = ((rows.tables.clone(), [0, 1, 2]), (rows.tables[1:], [0, 2]))
    for tables, starts in others:
        seq_lens = [40, 90][-len(tables) :]
        plan, output = attend(kernel, seq_lens, tables, starts)
        assert plan is not kept
        _, expected = attend(kernel_of(library), seq_lens, tables, starts)
        assert torch.equal(output, expected)
