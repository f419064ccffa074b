"""Native LoRA of experts against the reference; and a pair's bits in any company."""

import itertools

import numpy as np
import pytest
import torch

from loraplex.kernels.lora import LoraBatch, LoraCells, LoraPlace, LoraTable, LoraUse, lora_batch
from loraplex.kernels.native.library import (
    NativeLibraryError,
    ThreadPool,
    available_instruction_sets,
    load_library,
)
from loraplex.kernels.native.lora import NativeLora
from loraplex.kernels.routing import Routes, add_expert_lora, sort_routes
from support.cases_in_turn import in_turn

try:
    INSTRUCTION_SETS = available_instruction_sets()
except NativeLibraryError as error:
    pytest.skip(f"the native kernels are not built: {error}", allow_module_level=True)

NUM_LAYERS, LAYER = 2, 1
FUSED = ("experts.gate_proj", "experts.up_proj")
COUNTS = [(1, 1), (3, 2), (8, 8), (64, 2)]
"""Numbers of experts, and of those that compute a token."""
SIZES = {  # in_features, and out_features of gate and up
    "one": (1, (1, 1)),
    "odd": (37, (50, 19)),
    "several tiles of columns": (24, (1100, 513)),
}
RANKS = (8, 1, 0, 33, 3)
"""0: the adapter has nothing for the expert."""
# Relative to the largest output: a few roundings of the output dtype.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
DTYPES = in_turn("dtype", TOLERANCE)


@pytest.fixture(params=INSTRUCTION_SETS)
def library(request):
    torch.default_generator.manual_seed(0)
    return load_library([request.param])


def kernel_of(library, num_threads) -> NativeLora:
    return NativeLora(library, ThreadPool(library, num_threads))


