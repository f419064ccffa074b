"""OpenAPI 3.1 document of an app, from the descriptions of its routes."""

import ast
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute, Route

from loraplex.core.version import __version__
from loraplex.frontends.openapi.operation import (
    EVENTS,
    JSON,
    OF_BODIES,
    OF_KEYS,
    OF_READING,
    Media,
    Operation,
    Parameter,
    ResponseDoc,
    operation_of,
)

REF = "#/components/schemas/"
Schema = dict[str, Any]


class Schemas:
    """Schemas of pydantic models, which read requests, and of types that msgspec encodes."""

    def __init__(self, types: Iterable[Any]) -> None:
        """Build the schemas. Mappings among the types are schemas already."""
        found = [each for each in types if each is not None and not isinstance(each, Mapping)]
        models = _unique(each for each in found if _is_model(each))
        others = _unique(each for each in found if not _is_model(each))
        self._schemas: list[tuple[Any, Schema]] = []
        self.components: dict[str, Schema] = {}
        self._add_models(models)
        self._add_encoded(others)

    def of(self, type_: Any) -> Schema:
        if isinstance(type_, Mapping):
            return dict(type_)
        return next(schema for known, schema in self._schemas if known == type_)

    def _add_models(self, models: list[type[BaseModel]]) -> None:
        by_model, whole = models_json_schema(
            [(model, "validation") for model in models], ref_template=REF + "{model}"
        )
        self._add(whole.get("$defs", {}))
        self._schemas += [(model, by_model[model, "validation"]) for model in models]

    def _add_encoded(self, types: list[Any]) -> None:
        schemas, components = msgspec.json.schema_components(types, ref_template=REF + "{name}")
        names = {name: _short(name) for name in components}
        for struct in _structs(types):
            own = components.get(struct.__name__) or components.get(_full_name(struct))
            if own is not None:
                _complete(own, struct)
        self._add({names[name]: _renamed(own, names) for name, own in components.items()})
        renamed = (_renamed(schema, names) for schema in schemas)
        self._schemas += list(zip(types, renamed, strict=True))

    def _add(self, components: Mapping[str, Schema]) -> None:
        if twice := self.components.keys() & components.keys():
            raise ValueError(f"two types have the names {sorted(twice)}")
        self.components |= components


def _is_model(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, BaseModel)


def _unique(types: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for each in types:
        if each not in found:
            found.append(each)
    return found


def _full_name(struct: type) -> str:
    return f"{struct.__module__}.{struct.__qualname__}"


def _short(name: str) -> str:
    """Shorten a name with a module, which msgspec uses for two types of one name."""
    *modules, plain = name.split(".")
    return f"{modules[-2]}.{plain}" if modules else plain


def _renamed(schema: Any, names: Mapping[str, str]) -> Any:
    """Return a schema with references to the short names, in OpenAPI 3.1's JSON Schema dialect."""
    if isinstance(schema, list):
        return [_renamed(each, names) for each in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {key: _renamed(value, names) for key, value in schema.items()}
    if isinstance(renamed.get("items"), list):
        # msgspec writes a tuple as the drafts before 2020-12 had it.
        renamed |= {"prefixItems": renamed["items"], "items": False}
    if isinstance(renamed.get("$ref"), str):
        name = renamed["$ref"].removeprefix(REF)
        renamed["$ref"] = REF + names.get(name, name)
    return renamed


def _structs(types: Iterable[Any]) -> Iterator[type[msgspec.Struct]]:
    """Yield all structs that the types consist of."""
    infos = list(msgspec.inspect.multi_type_info(types))
    seen: set[type] = set()
    while infos:
        info = infos.pop()
        if isinstance(info, msgspec.inspect.StructType):
            if info.cls in seen:
                continue
            seen.add(info.cls)
            yield info.cls
        infos += _parts(info)


def _parts(info: Any) -> Iterator[Any]:
    """Yield the types inside a type of msgspec.inspect."""
    for name in getattr(info, "__struct_fields__", ()):
        value = getattr(info, name)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, msgspec.inspect.Type):
                yield each
            elif isinstance(each, msgspec.inspect.Field):
                yield each.type


def _complete(schema: Schema, struct: type[msgspec.Struct]) -> None:
    """Require every field that cannot be UNSET, and describe fields by their docstrings."""
    properties = schema.get("properties", {})
    notes = _attribute_docstrings(struct)
    for field in msgspec.structs.fields(struct):
        own = properties[field.encode_name]
        own.pop("default", None)
        if field.name in notes:
            own["description"] = notes[field.name]
    always = {
        field.encode_name
        for field in msgspec.structs.fields(struct)
        if field.default is not msgspec.UNSET
    }
    tagged = set(schema.get("required", ()))
    if not struct.__struct_config__.omit_defaults:
        schema["required"] = [name for name in properties if name in always | tagged]


@functools.cache
def _attribute_docstrings(struct: type) -> dict[str, str]:
    """Return the docstrings of the fields of a class and its bases."""
    found: dict[str, str] = {}
    for cls in reversed(struct.__mro__):
        if issubclass(cls, msgspec.Struct) and cls is not msgspec.Struct:
            found |= dict(_own_docstrings(cls))
    return found


@functools.cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module by name. inspect.getsource parses the file for each class."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}


def _own_docstrings(cls: type) -> Iterator[tuple[str, str]]:
    """Yield (name, docstring) of each documented field of the class itself."""
    definition: ast.stmt | None = _classes_of(cls.__module__).get(cls.__qualname__)
    if definition is None:  # a class within a function
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(note))),
            ):
                yield name, " ".join(note.split())


