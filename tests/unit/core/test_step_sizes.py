"""Sizes of a step by device and cores."""

import pytest

from loraplex.core.step_sizes import default_step_sizes, wanted_step_sizes


@pytest.mark.parametrize(
    ("cores", "expected"),
    [(1, (64, 512)), (16, (64, 512)), (32, (128, 512)), (64, (256, 1024)), (256, (256, 2048))],
)
def test_a_cpu_counts_its_cores(cores: int, expected: tuple[int, int]) -> None:
    assert default_step_sizes("cpu", cores) == expected


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu(device: str) -> None:
    assert default_step_sizes(device, 1) == (256, 8192)


@pytest.mark.parametrize(
    ("seqs", "tokens", "expected"),
    [
        (None, None, (64, 512)),
        (8, None, (8, 512)),
        (600, None, (600, 600)),
        (None, 32, (32, 32)),
        (600, 512, (600, 512)),
    ],
)
def test_an_open_size_agrees_with_one_that_is_set(
    seqs: int | None, tokens: int | None, expected: tuple[int, int]
) -> None:
    assert wanted_step_sizes("cpu", 2, seqs, tokens) == expected


def test_the_cores_of_this_process() -> None:
    assert wanted_step_sizes("cpu", None, None, None).max_num_seqs >= 64
