"""What was staged for one base, checked against another from its targets alone."""

import pytest

from loraplex.adapters.base_check import check_targets
from loraplex.adapters.shapes import BaseShapes
from loraplex.core.adapter import LoraTarget, TargetPart
from loraplex.core.errors import AdapterMismatchError, AdapterTooLargeError
from loraplex.core.rank_limits import RankLimits
from support.naming import naming

PLAIN = BaseShapes(2, {"q_proj": (16, 32)}, vocab_size=50, hidden_size=16)
BIASED = BaseShapes(
    2, {"q_proj": (16, 32)}, vocab_size=50, hidden_size=16, biased_modules=("q_proj",)
)


def lora(**changes):
    return LoraTarget(**{"layer": 0, "module": "q_proj", "rank": 4} | FEATURES | changes)


FEATURES = {"in_features": 16, "out_features": 32}


def factor(num_vectors):
    return LoraTarget(1, "q_proj", num_vectors, 0, 32, TargetPart.FACTOR)


@pytest.mark.parametrize(("shapes", "num_vectors"), [(PLAIN, 1), (BIASED, 2)])
def test_what_fits(shapes, num_vectors):
    check_targets([lora(), factor(num_vectors)], shapes, max_ranks=RankLimits(4))


@pytest.mark.parametrize(("shapes", "num_vectors"), [(PLAIN, 2), (BIASED, 1)])
def test_dora_of_a_layer_whose_bias_came_or_went(shapes, num_vectors):
    with pytest.raises(AdapterMismatchError, match=naming("q_proj", 1, 2)):
        check_targets([factor(num_vectors)], shapes, max_ranks=RankLimits(4))


@pytest.mark.parametrize(
    "change", [{"in_features": 15}, {"out_features": 33}, {"layer": 2}, {"module": "o_proj"}]
)
def test_another_base(change):
    with pytest.raises(AdapterMismatchError, match=naming("layer", 2)):
        check_targets([lora(**change)], PLAIN, max_ranks=RankLimits(4))


def test_a_rank_above_the_limit():
    with pytest.raises(AdapterTooLargeError, match=naming(4, 3, "q_proj", "max_lora_rank")):
        check_targets([lora()], PLAIN, max_ranks=RankLimits(3))