OPENAPI_VERSION = "3.1.0"
SCHEME = "apiKey"
_PARAMETER = re.compile(r"{(\w+)(:\w+)?}")
_ABOUT = """\
One server for one base model and thousands of LoRA adapters.

Every response has the header x-request-id, which is the client's own if it sent one. HEAD works
where GET does. What is not HTTP, or exceeds a limit of the connection, is refused before a route is
looked up: 400, 408, 414, 431, 501, 503 and 505, with `Connection: close`.
"""
_REQUEST_ID = Parameter(
    "x-request-id", "The request's id: the client's own, if it sent one that can be used."
)
_RETRY_AFTER = Parameter(
    "retry-after", "Seconds after which the same request may do better.", {"type": "integer"}
)
_SHARED = (_REQUEST_ID, _RETRY_AFTER)
_TRY_LATER = (429, 503)


class DescribedRoute(NamedTuple):
    """A route for one method."""

    path: str
    method: str
    operation: Operation


def document(
    routes: Iterable[BaseRoute], *, has_keys: bool, open_paths: Iterable[str] = ()
) -> Schema:
    """Return the document. has_keys: requests need an API key, except for open_paths."""
    described = [
        _guarded(each, has_keys and each.path not in set(open_paths))
        for each in described_routes(routes)
    ]
    schemas = Schemas(
        media.schema
        for each in described
        for media in (
            *(media for response in each.operation.responses for media in response.content),
            *filter(None, [each.operation.body]),
            *filter(None, [_error_event(each.operation)]),
        )
    )
    paths: dict[str, Schema] = {}
    for each in described:
        path = _PARAMETER.sub(r"{\1}", each.path)
        paths.setdefault(path, {})[each.method.lower()] = _operation(each, schemas)
    components: Schema = {
        "schemas": dict(sorted(schemas.components.items())),
        "headers": {each.name: _header(each) for each in _SHARED},
    }
    if has_keys:
        components["securitySchemes"] = {SCHEME: {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": "loraplex", "version": __version__, "description": _ABOUT},
        "paths": paths,
        "components": components,
    }


def described_routes(routes: Iterable[BaseRoute]) -> Iterator[DescribedRoute]:
    """Yield each route and method with a description; the first route of a path counts."""
    seen: set[tuple[str, str]] = set()
    for route in routes:
        for method, operation in _operations(route).items():
            path = getattr(route, "path", "")
            if (path, method) not in seen:
                seen.add((path, method))
                yield DescribedRoute(path, method, operation)


def _operations(route: BaseRoute) -> Mapping[str, Operation]:
    if not isinstance(route, Route) or not getattr(route, "include_in_schema", True):
        return {}
    several: Mapping[str, Operation] = getattr(route.endpoint, "operations", {})
    operation = operation_of(route.endpoint)
    if operation is None:
        return several
    methods = sorted((route.methods or set()) - {"HEAD"})
    return dict.fromkeys(methods, operation)


def _guarded(route: DescribedRoute, needs_key: bool) -> DescribedRoute:
    """Add the responses to errors, in the front end's format."""
    operation = route.operation
    kinds = [*operation.errors, *OF_READING]
    kinds += OF_BODIES if operation.body is not None else ()
    kinds += OF_KEYS if needs_key else ()
    errors = operation.error_responses(kinds) if operation.error_responses is not None else ()
    whole = msgspec.structs.replace(
        operation, responses=(*operation.responses, *errors), is_open=not needs_key
    )
    return route._replace(operation=whole)


def _operation(route: DescribedRoute, schemas: Schemas) -> Schema:
    operation = route.operation
    summary, _, rest = operation.about.partition(". ")
    parameters = [_path_parameter(*each) for each in _PARAMETER.findall(route.path)]
    parameters += [_parameter(each, "query") for each in operation.query]
    parameters += [_parameter(each, "header") for each in operation.headers]
    written: Schema = {
        "operationId": _operation_id(route),
        "tags": [operation.tag],
        "summary": summary.rstrip(".") or f"{route.method} {route.path}",
        **({"description": rest} if rest else {}),
        "parameters": parameters,
        "responses": dict(_responses(operation, schemas)),
    }
    if operation.body is not None:
        written["requestBody"] = {
            "required": operation.needs_body,
            "content": _content((operation.body,), schemas),
        }
    if not operation.is_open:
        written["security"] = [{SCHEME: []}]
    return written


def _operation_id(route: DescribedRoute) -> str:
    words = re.findall(r"[A-Za-z0-9]+", _PARAMETER.sub(r"\1", route.path))
    return "_".join([route.method.lower(), *words])


def _path_parameter(name: str, converter: str) -> Schema:
    note = "May have slashes." if converter else ""
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema, "description": note}


