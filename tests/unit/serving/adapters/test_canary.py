"""What a canary compares. That it runs and refuses, test_adapter_contract.py shows."""

import pytest

from loraplex.core.output import TokenLogprob
from loraplex.serving.adapters.canary import compare


def token(logprob, token_id=1, **top):
    pairs = tuple((int(name[1:]), value) for name, value in top.items())
    return TokenLogprob(token_id=token_id, logprob=logprob, rank=1, top=pairs)


def test_the_prompt_and_the_likeliest_next_tokens():
    base = [token(-1.0), token(-0.5, 7, t7=-0.5, t8=-2.0)]
    adapted = [token(-1.5), token(-0.4, 8, t8=-0.4, t7=-3.0)]
    report = compare(base, adapted)
    assert (report.base_token_id, report.adapter_token_id) == (7, 8)
    assert report.num_compared == 3
    assert report.largest_difference == pytest.approx(2.5)
    assert report.mean_difference == pytest.approx((0.5 + 2.5 + 1.6) / 3)


def test_of_a_token_that_one_side_leaves_out_no_more_is_counted_than_is_known():
    # 9 is the base's least likely, with less than any of the adapter's: they may be equal.
    base = [token(-0.1, 7, t7=-0.1, t9=-5.0)]
    adapted = [token(-0.1, 7, t7=-0.1, t8=-4.0)]
    report = compare(base, adapted)
    assert report.largest_difference == pytest.approx(1)  # 8: -4, and at most -5 by the base
    assert report.mean_difference == pytest.approx(1 / 3)
