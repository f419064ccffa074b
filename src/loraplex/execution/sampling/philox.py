"""Philox4x32-10: a counter-based random generator, vectorised over counters.

A draw is a pure function of (key, counter), so a token does not depend on what was drawn before it
or with it. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint32(0x9E3779B9)
_WEYL_1 = np.uint32(0xBB67AE85)
_MASK_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF
_SHIFT_32 = np.uint64(32)
_LOW_32 = np.uint64(_MASK_32)

U32Array = npt.NDArray[np.uint32]


class Purpose(enum.IntEnum):
    """What a draw is for: the third word of the counter, so that no two uses share a number."""

    TOKEN = 0


def philox4x32(counters: U32Array, keys: U32Array) -> U32Array:
    """Ten rounds. counters: [n, 4], keys: [n, 2]; returns [n, 4]."""
    word_0, word_1, word_2, word_3 = counters.astype(np.uint64).T
    key_0, key_1 = keys.T.copy()
    for _ in range(_ROUNDS):
        product_0 = word_0 * _MULTIPLIER_0
        product_1 = word_2 * _MULTIPLIER_1
        word_0, word_1, word_2, word_3 = (
            (product_1 >> _SHIFT_32) ^ word_1 ^ key_0,
            product_1 & _LOW_32,
            (product_0 >> _SHIFT_32) ^ word_3 ^ key_1,
            product_0 & _LOW_32,
        )
        key_0 += _WEYL_0  # modulo 2^32
        key_1 += _WEYL_1
    return np.stack((word_0, word_1, word_2, word_3), axis=1).astype(np.uint32)


def uniforms(draws: Sequence[tuple[int, int, int]], purpose: Purpose) -> npt.NDArray[np.float64]:
    """One uniform number in [0, 1), of 53 bits, per (seed, sequence index, output index).

    A seed is any 64-bit integer, signed or not; -1 and 2**64 - 1 are the same seed.
    """
    seeds = np.array([seed & _MASK_64 for seed, _, _ in draws], dtype=np.uint64)
    counters = np.array(
        [(output_index, sequence_index, purpose, 0) for _, sequence_index, output_index in draws],
        dtype=np.uint32,
    ).reshape(-1, 4)
    keys = np.stack((seeds & _LOW_32, seeds >> _SHIFT_32), axis=1).astype(np.uint32)
    words = philox4x32(counters, keys).astype(np.uint64)
    bits = ((words[:, 0] << _SHIFT_32) | words[:, 1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
