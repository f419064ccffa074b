"""Keys and values stored as int8: the bytes, the error, and the same bits however a step is cut."""

import itertools

import pytest
import torch

from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.library import (
    NativeLibraryError,
    available_instruction_sets,
    load_library,
)
from loraplex.kernels.ops import (
    AttentionRules,
    AttentionShape,
    Kernels,
    RowLayout,
    Storage,
    from_stored,
    stored_size,
    to_stored,
)
from loraplex.kernels.reference import ReferenceKernels
from support.dense_attention import dense_attention, random_queries, relative_error

try:
    INSTRUCTION_SETS = available_instruction_sets()
except NativeLibraryError:
    INSTRUCTION_SETS = ()

BACKENDS = ("reference", *INSTRUCTION_SETS)
SHAPES = {
    "grouped": AttentionShape(num_heads=8, num_kv_heads=2, head_dim=64, block_size=16),
    "one key head": AttentionShape(7, 1, 128, 16),
    "odd sizes": AttentionShape(6, 2, 22, 5),
    "one position per block": AttentionShape(4, 4, 6, 1),
    "blocks across tiles": AttentionShape(4, 2, 24, 48),
}
SHAPE = SHAPES["grouped"]
ALL_SHAPES = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def backend(name: str, num_threads: int = 2) -> Kernels:
    if name == "reference":
        return ReferenceKernels(torch.device("cpu"))
    return NativeKernels(load_library([name]), num_threads)


@pytest.fixture(params=BACKENDS)
def kernels(request) -> Kernels:
    torch.default_generator.manual_seed(0)
    return backend(request.param)


