"""Sizes are chosen by what a measurer returns, within the time of a clock."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

from loraplex.execution.checking import tuning
from loraplex.execution.checking.tuning import Tuning, TuningKernels
from loraplex.kernels.reference import ReferenceKernels

CPU = torch.device("cpu")
CANDIDATES = {"wide": ("a", "b", "c"), "long": ("d",)}
X = torch.tensor([[1.0, 2.0]])


class Sized(ReferenceKernels):
    """`multiply` has the size wide, `add` has the size long."""

    def size_of(self, op: str, arguments: Sequence[Any]) -> str | None:
        del arguments
        return {"multiply": "wide", "add": "long"}.get(op)


class Card:
    """Time as the tests want it: each op of a backend takes what is planted."""

    def __init__(self, planted: dict[str, Callable[..., Any]], **seconds: Sequence[float]) -> None:
        """planted: ops of candidates. seconds: of calls of a size, one after another; ours 1."""
        self._planted = planted
        self._seconds = {size: list(each) for size, each in seconds.items()}
        self._size = ""
        self.now = 0.0
        self.begun: list[str] = []

    def other(self, name: str, size: str) -> Any:
        kernels = Sized(CPU)
        if size in self._planted:
            setattr(kernels, {"wide": "multiply", "long": "add"}[name], self._planted[size])
        return kernels

    def begin(self, op: str) -> None:
        self.begun.append(op)
        self._size = op.rsplit(" ", 1)[1]

    def measure(self, work: Callable[[], object]) -> float:
        work()
        times = self._seconds.get(self._size)
        seconds = times.pop(0) if times else 1.0
        self.now += seconds
        return seconds

    def tune(self, *steps: Callable[[Any], object], fallen: Sequence[str] = ()) -> Tuning:
        kernels = TuningKernels(
            Sized(CPU),
            self.other,
            CANDIDATES,
            self.measure,
            lambda: self.now,
            self.begin,
            is_quantized=False,
            fallen=frozenset(fallen),
        )
        for number, step in enumerate(steps):
            with kernels.measuring(f"step {number}"):
                step(kernels)
        return kernels.result()


def multiply(kernels: Any) -> torch.Tensor:
    return cast("torch.Tensor", kernels.multiply(X, X))


def add(kernels: Any) -> torch.Tensor:
    return cast("torch.Tensor", kernels.add(X, X))


def ratios(found: Tuning) -> dict[str, float | None]:
    return {one.size: one.ratio for one in found.measured}


def test_the_fastest_is_chosen() -> None:
    found = Card({}, a=[3.0], b=[0.8], c=[0.6], d=[0.97]).tune(multiply, add)
    assert found.sizes == {"wide": "c"}
    assert ratios(found) == {"a": 3.0, "b": 0.8, "c": 0.6, "d": 0.97}
    assert not found.not_done


def test_steps_count_alike_however_long_they_are() -> None:
    card = Card({}, ours=[1.0, 10.0], a=[0.5, 12.0], b=[0.9, 9.0], c=[2.0, 0.2])
    found = card.tune(multiply, lambda kernels: kernels.multiply(X.repeat(3, 1), X.repeat(3, 1)))
    assert ratios(found) == {"a": 0.85, "b": 0.9, "c": 1.01}
    assert found.sizes == {"wide": "a"}


def test_a_call_of_a_shape_is_measured_once_in_a_step() -> None:
    card = Card({})
    card.tune(lambda kernels: (multiply(kernels), multiply(kernels)), multiply)
    assert card.begun.count("multiply with wide a") == 2


@pytest.mark.parametrize(
    ("planted", "problem"),
    [
        (lambda x, factor: x + factor, "differs by 0.25 of the largest number, in (1, 2)"),
        (lambda x, factor: (x * factor).double(), "torch.float64 (1, 2), not torch.float32 (1, 2)"),
        (lambda x, factor: x * factor * torch.nan, "differs by nan of the largest number, in"),
        (lambda x, factor: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
    ids=["wrong", "type", "nan", "raises"],
)
def test_a_candidate_that_fails_is_out_however_fast(
    planted: Callable[..., Any], problem: str
) -> None:
    found = Card({"a": planted}, a=[0.1], b=[0.5]).tune(multiply)
    assert found.sizes == {"wide": "b"}
    (line,) = found.problems
    assert line.startswith(f"wide a: {problem}")
    assert ratios(found)["a"] is None


def test_a_candidate_that_fails_in_a_later_step_is_out() -> None:
    def wrong_for_many(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return x * factor if len(x) == 1 else x

    many = X.repeat(3, 1)
    card = Card({"a": wrong_for_many}, a=[0.1, 0.1])
    found = card.tune(multiply, lambda kernels: kernels.multiply(many, many))
    assert found.sizes == {}
    assert len(found.problems) == 1


def test_results_are_those_of_our_own_sizes() -> None:
    card, seen = Card({"a": lambda x, factor: x}), []
    card.tune(lambda kernels: seen.append(multiply(kernels)))
    assert seen[0].tolist() == [[1.0, 4.0]]


def test_what_is_changed_in_place_is_changed_once() -> None:
    class Scaling(Sized):
        def size_of(self, op: str, arguments: Sequence[Any]) -> str | None:
            del arguments
            return "long" if op == "scale" else None

    card, x = Card({}), X.clone()
    kernels: Any = TuningKernels(
        Scaling(CPU),
        lambda *_: Scaling(CPU),
        CANDIDATES,
        card.measure,
        lambda: 0.0,
        card.begin,
        is_quantized=False,
        fallen=frozenset(),
    )
    with kernels.measuring("step"):
        kernels.scale(x, 3.0)
    assert x.tolist() == [[3.0, 6.0]]
    assert not kernels.result().problems


def test_what_the_time_does_not_allow_keeps_our_size() -> None:
    card = Card({}, a=[0.1], b=[tuning.TUNING_SECONDS], d=[0.1])
    found = card.tune(multiply, add)
    assert found.sizes == {}
    assert found.not_done == "no time was left for long, wide"
    assert set(ratios(found).values()) == {None}
    # Nothing begins after the time.
    assert card.begun[-1] == "multiply with wide b"


def test_a_size_that_was_measured_whole_is_used_though_the_time_ends() -> None:
    card = Card({}, d=[0.5], a=[tuning.TUNING_SECONDS])
    found = card.tune(add, multiply)
    assert found.sizes == {"long": "d"}
    assert found.not_done == "no time was left for wide"


def test_an_op_that_torch_computes_is_not_measured() -> None:
    assert Card({}).tune(multiply, add, fallen=["add"]).measured == tuple(
        Card({}).tune(multiply).measured
    )


def test_nothing_is_measured_outside_of_steps() -> None:
    card = Card({})
    kernels: Any = TuningKernels(
        Sized(CPU),
        card.other,
        CANDIDATES,
        card.measure,
        lambda: 0.0,
        card.begin,
        is_quantized=False,
        fallen=frozenset(),
    )
    assert multiply(kernels).tolist() == [[1.0, 4.0]]
    assert kernels.result() == Tuning()
