"""Which weight a request has in a fair share."""

import pytest

from loraplex.core.scheduler_settings import FairShare
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


def test_every_kind_of_share_has_weights():
    for kind in set(FairShare) - {FairShare.NONE}:
        assert share_weight(kind, {"both": 2.0}, adapters=["both"], tenant="both") > 1.0
