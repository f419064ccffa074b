"""JSON schemas of request and response bodies, each once, by name."""

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

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
