"""The native int8 and int4 linears: the very bits of the torch reference, on every instruction set.

So a row's bits do not depend on its company, the threads or the machine. Where a CPU may have a
dot product of its own (VNNI), the code for one without it runs, too.
"""

import mmap
from pathlib import Path

import pytest
import torch

from loraplex.core.errors import ConfigError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.native.library import (
    LIBRARY_FOLDER,
    NativeLibraryError,
    ThreadPool,
    available_instruction_sets,
    load_library,
)
from loraplex.kernels.native.linear import NativeLinear, NativeWeight
from loraplex.kernels.quantization import (
    QuantizedWeight,
    quantize,
    quantized_linear,
    rounded_linear,
)
from support.cases_in_turn import in_turn
from support.naming import naming

pytestmark = pytest.mark.skipif(
    not LIBRARY_FOLDER.exists(), reason="loraplex was installed without a compiler"
)

INT8, INT4 = WeightPrecision.INT8, WeightPrecision.INT4
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# (precision, group size, in, out): pairs and vectors left over, one group and several, a short one.
SIZES = [
    (INT8, 512, 1, 1),
    (INT8, 512, 7, 5),
    (INT8, 512, 33, 130),
    (INT8, 512, 512, 128),
    (INT8, 512, 513, 129),
    (INT8, 512, 1376, 300),
    (INT4, 32, 32, 1),
    (INT4, 32, 96, 130),
    (INT4, 32, 544, 33),
    (INT4, 64, 576, 128),
    (INT4, 128, 128, 5),
    (INT4, 128, 1408, 300),
]


def instruction_sets() -> tuple[str, ...]:
    try:
        return available_instruction_sets()
    except NativeLibraryError:
        return ()


def dot_products() -> list[tuple[str, bool]]:
    """Each instruction set, and whether it may use VNNI where the CPU has it."""
    return [
        (name, with_vnni)
        for name in instruction_sets()
        for with_vnni in ((True, False) if name.startswith("x86-64-v") else (False,))
    ]


def make_kernel(instruction_set: str, num_threads: int, with_vnni: bool = True) -> NativeLinear:
    library = load_library((instruction_set,))
    pool = ThreadPool(library, num_threads)
    if not with_vnni:
        pool.limit_cpu_features(0)
    return NativeLinear(library, pool)


@pytest.fixture(params=dot_products(), ids=lambda p: p[0] + ("" if p[1] else " without VNNI"))
def kernel(request: pytest.FixtureRequest) -> NativeLinear:
    instruction_set, with_vnni = request.param
    return make_kernel(instruction_set, 2, with_vnni)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def random_weight(
    precision: WeightPrecision,
    group_size: int,
    in_features: int,
    out_features: int,
    generator: torch.Generator,
) -> tuple[QuantizedWeight, torch.Tensor]:
    weight = torch.randn(out_features, in_features, generator=generator)
    bias = torch.randn(out_features, generator=generator)
    return quantize(weight, precision, group_size), bias


@pytest.mark.some(20)
@in_turn("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_bits_of_the_reference(
    kernel: NativeLinear,
    dtype: torch.dtype,
    size: tuple[WeightPrecision, int, int, int],
    generator: torch.Generator,
) -> None:
    weight, bias = random_weight(*size, generator)
    with_bias, without = kernel.pack(weight, bias), kernel.pack(weight, None)
    x = torch.randn(140, size[2], generator=generator).to(dtype)
    expected = quantized_linear(x, weight, bias)
    for num_rows in (*range(1, 41), 64, 140):
        assert torch.equal(kernel.apply(x[:num_rows], with_bias), expected[:num_rows])
    assert torch.equal(kernel.apply(x[:9], without), quantized_linear(x[:9], weight, None))


@pytest.mark.some(20)
@in_turn("dtype", DTYPES)
@pytest.mark.parametrize(
    ("precision", "in_features", "out_features"),
    [
        (INT8, 1, 1),
        (INT8, 7, 5),
        (INT8, 130, 130),
        (INT8, 513, 129),
        (INT8, 1376, 300),
        (INT4, 32, 1),
        (INT4, 96, 130),
        (INT4, 576, 128),
        (INT4, 1408, 300),
    ],
)
def test_inputs_of_weights_that_are_rounded_here_are_rounded_group_by_group(
    kernel: NativeLinear,
    dtype: torch.dtype,
    precision: WeightPrecision,
    in_features: int,
    out_features: int,
    generator: torch.Generator,
) -> None:
    weight = torch.randn(out_features, in_features, generator=generator)
    bias = torch.randn(out_features, generator=generator)
    packed = kernel.pack(weight, bias, precision)
    x = torch.randn(140, in_features, generator=generator).to(dtype)
    expected = rounded_linear(x, quantize(weight, precision), bias)
    for num_rows in (*range(1, 41), 64, 140):
        assert torch.equal(kernel.apply(x[:num_rows], packed), expected[:num_rows])


