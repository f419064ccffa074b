"""Native multi-LoRA against a loop in float64; and a token's bits in any company."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from loraplex.core.adapter import LM_HEAD, OUTSIDE_LAYERS
from loraplex.kernels.adapter_parts import AdapterParts, OutputVector, PartsUse, add_vectors
from loraplex.kernels.lora import (
    LoraBatch,
    LoraCells,
    LoraPlace,
    LoraTable,
    LoraUse,
    add_lora,
    lora_batch,
)
from loraplex.kernels.native.library import (
    NativeLibraryError,
    ThreadPool,
    available_instruction_sets,
    load_library,
)
from loraplex.kernels.native.lora import NativeLora
from support.cases_in_turn import in_turn

try:
    INSTRUCTION_SETS = available_instruction_sets()
except NativeLibraryError as error:
    pytest.skip(f"the native kernels are not built: {error}", allow_module_level=True)

NUM_LAYERS = 2
MODULES = ("q_proj", "other", "k_proj", "v_proj")
FUSED = ("q_proj", "k_proj", "v_proj")
SIZES = {  # in_features, and out_features of q, k and v
    "usual": (64, (48, 16, 16)),
    "odd": (37, (50, 3, 19)),
    "several tiles of columns": (24, (1100, 513, 8)),
}
RANKS = {"1": (1,), "8": (8,), "64": (64,), "mixed": (1, 64, 3, 8, 0, 17)}
# Relative to the largest output: a few roundings of the output dtype.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
DTYPES = in_turn("dtype", TOLERANCE)


@pytest.fixture(params=INSTRUCTION_SETS)
def library(request):
    torch.default_generator.manual_seed(0)
    return load_library([request.param])


def kernel_of(library, num_threads=1) -> NativeLora:
    return NativeLora(library, ThreadPool(library, num_threads))


class Case:
    """A pool with random adapters and a fused linear layer of three of its four modules."""

    def __init__(self, num_adapters, ranks, *, sizes="usual", dtype=torch.float32, pages=None):
        self.in_features, (q, k, v) = SIZES[sizes]
        self.out_offsets, self.width = (0, q, q + k), q + k + v
        self.dtype = dtype
        shapes = {
            name: (self.in_features, out) for name, out in zip(MODULES, (q, 5, k, v), strict=True)
        }
        cells = LoraCells([shapes] * NUM_LAYERS)
        shape = (num_adapters, len(cells))
        self.table = LoraTable(
            cells,
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int32),
            np.zeros(shape, np.float32),
        )
        pieces, used = [torch.full((7,), torch.nan)], 7
        for entry, layer, module in np.ndindex(num_adapters, NUM_LAYERS, len(MODULES)):
            cell = (entry, cells.by_place[layer, MODULES[module], 0])
            rank = ranks[(entry + layer + module) % len(ranks)]
            num_elements = rank * sum(shapes[MODULES[module]])
            self.table.offsets[cell], self.table.ranks[cell] = used, rank
            self.table.scales[cell] = 0.25 + 0.5 * (entry % 5)
            pieces.append(torch.randn(num_elements) / self.in_features**0.5)
            used += num_elements
        self.pool = torch.cat(pieces).to(pages or dtype)

    def inputs(self, num_tokens):
        """(y, x)"""
        y = torch.randn(num_tokens, self.width)
        return y.to(self.dtype), torch.randn(num_tokens, self.in_features).to(self.dtype)

    def batch(self, users, scales=None) -> LoraBatch:
        """users: each token's adapter, -1 for none. One group per adapter."""
        scales = scales or [1.0] * len(users)
        pairs = enumerate(zip(users, scales, strict=True))
        uses = [LoraUse(0, user, token, 1, scale) for token, (user, scale) in pairs if user >= 0]
        return lora_batch(self.pool, self.table, uses)

    def add(self, kernel, y, x, batch, layer=1):
        kernel.add(y, x, batch, LoraPlace(layer, FUSED, self.out_offsets))
        return y

    def expected(self, y, x, batch, layer=1):
        result = y.double()
        for group in batch.groups():
            for name, first in zip(FUSED, self.out_offsets, strict=True):
                cells = self.table.cells
                cell = (group.entry, cells.by_place[layer, name, 0])
                num_in, num_out = cells.shapes[cell[1]]
                rank, start = int(self.table.ranks[cell]), int(self.table.offsets[cell])
                flat = self.pool[start : start + rank * (num_in + num_out)].double()
                a = flat[: rank * num_in].view(rank, num_in)
                b = flat[rank * num_in :].view(rank, num_out)
                for token, scale in zip(group.token_indices, group.token_scales, strict=True):
                    reduced = (a * x[token].double()).sum(1) * scale * self.table.scales[cell]
                    result[token, first : first + num_out] += (reduced[:, None] * b).sum(0)
        return result


def users_of(kind, num_tokens):
    match kind:
        case "distinct":
            return list(range(num_tokens))
        case "identical":
            return [0] * num_tokens
        case "zipf":
            draws = np.random.default_rng(17).zipf(1.5, num_tokens)
            return (np.minimum(draws, num_tokens) - 2).tolist()
    raise AssertionError(kind)


