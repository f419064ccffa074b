"""Both CPU backends against plain formulas; and the same bits for a row alone and in company."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch.nn import functional

from loraplex.kernels.activations import Activation
from loraplex.kernels.dispatch import select_kernels
from loraplex.kernels.ops import AttentionRules, AttentionShape, Kernels, RowLayout, Storage
from loraplex.kernels.reference import ReferenceKernels
from support.dense_attention import dense_attention as dense_attention_of_rules
from support.dense_attention import random_queries

CPU = torch.device("cpu")
SHAPE = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=16, block_size=8)
NUM_BLOCKS = 200


@pytest.fixture(params=["reference", "fastest"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    torch.default_generator.manual_seed(0)
    return ReferenceKernels(CPU) if request.param == "reference" else select_kernels(CPU)


def test_linear(kernels: Kernels) -> None:
    x, weight, bias = torch.randn(3, 20), torch.randn(7, 20), torch.randn(7)
    packed = kernels.pack_linear(weight, bias)
    torch.testing.assert_close(kernels.linear(x, packed), x @ weight.t() + bias)
    packed = kernels.pack_linear(weight, None)
    torch.testing.assert_close(kernels.linear(x, packed), x @ weight.t())


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (520, 264), (1376, 40)])
def test_linear_gives_a_row_the_same_bits_in_any_company(
    kernels: Kernels, dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    weight = torch.randn(outputs, inputs).to(dtype)
    packed = kernels.pack_linear(weight, torch.randn(outputs).to(dtype))
    rows = torch.randn(70, inputs).to(dtype)
    expected = torch.cat([kernels.linear(row.unsqueeze(0), packed) for row in rows])
    for num_rows in (2, 3, 5, 7, 9, 16, 33, 70):
        assert torch.equal(kernels.linear(rows[:num_rows], packed), expected[:num_rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_multiply(kernels: Kernels, dtype: torch.dtype) -> None:
    x, factor = torch.randn(2, 40, 250).to(dtype)[:, :, 3:-7]
    expected = (x.double() * factor.double()).to(dtype)
    assert torch.equal(kernels.multiply(x, factor), expected)
    assert torch.equal(kernels.multiply(x[7:8], factor[7:8]), expected[7:8])


def test_layer_norm(kernels: Kernels) -> None:
    x, residual, weight, bias = *torch.randn(2, 5, 19), *torch.randn(2, 19)
    expected = functional.layer_norm(x, (19,), weight, bias, 1e-3)
    torch.testing.assert_close(kernels.layer_norm(x, weight, bias, 1e-3), expected)
    output, total = kernels.add_layer_norm(x, residual, weight, bias, 1e-3)
    assert torch.equal(total, x + residual)
    assert torch.equal(output, kernels.layer_norm(total, weight, bias, 1e-3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layer_norms_and_activations_give_a_row_the_same_bits_in_any_company(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    x, weight, bias = torch.randn(40, 250).to(dtype), *torch.randn(2, 250).to(dtype)

    def results(rows: torch.Tensor) -> torch.Tensor:
        activated = [
            kernels.activate(rows, activation)
            for activation in (Activation.GELU, Activation.GELU_TANH, Activation.RELU)
        ]
        return torch.stack((kernels.layer_norm(rows, weight, bias, 1e-5), *activated))

    alone = torch.cat([results(row.unsqueeze(0)) for row in x], dim=1)
    for num_rows in (2, 7, 16, 40):
        assert torch.equal(results(x[:num_rows]), alone[:, :num_rows])


def test_rms_norm(kernels: Kernels) -> None:
    x, weight = torch.randn(5, 3, 16), torch.randn(16)
    expected = functional.rms_norm(x, (16,), weight, 1e-3)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-3), expected)


def test_rms_norm_of_half_precision_sums_in_float32(kernels: Kernels) -> None:
    x = torch.full((1, 4096), 300.0, dtype=torch.float16)  # its squares overflow float16
    weight = torch.ones(4096, dtype=torch.float16)
    assert torch.equal(kernels.rms_norm(x, weight, 1e-6), torch.ones_like(x))


def test_add_rms_norm(kernels: Kernels) -> None:
    x, residual, weight = torch.randn(5, 16), torch.randn(5, 16), torch.randn(16)
    normed, new_residual = kernels.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(new_residual, residual + x)
    assert torch.equal(normed, kernels.rms_norm(residual + x, weight, 1e-6))


def test_silu_mul(kernels: Kernels) -> None:
    x = torch.randn(5, 24)
    expected = functional.silu(x[:, :12]) * x[:, 12:]
    torch.testing.assert_close(kernels.gate(x, Activation.SILU), expected)


def test_silu_mul_gives_a_row_the_same_bits_in_any_company(kernels: Kernels) -> None:
    rows = torch.randn(129, 2 * 1376)
    expected = torch.cat([kernels.gate(row.unsqueeze(0), Activation.SILU) for row in rows])
    for num_rows in (5, 7, 37, 129):
        assert torch.equal(kernels.gate(rows[:num_rows], Activation.SILU), expected[:num_rows])


def test_rotary_turns_pairs_of_a_fused_view(kernels: Kernels) -> None:
    """Compare with complex numbers: (x_i, x_{i + D/2}) times e^{i angle}; the rest is untouched."""
    fused = torch.randn(3, 5 * 8)
    before = fused.clone()
    query, key = fused[:, :24].view(3, 3, 8), fused[:, 24:32].view(3, 1, 8)
    angles = torch.rand(3, 4) * 6
    kernels.rotary(query, key, angles.cos(), angles.sin())
    pairs = before.view(3, 5, 2, 4)
    turned = torch.complex(pairs[:, :, 0], pairs[:, :, 1]) * torch.polar(
        torch.ones(3, 1, 4), angles.unsqueeze(1)
    )
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(fused.view(3, 5, 8)[:, :4], expected[:, :4])
    assert torch.equal(fused[:, 32:], before[:, 32:])


Window = tuple[int | None, int]
"""Numbers of positions and of sinks."""


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: Window = (None, 0)
) -> torch.Tensor:
    """query [n, H, D] are the last of key, value [L, K, D]."""
    num_seen, num_sinks = window
    num_keys = len(key)
    positions = torch.arange(num_keys - len(query), num_keys).unsqueeze(1)
    keys = torch.arange(num_keys)
    visible = keys <= positions
    if num_seen is not None:
        visible &= (keys > positions - num_seen) | (keys < num_sinks)
    groups = query.shape[1] // key.shape[1]
    return functional.scaled_dot_product_attention(
        query.transpose(0, 1),
        key.repeat_interleave(groups, 1).transpose(0, 1),
        value.repeat_interleave(groups, 1).transpose(0, 1),
        attn_mask=visible,
    ).transpose(0, 1)


class PagedRows:
    """Rows with known keys and values, written to shuffled blocks."""

    def __init__(
        self,
        kernels: Kernels,
        seq_lens: Sequence[int],
        dtype: torch.dtype = torch.float32,
        shape: AttentionShape = SHAPE,
    ) -> None:
        self.kernels = kernels
        self.shape = shape
        self.seq_lens = seq_lens
        self.storage: Storage = kernels.allocate_kv(NUM_BLOCKS, shape, dtype)
        self.storage.tensors[0].fill_(torch.nan)
        self.storage.tensors[1].fill_(torch.nan)
        order = iter(torch.randperm(NUM_BLOCKS).tolist())
        widest = -(-max(seq_lens) // shape.block_size)
        self.tables = torch.zeros(len(seq_lens), widest, dtype=torch.int64)
        self.keys, self.values = [], []
        for row, seq_len in enumerate(seq_lens):
            num_blocks = -(-seq_len // shape.block_size)
            self.tables[row, :num_blocks] = torch.tensor([next(order) for _ in range(num_blocks)])
            self._write(row, seq_len, dtype)

    def _write(self, row: int, seq_len: int, dtype: torch.dtype) -> None:
        sizes = (seq_len, self.shape.num_kv_heads, self.shape.head_dim)
        key, value = torch.randn(sizes).to(dtype), torch.randn(sizes).to(dtype)
        positions = torch.arange(seq_len)
        blocks = self.tables[row, positions // self.shape.block_size]
        slots = blocks * self.shape.block_size + positions % self.shape.block_size
        self.kernels.write_kv(self.storage, key, value, slots)
        self.keys.append(key)
        self.values.append(value)

    def attend(
        self,
        queries: Sequence[torch.Tensor],
        rows: Sequence[int],
        window: Window = (None, 0),
        *,
        is_causal: bool = True,
    ) -> list[torch.Tensor]:
        counts = [len(query) for query in queries]
        layout = RowLayout(
            list(itertools.accumulate(counts, initial=0)),
            [self.seq_lens[row] for row in rows],
            self.tables[list(rows)],
        )
        rules = AttentionRules(
            scale=self.shape.head_dim**-0.5,
            window=window[0],
            num_sink_tokens=window[1],
            is_causal=is_causal,
        )
        plan = self.kernels.plan_attention(layout, self.shape, rules)
        output = self.kernels.paged_attention(torch.cat(list(queries)), self.storage, plan)
        return list(output.split(counts))


@pytest.mark.covering(2)
@pytest.mark.some(14)
@pytest.mark.parametrize(
    "window", [(None, 0), (1, 0), (5, 0), (100, 0), (1, 1), (5, 70), (100, 17)], ids=str
)
@pytest.mark.parametrize(
    "shape",
    [SHAPE, AttentionShape(4, 4, 8, 16), AttentionShape(8, 1, 8, 5)],
    ids=["grouped", "one query head per key head", "one key head"],
)
def test_ragged_paged_attention(kernels: Kernels, window: Window, shape: AttentionShape) -> None:
    """Decoding rows, a whole prompt, a later chunk, and one that crosses ranges of keys.

    What no row has written is NaN: nothing of it may come through.
    """
    seq_lens, counts = (1, 7, 130, 64, 65, 300), (1, 1, 130, 3, 1, 70)
    rows = PagedRows(kernels, seq_lens, shape=shape)
    queries = random_queries(counts, shape)
    outputs = rows.attend(queries, range(len(seq_lens)), window)
    for query, key, value, output in zip(queries, rows.keys, rows.values, outputs, strict=True):
        expected = dense_attention(query, key, value, window)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [(None, 0), (1, 0), (5, 0), (70, 0), (40, 18)], ids=str)
@pytest.mark.parametrize("shape", [SHAPE, AttentionShape(8, 1, 8, 5)], ids=["grouped", "one head"])
def test_queries_that_see_later_keys(
    kernels: Kernels, window: Window, shape: AttentionShape
) -> None:
    """Whole rows, alone and together with the same bits; a window is on both sides."""
    seq_lens = (1, 7, 64, 65, 130, 300)
    rows = PagedRows(kernels, seq_lens, shape=shape)
    queries = random_queries(seq_lens, shape)
    outputs = rows.attend(queries, range(len(seq_lens)), window, is_causal=False)
    for row, output in enumerate(outputs):
        vectors = (queries[row], rows.keys[row], rows.values[row])
        expected = dense_attention_of_rules(*vectors, *window, is_causal=False)
        torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
        (alone,) = rows.attend([queries[row]], [row], window, is_causal=False)
        assert torch.equal(alone, output)


def test_queries_may_outnumber_the_keys_of_their_row(kernels: Kernels) -> None:
    """Each query sees all keys: in cross attention they are of another text."""
    rows = PagedRows(kernels, (7, 90))
    queries = random_queries((150, 1), SHAPE)
    outputs = rows.attend(queries, range(2), is_causal=False)
    for query, key, value, output in zip(queries, rows.keys, rows.values, outputs, strict=True):
        expected = dense_attention_of_rules(query, key, value, is_causal=False)
        torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_storage_is_summed_in_float32(kernels: Kernels, dtype: torch.dtype) -> None:
    rows = PagedRows(kernels, [90], dtype)
    (query,) = random_queries([90], SHAPE)
    (output,) = rows.attend([query.to(dtype)], [0])
    expected = dense_attention(
        query.to(dtype).float(), rows.keys[0].float(), rows.values[0].float()
    )
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("window", [(None, 0), (40, 0), (40, 18)], ids=str)
def test_attention_gives_a_row_the_same_bits_in_any_company(
    kernels: Kernels, window: Window
) -> None:
    seq_lens = (1, 50, 63, 64, 65, 200, 320)
    rows = PagedRows(kernels, seq_lens)
    queries = random_queries(seq_lens, SHAPE)
    together = rows.attend(queries, range(len(seq_lens)), window)
    backwards = rows.attend(queries[::-1], range(len(seq_lens))[::-1], window)[::-1]
    for row in range(len(seq_lens)):
        (alone,) = rows.attend([queries[row]], [row], window)
        assert torch.equal(alone, together[row])
        assert torch.equal(alone, backwards[row])


@pytest.mark.parametrize("window", [(None, 0), (40, 0), (40, 18)], ids=str)
def test_a_token_has_the_same_bits_whatever_the_chunk(kernels: Kernels, window: Window) -> None:
    seq_len = 300
    rows = PagedRows(kernels, [seq_len])
    (query,) = random_queries([seq_len], SHAPE)
    (whole,) = rows.attend([query], [0], window)
    for start, end in ((0, 1), (0, 13), (13, 40), (60, 68), (127, 129), (99, 300), (299, 300)):
        rows.seq_lens = [end]
        (chunk,) = rows.attend([query[start:end]], [0], window)
        assert torch.equal(chunk, whole[start:end])