@pytest.mark.parametrize("num_blocks", [2, 8])
@pytest.mark.parametrize("precision", [INT8, INT4])
def test_groups_of_rounded_inputs_end_with_a_block(
    kernel: NativeLinear, precision: WeightPrecision, num_blocks: int, generator: torch.Generator
) -> None:
    weight = torch.randn(90, 1408 if precision is INT8 else 1536, generator=generator)
    x = torch.randn(33, weight.shape[1], generator=generator)
    blocks = torch.split(weight, weight.shape[1] // num_blocks, 1)
    inputs = torch.split(x, weight.shape[1] // num_blocks, 1)
    sums = [
        rounded_linear(part, quantize(block, precision), None)
        for part, block in zip(inputs, blocks, strict=True)
    ]
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    assert torch.equal(kernel.apply(x, kernel.pack(weight, None, precision, num_blocks)), sums[0])


@pytest.mark.parametrize("is_rounded_here", [True, False])
@pytest.mark.parametrize("precision", [INT8, INT4])
def test_extreme_numbers_do_not_overflow(
    kernel: NativeLinear, precision: WeightPrecision, is_rounded_here: bool
) -> None:
    """Every product of a group is the largest one there is, all of one sign."""
    for sign in (1.0, -1.0):
        weight = torch.full((20, 1024), sign)
        stored = quantize(weight, precision, 512)
        x = torch.full((3, 1024), 2.0)
        packed = kernel.pack(weight if is_rounded_here else stored, None, precision)
        torch.testing.assert_close(kernel.apply(x, packed), torch.full((3, 20), sign * 2048.0))


@pytest.mark.parametrize("precision", [INT8, INT4])
@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_the_number_of_threads_changes_no_bit(
    instruction_set: str, precision: WeightPrecision, generator: torch.Generator
) -> None:
    weight = torch.randn(1000, 704, generator=generator)
    x = torch.randn(150, 704, generator=generator)
    results = []
    for num_threads in (1, 2, 3):
        kernel = make_kernel(instruction_set, num_threads)
        packed = kernel.pack(weight, None, precision)
        results.append([kernel.apply(x[:num_rows], packed) for num_rows in (1, 8, 150)])
    for others in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], others, strict=True))


@in_turn("dtype", DTYPES)
@pytest.mark.parametrize("precision", [INT8, INT4])
def test_a_row_keeps_to_itself(
    kernel: NativeLinear, precision: WeightPrecision, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """An outlier, zeros, tiny numbers, an infinity, a NaN: the others have the bits they had."""
    packed = kernel.pack(torch.randn(90, 544, generator=generator), None, precision)
    x = torch.randn(8, 544, generator=generator).to(dtype)
    expected = kernel.apply(x, packed)
    x[1] *= 20.0
    x[2] = 0.0
    x[3], x[3, 7] = 0.0, 1e-38 if dtype is not torch.float16 else 0.0
    x[5, 543], x[6, 0] = -torch.inf, torch.nan
    y = kernel.apply(x, packed)
    assert torch.equal(y[[0, 4, 7]], expected[[0, 4, 7]])
    assert y[1].isfinite().all()
    assert torch.equal(y[2:4], torch.zeros_like(y[2:4]))
    assert y[5:7].isnan().all()


@pytest.mark.parametrize("precision", [INT8, INT4])
def test_the_packed_layout_is_the_same_for_every_instruction_set(
    precision: WeightPrecision, generator: torch.Generator
) -> None:
    weight = torch.randn(77, 96, generator=generator)
    kernels = [make_kernel(name, 1) for name in instruction_sets()]
    panels = [kernel.pack(weight, None, precision).panels for kernel in kernels]
    assert all(torch.equal(panels[0], other) for other in panels[1:])


@pytest.mark.parametrize("precision", [WeightPrecision.NATIVE, INT8, INT4])
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_panels_may_be_a_read_only_file_at_any_place(
    kernel: NativeLinear, precision: WeightPrecision, generator: torch.Generator, tmp_path: Path
) -> None:
    packed = kernel.pack(torch.randn(50, 544, generator=generator), None, precision)
    x = torch.randn(5, 544, generator=generator)
    sizes = (packed.kind, packed.group_size, 0, packed.out_features, packed.in_features)
    for offset in (64, 1):
        file = tmp_path / f"{offset}"
        file.write_bytes(bytes(offset) + packed.panels.numpy().tobytes())
        with file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        panels = torch.frombuffer(mapped, dtype=torch.uint8, offset=offset)
        assert panels.numel() == kernel.packed_bytes(*sizes)
        assert torch.equal(
            kernel.apply(x, NativeWeight(*sizes, panels, None)), kernel.apply(x, packed)
        )


def test_sizes_that_no_kernel_takes(kernel: NativeLinear) -> None:
    kinds = {
        precision: kernel.pack(torch.ones(1, 32), None, precision).kind
        for precision in (INT8, INT4)
    }
    assert kernel.packed_bytes(kinds[INT8], 512, 0, 16, 100) > 0
    assert kernel.packed_bytes(kinds[INT8], 48, 0, 16, 96) == 0
    assert kernel.packed_bytes(kinds[INT8], 8, 0, 16, 96) == 0
    assert kernel.packed_bytes(kinds[INT8], 1024, 0, 16, 2048) == 0
    assert kernel.packed_bytes(kinds[INT4], 128, 0, 16, 128) > 0
    assert kernel.packed_bytes(kinds[INT4], 128, 0, 16, 192) == 0
    assert kernel.packed_bytes(kinds[INT4], 16, 0, 16, 40) == 0


def test_fp8_is_for_a_gpu(kernel: NativeLinear) -> None:
    with pytest.raises(ConfigError, match=naming("fp8", "GPU", "CPU", "int8")):
        kernel.pack(torch.ones(16, 16), None, WeightPrecision.FP8)
