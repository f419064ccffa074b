"""Slopes of attention with linear biases (ALiBi, arXiv:2108.12409)."""

import itertools


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the slope of each head.

    For a power of 2 they are a geometric series. For another number the series of the power below
    comes first, then every other slope of the power above.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = (*_series(power), *_series(2 * power)[::2])
    return tuple(itertools.islice(slopes, num_heads))


def _series(num_heads: int) -> tuple[float, ...]:
    return tuple(2.0 ** (-8.0 * n / num_heads) for n in range(1, num_heads + 1))
