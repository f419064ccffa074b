import numpy as np
import pytest

from loraplex.core.errors import InvalidTensorError
from loraplex.frontends.kserve.outputs import classified
from loraplex.frontends.kserve.tensors import Tensor, numbers, strings


def test_the_highest_of_each_element_of_the_batch():
    scores = numbers("y", "FP32", [[1, 2.5, 3, 4], [9, 8, 7, 6]])
    classes = classified(scores, 2)
    assert (classes.name, classes.datatype, classes.shape) == ("y", "BYTES", (2, 2))
    assert classes.array.tolist() == [
        [b"4.000000:3", b"3.000000:2"],
        [b"9.000000:0", b"8.000000:1"],
    ]


def test_indices_run_through_all_inner_dimensions():
    scores = numbers("y", "INT32", [[[1, 5], [3, 4]]])
    assert classified(scores, 9).array.tolist() == [[b"5:1", b"4:3", b"3:2", b"1:0"]]


def test_one_dimension_has_no_batch():
    assert classified(numbers("y", "INT64", [3, 7]), 1).array.tolist() == [b"7:1"]


def test_the_first_of_equals_comes_first():
    assert classified(numbers("y", "FP16", [[1, 1, 1]]), 2).array.tolist() == [
        [b"1.000000:0", b"1.000000:1"]
    ]


def test_large_integers_keep_their_order():
    scores = numbers("y", "UINT64", [[2**63, 2**63 + 1]])
    assert classified(scores, 1).array.tolist() == [[f"{2**63 + 1}:1".encode()]]


@pytest.mark.parametrize(
    "tensor",
    [
        strings("y", ["a"]),
        numbers("y", "BOOL", [[True]]),
        Tensor.of("y", "BF16", np.zeros((1, 2), dtype=np.uint16)),
    ],
    ids=lambda tensor: tensor.datatype,
)
def test_what_has_no_order(tensor):
    # Triton's text.
    with pytest.raises(InvalidTensorError, match="due to unsupported type"):
        classified(tensor, 1)


def test_nothing_to_classify():
    assert classified(numbers("y", "FP32", [[], []]), 3).shape == (2, 0)
    assert classified(numbers("y", "FP32", np.zeros((0, 3))), 3).shape == (0, 3)
