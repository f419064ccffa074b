"""How FlashInfer is called: a module with its signatures that computes by the formula."""

import dataclasses
import inspect
import sys
import types

import pytest
import torch

from loraplex.core.errors import ConfigError
from loraplex.kernels.accelerator import HostAccelerator
from loraplex.kernels.cuda.attention import CudaAttention
from loraplex.kernels.cuda.graphs import StepGraphs
from loraplex.kernels.ops import AttentionRules, AttentionShape
from support.dense_attention import dense_attention, relative_error
from support.naming import refused
from support.paged_rows import PagedRows, padded_rows

SHAPE = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=64, block_size=16)


class _Wrapper:
    """What both wrappers have in common in 0.6.18 and 0.7.2."""

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8
        self.workspaces = (float_workspace_buffer, int_workspace_buffer)

    def _keep(self, indptr, indices, last_page_len, sizes):
        for host in (indptr, last_page_len):
            assert host.device.type == "cpu"
            assert host.dtype == torch.int32
        assert indices.dtype == torch.int32
        assert indptr[0] == 0
        assert indptr[-1] == len(indices)
        assert (indptr.diff() >= 1).all(), "every row has a page"
        assert ((last_page_len >= 1) & (last_page_len <= sizes[3])).all()
        self.pages, self.sizes = (indptr, indices, last_page_len), sizes

    def _attend(self, query, cache, starts, out):
        indptr, indices, last_page_len = self.pages
        heads, kv_heads, head_dim, page_size = self.sizes
        assert query.shape == out.shape == (int(starts[-1]), heads, head_dim)
        assert query.dtype == self.dtype
        for pages in cache:
            assert pages.shape[1:] == (page_size, kv_heads, head_dim)
        for row in range(len(last_page_len)):
            ids = indices[indptr[row] : indptr[row + 1]].long()
            length = (len(ids) - 1) * page_size + int(last_page_len[row])
            key, value = (each[ids].flatten(0, 1)[:length] for each in cache)
            rows = slice(int(starts[row]), int(starts[row + 1]))
            found = dense_attention(
                query[rows], key, value, scale=self.scale, soft_cap=self.soft_cap
            )
            out[rows] = found.to(out.dtype)
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    made = 0

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
    ):
        assert kv_layout == "NHD"
        type(self).made += 1
        self.use_tensor_cores = use_tensor_cores
        self.buffers = None
        if use_cuda_graph:
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self.buffers = (
                paged_kv_indptr_buffer,
                paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer,
            )

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        sm_scale=None,
    ):
        self.scale, self.soft_cap = sm_scale, logits_soft_cap
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._keep(indptr, indices, last_page_len, sizes)
        assert q_data_type == kv_data_type
        self.dtype = q_data_type
        if self.buffers is not None:
            assert len(last_page_len) == len(self.buffers[2]), "the batch size is frozen"
            for buffer, given in zip(self.buffers, self.pages, strict=True):
                buffer[: len(given)] = given
            self.pages = self.buffers

    def run(self, q, paged_kv_cache, *args, out=None):
        return self._attend(q, paged_kv_cache, range(len(self.pages[2]) + 1), out)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False):
        assert kv_layout == "NHD"
        assert not use_cuda_graph

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal=False,
        sm_scale=None,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        assert qo_indptr.device.type == "cpu"
        assert causal
        self.scale, self.soft_cap = sm_scale, logits_soft_cap
        assert q_data_type == kv_data_type
        sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._keep(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, sizes)
        self.starts, self.dtype = qo_indptr, q_data_type

    def run(self, q, paged_kv_cache, *args, out=None):
        return self._attend(q, paged_kv_cache, self.starts, out)


@pytest.fixture
def flashinfer(monkeypatch):
    torch.default_generator.manual_seed(0)
    module = types.ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return module


def kernel(backend: str = "flashinfer", *, batch_invariant: bool = False) -> CudaAttention:
    host = HostAccelerator()
    return CudaAttention(
        host.device, batch_invariant=batch_invariant, backend=backend, accelerator=host
    )


def broken(*args, **kwargs):
    raise RuntimeError("no nvcc")


def served_by_flashinfer(rows: PagedRows, rules: AttentionRules) -> bool:
    queries = rows.queries([1] * len(rows.seq_lens))
    return rows.kernel.plan(rows.layout(queries), SHAPE, rules).flashinfer is not None


def half_rows(seq_lens, **kwargs) -> PagedRows:
    rows = PagedRows(kernel(), SHAPE, seq_lens, dtype=torch.float16, **kwargs)
    for tensor in rows.storage.tensors:
        tensor.nan_to_num_()  # the formula multiplies what padding reads
    return rows


@pytest.mark.parametrize("counts", [[1, 1, 1], [5, 1, 30]], ids=["decode", "mixed"])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_equals_the_formula(flashinfer, counts, soft_cap):
    rows = half_rows([16, 33, 47])
    queries = rows.queries(counts)
    rules = AttentionRules(scale=0.3, soft_cap=soft_cap)
    assert served_by_flashinfer(rows, rules)
    output = rows.attended(queries, rules)
    assert relative_error(output, rows.expected(queries, rules)) < 1e-3


