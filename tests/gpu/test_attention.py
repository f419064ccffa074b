"""Attention at the sizes of real models, against float64."""

import itertools

import pytest
import torch

from loraplex.kernels.accelerator import CudaAccelerator
from loraplex.kernels.cuda.attention import CudaAttention
from loraplex.kernels.cuda.graphs import StepGraphs
from loraplex.kernels.ops import AttentionRules, AttentionShape, RowLayout, from_stored, to_stored
from support.dense_attention import relative_error
from support.paged_rows import PagedRows, padded_rows, score_terms, stored_parts

pytestmark = pytest.mark.gpu

SHAPES = {
    "llama 3 8b": AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16),
    "llama 2 7b": AttentionShape(32, 32, 128, 16),
    "qwen 2 0.5b": AttentionShape(14, 2, 64, 16),
    "phi 2": AttentionShape(32, 32, 80, 16),
    "gemma 2b": AttentionShape(8, 1, 256, 16),
    "phi 3": AttentionShape(32, 32, 96, 32),
    "gemma 3 4b": AttentionShape(8, 4, 256, 16),
    "heads of 512": AttentionShape(8, 2, 512, 16),
    "heads of 512, no groups": AttentionShape(4, 4, 512, 16),
}
LLAMA = SHAPES["llama 3 8b"]
ALL_SHAPES = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
LARGE_HEADS = pytest.mark.parametrize(
    "shape", [shape for shape in SHAPES.values() if shape.head_dim > 128], ids=str
)
ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
STEPS = {
    "one row": ([4096], [1]),
    "decode": ([1, 17, 4096, 1000, 255, 256, 257, 2], [1] * 8),
    "prompts": ([700, 130], [700, 130]),
    "mixed": ([1, 2048, 4096, 300, 33], [1, 256, 1, 300, 5]),
}
ALL_STEPS = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def attention(*, batch_invariant: bool = False) -> CudaAttention:
    return CudaAttention(DEVICE, batch_invariant=batch_invariant)


def error(rows: PagedRows, counts, rules=None, sink_logits=None) -> float:
    queries = rows.queries(counts)
    expected = rows.expected(queries, rules, sink_logits)
    return relative_error(rows.attended(queries, rules, sink_logits), expected)


@ALL_SHAPES
@DTYPES
@ALL_STEPS
def test_equals_the_formula(shape, dtype, step):
    seq_lens, counts = step
    rows = PagedRows(attention(), shape, seq_lens, dtype=dtype, device=DEVICE)
    assert error(rows, counts) < ROUNDING[dtype]


@pytest.mark.parametrize("window", [(512, 0), (512, 4), (33, 70)], ids=str)
@pytest.mark.parametrize("shape", [LLAMA, SHAPES["llama 2 7b"]], ids=["groups", "no groups"])
@ALL_STEPS
def test_windows_and_sinks(window, shape, step):
    seq_lens, counts = step
    rows = PagedRows(attention(), shape, seq_lens, dtype=torch.bfloat16, device=DEVICE)
    num_tokens, num_sinks = window
    rules = AttentionRules(scale=0.09, window=num_tokens, num_sink_tokens=num_sinks)
    assert error(rows, counts, rules) < ROUNDING[torch.bfloat16]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *itertools.product(["cap", "slopes", "sinks"], ["llama 3 8b", "llama 2 7b"]),
        *itertools.product(["all, in a window"], ["llama 3 8b", "gemma 3 4b", "heads of 512"]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@ALL_STEPS
def test_terms_of_scores(kind, name, dtype, step, batch_invariant):
    seq_lens, counts = step
    shape = SHAPES[name]
    kernel = attention(batch_invariant=batch_invariant)
    rows = PagedRows(kernel, shape, seq_lens, dtype=dtype, device=DEVICE)
    # Another exponential bends the scores than the formula's.
    assert error(rows, counts, *score_terms(kind, shape)) < 2 * ROUNDING[dtype]


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "invariant"])
@pytest.mark.parametrize("is_causal", [True, False], ids=["decoder", "encoder"])
@DTYPES
@ALL_STEPS
def test_biases_by_distance(dtype, step, is_causal, batch_invariant):
    seq_lens, counts = step
    shape = AttentionShape(12, 12, 64, 16)  # of Flan-T5 base
    rules = AttentionRules(scale=0.2, is_causal=is_causal)
    position_bias = torch.randn(shape.num_heads, 2 * 128 + 1)
    kernel = attention(batch_invariant=batch_invariant)
    rows = PagedRows(kernel, shape, seq_lens, dtype=dtype, device=DEVICE)
    queries = rows.queries(counts)
    output = rows.attended(queries, rules, None, position_bias)
    expected = rows.expected(queries, rules, None, position_bias)
    assert relative_error(output, expected) < 2 * ROUNDING[dtype]


@LARGE_HEADS
@DTYPES
@ALL_STEPS
def test_batch_invariant_equals_the_formula(shape, dtype, step):
    seq_lens, counts = step
    kernel = attention(batch_invariant=True)
    rows = PagedRows(kernel, shape, seq_lens, dtype=dtype, device=DEVICE)
    assert error(rows, counts) < ROUNDING[dtype]