class Case:
    """A pool with random adapters of the experts of two layers."""

    def __init__(self, num_adapters, num_experts, *, sizes="odd", dtype=torch.float32):
        self.in_features, sizes_of = SIZES[sizes]
        self.out_offsets, self.width = (0, sizes_of[0]), sum(sizes_of)
        self.num_experts, self.dtype = num_experts, dtype
        shapes = {name: (self.in_features, out) for name, out in zip(FUSED, sizes_of, strict=True)}
        layers = [{"q_proj": (3, 2)} | shapes] * NUM_LAYERS
        cells = LoraCells(layers, [dict.fromkeys(FUSED, num_experts)] * NUM_LAYERS)
        shape = (num_adapters, len(cells))
        self.table = LoraTable(
            cells,
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int32),
            np.zeros(shape, np.float32),
        )
        pieces, used = [torch.full((7,), torch.nan)], 7
        for entry, cell in np.ndindex(shape):
            rank = RANKS[(3 * entry + cell + cell // 5) % len(RANKS)]
            num_elements = rank * sum(cells.shapes[cell])
            place = (entry, cell)
            self.table.offsets[place], self.table.ranks[place] = used, rank
            self.table.scales[place] = 0.25 + 0.5 * (entry % 5)
            pieces.append(torch.randn(num_elements) / self.in_features**0.5)
            used += num_elements
        self.pool = torch.cat(pieces).to(dtype)

    def batch(self, waves) -> LoraBatch:
        """waves: in each one every token's adapter, -1 for none."""
        return lora_batch(
            self.pool,
            self.table,
            [
                LoraUse(wave, user, token, 1, 1.0 + 0.25 * (token % 3))
                for wave, users in enumerate(waves)
                for token, user in enumerate(users)
                if user >= 0
            ],
        )

    def routes(self, num_tokens, num_chosen) -> Routes:
        experts = torch.rand(num_tokens, self.num_experts).argsort(1)[:, :num_chosen].int()
        return sort_routes(experts, torch.rand(experts.shape), self.num_experts)

    def inputs(self, routes, *, is_by_pair=False):
        """(y, x)"""
        num_pairs = len(routes.pairs)
        num_rows = num_pairs if is_by_pair else len(routes.experts)
        y, x = torch.randn(num_pairs, self.width), torch.randn(num_rows, self.in_features)
        return y.to(self.dtype), x.to(self.dtype)

    def add(self, kernel, y, x, batch, routes):
        result = y.clone()
        kernel.add_experts(result, x, batch, routes, LoraPlace(LAYER, FUSED, self.out_offsets))
        return result

    def expected(self, y, x, batch, routes):
        result = y.clone()
        add_expert_lora(result, x, batch, routes, LoraPlace(LAYER, FUSED, self.out_offsets))
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


@pytest.mark.some(4)
@DTYPES
@in_turn("num_tokens", [1, 5, 70])
@pytest.mark.parametrize(("num_experts", "num_chosen"), COUNTS)
@in_turn("kind", ["distinct", "identical", "zipf"])
def test_against_the_reference(library, kind, num_experts, num_chosen, num_tokens, dtype):
    users = users_of(kind, num_tokens)
    users = [user % 12 if user >= 0 else user for user in users]
    case = Case(12, num_experts, dtype=dtype)
    batch = case.batch([users, [(user + 1) % 12 for user in users[: num_tokens // 2]]])
    routes = case.routes(num_tokens, num_chosen)
    for is_by_pair in (False, True):
        y, x = case.inputs(routes, is_by_pair=is_by_pair)
        result = case.add(kernel_of(library, 2), y, x, batch, routes)
        expected = case.expected(y, x, batch, routes)
        error = (result.double() - expected.double()).abs().max()
        assert error <= TOLERANCE[dtype] * expected.double().abs().max()
        assert num_tokens < 70 or not torch.equal(result, y)


@DTYPES
@pytest.mark.parametrize("sizes", SIZES)
def test_bits_do_not_depend_on_company_or_threads(library, sizes, dtype):
    case = Case(6, 8, sizes=sizes, dtype=dtype)
    users, seconds = users_of("zipf", 70), users_of("zipf", 40)
    waves = [[user % 6 for user in users], [user % 6 for user in seconds]]
    routes = case.routes(70, 3)
    y, x = case.inputs(routes)
    one, two = kernel_of(library, 1), kernel_of(library, 2)
    together = case.add(two, y, x, case.batch(waves), routes)
    assert torch.equal(together, case.add(one, y, x, case.batch(waves), routes))
    for token in (0, 1, 39, 40, 69):
        # The token's place decides its scale.
        own = [[-1] * token + wave[token : token + 1] for wave in waves if token < len(wave)]
        pairs = slice(3 * token, 3 * token + 3)
        alone = case.add(one, y, x, case.batch(own), routes)
        assert torch.equal(alone[pairs], together[pairs])
        assert torch.equal(alone[: 3 * token], y[: 3 * token])
    # Nor does it matter which of a token's experts is the first.
    flipped = sort_routes(routes.experts.flip(1), routes.weights, 8)
    by_token = case.add(one, y.view(70, 3, -1).flip(1).flatten(0, 1), x, case.batch(waves), flipped)
    assert torch.equal(by_token.view(70, 3, -1).flip(1).flatten(0, 1), together)


def test_experts_without_lora_are_left_alone(library):
    case = Case(1, 4)
    for module, expert in itertools.product(FUSED, (0, 2, 3)):
        cell = case.table.cells.by_place[LAYER, module, expert]
        case.table.ranks[0, cell], case.table.offsets[0, cell] = 0, 1 << 60
    routes = sort_routes(torch.tensor([[0, 1], [2, 3], [1, 3]]).int(), torch.ones(3, 2), 4)
    y, x = case.inputs(routes)
    result = case.add(kernel_of(library, 1), y, x, case.batch([[0, 0, 0]]), routes)
    changed = [not torch.equal(*rows) for rows in zip(result, y, strict=True)]
    assert changed == [False, True, False, False, True, False]


@pytest.mark.parametrize("users", [[], [-1, -1]])
def test_no_tokens_and_no_adapters(library, users):
    case = Case(1, 4)
    routes = case.routes(len(users), 2)
    y, x = case.inputs(routes)
    assert torch.equal(case.add(kernel_of(library, 2), y, x, case.batch([users]), routes), y)
