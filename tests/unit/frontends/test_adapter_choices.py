import json
import re

import pytest

from loraplex.core.adapter import AdapterChoice, ByDigest, ByName, ByTaskId
from loraplex.core.errors import InvalidParameterError
from loraplex.frontends.adapter_choices import read_choices
from loraplex.serving.admission import MAX_ADAPTERS, check_adapters
from support.naming import naming, refused


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
    ("value", "param", "named"),
    [
        ("fr", "adapters", ("adapters", '"fr"')),
        ({"name": "fr"}, "adapters", ("adapters", '{"name": "fr"}')),
        ([5], "adapters[0]", (5, "adapters[0]")),
        ([None], "adapters[0]", ("adapters[0]", "null")),
        ([["fr"]], "adapters[0]", ('["fr"]', "adapters[0]")),
        ([""], "adapters[0].name", ("adapters[0].name", '""')),
        (["fr", {}], "adapters[1]", ("adapters[1]", "name, task_id and digest", "none")),
        ([{"scale": 1}], "adapters[0]", ("adapters[0]", "name, task_id and digest", "none")),
        ([{"name": "a", "task_id": 1}], "adapters[0]", ("name and task_id", "adapters[0]")),
        (
            [{"name": "a", "sclae": 1}],
            "adapters[0].sclae",
            ("adapters[0]", "sclae", "name, task_id, digest, scale"),
        ),
        ([{"name": 5}], "adapters[0].name", (5, "adapters[0].name")),
        ([{"digest": ["x"]}], "adapters[0].digest", ("adapters[0].digest", '["x"]')),
        ([{"task_id": "5"}], "adapters[0].task_id", ("adapters[0].task_id", 0, "2**64 - 1", '"5"')),
        ([{"task_id": True}], "adapters[0].task_id", ("true", "adapters[0].task_id", 0)),
        ([{"task_id": -1}], "adapters[0].task_id", (-1, "adapters[0].task_id", 0)),
        (
            [{"task_id": 2**64}],
            "adapters[0].task_id",
            ("adapters[0].task_id", 0, "2**64 - 1", 2**64),
        ),
        ([{"name": "a", "scale": "1"}], "adapters[0].scale", ("adapters[0].scale", '"1"')),
        ([{"name": "a", "scale": False}], "adapters[0].scale", ("adapters[0].scale", "false")),
        ([{"name": "a", "scale": 10**400}], "adapters[0].scale", ("adapters[0].scale",)),
    ],
)
def test_what_is_wrong_is_named(value, param, named):
    with pytest.raises(InvalidParameterError) as caught:
        read_choices(value)
    assert caught.value.param == param
    assert re.search(naming(*named), caught.value.message)
    assert len(caught.value.message) < 200


def test_limits():
    check_adapters([AdapterChoice(ByName("a"), scale) for scale in (-100.0, 0.0, 100.0)])
    check_adapters([AdapterChoice(ByName("a"))] * MAX_ADAPTERS)
    with refused(InvalidParameterError, 17, 16, param="adapters"):
        check_adapters([AdapterChoice(ByName("a"))] * (MAX_ADAPTERS + 1))
    for scale in (100.5, -1e9, float("nan"), float("inf")):
        with refused(InvalidParameterError, "[-100, 100]", f"{scale:g}", param="adapters"):
            check_adapters([AdapterChoice(ByName("a")), AdapterChoice(ByName("b"), scale)])
