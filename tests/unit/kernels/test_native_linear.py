"""The native linear against float64; a row's bits alone, in company, on any number of threads.

Every instruction set that this CPU has is tested, at sizes that fill no vector, panel or block.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from loraplex.kernels.native.library import (
    CPU_BFLOAT16_ORDERS,
    LIBRARY_FOLDER,
    NativeLibraryError,
    ThreadPool,
    available_instruction_sets,
    load_library,
)
from loraplex.kernels.native.linear import NativeLinear, NativeWeight
from support.bfloat16_sums import sums_of

pytestmark = pytest.mark.skipif(
    not LIBRARY_FOLDER.exists(), reason="loraplex was installed without a compiler"
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# Relative error in the 2-norm: float32 sums, then one rounding to the output's type.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}

# (in, out): one of each, less than a vector, a block of depth and one more, panels left over.
SIZES = [(1, 1), (7, 5), (16, 130), (256, 128), (257, 129), (515, 300), (1030, 33)]

FEW_AND_MANY_ROWS = [*range(2, 34), 64, 100, 127, 128, 129, 257]


def instruction_sets() -> tuple[str, ...]:
    try:
        return available_instruction_sets()
    except NativeLibraryError:
        return ()


@pytest.fixture(params=instruction_sets())
def kernel(request: pytest.FixtureRequest) -> NativeLinear:
    return make_kernel(request.param, 2)


def make_kernel(instruction_set: str, num_threads: int, features: int = ~0) -> NativeLinear:
    library = load_library((instruction_set,))
    pool = ThreadPool(library, num_threads)
    pool.limit_cpu_features(features & (1 << 64) - 1)
    return NativeLinear(library, pool)


def random_weight(
    out_features: int, in_features: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(out_features + in_features)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    return weight, torch.randn(out_features, generator=generator).to(dtype)


def random_rows(num_rows: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_rows, in_features, generator=torch.Generator().manual_seed(num_rows)).to(
        dtype
    )


def one_by_one(kernel: NativeLinear, x: torch.Tensor, weight: NativeWeight) -> torch.Tensor:
    return torch.cat([kernel.apply(row.unsqueeze(0), weight) for row in x])


@pytest.mark.covering(2)
@pytest.mark.some(18)
@pytest.mark.parametrize("activations", DTYPES, ids=str)
@pytest.mark.parametrize("weights", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_against_float64(
    kernel: NativeLinear, weights: torch.dtype, activations: torch.dtype, has_bias: bool
) -> None:
    for in_features, out_features in SIZES:
        weight, bias = random_weight(out_features, in_features, weights)
        packed = kernel.pack(weight, bias if has_bias else None)
        for num_rows in (1, 3, 8, 37, 140):
            x = random_rows(num_rows, in_features, activations)
            y = kernel.apply(x, packed)
            exact = x.double() @ weight.double().t() + (bias.double() if has_bias else 0.0)
            assert y.dtype == activations
            assert y.shape == exact.shape
            assert (y.double() - exact).norm() <= TOLERANCE[activations] * exact.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_in_company(
    kernel: NativeLinear, dtype: torch.dtype
) -> None:
    for in_features, out_features in SIZES:
        packed = kernel.pack(*random_weight(out_features, in_features, dtype))
        x = random_rows(257, in_features, dtype)
        alone = one_by_one(kernel, x, packed)
        for num_rows in FEW_AND_MANY_ROWS:
            assert torch.equal(kernel.apply(x[:num_rows], packed), alone[:num_rows])
            assert torch.equal(kernel.apply(x[-num_rows:], packed), alone[-num_rows:])


@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_the_number_of_threads_changes_no_bit(instruction_set: str) -> None:
    x = random_rows(150, 700, torch.bfloat16)
    results = []
    for num_threads in (1, 2, 3, 7):
        kernel = make_kernel(instruction_set, num_threads)
        packed = kernel.pack(*random_weight(1000, 700, torch.bfloat16))
        results.append([kernel.apply(x[:num_rows], packed) for num_rows in (1, 8, 150)])
    for others in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], others, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_instruction_sets_with_fused_multiply_add_agree_to_the_bit(dtype: torch.dtype) -> None:
    """So a cache of packed weights and a replayed request may move from one machine to another."""
    sets = (name for name in instruction_sets() if name != "generic")
    kernels = [make_kernel(name, 2, ~CPU_BFLOAT16_ORDERS) for name in sets]
    x = random_rows(37, 515, dtype)
    results = [kernel.apply(x, kernel.pack(*random_weight(300, 515, dtype))) for kernel in kernels]
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_instructions_for_bfloat16_add_in_their_own_order() -> None:
    sums = sums_of(load_library()) if LIBRARY_FOLDER.exists() else None
    if sums is None:
        pytest.skip("needs AMX, AVX512-BF16 at full speed, or aarch64's BF16")
    kernel = make_kernel(load_library().instruction_set, 2)
    weight, _ = random_weight(48, 333, torch.bfloat16)
    x = random_rows(40, 333, torch.bfloat16)
    expected = sums(x, weight).bfloat16()
    packed = kernel.pack(weight, None)
    assert torch.equal(kernel.apply(x, packed), expected)
    assert torch.equal(one_by_one(kernel, x, packed), expected)


@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1e-20, 1e20, 3e38])
def test_tiny_and_huge_numbers_have_the_same_bits_alone_and_in_company(
    kernel: NativeLinear, magnitude: float
) -> None:
    generator = torch.Generator().manual_seed(3)
    spread = torch.exp(4 * torch.randn(37, 517, generator=generator))
    factor = magnitude**0.5
    x = (torch.randn(37, 517, generator=generator) * spread * factor).bfloat16()
    weight = (torch.randn(300, 517, generator=generator) * factor).bfloat16()
    x[5, 7], x[6, 8], weight[9, 10] = torch.inf, torch.nan, torch.inf
    packed = kernel.pack(weight, None)
    together, alone = kernel.apply(x, packed), one_by_one(kernel, x, packed)
    assert torch.equal(together.isnan(), alone.isnan())
    assert torch.equal(together.nan_to_num(0.0), alone.nan_to_num(0.0))


def test_the_packed_layout_is_the_same_for_every_instruction_set() -> None:
    weight, _ = random_weight(77, 45, torch.bfloat16)
    panels = [make_kernel(name, 1).pack(weight, None).panels for name in instruction_sets()]
    assert all(torch.equal(panels[0], other) for other in panels[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pointers_need_no_more_than_the_alignment_of_an_element(
    kernel: NativeLinear, dtype: torch.dtype
) -> None:
    weight, bias = random_weight(50, 130, dtype)
    x = random_rows(11, 130, dtype)
    expected = kernel.apply(x, kernel.pack(weight, bias))
    wide_weight, wide_x = torch.zeros(50, 133, dtype=dtype), torch.zeros(11, 141, dtype=dtype)
    wide_weight[:, 1:131], wide_x[:, 3:133] = weight, x
    packed = kernel.pack(wide_weight[:, 1:131], torch.cat((bias[:1], bias))[1:])
    assert torch.equal(kernel.apply(wide_x[:, 3:133], packed), expected)


def test_transposed_views_are_taken(kernel: NativeLinear) -> None:
    weight, _ = random_weight(50, 130, torch.float32)
    x = random_rows(11, 130, torch.float32)
    expected = kernel.apply(x, kernel.pack(weight, None))
    packed = kernel.pack(weight.t().contiguous().t(), None)
    assert torch.equal(kernel.apply(x.t().contiguous().t(), packed), expected)


def test_callers_of_one_pool_take_turns(kernel: NativeLinear) -> None:
    packed = kernel.pack(*random_weight(200, 300, torch.float32))
    inputs = [random_rows(num_rows, 300, torch.float32) for num_rows in range(1, 9)]
    expected = [kernel.apply(x, packed) for x in inputs]

    def apply_often(index: int) -> bool:
        results = (kernel.apply(inputs[index], packed) for _ in range(50))
        return all(torch.equal(result, expected[index]) for result in results)

    with ThreadPoolExecutor(len(inputs)) as callers:
        assert all(callers.map(apply_often, range(len(inputs))))


def test_no_rows(kernel: NativeLinear) -> None:
    packed = kernel.pack(*random_weight(50, 130, torch.float32))
    assert kernel.apply(torch.empty(0, 130), packed).shape == (0, 50)


def test_nothing_is_written_beyond_the_result(kernel: NativeLinear) -> None:
    """The kernel writes whole vectors where it may, and single elements where it must."""
    for out_features in (1, 15, 17, 129):
        packed = kernel.pack(*random_weight(out_features, 20, torch.float32))
        x = random_rows(7, 20, torch.float32)
        target = torch.full((9, out_features + 3), 7.0)
        kernel.apply_into(target[1:8, 1 : out_features + 1], x, packed)
        assert torch.equal(target[1:8, 1 : out_features + 1], kernel.apply(x, packed))
        target[1:8, 1 : out_features + 1] = 7.0
        assert torch.equal(target, torch.full_like(target, 7.0))


def test_what_is_not_a_number_spreads_only_in_its_row(kernel: NativeLinear) -> None:
    packed = kernel.pack(*random_weight(40, 33, torch.bfloat16))
    x = random_rows(5, 33, torch.bfloat16)
    expected = kernel.apply(x, packed)
    x[2, 32] = torch.nan
    y = kernel.apply(x, packed)
    assert y[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(y[others], expected[others])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_are_rounded_as_torch_rounds(kernel: NativeLinear, dtype: torch.dtype) -> None:
    """Every number plus half the way to the next: ties, subnormal and largest ones."""
    integers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    numbers, following = integers.view(dtype), (integers + 1).view(dtype)
    halves = (following - numbers) / 2
    x = torch.stack((numbers, halves), dim=1)[halves.isfinite()]
    expected = x.float().sum(1).to(dtype)
    y = kernel.apply(x, kernel.pack(torch.ones(17, 2), None))
    assert torch.equal(y, expected.unsqueeze(1).expand(-1, 17))
