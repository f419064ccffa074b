"""The gated delta rule: formulas of transformers, and one set of bits for a position."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional
from transformers.models.qwen3_5 import modeling_qwen3_5

from loraplex.kernels.delta import DeltaGates, DeltaShape
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.library import (
    NativeLibraryError,
    available_instruction_sets,
    load_library,
)
from loraplex.kernels.ops import Kernels
from loraplex.kernels.reference import ReferenceKernels
from support.delta_rules import LENGTHS, Case, compute, expected

try:
    INSTRUCTION_SETS = available_instruction_sets()
except NativeLibraryError:
    INSTRUCTION_SETS = ()

EVERY = 16
TOLERANCE = 2e-5


@pytest.fixture(params=["reference", *INSTRUCTION_SETS])
def make_kernels(request: pytest.FixtureRequest) -> Callable[[int], Kernels]:
    """Return what makes a backend with so many threads."""
    if request.param == "reference":
        return lambda _: ReferenceKernels(torch.device("cpu"))
    library = load_library([request.param])
    return lambda num_threads: NativeKernels(library, num_threads)


SHAPES = {
    "odd": DeltaShape(2, 6, 7, 11, EVERY),
    "one head": DeltaShape(1, 1, 5, 3, EVERY),
    "vectors": DeltaShape(2, 4, 32, 64, EVERY),
    "wide": DeltaShape(1, 5, 16, 160, EVERY),
}


@pytest.mark.parametrize("in_chunks", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_formulas_of_transformers(
    make_kernels: Callable[[int], Kernels], name: str, in_chunks: bool
) -> None:
    case = Case(SHAPES[name])
    computed = compute(make_kernels(2), case, [17, 5])
    for sequence, length in enumerate(case.lengths):
        output, state = expected(case, sequence, in_chunks=in_chunks)
        torch.testing.assert_close(
            computed.outputs[sequence], output, rtol=TOLERANCE, atol=TOLERANCE
        )
        if length % EVERY == 0:
            own = computed.states[sequence, length]
            torch.testing.assert_close(own, state, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SHAPES)
def test_a_position_has_one_set_of_bits(
    make_kernels: Callable[[int], Kernels], name: str, dtype: torch.dtype
) -> None:
    case = Case(SHAPES[name], dtype)
    whole = compute(make_kernels(1), case, [max(LENGTHS)])
    alone = compute(make_kernels(3), case, [1], num_padding=2)
    others = [
        compute(make_kernels(2), case, cuts, has_gaps=has_gaps, num_padding=num_padding)
        for cuts, has_gaps, num_padding in (([3, 2, 19], False, 0), ([33, 7], True, 3))
    ]
    for other in (alone, *others):
        for own, wanted in zip(other.outputs, whole.outputs, strict=True):
            assert torch.equal(own, wanted)
        assert other.states.keys() <= whole.states.keys()
        for place, state in other.states.items():
            assert torch.equal(state, whole.states[place])


def test_a_row_in_the_step_of_others_has_the_bits_that_it_has_alone(
    make_kernels: Callable[[int], Kernels],
) -> None:
    shape = SHAPES["odd"]
    together = Case(shape)
    computed = compute(make_kernels(2), together, [9])
    alone = Case(shape)
    alone.inputs = together.inputs[-1:]
    (output,) = compute(make_kernels(4), alone, [9]).outputs
    assert torch.equal(output, computed.outputs[-1])


def test_gaps_are_not_written(make_kernels: Callable[[int], Kernels]) -> None:
    computed = compute(make_kernels(1), Case(SHAPES["odd"]), [50], has_gaps=True)
    assert set(computed.states) == {(2, 16), (3, 16), (4, 48)}


def test_extreme_gates(make_kernels: Callable[[int], Kernels]) -> None:
    """Decays of e^-1000 a position forget all, and those of 0 forget nothing."""
    case = Case(SHAPES["odd"])
    rates = torch.tensor([7.0, -30.0] * 3)
    case.gates = DeltaGates(rates, torch.full((6,), 30.0))
    computed = compute(make_kernels(1), case, [50])
    for sequence in range(len(LENGTHS)):
        output, _ = expected(case, sequence, in_chunks=False)
        torch.testing.assert_close(
            computed.outputs[sequence], output, rtol=TOLERANCE, atol=TOLERANCE
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [5, 64, 130])
def test_gated_rms_norm(
    make_kernels: Callable[[int], Kernels], dtype: torch.dtype, size: int
) -> None:
    torch.default_generator.manual_seed(1)
    kernels = make_kernels(2)
    # Views of longer rows, as the projections give them.
    x, gate = torch.randn(2, 9, 4 * size + 3).to(dtype)[:, :, : 3 * size].view(2, 9, 3, size)
    norm = modeling_qwen3_5.Qwen3_5RMSNormGated(size).to(dtype)
    with torch.no_grad():
        norm.weight.normal_()
        wanted = norm(x, gate)
    weight = norm.weight.detach()
    got = kernels.gated_rms_norm(x, gate, weight, 1e-6, is_gated_first=False)
    assert_rounded(got, wanted)
    product = x.float() * functional.silu(gate.float())
    rms = torch.rsqrt(product.square().mean(-1, keepdim=True) + 1e-6)
    wanted = weight * (product * rms).to(dtype)
    got = kernels.gated_rms_norm(x, gate, weight, 1e-6, is_gated_first=True)
    assert_rounded(got, wanted)
    weights = torch.randn(3, size).to(dtype)
    got = kernels.gated_rms_norm(x, gate, weights, 1e-6, is_gated_first=True)
    assert_rounded(got, weights * (product * rms).to(dtype))
    alone = kernels.gated_rms_norm(x[4:5], gate[4:5], weights, 1e-6, is_gated_first=True)
    assert torch.equal(alone, got[4:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [5, 64, 130])
def test_sigmoid_gate(
    make_kernels: Callable[[int], Kernels], dtype: torch.dtype, size: int
) -> None:
    torch.default_generator.manual_seed(1)
    kernels = make_kernels(2)
    x = torch.randn(9, 3, size).to(dtype)
    gate = torch.randn(9, 6 * size + 3).to(dtype)[:, : 6 * size].view(9, 6, size)[:, 1::2]
    got = kernels.sigmoid_gate(x, gate)
    assert_rounded(got, x * torch.sigmoid(gate))
    assert torch.equal(kernels.sigmoid_gate(x[4:5], gate[4:5]), got[4:5])


def assert_rounded(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Check the values but for one place of their last digit."""
    assert got.dtype == wanted.dtype
    step = torch.finfo(got.dtype).eps * 2
    torch.testing.assert_close(got, wanted, rtol=max(step, 2e-6), atol=1e-6)