@pytest.mark.parametrize("name", ["llama 3 8b", "llama 2 7b", "gemma 3 4b", "heads of 512"])
@DTYPES
@ALL_STEPS
def test_int8(name, dtype, step):
    seq_lens, counts = step
    shape = SHAPES[name]
    rows = PagedRows(attention(), shape, seq_lens, dtype=dtype, kv_dtype=torch.int8, device=DEVICE)
    for vectors in (rows.keys, rows.values):
        vectors[:] = [from_stored(to_stored(each, torch.int8)) for each in vectors]
    assert error(rows, counts) < ROUNDING[dtype]


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["as the model", "int8"])
@DTYPES
def test_write_rounds_as_the_reference(dtype, kv_dtype):
    kernel, kv_dtype = attention(), kv_dtype or dtype
    storage = kernel.allocate(40, LLAMA, kv_dtype)
    fused = torch.randn(500, 32 + 8 + 8, 128, device=DEVICE).to(dtype)
    fused[3, 35, 7], fused[4, 41, 0], fused[5] = torch.nan, torch.inf, 0
    _, key, value = fused.split([32, 8, 8], 1)
    slots = torch.randperm(640, device=DEVICE)[:500]
    slots[[7, 400]] = -1
    kernel.write(storage, key, value, slots)
    written = slots >= 0
    for tensor, given in ((storage.tensors[0], key), (storage.tensors[1], value)):
        stored = tensor
        if kv_dtype == torch.int8:
            stored = torch.cat(stored_parts(tensor, LLAMA), -1)
        stored = stored.flatten(0, 1)[slots[written]].cpu()
        expected = to_stored(given[written].cpu(), kv_dtype)
        assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("kind", ["sinks", "all, in a window"])
@DTYPES
def test_batch_invariant_bits(dtype, kind):
    """Compare the bits of a prompt whole, in chunks and token by token, alone and in a batch."""
    rows = PagedRows(
        attention(batch_invariant=True), LLAMA, [1500, 50, 900], dtype=dtype, device=DEVICE
    )
    rules, sink_logits = score_terms(kind, LLAMA)
    query, other, third = rows.queries([1500, 1, 90])
    whole = rows.attended([query, other, third], rules, sink_logits)[:1500]
    expected = rows.expected([query, other, third], rules, sink_logits)[:1500]
    assert relative_error(whole, expected) < 2 * ROUNDING[dtype]
    for count in (1, 2, 17, 64, 1000):
        found = rows.attended([query[-count:], other, third], rules, sink_logits)
        assert torch.equal(found[:count], whole[1500 - count :])
    for end, count in itertools.product((1, 255, 257, 513, 1400), (1, 16, 200)):
        first = max(0, end - count)
        layout = RowLayout([0, end - first], [end], rows.block_tables[:1])
        plan = rows.kernel.plan(layout, LLAMA, rules)
        batch = rows.batch([query[first:end]])
        found = rows.kernel.attend(batch, rows.storage, plan, sink_logits.to(DEVICE))
        assert torch.equal(found.cpu(), whole[first:end])


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("kind", ["cap", "all, in a window"])
@pytest.mark.parametrize("shape", [LLAMA, SHAPES["llama 2 7b"]], ids=["groups", "no groups"])
def test_recorded_step_attends_for_other_rows(shape, batch_invariant, kind):
    accelerator = CudaAccelerator(DEVICE)
    rows = PagedRows(
        attention(batch_invariant=batch_invariant),
        shape,
        [3000, 20, 333],
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    graphs = StepGraphs(accelerator)
    graphs.is_recording = True
    queries = rows.queries([1, 1, 1])
    rules, sink_logits = score_terms(kind, shape)
    expected = rows.expected(queries, rules, sink_logits)
    sinks = None if sink_logits is None else sink_logits.to(DEVICE)
    torch.cuda.synchronize()
    for chosen in ([1], [2, 0], [0, 1, 2]):
        with accelerator.compute():
            layout = RowLayout(
                range(len(chosen) + 1),
                [rows.seq_lens[row] for row in chosen],
                torch.cat((rows.block_tables[chosen], rows.block_tables[: 4 - len(chosen)])),
            )
            on_device = padded_rows(layout, 4 - len(chosen))
            layout = RowLayout(
                layout.query_start_loc, layout.seq_lens, layout.block_tables, on_device
            )
            plan = rows.kernel.plan(layout, shape, rules)
            query = rows.batch([queries[row] for row in chosen], 4 - len(chosen))
            query = query.contiguous()
            found = graphs.repeat(
                4,
                (query, *plan.tensors),
                lambda q=query, p=plan: rows.kernel.attend(q, rows.storage, p, sinks),
            )
        accelerator.synchronize()
        error = relative_error(found[: len(chosen)].cpu(), expected[chosen])
        assert error < 2 * ROUNDING[torch.bfloat16]
        assert not found[len(chosen) :].any()
