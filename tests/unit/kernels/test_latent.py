"""Latent attention and LoRA by heads against plain products in float64; and bits in any company."""

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch

from loraplex.kernels.adapter_parts import AdapterParts, OutputVector, PartsUse
from loraplex.kernels.latent import HeadsPlace
from loraplex.kernels.lora import LoraUse
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.library import (
    NativeLibraryError,
    available_instruction_sets,
    load_library,
)
from loraplex.kernels.ops import AttentionRules, AttentionShape, Kernels, RowLayout, Storage
from loraplex.kernels.reference import ReferenceKernels
from support.dense_attention import relative_error
from support.pooled_adapters import PooledAdapters

try:
    INSTRUCTION_SETS: tuple[str, ...] = available_instruction_sets()
except NativeLibraryError:
    INSTRUCTION_SETS = ()
REFERENCE = "reference"
SHAPES = {
    # (heads, latent, key, block size)
    "usual": (16, 512, 64, 16),
    "few heads": (3, 24, 8, 16),
    "odd sizes": (5, 37, 6, 5),
    "more heads than a tile": (40, 20, 4, 8),
    "blocks across tiles": (4, 16, 8, 48),
}
# Relative to the largest output. A score is one sum of up to 576 products.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
LENGTHS = (1, 5, 64, 65, 130, 1100)


@pytest.fixture(params=[REFERENCE, *INSTRUCTION_SETS])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    torch.default_generator.manual_seed(0)
    return backend(request.param, 1)


def backend(name: str, num_threads: int) -> Kernels:
    if name == REFERENCE:
        return ReferenceKernels(torch.device("cpu"))
    return NativeKernels(load_library([name]), num_threads)


