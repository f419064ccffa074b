"""Many small cases in one test."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

TestFunction = Callable[..., None]


def in_turn(names: str, values: Iterable[Any]) -> Callable[[TestFunction], TestFunction]:
    """Run a test with each value: as `pytest.mark.parametrize`, but in one test.

    For thousands of small cases pytest takes longer than they do. Each case has the random numbers
    that it would have alone, and a failure names its case. The cases share the test's fixtures.
    """
    cases = [dict(zip(*_named(names, value), strict=True)) for value in values]

    def decorate(test: TestFunction) -> TestFunction:
        @functools.wraps(test)
        def each(**fixtures: Any) -> None:
            for case in cases:
                # torch.manual_seed records the stack for each kind of device that is not there.
                torch.default_generator.manual_seed(0)
                try:
                    test(**fixtures, **case)
                except Exception as error:
                    error.add_note(f"with {case}")
                    raise

        signature = inspect.signature(test)
        others = [each for name, each in signature.parameters.items() if name not in cases[0]]
        vars(each)["__signature__"] = signature.replace(parameters=others)
        return each

    return decorate


def _named(names: str, value: Any) -> tuple[list[str], Any]:
    split = [name.strip() for name in names.split(",")]
    return split, value if len(split) > 1 else (value,)
