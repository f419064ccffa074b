"""Document that is generated from the declared routes."""

from typing import Literal

import jsonschema
import msgspec
import pytest
from pydantic import BaseModel
from starlette.routing import Route

from loraplex.core.errors import (
    InternalError,
    InvalidRequestError,
    QueueFullError,
    UnauthenticatedError,
)
from loraplex.frontends.openapi.document import Schemas, document
from loraplex.frontends.openapi.operation import (
    JSON,
    Media,
    Parameter,
    ResponseDoc,
    by_status,
    described,
    events_of,
    json_body,
    json_of,
    with_error_responses,
)
from tools.openapi_page import openapi_page


class Requested(BaseModel):
    number: int


class Failure(msgspec.Struct):
    error: str


class Reported(msgspec.Struct):
    kind: Literal["told"] = "told"
    """What it is."""
    pair: tuple[int, str] = (1, "")
    absent: int | msgspec.UnsetType = msgspec.UNSET


STATUSES = {InvalidRequestError: 400, UnauthenticatedError: 401, QueueFullError: 429}


def responses(kinds):
    rows = ((STATUSES.get(kind, 500), Media(JSON, Failure)) for kind in kinds)
    return by_status(rows)


@described(
    json_of(Reported),
    tag="some",
    body=json_body(Requested),
    query=(Parameter("how", "How it is done."),),
    errors=(QueueFullError, InternalError),
)
async def handler(request):
    """Does it. And explains more
    about it."""


def made(*, has_keys=True, path="/some/{name:path}", open_paths=()):
    route = Route(path, with_error_responses(handler, responses), methods=["POST"])
    return document([route], has_keys=has_keys, open_paths=open_paths)


def test_a_route_is_described():
    operation = made()["paths"]["/some/{name}"]["post"]
    assert operation["summary"] == "Does it"
    assert operation["description"] == "And explains more about it."
    assert [(each["name"], each["in"]) for each in operation["parameters"]] == [
        ("name", "path"),
        ("how", "query"),
    ]
    assert list(operation["responses"]) == ["200", "400", "401", "429", "500"]
    assert "retry-after" in operation["responses"]["429"]["headers"]
    assert operation["security"] == [{"apiKey": []}]


@pytest.mark.parametrize("fields", [{"has_keys": False}, {"open_paths": ["/some/{name:path}"]}])
def test_without_a_key_no_route_requires_one(fields):
    operation = made(**fields)["paths"]["/some/{name}"]["post"]
    assert "401" not in operation["responses"]
    assert "security" not in operation


def test_a_response_has_all_fields_but_those_that_may_be_absent():
    schemas = Schemas([Reported])
    assert schemas.of(Reported) == {"$ref": "#/components/schemas/Reported"}
    written = schemas.components["Reported"]
    assert written["required"] == ["kind", "pair"]
    assert written["properties"]["kind"]["description"] == "What it is."
    jsonschema.Draft202012Validator.check_schema(written)
    validator = jsonschema.Draft202012Validator(written)
    assert validator.is_valid({"kind": "told", "pair": [1, "a"]})
    assert not validator.is_valid({"kind": "told", "pair": ["a", 1]})


def test_two_types_of_one_name_are_distinguished():
    class Requested(msgspec.Struct):
        number: str

    with pytest.raises(ValueError, match="Requested"):
        Schemas([Requested, globals()["Requested"]])


def test_events_say_what_their_data_are():
    @described(ResponseDoc(200, (events_of(Reported, "And an end."),)), tag="some")
    async def stream(request):
        """Streams."""

    route = Route("/stream", with_error_responses(stream, responses, Failure))
    written = document([route], has_keys=False)["paths"]["/stream"]["get"]["responses"]["200"]
    event = written["content"]["text/event-stream"]["schema"]
    data, end = event["properties"]["data"]["anyOf"]
    assert end == {"const": "And an end."}
    assert data["contentSchema"] == {
        "anyOf": [
            {"$ref": "#/components/schemas/Reported"},
            {"$ref": "#/components/schemas/Failure"},
        ]
    }


def test_the_servers_own_document_is_one_of_openapi_3_1():
    written = msgspec.json.decode(openapi_page())
    assert written["openapi"].startswith("3.1")
    for schema in written["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    ids = [each["operationId"] for path in written["paths"].values() for each in path.values()]
    assert len(ids) == len(set(ids))
    untold = [
        each for path in written["paths"].values() for each in path.values() if not each["tags"][0]
    ]
    assert untold == []


def test_ranges_are_those_that_sampling_knows():
    written = msgspec.json.decode(openapi_page())["components"]["schemas"]["ChatBody"]["properties"]
    number, null = written["temperature"]["anyOf"]
    assert (number["minimum"], number["maximum"], null["type"]) == (0, 100, "null")
    assert written["top_p"]["anyOf"][0]["exclusiveMinimum"] == 0
    assert written["logprobs"]["anyOf"][0] == {"type": "boolean"}
