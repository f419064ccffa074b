import json

import pytest

from loraplex.core.adapter import AdapterChoice, ByDigest, ByName, ByTaskId
from loraplex.core.errors import InvalidParameterError
from loraplex.core.request import MAX_ADAPTERS, check_adapters
from loraplex.frontends.adapter_choices import read_choices


def test_every_way_to_name_an_adapter():
    entries = [
        "org/fr.v2",
        {"name": "legal", "scale": 0.5},
        {"task_id": 0},
        {"task_id": 2**64 - 1, "name": None, "scale": None},
        {"digest": "9f86", "scale": -1},
    ]
    assert read_choices(json.loads(json.dumps(entries))) == (
        AdapterChoice(ByName("org/fr.v2"), 1.0),
        AdapterChoice(ByName("legal"), 0.5),
        AdapterChoice(ByTaskId(0), 1.0),
        AdapterChoice(ByTaskId(2**64 - 1), 1.0),
        AdapterChoice(ByDigest("9f86"), -1.0),
    )


@pytest.mark.parametrize(
    ("value", "param", "text"),
    [
        ("fr", "adapters", 'must be a list of adapters, each a name or an object, got "fr"'),
        ({"name": "fr"}, "adapters", "must be a list"),
        ([5], "adapters[0]", "must be an adapter's name or an object with name and scale, got 5"),
        ([None], "adapters[0]", "got null"),
        ([["fr"]], "adapters[0]", 'got ["fr"]'),
        ([""], "adapters[0].name", "must be a string that is not empty"),
        (["fr", {}], "adapters[1]", "one of name, task_id and digest, got none"),
        ([{"scale": 1}], "adapters[0]", "got none"),
        ([{"name": "a", "task_id": 1}], "adapters[0]", "got name and task_id"),
        ([{"name": "a", "sclae": 1}], "adapters[0].sclae", "has no field 'sclae'; known: name"),
        ([{"name": 5}], "adapters[0].name", "must be a string that is not empty, got 5"),
        ([{"digest": ["x"]}], "adapters[0].digest", "must be a string"),
        ([{"task_id": "5"}], "adapters[0].task_id", "must be an integer from 0 to 2**64 - 1"),
        ([{"task_id": True}], "adapters[0].task_id", "got true"),
        ([{"task_id": -1}], "adapters[0].task_id", "got -1"),
        ([{"task_id": 2**64}], "adapters[0].task_id", "must be an integer"),
        ([{"name": "a", "scale": "1"}], "adapters[0].scale", 'must be a number, got "1"'),
        ([{"name": "a", "scale": False}], "adapters[0].scale", "must be a number, got false"),
        ([{"name": "a", "scale": 10**400}], "adapters[0].scale", "must be a number"),
    ],
)
def test_what_is_wrong_is_named(value, param, text):
    with pytest.raises(InvalidParameterError) as caught:
        read_choices(value)
    assert caught.value.param == param
    assert text in caught.value.message
    assert len(caught.value.message) < 200


def test_limits():
    check_adapters([AdapterChoice(ByName("a"), scale) for scale in (-100.0, 0.0, 100.0)])
    check_adapters([AdapterChoice(ByName("a"))] * MAX_ADAPTERS)
    with pytest.raises(InvalidParameterError, match=r"17 entries; at most 16"):
        check_adapters([AdapterChoice(ByName("a"))] * (MAX_ADAPTERS + 1))
    for scale in (100.5, -1e9, float("nan"), float("inf")):
        with pytest.raises(InvalidParameterError, match=r"must be in \[-100, 100\], got"):
            check_adapters([AdapterChoice(ByName("a")), AdapterChoice(ByName("b"), scale)])
