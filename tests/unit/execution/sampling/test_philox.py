import numpy as np
import pytest

from loraplex.execution.sampling.draws import Purpose, philox4x32, uniforms

ONES = 0xFFFFFFFF

# The known results of Random123 (kat_vectors: philox4x32 10): counter, key, result.
KNOWN_RESULTS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_RESULTS)
def test_known_results(counter, key, expected):
    got = philox4x32(np.array([counter], np.uint32), np.array([key], np.uint32))
    assert tuple(got[0].tolist()) == expected


def test_a_draw_does_not_depend_on_its_company():
    draws = [
        (seed, index, output) for seed in (0, 1, 2**63) for index in (0, 1) for output in (0, 7)
    ]
    together = uniforms(draws, Purpose.TOKEN)
    alone = [uniforms([draw], Purpose.TOKEN)[0] for draw in draws]
    assert together.tolist() == alone
    assert len(set(alone)) == len(draws)


def test_the_key_is_the_seed_and_the_counter_is_output_sequence_purpose():
    words = philox4x32(
        np.array([[5, 3, Purpose.TOKEN, 0]], np.uint32),
        np.array([[0x89ABCDEF, 0x01234567]], np.uint32),
    )[0]
    bits = (int(words[0]) << 32 | int(words[1])) >> 11
    assert uniforms([(0x0123456789ABCDEF, 3, 5)], Purpose.TOKEN)[0] == bits / 2**53


def test_a_negative_seed_is_its_two_s_complement():
    negative, positive = uniforms([(-1, 0, 0), (2**64 - 1, 0, 0)], Purpose.TOKEN)
    assert negative == positive


def test_numbers_are_uniform():
    numbers = uniforms([(11, 0, i) for i in range(20_000)], Purpose.TOKEN)
    counts = np.histogram(numbers, bins=20, range=(0.0, 1.0))[0]
    chi_square = float(((counts - 1000.0) ** 2 / 1000.0).sum())
    assert chi_square < 43.8  # 99.9 % quantile, 19 degrees of freedom


def test_no_draws_give_no_numbers():
    assert uniforms([], Purpose.TOKEN).shape == (0,)
