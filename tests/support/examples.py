"""Number of examples that Hypothesis tries, by profile (`pytest --hypothesis-profile=NAME`), and
which parameters of a fixture are left to CI."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# For `make test`, for CI's second stage, and for `make soak`.
PROFILES = {"dev": 15, "ci": 30, "soak": 2000}

_FEWEST = 5


def register_profiles() -> None:
    """Register the profiles and load "dev". No test may fail because the machine is slow."""
    for name, max_examples in PROFILES.items():
        settings.register_profile(
            name,
            max_examples=max_examples,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
    settings.load_profile("dev")


def num_examples(weight: float) -> int:
    """Return `weight` times the number of examples in the profile in use."""
    return max(_FEWEST, round(weight * settings().max_examples))


def examples(weight: float = 1, **options: Any) -> settings:
    """Return settings with `weight` times the examples of the profile in use."""
    return settings(max_examples=num_examples(weight), **options)


def quick_and_slow(quick: Iterable[str], slow: Iterable[str]) -> list[Any]:
    """Return the parameters of a fixture: the tests with slow ones are left to CI."""
    return [*quick, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]
