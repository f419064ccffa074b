"""Recurrences by Triton's programs, interpreted: transformers' formulas, one set of bits."""

from collections.abc import Sequence

import pytest
import torch
from torch.nn import functional

from loraplex.kernels.cuda import elementwise, recurrence
from loraplex.kernels.delta import DeltaGates, DeltaShape
from loraplex.kernels.reference import ReferenceKernels
from loraplex.kernels.ssm import SsmShape
from support.delta_rules import Case, compute, expected
from support.state_spaces import StateSpace


class Programs(ReferenceKernels):
    """The reference with the programs' recurrences."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.delta_rule, self.ssd = recurrence.delta_rule, recurrence.ssd


KERNELS, REFERENCE = Programs(), ReferenceKernels(torch.device("cpu"))
EVERY = 4
# The interpreter is slow: few positions, and borders that are close.
LENGTHS = (1, EVERY, 2 * EVERY + 1)
DELTA = {
    "odd": DeltaShape(1, 3, 7, 11, EVERY),
    "parts": DeltaShape(2, 2, 18, 37, EVERY),
}
SPACES = {
    "group": SsmShape(2, 6, 10, 1, EVERY),
    "parts": SsmShape(2, 37, 17, 2, EVERY),
}
DTYPES = [torch.float32, torch.float16]
TOLERANCE = 2e-5


@pytest.mark.parametrize("name", DELTA)
def test_delta_rule_of_transformers(name: str) -> None:
    case = Case(DELTA[name], lengths=LENGTHS)
    computed = compute(KERNELS, case, [5, 2])
    for sequence, length in enumerate(LENGTHS):
        output, state = expected(case, sequence, in_chunks=False)
        torch.testing.assert_close(
            computed.outputs[sequence], output, rtol=TOLERANCE, atol=TOLERANCE
        )
        if length % EVERY == 0:
            own = computed.states[sequence, length]
            torch.testing.assert_close(own, state, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_position_has_one_set_of_bits(dtype: torch.dtype) -> None:
    case = Case(DELTA["odd"], dtype, LENGTHS)
    whole = compute(KERNELS, case, [max(LENGTHS)])
    for cuts, has_gaps, num_padding in (([1], False, 2), ([5, 3], True, 0)):
        other = compute(KERNELS, case, cuts, has_gaps=has_gaps, num_padding=num_padding)
        for own, wanted in zip(other.outputs, whole.outputs, strict=True):
            assert torch.equal(own, wanted)
        for place, state in other.states.items():
            assert torch.equal(state, whole.states[place])
        assert set(other.states) <= set(whole.states)
    reference = compute(REFERENCE, case, [max(LENGTHS)])
    for own, wanted in zip(whole.outputs, reference.outputs, strict=True):
        torch.testing.assert_close(own, wanted, rtol=2e-3, atol=TOLERANCE)


def test_extreme_gates() -> None:
    """Decays of e^-1000 a position forget all, and those of 0 forget nothing."""
    case = Case(DELTA["odd"], lengths=LENGTHS)
    case.gates = DeltaGates(torch.tensor([7.0, -30.0, 7.0]), torch.full((3,), 30.0))
    computed = compute(KERNELS, case, [9])
    for sequence in range(len(LENGTHS)):
        output, _ = expected(case, sequence, in_chunks=False)
        torch.testing.assert_close(
            computed.outputs[sequence], output, rtol=TOLERANCE, atol=TOLERANCE
        )


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.3, 0.9)], ids=["free", "limited"])
def test_state_space_of_transformers(name: str, limits: tuple[float, float]) -> None:
    space = _space(name, limits=limits)
    results, states = space.run(KERNELS, [6, 1])
    for sequence, output in enumerate(results):
        wanted, last = space.by_chunks(sequence)
        torch.testing.assert_close(output, wanted, rtol=1e-5, atol=2e-4)
        if LENGTHS[sequence] % EVERY == 0:
            own = states.tensors[0][space.state(sequence, LENGTHS[sequence])]
            torch.testing.assert_close(own, last.mT, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_a_state_space_do_not_depend_on_chunks(dtype: torch.dtype) -> None:
    space = _space("group", dtype)
    whole, _ = space.run(KERNELS, [max(LENGTHS)])
    for cuts in ([1], [3, 2]):
        for own, wanted in zip(space.run(KERNELS, cuts)[0], whole, strict=True):
            assert torch.equal(own, wanted)


def test_tiny_steps_keep_their_digits() -> None:
    """softplus of -40 is e^-40, of which 1 + e^-40 keeps nothing."""
    space = _space("group")
    space.gates = space.gates._replace(dt_bias=torch.full((2,), -40.0), skip=torch.zeros(2))
    (own, *_), _ = space.run(KERNELS, [9])
    (wanted, *_), _ = space.run(REFERENCE, [9])
    torch.testing.assert_close(own, wanted, rtol=1e-4, atol=0.0)
    assert wanted.abs().max() > 0


def test_padding_gaps_and_rows_without_tokens_write_nothing() -> None:
    space = _space("group")
    chunk, states = space.storages()
    output = space.step(KERNELS, (chunk, states), [(2, 0, 3)], num_padding=2, num_empty_rows=2)
    assert states.tensors[0].isnan().all(), "no row ends a state"
    for tensor in chunk.tensors[1:]:
        assert tensor.flatten(0, 1).isfinite().all(1).sum() == 3
    assert chunk.tensors[0].isnan().all(), "the convolution's"
    wanted = space.step(REFERENCE, space.storages(), [(2, 0, 3)])
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [5, 130, 1030])
def test_gated_rms_norm(dtype: torch.dtype, size: int) -> None:
    torch.default_generator.manual_seed(1)
    x, gate = torch.randn(2, 5, 4 * size + 3).to(dtype)[:, :, : 3 * size].view(2, 5, 3, size)
    weights = torch.randn(3, size).to(dtype)
    for weight in (weights, weights[0]):
        for is_gated_first in (False, True):
            arguments = (x, gate, weight, 1e-6)
            own = elementwise.gated_rms_norm(*arguments, is_gated_first=is_gated_first)
            wanted = REFERENCE.gated_rms_norm(*arguments, is_gated_first=is_gated_first)
            _assert_rounded(own, wanted)
            part = (x[3:4], gate[3:4], weight, 1e-6)
            alone = elementwise.gated_rms_norm(*part, is_gated_first=is_gated_first)
            assert torch.equal(alone, own[3:4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [5, 64, 130])
def test_sigmoid_gate(dtype: torch.dtype, size: int) -> None:
    torch.default_generator.manual_seed(1)
    x = torch.randn(9, 3, size).to(dtype)
    whole = torch.randn(9, 6 * size + 3).to(dtype)[:, : 6 * size].view(9, 6, size)
    for gate in (whole[:, 1::2], whole[:, :3, :1].expand(-1, -1, size)):
        own = elementwise.sigmoid_gate(x, gate)
        _assert_rounded(own, REFERENCE.sigmoid_gate(x, gate))
        assert torch.equal(elementwise.sigmoid_gate(x[4:5], gate[4:5]), own[4:5])
    _assert_rounded(own, x * functional.sigmoid(whole[:, :3, :1].float()).to(dtype))


def _space(
    name: str,
    dtype: torch.dtype = torch.float32,
    limits: tuple[float, float] = (0.0, float("inf")),
    lengths: Sequence[int] = LENGTHS,
) -> StateSpace:
    torch.default_generator.manual_seed(0)
    return StateSpace(SPACES[name], dtype, limits, lengths=lengths)


def _assert_rounded(own: torch.Tensor, wanted: torch.Tensor) -> None:
    """Check the values but for one place of their last digit."""
    assert own.dtype == wanted.dtype
    step = torch.finfo(own.dtype).eps * 2
    torch.testing.assert_close(own, wanted, rtol=max(step, 2e-6), atol=1e-6)