@pytest.mark.parametrize(
    "rules",
    [AttentionRules(scale=0.1, window=8), AttentionRules(scale=0.1, alibi_slopes=(0.5,) * 8)],
    ids=["window", "slopes"],
)
def test_triton_attends_by_rules_that_flashinfer_lacks(flashinfer, rules):
    rows = half_rows([16, 33])
    assert not served_by_flashinfer(rows, rules)
    assert served_by_flashinfer(rows, rows.rules)


def test_triton_attends_with_sink_logits(flashinfer):
    rows = half_rows([16, 33])
    queries, sink_logits = rows.queries([1, 3]), torch.linspace(-2, 3, 8)
    assert served_by_flashinfer(rows, rows.rules)
    output = rows.attended(queries, sink_logits=sink_logits)
    assert relative_error(output, rows.expected(queries, None, sink_logits)) < 2e-3


def test_layers_with_other_rules_do_not_take_the_one_plan_of_a_step(flashinfer):
    rows = half_rows([16, 33])
    queries, other = rows.queries([1, 1]), AttentionRules(scale=0.5)
    layout = rows.layout(queries)
    first, second = (rows.kernel.plan(layout, SHAPE, rules) for rules in (rows.rules, other))
    assert first.flashinfer is not None
    assert second.flashinfer is None
    output = rows.kernel.attend(rows.batch(queries), rows.storage, first)
    assert relative_error(output, rows.expected(queries)) < 1e-3


def test_a_soft_cap_that_cannot_be_built_is_refused(flashinfer, monkeypatch):
    rows = half_rows([16])
    monkeypatch.setattr(BatchDecodeWithPagedKVCacheWrapper, "plan", broken)
    with refused(ConfigError, "attention_backend=flashinfer", param="attention_backend"):
        rows.attended(rows.queries([1]), AttentionRules(scale=0.1, soft_cap=50.0))


def test_recorded_step_is_planned_again(flashinfer):
    rows = half_rows([16, 33, 47], table_width=4)
    graphs = StepGraphs(HostAccelerator())
    graphs.is_recording = True
    queries = rows.queries([1, 1, 1])
    expected = rows.expected(queries)
    whole = rows.layout(queries)
    for chosen in ([1], [2, 0], [0, 1, 2]):
        layout = dataclasses.replace(
            whole,
            query_start_loc=range(len(chosen) + 1),
            seq_lens=[rows.seq_lens[row] for row in chosen],
            block_tables=rows.block_tables[chosen],
        )
        on_device = padded_rows(layout, 4 - len(chosen))
        layout = dataclasses.replace(layout, on_device=on_device)
        plan = rows.kernel.plan(layout, SHAPE, rows.rules)
        query = rows.batch([queries[row] for row in chosen], 4 - len(chosen))
        found = graphs.repeat(
            4, (query,), lambda q=query, p=plan: rows.kernel.attend(q, rows.storage, p)
        )
        assert relative_error(found[: len(chosen)], expected[chosen]) < 1e-3
    assert len(graphs) == 1


def test_wrappers_are_made_once(flashinfer):
    rows = half_rows([16, 33])
    layout = rows.layout(rows.queries([1, 1]))
    first = rows.kernel.plan(layout, SHAPE, rows.rules).flashinfer.wrapper
    assert rows.kernel.plan(layout, SHAPE, rows.rules).flashinfer.wrapper is first
    assert first.use_tensor_cores


def test_triton_attends_for_queries_of_another_type_than_the_storage(flashinfer):
    rows = half_rows([16, 33])
    rows.dtype = torch.float32
    queries = rows.queries([1, 3])
    assert served_by_flashinfer(rows, rows.rules)
    assert relative_error(rows.attended(queries), rows.expected(queries)) < 1e-6


def test_required_and_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="not installed"):
        kernel().allocate(2, SHAPE, torch.float16)
    kernel("auto").allocate(2, SHAPE, torch.float16)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "invariant"),
    [(torch.int8, 64, False), (torch.float32, 64, False), (torch.float16, 80, False),
     (torch.float16, 64, True)],
)  # fmt: skip
def test_required_and_not_served(flashinfer, dtype, head_dim, invariant):
    shape = dataclasses.replace(SHAPE, head_dim=head_dim)
    with pytest.raises(ConfigError, match="attention_backend") as raised:
        kernel(batch_invariant=invariant).allocate(2, shape, dtype)
    assert raised.value.param == "attention_backend"


def test_required_and_broken(flashinfer, monkeypatch):
    monkeypatch.setattr(flashinfer, "BatchPrefillWithPagedKVCacheWrapper", broken)
    with refused(ConfigError, "nvcc", "attention_backend=flashinfer", param="attention_backend"):
        kernel().allocate(2, SHAPE, torch.float16)


def test_real_signatures_take_what_is_said():
    """Where FlashInfer is installed: every argument that the double takes."""
    real = pytest.importorskip("flashinfer")
    for double in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        for method in ("__init__", "run", "reset_workspace_buffer"):
            taken = inspect.signature(getattr(getattr(real, double.__name__), method)).parameters
            assert set(inspect.signature(getattr(double, method)).parameters) <= set(taken)
