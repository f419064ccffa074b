"""The recurrence of Mamba2 against transformers' forms, and the same bits however it is cut."""

import itertools
from collections.abc import Sequence

import pytest
import torch

from loraplex.kernels.dispatch import select_kernels
from loraplex.kernels.ops import Kernels
from loraplex.kernels.reference import ReferenceKernels
from loraplex.kernels.ssm import SsmShape
from support.state_spaces import EVERY, LENGTHS, StateSpace

CPU = torch.device("cpu")
SHAPES = {
    "one-group": SsmShape(4, 6, 10, 1, EVERY),
    "groups": SsmShape(6, 16, 32, 3, EVERY),
    "a-group-each": SsmShape(3, 5, 7, 3, EVERY),
    "published": SsmShape(2, 64, 128, 1, EVERY),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["reference", "fastest"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    torch.default_generator.manual_seed(0)
    return ReferenceKernels(CPU) if request.param == "reference" else select_kernels(CPU)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.3, 0.9)], ids=["free", "limited"])
def test_both_forms_of_transformers(
    kernels: Kernels, name: str, limits: tuple[float, float]
) -> None:
    space = StateSpace(SHAPES[name], limits=limits)
    results, states = space.run(kernels, [100])
    for sequence, output in enumerate(results):
        expected, last = space.by_chunks(sequence)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=2e-4)
        if limits[0] == 0:  # transformers' steps have no limits
            expected = space.by_steps(sequence)
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=2e-4)
        if LENGTHS[sequence] % EVERY == 0:
            state = states.tensors[0][space.state(sequence, LENGTHS[sequence])]
            torch.testing.assert_close(state.mT, last, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_results_are_rounded_once(kernels: Kernels, dtype: torch.dtype) -> None:
    space = StateSpace(SHAPES["groups"], dtype)
    for sequence, output in enumerate(space.run(kernels, [100])[0]):
        expected, _ = space.by_chunks(sequence)
        torch.testing.assert_close(output, expected.to(dtype), rtol=2e-2, atol=1e-3)


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (1, 5, 2), (8, 1), (13,)], ids=str)
def test_bits_do_not_depend_on_chunks(
    kernels: Kernels, name: str, dtype: torch.dtype, cuts: Sequence[int]
) -> None:
    """Rows go on from what other steps stored, and from states, in any company."""
    space = StateSpace(SHAPES[name], dtype)
    storages = space.storages()
    whole = [
        space.step(kernels, storages, [(sequence, 0, length)])
        for sequence, length in enumerate(LENGTHS)
    ]
    results, states = space.run(kernels, cuts)
    for output, expected in zip(results, whole, strict=True):
        assert torch.equal(output, expected)
    assert torch.equal(states.tensors[0][1:], storages[1].tensors[0][1:])


def test_bits_do_not_depend_on_other_heads(kernels: Kernels) -> None:
    """Ranks compute a part of the heads each."""
    space = StateSpace(SHAPES["groups"])
    whole, _ = space.run(kernels, [5])
    part = StateSpace(SsmShape(4, 16, 32, 2, EVERY))
    heads, keys = part.shape.num_heads, part.shape.part_sizes[1]
    first, second, third = (list(itertools.accumulate(space.shape.part_sizes, initial=0)))[:3]
    for sequence, xbc in enumerate(space.xbc):
        own = (xbc[:, first : first + heads * 16], xbc[:, second:], xbc[:, third:])
        part.xbc[sequence] = torch.cat([own[0], own[1][:, :keys], own[2][:, :keys]], dim=1)
        part.dt[sequence] = space.dt[sequence][:, :heads]
    gates = space.gates
    part.gates = gates._replace(
        rate=gates.rate[:heads], dt_bias=gates.dt_bias[:heads], skip=gates.skip[:heads]
    )
    for output, expected in zip(part.run(kernels, [5])[0], whole, strict=True):
        assert torch.equal(output, expected[:, : heads * 16])


def test_padding_and_gaps_are_not_written(kernels: Kernels) -> None:
    space = StateSpace(SHAPES["one-group"])
    chunk, states = space.storages()
    space.step(kernels, (chunk, states), [(4, 0, 6), (1, 0, 3)], num_padding=3, num_empty_rows=2)
    assert states.tensors[0].isnan().all(), "no row ends a state"
    places = [space.positions.place(4, i) for i in range(6)]
    places += [space.positions.place(1, i) for i in range(3)]
    # Keys lie in an order of the backend.
    for tensor in chunk.tensors[2:]:
        stored = tensor.flatten(0, 1)
        assert stored[places].isfinite().all()
        assert stored.isnan().all(1).sum() == len(stored) - len(places)
    assert chunk.tensors[0].isnan().all(), "the convolution's"


def test_states_without_a_block_are_passed(kernels: Kernels) -> None:
    """Entries between checkpoints are gaps: what follows is the same without them."""
    space = StateSpace(SHAPES["groups"])
    whole, _ = space.run(kernels, [100])
    chunk, states = space.storages()
    plan = space.plan([(4, 0, LENGTHS[4])], 0, 0)
    ends = torch.nonzero(plan.writes >= 0).flatten()
    last = plan.writes[ends[-1]]
    plan.writes[ends[:-1]] = -1
    plan.places[: ends[-1] + 1] = -1
    output = kernels.ssd(space.xbc[4], space.dt[4], space.gates, space.shape, plan, chunk, states)
    assert torch.equal(output, whole[4])
    assert states.tensors[0][last].isfinite().all()
    assert states.tensors[0].isfinite().flatten(1).all(1).sum() == 1
