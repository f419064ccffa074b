"""Row norms read from panels: of what the packed weight stands for, in every kind and odd size."""

import threading

import pytest
import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.library import LIBRARY_FOLDER, ThreadPool, load_library
from loraplex.kernels.native.linear import NativeLinear
from loraplex.kernels.quantization import quantize
from loraplex.kernels.reference import ReferenceKernels
from support.stored_weights import FORMS, SUPER_BLOCK_FORMS, stored_weight, super_block_weight

pytestmark = pytest.mark.skipif(
    not LIBRARY_FOLDER.exists(), reason="loraplex was installed without a compiler"
)

SIZES = [(1, 1), (5, 7), (16, 64), (130, 33), (129, 513), (300, 1376)]
INT4_SIZES = [(1, 32), (130, 96), (129, 544)]


@pytest.fixture(scope="module")
def linear():
    library = load_library()
    return NativeLinear(library, ThreadPool(library, 1))


def weight_of(out_features: int, in_features: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(out_features + in_features)
    return torch.randn(out_features, in_features, generator=generator).to(dtype)


def squares(weight: torch.Tensor) -> torch.Tensor:
    return weight.double().square().sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_of_floats(linear, dtype, size):
    weight = weight_of(*size, dtype)
    packed = linear.pack(weight, None)
    before = packed.panels.clone()
    torch.testing.assert_close(linear.squared_row_norms(packed), squares(weight), rtol=5e-6, atol=0)
    assert torch.equal(packed.panels, before)
    apart = ReferenceKernels(torch.device("cpu"))
    packed = apart.pack_linear(weight, None)
    torch.testing.assert_close(apart.squared_row_norms(packed), squares(weight), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("precision", "size"),
    [(WeightPrecision.INT8, size) for size in SIZES]
    + [(WeightPrecision.INT4, size) for size in INT4_SIZES],
    ids=str,
)
def test_of_quantised_weights(linear, precision, size):
    quantized = quantize(weight_of(*size), precision)
    found = linear.squared_row_norms(linear.pack(quantized, None))
    torch.testing.assert_close(found, squares(quantized.dequantized()), rtol=5e-6, atol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_blocks", [0, 2])
def test_of_stored_weights(linear, form, num_blocks):
    stored = stored_weight(form, 32, 192, 37, torch.Generator().manual_seed(1))
    found = linear.squared_row_norms(linear.pack(stored, None, num_blocks=num_blocks))
    torch.testing.assert_close(found, squares(stored.dequantized()), rtol=1e-5, atol=0)


@pytest.mark.parametrize("form", SUPER_BLOCK_FORMS)
@pytest.mark.parametrize("num_blocks", [0, 2])
@pytest.mark.parametrize("group_size", [16, 32])
def test_of_super_blocks(linear, form, num_blocks, group_size):
    stored = super_block_weight(form, group_size, 1024, 37, torch.Generator().manual_seed(3))
    packed = linear.pack(stored, None, num_blocks=num_blocks)
    expected = squares(stored.dequantized())
    torch.testing.assert_close(linear.squared_row_norms(packed), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("form", [*FORMS, *SUPER_BLOCK_FORMS])
def test_rows_are_what_was_packed(linear, form):
    """Rows in any order, and one of them twice; rounded once, to the wanted type."""
    generator = torch.Generator().manual_seed(4)
    make = super_block_weight if form in SUPER_BLOCK_FORMS else stored_weight
    stored = make(form, 32, 512, 37, generator)
    rows = torch.tensor([36, 0, 17, 17, 5])
    packed = linear.pack(stored, None)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = linear.rows(packed, rows, dtype)
        assert torch.equal(found, stored.dequantized()[rows].to(dtype))


def test_a_short_last_group_with_offsets(linear):
    stored = stored_weight("int8 offsets", 64, 131, 20, torch.Generator().manual_seed(2))
    found = linear.squared_row_norms(linear.pack(stored, None))
    torch.testing.assert_close(found, squares(stored.dequantized()), rtol=1e-5, atol=0)


def test_in_many_pieces(linear, monkeypatch):
    monkeypatch.setattr("loraplex.kernels.native.linear._ROWS_AT_ONCE", 7)
    weight = weight_of(130, 33)
    found = linear.squared_row_norms(linear.pack(weight, None))
    torch.testing.assert_close(found, squares(weight), rtol=5e-6, atol=0)


def test_a_linear_of_another_thread_is_not_a_step_s():
    """What is computed apart meanwhile is not recorded, and has the same values."""
    kernels = NativeKernels(load_library(), 2)
    packed = kernels.pack_linear(weight_of(48, 32), torch.ones(48))
    apart = weight_of(3, 32)
    seen: list[torch.Tensor] = []

    def compute() -> torch.Tensor:
        thread = threading.Thread(
            target=lambda: seen.append(kernels.linear_apart(apart, packed, apart.dtype))
        )
        thread.start()
        thread.join()
        return kernels.linear(x, packed)

    for _ in range(3):
        x = torch.randn(4, 32)
        found = kernels.repeat("a step", [x], compute)
        torch.testing.assert_close(found, x @ weight_of(48, 32).t() + 1)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], weight_of(3, 32) @ weight_of(48, 32).t())