def relative_error(y, expected):
    return (y.double() - expected).abs().max() / expected.abs().max()


@pytest.mark.covering(2)
@pytest.mark.some(12)
@DTYPES
@in_turn("num_tokens", [1, 5, 60])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("ranks", RANKS)
@in_turn("kind", ["distinct", "identical", "zipf"])
def test_against_the_loop(library, kind, ranks, sizes, num_tokens, dtype):
    users = users_of(kind, num_tokens)
    case = Case(max(max(users), 0) + 1, RANKS[ranks], sizes=sizes, dtype=dtype)
    batch = case.batch(users, [1.0 + 0.25 * (i % 3) for i in range(num_tokens)])
    y, x = case.inputs(num_tokens)
    expected = case.expected(y, x, batch)
    case.add(kernel_of(library, 2), y, x, batch)
    assert relative_error(y, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("pages", [torch.bfloat16, torch.float16], ids=str)
def test_pages_may_have_their_own_dtype(library, pages):
    case = Case(3, (8,), pages=pages)
    y, x = case.inputs(9)
    batch = case.batch([0, 1, 2] * 3)
    expected = case.expected(y, x, batch)
    case.add(kernel_of(library), y, x, batch)
    assert relative_error(y, expected) < TOLERANCE[torch.float32]


@DTYPES
def test_rows_may_be_views(library, dtype):
    case = Case(2, (8,), dtype=dtype)
    y, x = case.inputs(6)
    wide_y = torch.full((6, case.width + 5), 3.0, dtype=dtype)
    wide_x = torch.full((6, case.in_features + 3), torch.nan, dtype=dtype)
    wide_y[:, 1:-4], wide_x[:, 2:-1] = y, x
    batch = case.batch([0, -1, 1, 1, 0, 1])
    kernel = kernel_of(library)
    case.add(kernel, wide_y[:, 1:-4], wide_x[:, 2:-1], batch)
    assert torch.equal(wide_y[:, 1:-4], case.add(kernel, y, x, batch))
    assert torch.equal(wide_y[:, :1], torch.full((6, 1), 3.0, dtype=dtype))
    assert torch.equal(wide_y[:, -4:], torch.full((6, 4), 3.0, dtype=dtype))


@DTYPES
@pytest.mark.parametrize("sizes", SIZES)
def test_a_token_s_bits_do_not_depend_on_its_company_or_on_threads(library, sizes, dtype):
    users = users_of("zipf", 150)
    case = Case(max(users) + 1, RANKS["mixed"], sizes=sizes, dtype=dtype)
    y, x = case.inputs(150)
    together = case.add(kernel_of(library, 2), y.clone(), x, case.batch(users))
    one_thread = kernel_of(library, 1)
    assert torch.equal(case.add(one_thread, y.clone(), x, case.batch(users)), together)
    for first, end in [(i, i + 1) for i in range(0, 150, 7)] + [(3, 5), (20, 43), (100, 107)]:
        batch = case.batch(users[first:end])
        part = case.add(one_thread, y[first:end].clone(), x[first:end], batch)
        assert torch.equal(part, together[first:end])


@DTYPES
@pytest.mark.parametrize("sizes", SIZES)
def test_a_tile_of_one_thread_has_the_bits_of_tiles_of_all(library, sizes, dtype):
    """One thread computes both products of its tokens where adapters or tokens are many."""
    case = Case(40, RANKS["mixed"], sizes=sizes, dtype=dtype)
    y, x = case.inputs(300)
    for uses in (
        [LoraUse(0, entry, 7 * entry, 1 + entry % 7, 0.5) for entry in range(40)],
        [LoraUse(0, 3, 10, 260, 2.0)],
        [LoraUse(wave, 39 * wave, 0, 300, 1.0) for wave in range(2)],
    ):
        batch = lora_batch(case.pool, case.table, uses)
        expected = case.expected(y, x, batch)
        together = case.add(kernel_of(library, 2), y.clone(), x, batch)
        assert relative_error(together, expected) < 2 * TOLERANCE[dtype]
        # So many threads that none has enough tiles.
        assert torch.equal(case.add(kernel_of(library, 16), y.clone(), x, batch), together)
        for token in (0, 14, 133, 269):
            own = [
                use._replace(first_token=0, num_tokens=1)
                for use in uses
                if 0 <= token - use.first_token < use.num_tokens
            ]
            alone = lora_batch(case.pool, case.table, own)
            part = case.add(kernel_of(library, 1), y[token : token + 1].clone(), x[token:], alone)
            assert torch.equal(part[0], together[token])


def test_several_adapters_of_a_token_add_up_in_the_order_of_the_groups(library):
    case = Case(3, (4,), dtype=torch.bfloat16)
    y, x = case.inputs(3)
    uses = [
        LoraUse(0, 0, 0, 1, 1.0),
        LoraUse(0, 0, 2, 1, 0.5),
        LoraUse(1, 1, 0, 1, 2.0),
        LoraUse(1, 2, 1, 1, 1.0),
        LoraUse(2, 2, 0, 1, 1.0),
    ]
    kernel = kernel_of(library, 2)
    one_by_one = y.clone()
    for use in uses:
        case.add(kernel, one_by_one, x, lora_batch(case.pool, case.table, [use]))
    batch = lora_batch(case.pool, case.table, uses)
    expected = case.expected(y, x, batch)
    assert torch.equal(case.add(kernel, y, x, batch), one_by_one)
    assert relative_error(y, expected) < 2 * TOLERANCE[torch.bfloat16]


def test_what_no_adapter_changes_keeps_its_bits(library):
    case = Case(2, (4,))
    for layer in range(NUM_LAYERS):
        case.table.ranks[0, case.table.cells.by_place[layer, "q_proj", 0]] = 0
    y, x = case.inputs(3)
    before = y.clone()
    case.add(kernel_of(library), y, x, case.batch([0, 0, -1]))
    assert torch.equal(y[:, :48], before[:, :48])
    assert torch.equal(y[2], before[2])
    assert not torch.equal(y[:2, 48:], before[:2, 48:])
    case.table.ranks[:] = 0
    assert torch.equal(case.add(kernel_of(library), y.clone(), x, case.batch([0, 1, 0])), y)


def test_one_kernel_serves_many_steps_layers_and_tables(library):
    kernel = kernel_of(library, 2)
    for case in (Case(4, (8,)), Case(3, (3,), sizes="odd")):
        for users in ([0, 1, 2], [2, 2, 2, 1]):
            batch = case.batch(users)
            for layer in (0, 1):
                y, x = case.inputs(len(users))
                expected = y.clone()
                add_lora(expected, x, batch, LoraPlace(layer, FUSED, case.out_offsets))
                torch.testing.assert_close(case.add(kernel, y, x, batch, layer), expected)


def test_modules_may_be_applied_one_by_one_into_their_own_output(library):
    case = Case(1, (4,))
    y, x = torch.zeros(3, case.width), torch.randn(3, case.in_features)
    single = torch.zeros(3, 16)
    kernel, batch = kernel_of(library), case.batch([0, 0, -1])
    case.add(kernel, y, x, batch)
    kernel.add(single, x, batch, LoraPlace(1, ("v_proj",), (0,)))
    assert torch.equal(single, y[:, 64:])


def test_a_layer_that_is_not_there_is_refused(library):
    case = Case(1, (4,))
    y, x = case.inputs(2)
    with pytest.raises(KeyError, match="q_proj"):
        case.add(kernel_of(library), y, x, case.batch([0, 0]), layer=NUM_LAYERS)


def random_parts(case: Case, seed: int) -> AdapterParts:
    """Vectors of all modules, in two pieces each, with a factor, a shift, or both."""
    draw = torch.Generator().manual_seed(seed)
    parts = AdapterParts()
    for number, (layer, module) in enumerate(itertools.product(range(NUM_LAYERS), MODULES)):
        _, size = case.table.cells.layers[layer][module]
        factor, shift = torch.randn(2, size, generator=draw).to(case.dtype)
        middle = size // 2
        first = OutputVector(0, factor[:middle], shift[:middle] if number % 2 else None)
        second = OutputVector(middle, None if number % 3 else factor[middle:], shift[middle:])
        parts.vectors[layer, module] = [first, second, OutputVector(0, None, shift)]
    parts.vectors[OUTSIDE_LAYERS, LM_HEAD] = [OutputVector(0, factor, None)]
    return parts


@pytest.mark.covering(2)
@DTYPES
@pytest.mark.parametrize("sizes", list(SIZES))
@pytest.mark.parametrize("num_threads", [1, 2])
def test_other_changes_of_the_outputs_have_the_bits_of_torch(library, dtype, sizes, num_threads):
    """Also where two adapters apply to a token, and with adapters that change nothing else."""
    case, kernel = Case(3, (4, 0), sizes=sizes, dtype=dtype), kernel_of(library, num_threads)
    uses = [LoraUse(0, 0, 0, 9, 1.0), LoraUse(0, 1, 9, 30, 0.5), LoraUse(1, 2, 3, 20, -1.5)]
    plain = lora_batch(case.pool, case.table, uses)
    parts = [random_parts(case, seed) for seed in range(3)]
    changed = tuple(
        PartsUse(parts[group.entry], group.token_indices, group.token_scales)
        for group in plain.groups()
    )
    batch = dataclasses.replace(plain, parts=changed)
    for layer in range(NUM_LAYERS):
        y, x = case.inputs(40)
        expected = y.clone()
        add_vectors(expected, changed, layer, FUSED, case.out_offsets)
        kernel.add(expected, x, plain, LoraPlace(layer, FUSED, case.out_offsets))
        kernel.add(y, x, batch, LoraPlace(layer, FUSED, case.out_offsets))
        assert torch.equal(y, expected)
