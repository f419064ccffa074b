"""Attention that is not causal, and position biases, of both host backends against a dense loop."""

import itertools
from collections.abc import Sequence

import pytest
import torch

from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.library import available_instruction_sets, load_library
from loraplex.kernels.ops import AttentionRules, AttentionShape, Kernels, RowLayout, Storage
from loraplex.kernels.reference import ReferenceKernels

SHAPE = AttentionShape(num_heads=6, num_kv_heads=3, head_dim=16, block_size=16)
MAX_DISTANCE = 21
WHOLE = AttentionRules(scale=0.25, is_causal=False)
RULES = {
    "whole": WHOLE,
    "window": AttentionRules(scale=0.25, window=30, num_sink_tokens=3, is_causal=False),
    "causal": AttentionRules(scale=1.0),
}
COUNTS, SEQ_LENS = (3, 90, 1, 200), (3, 90, 70, 200)


@pytest.fixture(params=["reference", "native"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    torch.default_generator.manual_seed(5)
    if request.param == "reference":
        return ReferenceKernels(torch.device("cpu"))
    return NativeKernels(load_library(available_instruction_sets()[-1:]), 1)


class Rows:
    """Rows with random keys and values in blocks; what was not written is NaN."""

    def __init__(self, kernels: Kernels, seq_lens: Sequence[int]) -> None:
        self._kernels = kernels
        counts = [-(-length // SHAPE.block_size) for length in seq_lens]
        self.storage: Storage = kernels.allocate_kv(sum(counts), SHAPE, torch.float32)
        for tensor in self.storage.tensors:
            tensor.fill_(torch.nan)
        order = torch.randperm(sum(counts))
        self.tables = torch.zeros(len(seq_lens), max(counts), dtype=torch.int64)
        self.seq_lens = list(seq_lens)
        self.keys, self.values = [], []
        for row, (length, first) in enumerate(
            zip(seq_lens, itertools.accumulate(counts, initial=0), strict=False)
        ):
            self.tables[row, : counts[row]] = order[first : first + counts[row]]
            key, value = torch.randn(2, length, SHAPE.num_kv_heads, SHAPE.head_dim)
            positions = torch.arange(length)
            size = SHAPE.block_size
            slots = self.tables[row, positions // size] * size + positions % size
            kernels.write_kv(self.storage, key, value, slots)
            self.keys.append(key)
            self.values.append(value)

    def attend(
        self,
        queries: Sequence[torch.Tensor],
        rules: AttentionRules,
        bias: torch.Tensor | None,
        rows: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        counts = [len(query) for query in queries]
        chosen = list(range(len(queries))) if rows is None else list(rows)
        layout = RowLayout(
            list(itertools.accumulate(counts, initial=0)),
            [self.seq_lens[row] for row in chosen],
            self.tables[chosen],
        )
        plan = self._kernels.plan_attention(layout, SHAPE, rules)
        output = self._kernels.paged_attention(
            torch.cat(list(queries)), self.storage, plan, position_bias=bias
        )
        return list(output.split(counts))


def dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rules: AttentionRules,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """One row, in float64."""
    shared = SHAPE.num_heads // SHAPE.num_kv_heads
    keys, values = (each.double().repeat_interleave(shared, dim=1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * rules.scale
    own = torch.arange(len(key) - len(query), len(key)).unsqueeze(1)
    distances = torch.arange(len(key)) - own
    if bias is not None:
        scores += bias.double()[:, distances.clamp(-MAX_DISTANCE, MAX_DISTANCE) + MAX_DISTANCE]
    sees = torch.ones_like(distances, dtype=torch.bool)
    if rules.window is not None:
        sees = distances.abs() < rules.window
        sees |= (torch.arange(len(key)) < rules.num_sink_tokens) & (distances <= 0)
    if rules.is_causal:
        sees &= distances <= 0
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def random_bias() -> torch.Tensor:
    return torch.randn(SHAPE.num_heads, 2 * MAX_DISTANCE + 1)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_rows_against_a_dense_loop(kernels: Kernels, rules: AttentionRules, has_bias: bool) -> None:
    rows = Rows(kernels, SEQ_LENS)
    bias = random_bias() if has_bias else None
    queries = [torch.randn(count, SHAPE.num_heads, SHAPE.head_dim) for count in COUNTS]
    for row, got in enumerate(rows.attend(queries, rules, bias)):
        expected = dense(queries[row], rows.keys[row], rows.values[row], rules, bias)
        assert torch.allclose(got.double(), expected, atol=2e-5), row


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_a_row_has_the_bits_that_it_has_alone(
    kernels: Kernels, rules: AttentionRules, has_bias: bool
) -> None:
    rows = Rows(kernels, SEQ_LENS)
    bias = random_bias() if has_bias else None
    queries = [torch.randn(count, SHAPE.num_heads, SHAPE.head_dim) for count in COUNTS]
    together = rows.attend(queries, rules, bias)
    for row, query in enumerate(queries):
        (alone,) = rows.attend([query], rules, bias, [row])
        assert torch.equal(alone, together[row]), row


def test_queries_may_outnumber_keys(kernels: Kernels) -> None:
    rows = Rows(kernels, (5, 130))
    queries = [torch.randn(count, SHAPE.num_heads, SHAPE.head_dim) for count in (40, 150)]
    for row, got in enumerate(rows.attend(queries, WHOLE, None)):
        expected = dense(queries[row], rows.keys[row], rows.values[row], WHOLE, None)
        assert torch.allclose(got.double(), expected, atol=2e-5), row


@pytest.mark.parametrize("num_keys", [1, 16, 64, 65, 300])
def test_a_query_that_decodes_has_the_bits_of_a_prompt(kernels: Kernels, num_keys: int) -> None:
    """Cross attention of a decoder reads the same keys in steps of any number of tokens."""
    rows = Rows(kernels, (num_keys,))
    query = torch.randn(7, SHAPE.num_heads, SHAPE.head_dim)
    (together,) = rows.attend([query], WHOLE, None)
    for index in range(len(query)):
        (alone,) = rows.attend([query[index : index + 1]], WHOLE, None)
        assert torch.equal(alone[0], together[index])
        (causal,) = rows.attend([query[index : index + 1]], AttentionRules(scale=0.25), None)
        assert torch.equal(causal, alone)
