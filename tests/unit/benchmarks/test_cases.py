import pytest
from comparison.cases import stages
from comparison.sizes import SHORT

from loraplex.bench.arrivals import ClosedLoop
from loraplex.core.errors import ConfigError
from support.naming import naming


def test_the_workloads_by_name():
    found = stages(["W1", "W2", "W3", "W4", "W5", "W6", "tax"], 2000, 0)
    assert [stage.name for stage in found] == [
        *("standard", "first use", "many, resident", "many, from disk")
    ]
    names = [case.name for case in found[0].cases]
    assert names[:6] == ["W1", "W2-8", "W2-32", "W3-8", "W3-32", "W4"]
    assert [case.uses_adapters for case in found[0].cases[:4]] == [False, False, False, True]
    many = {case.name: case.load for case in found[2].cases}
    assert many["W6-n2000"].num_requests == many["W6-n5"].num_requests == 4000
    assert many["W6-n2000"].arrivals == ClosedLoop(32)
    assert (found[2].num_resident, found[3].num_resident) == (2000, 100)
    with pytest.raises(ConfigError, match=naming("W7", "W1", "W2", "W3", "W4")):
        stages(["W7"], 10, 0)


def test_single_workloads_of_groups():
    (found,) = stages(["W1", "W3-8"], 10, 0)
    assert [case.name for case in found.cases] == ["W1", "W3-8"]
    with pytest.raises(ConfigError, match=naming("W3-9", "W5-8")):
        stages(["W3-9", "W5-8"], 10, 0)


def test_large_models_have_short_forms():
    (found,) = stages(["W1", "W2", "W3", "W4", "held"], 10, 0, SHORT)
    assert [case.name for case in found.cases] == ["W1", "W2-8", "W3-8", "W4", "held"]
    assert [case.uses_adapters for case in found.cases] == [False, False, True, True, False]
    assert found.num_adapters == SHORT.num_adapters == 8
    for case in found.cases[:4]:
        assert case.load.prompt_tokens.high <= 96
        assert case.load.output_tokens.high <= 24
        longest = case.load.prompt_tokens.high + case.load.output_tokens.high
        assert longest <= SHORT.max_model_len
    assert max(found.cases[4].load.rungs) <= SHORT.max_num_seqs
    for group in ("W5", "W6", "tax", "W2-32"):
        with pytest.raises(ConfigError, match=naming(group, "W1", "held")):
            stages([group], 10, 0, SHORT)