def _parameter(parameter: Parameter, place: str) -> Schema:
    return {
        "name": parameter.name,
        "in": place,
        "description": parameter.note,
        "schema": dict(parameter.schema),
    }


def _responses(operation: Operation, schemas: Schemas) -> Iterator[tuple[str, Schema]]:
    by_status: dict[int, list[ResponseDoc]] = {}
    for response in operation.responses:
        by_status.setdefault(response.status, []).append(response)
    for status, responses in sorted(by_status.items()):
        headers = [_REQUEST_ID]
        headers += [_RETRY_AFTER] if status in _TRY_LATER else []
        headers += operation.response_headers if status < 300 else ()
        written: Schema = {
            "description": responses[0].description,
            "headers": {each.name: _header_or_reference(each) for each in headers},
        }
        forms = [media for response in responses for media in response.content]
        failure = _error_event(operation)
        if status == 200 and failure and any(media.media_type == EVENTS for media in forms):
            forms.append(failure)
        if forms:
            written["content"] = _content(forms, schemas)
        yield str(status), written


def _error_event(operation: Operation) -> Media | None:
    return None if operation.error_event is None else Media(EVENTS, operation.error_event)


def _header(header: Parameter) -> Schema:
    return {"description": header.note, "schema": dict(header.schema)}


def _header_or_reference(header: Parameter) -> Schema:
    if header in _SHARED:
        return {"$ref": f"#/components/headers/{header.name}"}
    return _header(header)


def _content(forms: Sequence[Media], schemas: Schemas) -> Schema:
    by_type: dict[str, list[Media]] = {}
    for media in forms:
        known = by_type.setdefault(media.media_type, [])
        if media not in known:
            known.append(media)
    return {name: _media_object(several, schemas) for name, several in by_type.items()}


def _media_object(forms: Sequence[Media], schemas: Schemas) -> Schema:
    found = [schemas.of(media.schema) for media in forms if media.schema is not None]
    if not found:
        return {"schema": {"type": "string"}}
    schema = found[0] if len(found) == 1 else {"anyOf": found}
    if forms[0].media_type != EVENTS:
        return {"schema": schema}
    data: Schema = {"type": "string", "contentMediaType": JSON, "contentSchema": schema}
    if end := forms[0].end:
        data = {"anyOf": [data, {"const": end}]}
    return {
        "schema": {
            "description": "Each server-sent event.",
            "type": "object",
            "properties": {"event": {"type": "string"}, "data": data},
            "required": ["data"],
        }
    }
