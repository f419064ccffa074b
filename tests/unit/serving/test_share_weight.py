"""Which weight a request has in a fair share."""

import pytest

from loraplex.core.scheduler_settings import MAX_SHARE_WEIGHT, MIN_SHARE_WEIGHT, FairShare
from loraplex.scheduling.fair_share import FairShares
from loraplex.serving.admission import share_weight

WEIGHTS = {"fast": 4.0, "slow": 0.5, "team": 3.0}


@pytest.mark.parametrize(
    ("fair_share", "adapters", "tenant", "weight"),
    [
        ("none", ["fast"], "team", 1.0),
        ("adapter", ["fast"], "team", 4.0),
        ("adapter", ["fast", "slow"], "team", 0.5),
        ("adapter", ["other"], "team", 1.0),
        ("adapter", [], "team", 1.0),
        ("tenant", ["fast"], "team", 3.0),
        ("tenant", ["fast"], "fast", 4.0),
        ("tenant_adapter", ["slow"], "team", 1.5),
    ],
)
def test_weight(fair_share, adapters, tenant, weight):
    assert share_weight(fair_share, WEIGHTS, adapters=adapters, tenant=tenant) == weight


@pytest.mark.parametrize("weight", [MIN_SHARE_WEIGHT, MAX_SHARE_WEIGHT])
def test_allowed_weights_make_a_share_that_the_scheduler_takes(weight):
    kind, others = FairShare.TENANT_ADAPTER, 20_000
    product = share_weight(kind, {"a": weight}, adapters=["a"], tenant="t", tenant_weight=weight)
    heaviest = share_weight(
        kind, {"a": MAX_SHARE_WEIGHT}, adapters=["a"], tenant="t", tenant_weight=MAX_SHARE_WEIGHT
    )
    shares = FairShares(kind, input_weight=1.0, output_weight=2.0)
    for number in range(others):
        shares.enter(("other", number), heaviest, ())
    shares.enter(("t", 1), product, ())
    assert shares.part(("t", 1), 64) == 1
    for number in range(others):
        shares.leave(("other", number))
    assert shares.part(("t", 1), 64) == 64
    start = shares.virtual_time
    shares.charge(("t", 1), 6, 1)
    assert shares.counter(("t", 1)) == shares.virtual_time - start == 8 / product
    shares.check({("t", 1): 1})


def test_every_kind_of_share_has_weights():
    for kind in set(FairShare) - {FairShare.NONE}:
        assert share_weight(kind, {"both": 2.0}, adapters=["both"], tenant="both") > 1.0
