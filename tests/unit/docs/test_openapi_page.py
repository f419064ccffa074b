"""The OpenAPI document of the documentation has the routes and schemas of the app."""

import json
import os
import re
import subprocess
import sys

import msgspec
import pytest
from pydantic import BaseModel

from loraplex.app import http_app
from loraplex.frontends.kserve.http.routes import Resource
from loraplex.frontends.openapi.operation import operation_of
from tools.openapi_page import openapi_page

PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
REF = "#/components/schemas/"
BODIES = (BaseModel, msgspec.Struct)


@pytest.fixture(scope="module")
def app_and_document():
    """Return the routes that the app serves, and the document that is written for it."""
    routes = []

    def recorded(original):
        def made(*arguments, **options):
            result = original(*arguments, **options)
            routes.extend(getattr(result, "routes", result))
            return result

        return made

    with pytest.MonkeyPatch.context() as patch:
        for name in ("Starlette", "kserve_routes"):
            patch.setattr(http_app, name, recorded(getattr(http_app, name)))
        document = json.loads(openapi_page())
    return routes, document


def served_methods(route):
    """Return the methods of a route, without those that are refused or mean another one."""
    if isinstance(route.endpoint, Resource):
        return {method for method, _, _ in route.endpoint.features}
    if route.methods is None:
        return set(route.endpoint.operations)
    return route.methods - {"HEAD"}


def operations(routes):
    """Yield each described operation of the routes."""
    for route in routes:
        if operation := operation_of(route.endpoint):
            yield operation
        yield from getattr(route.endpoint, "operations", {}).values()


def test_the_document_has_the_routes_of_the_app(app_and_document):
    routes, document = app_and_document
    served = {
        (PARAMETER.sub(r"{\1}", route.path), method.lower())
        for route in routes
        if route.include_in_schema
        for method in served_methods(route)
    }
    written = {(path, method) for path, item in document["paths"].items() for method in item}
    assert written == served
    assert len(written) > 90


def fields_of(type_):
    """Return the names that a body of the type may have, as clients write them."""
    if issubclass(type_, BaseModel):
        return {field.alias or name for name, field in type_.model_fields.items()}
    return {field.encode_name for field in msgspec.structs.fields(type_)} | (
        {type_.__struct_config__.tag_field} - {None}
    )


def test_the_document_has_the_schemas_of_the_apps_bodies(app_and_document):
    routes, document = app_and_document
    schemas = document["components"]["schemas"]
    bodies = {
        media.schema
        for operation in operations(routes)
        for media in (operation.body, *(m for each in operation.responses for m in each.content))
        if media and isinstance(media.schema, type) and issubclass(media.schema, BODIES)
    }
    assert len(bodies) > 40
    for body in bodies:
        assert set(schemas[body.__name__].get("properties", {})) == fields_of(body), body


def references(value):
    """Yield the names of the schemas that a part of the document refers to."""
    if isinstance(value, dict):
        if str(value.get("$ref", "")).startswith(REF):
            yield value["$ref"].removeprefix(REF)
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from references(each)


def test_each_schema_is_there_and_is_used(app_and_document):
    _, document = app_and_document
    assert set(references(document)) == set(document["components"]["schemas"])


def test_the_document_is_written_without_torch():
    """`make docs` installs neither torch nor the kernels."""
    program = (
        "import sys; sys.modules['torch'] = None; "
        "from tools.openapi_page import openapi_page; print(len(openapi_page()))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    assert int(finished.stdout) > 100_000