def stored_vectors(storage: Storage, shape: AttentionShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as the reference lays them out: [num_blocks, K, block_size, D + 4]."""
    key, value = storage.tensors
    blocks, head_dim, size = key.shape[0], shape.head_dim, shape.block_size
    if key.shape[2] == size and key.shape[3] == stored_size(head_dim, torch.int8):
        return key, value
    laid_out = []
    for tensor, sizes in ((key, (head_dim, size)), (value, (size, head_dim))):
        parts = tensor.view(blocks, shape.num_kv_heads, -1)
        numbers = parts[..., : head_dim * size].reshape(blocks, -1, *sizes)
        if tensor is key:
            numbers = numbers.transpose(2, 3)
        scales = parts[..., head_dim * size :].reshape(blocks, -1, size, 4)
        laid_out.append(torch.cat((numbers, scales), dim=-1))
    return laid_out[0], laid_out[1]


class Int8Rows:
    """Rows with known keys and values in shuffled blocks; what was not written has NaN scales."""

    def __init__(self, kernels, seq_lens, *, shape=SHAPE, dtype=torch.float32, kv_dtype=torch.int8):
        self.kernels, self.shape = kernels, shape
        counts = [-(-length // shape.block_size) for length in seq_lens]
        self.storage = kernels.allocate_kv(sum(counts) + 2, shape, kv_dtype)
        if kv_dtype == torch.int8:
            self.storage.tensors[0].fill_(-1)  # 0xffffffff is a NaN
            self.storage.tensors[1].fill_(-1)
        order = torch.randperm(sum(counts) + 2)
        self.tables = torch.zeros(len(seq_lens), max(counts), dtype=torch.int64)
        self.keys, self.values = [], []
        for row, (length, count) in enumerate(zip(seq_lens, counts, strict=True)):
            self.tables[row, :count] = order[sum(counts[:row]) :][:count]
            key, value = torch.randn(2, length, shape.num_kv_heads, shape.head_dim).to(dtype)
            key *= torch.rand(length, shape.num_kv_heads, 1) * 4
            kernels.write_kv(self.storage, key, value, self.slots(row, torch.arange(length)))
            self.keys.append(key)
            self.values.append(value)

    def slots(self, row, positions):
        size = self.shape.block_size
        return self.tables[row, positions // size] * size + positions % size

    def attend(self, queries, seq_lens, rows=None, *, window=None, sinks=0, kernels=None):
        counts = [len(query) for query in queries]
        rows = list(range(len(queries))) if rows is None else rows
        starts = list(itertools.accumulate(counts, initial=0))
        kernels = kernels or self.kernels
        plan = kernels.plan_attention(
            RowLayout(starts, seq_lens, self.tables[rows]),
            self.shape,
            AttentionRules(scale=self.shape.head_dim**-0.5, window=window, num_sink_tokens=sinks),
        )
        return list(kernels.paged_attention(torch.cat(queries), self.storage, plan).split(counts))


def rounded(vectors: torch.Tensor) -> torch.Tensor:
    return from_stored(to_stored(vectors, torch.int8))


@ALL_SHAPES
def test_bytes_of_a_storage(kernels, shape):
    storage = kernels.allocate_kv(7, shape, torch.int8)
    vectors = 2 * 7 * shape.block_size * shape.num_kv_heads
    assert storage.num_bytes == vectors * (shape.head_dim + 4) == 7 * shape.block_bytes(torch.int8)
    for dtype in (torch.float32, torch.bfloat16):
        assert kernels.allocate_kv(7, shape, dtype).num_bytes == 7 * shape.block_bytes(dtype)


@pytest.mark.covering(2)
@pytest.mark.some(15)
@ALL_SHAPES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_every_backend_stores_the_same_bytes(name, shape, dtype):
    torch.default_generator.manual_seed(0)
    reference, native = backend("reference"), backend(name)
    key, value = torch.randn(2, 40, shape.num_kv_heads, shape.head_dim).to(dtype)
    key[3], value[5, 0], key[7, -1, 0] = 0.0, 0.0, torch.inf
    value[11, 0, -1], key[13] = torch.nan, torch.tensor(2e-7 if dtype == torch.float16 else 1e-38)
    slots = torch.randperm(50)[:40]
    num_blocks = -(-50 // shape.block_size)
    expected = reference.allocate_kv(num_blocks, shape, torch.int8)
    reference.write_kv(expected, key, value, slots)
    got = native.allocate_kv(num_blocks, shape, torch.int8)
    native.write_kv(got, key, value, slots)
    for one, other in zip(stored_vectors(got, shape), expected.tensors, strict=True):
        assert torch.equal(one[..., :-4], other[..., :-4])
        torch.testing.assert_close(
            *(part[..., -4:].contiguous().view(torch.float32) for part in (one, other)),
            rtol=0,
            atol=0,
            equal_nan=True,
        )


def test_a_vector_is_rounded_by_at_most_half_a_step():
    torch.default_generator.manual_seed(0)
    vectors = torch.randn(200, 64) * torch.logspace(-30, 30, 200).unsqueeze(1)
    steps = vectors.abs().amax(-1, keepdim=True) / 127
    assert ((rounded(vectors) - vectors).abs() <= steps * 0.5001).all()
    extremes = torch.tensor([[0.0, -0.0], [3e38, -3e38], [1e-44, 0.0]])
    torch.testing.assert_close(rounded(extremes), extremes, rtol=1e-6, atol=1e-40)
    assert rounded(torch.tensor([[1.0, torch.inf], [torch.nan, 1.0]])).isnan().all()


@pytest.mark.covering(2)
@pytest.mark.some(25)
@ALL_SHAPES
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (1, 0), (70, 0), (1, 5), (70, 40)])
def test_attention_is_that_of_the_rounded_vectors(kernels, shape, window, sinks):
    seq_lens, counts = [1, 7, 130, 65, 600], [1, 7, 33, 1, 3]
    rows = Int8Rows(kernels, seq_lens, shape=shape)
    queries = random_queries(counts, shape)
    outputs = rows.attend(queries, seq_lens, window=window, sinks=sinks)
    for query, key, value, output in zip(queries, rows.keys, rows.values, outputs, strict=True):
        expected = dense_attention(query, rounded(key), rounded(value), window, sinks)
        assert relative_error(output, expected) < 3e-6
        # What int8 costs against float keys and values.
        assert relative_error(output, dense_attention(query, key, value, window, sinks)) < 0.03


@pytest.mark.covering(2)
@pytest.mark.some(16)
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (40, 0), (600, 0), (40, 70)])
@pytest.mark.parametrize("shape", [SHAPE, SHAPES["odd sizes"]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_company_or_chunks(kernels, shape, window, sinks, dtype):
    seq_lens = [1, 64, 65, 513]
    rows = Int8Rows(kernels, seq_lens, shape=shape, dtype=dtype)
    queries = random_queries(seq_lens, shape, dtype)
    together = rows.attend(queries, seq_lens, window=window, sinks=sinks)
    for row, length in enumerate(seq_lens):
        whole, query = together[row], queries[row]
        assert torch.equal(
            rows.attend([query], [length], [row], window=window, sinks=sinks)[0], whole
        )
        for start, end in ((0, 1), (0, 13), (60, 65), (127, 129), (400, 513)):
            if end <= length:
                (output,) = rows.attend(
                    [query[start:end]], [end], [row], window=window, sinks=sinks
                )
                assert torch.equal(output, whole[start:end])


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.bfloat16, torch.float32], ids=str)
def test_bits_are_those_of_every_instruction_set_and_number_of_threads(kv_dtype):
    """But for the generic one, which has no fused multiply-add: it is close."""
    torch.default_generator.manual_seed(0)
    seq_lens = [700, 1, 1300]
    queries = random_queries([3, 1, 1], SHAPE)
    outputs = {}
    for name in INSTRUCTION_SETS:
        torch.default_generator.manual_seed(1)
        rows = Int8Rows(backend(name), seq_lens, kv_dtype=kv_dtype)
        for num_threads in (1, 2, 5):
            result = rows.attend(queries, seq_lens, kernels=backend(name, num_threads))
            outputs[name, num_threads] = torch.cat(result)
    for (name, _), output in outputs.items():
        first = outputs[INSTRUCTION_SETS[0], 1]
        if name == "generic":
            torch.testing.assert_close(output, first, rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(output, first)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_a_later_token_that_is_not_finite_is_not_seen(name):
    torch.default_generator.manual_seed(0)
    kernels = backend(name)
    rows = Int8Rows(kernels, [100])
    queries = random_queries([100], SHAPE)
    (expected,) = rows.attend(queries, [100])
    rows.keys[0][70:] = torch.inf
    rows.values[0][70:] = torch.nan
    kernels.write_kv(rows.storage, rows.keys[0], rows.values[0], rows.slots(0, torch.arange(100)))
    (output,) = rows.attend(queries, [100])
    assert torch.equal(output[:70], expected[:70])
    assert output[70:].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, torch.float16), (torch.bfloat16, torch.float32)],
    ids=str,
)
def test_float_storage_of_another_dtype(kernels, dtype, kv_dtype):
    rows = Int8Rows(kernels, [90], dtype=dtype, kv_dtype=kv_dtype)
    queries = random_queries([90], SHAPE, dtype=dtype)
    (output,) = rows.attend(queries, [90])
    assert output.dtype == dtype
    expected = dense_attention(
        queries[0], *(part.to(kv_dtype) for part in (rows.keys[0], rows.values[0]))
    )
    assert relative_error(output, expected) < (1e-5 if dtype == torch.float32 else 1e-2)