class Case:
    """Rows whose vectors lie in shuffled blocks; what no row wrote is NaN."""

    def __init__(
        self, shape: tuple[int, int, int, int], lengths: Sequence[int], dtype: torch.dtype
    ) -> None:
        self.num_heads, self.latent, self.key, self.block_size = shape
        self.lengths = lengths
        size = self.latent + self.key
        self.vectors = [torch.randn(length, size).to(dtype) for length in lengths]
        self.queries = [torch.randn(length, self.num_heads, size).to(dtype) for length in lengths]
        counts = [-(-length // self.block_size) for length in lengths]
        num_blocks = sum(counts) + 2
        stored = torch.full((num_blocks, 1, self.block_size, size), torch.nan, dtype=dtype)
        self.storage = Storage((stored,))
        order = torch.randperm(num_blocks)
        self.tables = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
        for row, count in enumerate(counts):
            self.tables[row, :count] = order[sum(counts[:row]) :][:count]

    @property
    def rules(self) -> AttentionRules:
        return AttentionRules(scale=0.11)

    def write(self, kernels: Kernels) -> None:
        for row, vectors in enumerate(self.vectors):
            positions = torch.arange(len(vectors))
            blocks = self.tables[row, positions // self.block_size]
            slots = blocks * self.block_size + positions % self.block_size
            # Rows that are apart, as those of a wider product are.
            latent, key = torch.cat((vectors, vectors), 1)[:, : self.latent + self.key].split(
                [self.latent, self.key], 1
            )
            kernels.write_latent(self.storage, latent, key, slots)

    def attend(self, kernels: Kernels, chunks: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Compute the positions first to end - 1 of each (row, first, end)."""
        starts = [0, *itertools.accumulate(end - first for _, first, end in chunks)]
        rows = [row for row, _, _ in chunks]
        layout = RowLayout(starts, [end for _, _, end in chunks], self.tables[rows])
        shape = AttentionShape(self.num_heads, 1, self.latent + self.key, self.block_size)
        plan = kernels.plan_latent_attention(layout, shape, self.rules)
        query = torch.cat([self.queries[row][first:end] for row, first, end in chunks])
        latent = query[..., : self.latent].contiguous()
        return kernels.latent_attention(latent, query[..., self.latent :], self.storage, plan)

    def expected(self, row: int) -> torch.Tensor:
        """Return [length, heads, latent] in float64."""
        query, keys = self.queries[row].double(), self.vectors[row].double()
        scores = torch.einsum("qhd,kd->qhk", query, keys) * self.rules.scale
        num = len(keys)
        hidden = torch.ones(num, num, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden.unsqueeze(1), -torch.inf).softmax(-1)
        return torch.einsum("qhk,kd->qhd", weights, keys[:, : self.latent])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_same_as_dense_attention(
    kernels: Kernels, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    lengths = LENGTHS if shape[1] < 512 and dtype == torch.float32 else LENGTHS[:5]
    case = Case(shape, lengths, dtype)
    case.write(kernels)
    whole = [(row, 0, length) for row, length in enumerate(lengths)]
    attended = case.attend(kernels, whole).split(list(lengths))
    for row, own in enumerate(attended):
        assert own.dtype == dtype
        assert relative_error(own, case.expected(row)) < TOLERANCE[dtype], f"row {row}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [REFERENCE, *INSTRUCTION_SETS])
def test_same_bits_in_chunks_in_company_and_on_threads(name: str, dtype: torch.dtype) -> None:
    torch.default_generator.manual_seed(0)
    case = Case((6, 40, 8, 16), LENGTHS, dtype)
    kernels = backend(name, 1)
    case.write(kernels)
    alone = [case.attend(kernels, [(row, 0, length)]) for row, length in enumerate(LENGTHS)]
    for num_threads in (1, 3):
        kernels = backend(name, num_threads)
        together = case.attend(kernels, [(row, 0, n) for row, n in enumerate(LENGTHS)])
        assert torch.equal(together, torch.cat(alone))
        last = [(row, n - 1, n) for row, n in enumerate(LENGTHS)][::-1]
        expected = torch.cat([alone[row][-1:] for row, _, _ in last])
        assert torch.equal(case.attend(kernels, last), expected)
        assert torch.equal(case.attend(kernels, last[:1]), expected[:1])
        parts = [(5, first, min(first + 300, 1100)) for first in range(0, 1100, 300)]
        pieces = [case.attend(kernels, [part]) for part in parts]
        assert torch.equal(torch.cat(pieces), alone[5])


LATENT, KEY, VALUE, HEADS = 20, 12, 9, 11
PLACES = [
    HeadsPlace(0, "kv_b_proj", HEADS, KEY, VALUE, is_of_keys=is_of_keys)
    for is_of_keys in (True, False)
]
USES = [
    LoraUse(0, 0, 0, 3, 1.0),
    LoraUse(0, 1, 3, 2, 0.5),
    LoraUse(1, 2, 1, 3, 2.0),  # a second adapter of some of the tokens
]
NUM_TOKENS = 6


def pooled(dtype: torch.dtype) -> PooledAdapters:
    shapes = {"other": (7, 5), "kv_b_proj": (LATENT, HEADS * (KEY + VALUE))}
    return PooledAdapters(3, (30, 4, 1), shapes, dtype, num_layers=1)


def given(place: HeadsPlace, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x, a part of wider heads, and y."""
    sizes = (KEY, LATENT) if place.is_of_keys else (LATENT, VALUE)
    x = torch.randn(NUM_TOKENS, HEADS, sizes[0] + 3).to(dtype)[..., : sizes[0]]
    return x, torch.randn(NUM_TOKENS, HEADS, sizes[1]).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("place", PLACES, ids=["keys", "values"])
def test_lora_is_that_of_the_whole_layer(
    kernels: Kernels, place: HeadsPlace, dtype: torch.dtype
) -> None:
    adapters = pooled(dtype)
    x, y = given(place, dtype)
    expected = y.double()
    table = adapters.table
    cell = table.cells.by_place[0, "kv_b_proj", 0]
    for use in USES:
        rank, offset = table.ranks[use.entry, cell], table.offsets[use.entry, cell]
        a = adapters.pool[offset : offset + rank * LATENT].view(rank, LATENT).double()
        offset += rank * LATENT
        b = adapters.pool[offset : offset + rank * HEADS * (KEY + VALUE)].view(rank, -1).double()
        weight = (b.t() @ a).view(HEADS, KEY + VALUE, LATENT)[:, place.span]
        weight = weight * float(table.scales[use.entry, cell]) * use.scale
        tokens = slice(use.first_token, use.first_token + use.num_tokens)
        form = "thk,hkl->thl" if place.is_of_keys else "thl,hvl->thv"
        expected[tokens] += torch.einsum(form, x[tokens].double(), weight)
    batch = adapters.batch(USES, NUM_TOKENS)
    kernels.add_heads_lora(y, x, batch, place)
    assert relative_error(y, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("place", PLACES, ids=["keys", "values"])
def test_lora_has_the_same_bits_alone(kernels: Kernels, place: HeadsPlace) -> None:
    adapters = pooled(torch.bfloat16)
    x, y = given(place, torch.bfloat16)
    together, alone = y.clone(), y.clone()
    kernels.add_heads_lora(together, x, adapters.batch(USES, NUM_TOKENS), place)
    for token in range(NUM_TOKENS):
        uses = [
            use._replace(first_token=0, num_tokens=1)
            for use in USES
            if use.first_token <= token < use.first_token + use.num_tokens
        ]
        if uses:
            own = alone[token : token + 1]
            kernels.add_heads_lora(own, x[token : token + 1], adapters.batch(uses, 1), place)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("place", PLACES, ids=["keys", "values"])
def test_vectors_scale_the_outputs_of_each_head(kernels: Kernels, place: HeadsPlace) -> None:
    adapters = pooled(torch.float32)
    x = torch.randn(NUM_TOKENS, HEADS, KEY + VALUE)[..., place.span]
    factor, shift = torch.randn(2, HEADS * (KEY + VALUE))
    parts = AdapterParts({(0, "kv_b_proj"): [OutputVector(0, factor, None)]})
    both = AdapterParts({(0, "kv_b_proj"): [OutputVector(0, factor, shift)]})
    tokens, scales = torch.tensor([1, 2, 4]), torch.tensor([1.0, 0.5, 2.0])
    uses = (PartsUse(parts, tokens, scales), PartsUse(both, tokens[:2], scales[:2]))
    batch = dataclasses.replace(adapters.batch(USES, NUM_TOKENS), parts=uses)
    scaled = kernels.scale_heads(x, batch, place)
    factors = place.outputs(factor[None])
    expected = x.clone()
    expected[tokens] += x[tokens] * factors * scales.view(-1, 1, 1)
    # A shift of keys adds the same to all scores of a query's head.
    shifts = 0.0 if place.is_of_keys else place.outputs(shift[None])
    expected[tokens[:2]] += (x[tokens[:2]] * factors + shifts) * scales[:2].view(-1, 1, 1)
    assert scaled.is_contiguous()
    torch.testing.assert_close(scaled, expected)
