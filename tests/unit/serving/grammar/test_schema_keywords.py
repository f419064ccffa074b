"""Every keyword of JSON Schema, in draft 2020-12 and in its older forms: it is enforced, or an
annotation, or refused by its name; where a function is not strict, it is left out instead.
"""

import json
import re
from typing import Any

import llguidance
import pytest

from loraplex.core.errors import InvalidParameterError, UnsupportedFeatureError
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.tools import FunctionTool, ToolMode, ToolUse
from loraplex.serving.grammar.check import GrammarCheck, SpecialTokens
from loraplex.serving.text.chat_format import ChatFormat, CompletionSyntax, completion_grammar
from support.naming import refused

STRING = {"type": "string"}
ENFORCED: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "type": ({"type": "string"}, "a", 1),
    "type of several": ({"type": ["string", "null"]}, None, 1),
    "enum": ({"enum": [1, "a"]}, "a", "b"),
    "const": ({"const": 3}, 3, 4),
    "multipleOf": ({"type": "number", "multipleOf": 0.5}, 1.5, 1.3),
    "maximum": ({"type": "number", "maximum": 3}, 3, 4),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 3}, 2, 3),
    "exclusiveMaximum of draft 4": (
        {"type": "number", "maximum": 3, "exclusiveMaximum": True},
        *(2, 3),
    ),
    "minimum": ({"type": "number", "minimum": 3}, 3, 2),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 3}, 4, 3),
    "exclusiveMinimum of draft 4": (
        {"type": "number", "minimum": 3, "exclusiveMinimum": True},
        *(4, 3),
    ),
    "maxLength": ({"type": "string", "maxLength": 1}, "a", "ab"),
    "minLength": ({"type": "string", "minLength": 2}, "ab", "a"),
    "pattern": ({"type": "string", "pattern": "^a+$"}, "aa", "b"),
    "format": ({"type": "string", "format": "date"}, "2020-01-01", "x"),
    "items": ({"type": "array", "items": STRING}, ["a"], [1]),
    "items of draft 6": ({"type": "array", "items": [STRING], "minItems": 1}, ["a"], [1]),
    "additionalItems": (
        {"type": "array", "items": [STRING], "additionalItems": False},
        *(["a"], ["a", 1]),
    ),
    "prefixItems": ({"type": "array", "prefixItems": [STRING]}, ["a"], [1]),
    "maxItems": ({"type": "array", "maxItems": 1}, [1], [1, 2]),
    "minItems": ({"type": "array", "minItems": 1}, [1], []),
    "properties": ({"type": "object", "properties": {"a": STRING}}, {"a": "x"}, {"a": 1}),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^a": STRING}},
        *({"ab": "x"}, {"ab": 1}),
    ),
    "additionalProperties": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        *({"a": 1}, {"b": 1}),
    ),
    "required": ({"type": "object", "required": ["a"]}, {"a": 1}, {}),
    "maxProperties": ({"type": "object", "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 1}),
    "minProperties": ({"type": "object", "minProperties": 1}, {"a": 1}, {}),
    "allOf": ({"allOf": [STRING, {"minLength": 2}]}, "ab", "a"),
    "anyOf": ({"anyOf": [STRING, {"type": "integer"}]}, 1, None),
    "oneOf": ({"oneOf": [STRING, {"type": "integer"}]}, 1, None),
    "$ref and $defs": ({"$ref": "#/$defs/a", "$defs": {"a": STRING}}, "a", 1),
    "definitions": ({"$ref": "#/definitions/a", "definitions": {"a": STRING}}, "a", 1),
    "$anchor": ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", **STRING}}}, "a", 1),
    "$id": ({"$ref": "http://x.y/z", "$defs": {"a": {"$id": "http://x.y/z", **STRING}}}, "a", 1),
    "id of draft 4": (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "$ref": "http://x.y/z",
            "definitions": {"a": {"id": "http://x.y/z", **STRING}},
        },
        *("a", 1),
    ),
}
"""Keyword: (schema, what matches it, what does not)."""

ANNOTATIONS: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$vocabulary": {},
    "$comment": "c",
    "title": "t",
    "description": "d",
    "default": 1,
    "examples": [1],
    "deprecated": True,
    "readOnly": True,
    "writeOnly": True,
    "contentEncoding": "base64",
    "contentMediaType": "text/html",
    "contentSchema": {},
    # OpenAPI's, and any that JSON Schema has not
    "nullable": True,
    "discriminator": {},
    "xml": {},
    "externalDocs": {},
    "example": 1,
    "x-other": 1,
    "propertyOrdering": [],
}

REFUSED: dict[str, dict[str, Any]] = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": STRING},
    "minContains": {"type": "array", "contains": STRING, "minContains": 1},
    "maxContains": {"type": "array", "contains": STRING, "maxContains": 1},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {}}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "not": {"not": STRING},
    "if": {"if": STRING, "then": {"minLength": 1}},
    "then": {"if": STRING, "then": {"minLength": 1}},
    "else": {"if": STRING, "else": {"minimum": 1}},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "$dynamicAnchor": {"$dynamicAnchor": "a", **STRING},
    "$recursiveRef": {"$recursiveRef": "#"},
    "oneOf": {"oneOf": [STRING, {"minLength": 2}]},
    "color": {"type": "string", "format": "color"},
    "look-around": {"type": "string", "pattern": "^a(?=b)"},
    # draft 3
    "extends": {"extends": {"type": "array"}},
    "disallow": {"disallow": "array"},
    "divisibleBy": {"type": "integer", "divisibleBy": 2},
    "required": {"type": "string", "required": True},
}
"""What the message names: schema. All of them let `"ab"` or an empty list or object through."""


@pytest.fixture(scope="module")
def vocabulary() -> SpecialTokens:
    return SpecialTokens({}, 0)


@pytest.fixture(scope="module")
def check(vocabulary: SpecialTokens) -> GrammarCheck:
    return GrammarCheck(vocabulary)


def accepts(vocabulary: SpecialTokens, compiled: Grammar, text: str) -> bool:
    tokenizer = llguidance.LLTokenizer(vocabulary, slices=[])  # type: ignore[arg-type]
    matcher = llguidance.LLMatcher(tokenizer, compiled.text)
    tokens = [vocabulary.id_of_byte[byte] for byte in text.encode()]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def schema_grammar(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


@pytest.mark.parametrize("keyword", ENFORCED)
def test_it_is_enforced(check: GrammarCheck, vocabulary: SpecialTokens, keyword: str) -> None:
    schema, right, wrong = ENFORCED[keyword]
    compiled = check.compiled(schema_grammar(schema))
    assert accepts(vocabulary, compiled, json.dumps(right))
    assert not accepts(vocabulary, compiled, json.dumps(wrong))


@pytest.mark.parametrize("keyword", ANNOTATIONS)
def test_it_says_nothing_of_a_value(
    check: GrammarCheck, vocabulary: SpecialTokens, keyword: str
) -> None:
    compiled = check.compiled(schema_grammar({**STRING, keyword: ANNOTATIONS[keyword]}))
    assert accepts(vocabulary, compiled, '"ab"')
    assert not accepts(vocabulary, compiled, "1")


@pytest.mark.parametrize("keyword", REFUSED)
def test_it_is_refused_by_its_name_and_place(check: GrammarCheck, keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": REFUSED[keyword]}}
    with pytest.raises(UnsupportedFeatureError, match=re.escape(keyword)) as caught:
        check.compiled(schema_grammar(schema))
    assert "at #/properties/a: " in caught.value.message
    assert "not valid" not in caught.value.message


def message(use: ToolUse, family: str = "hermes") -> Grammar:
    chat_format = ChatFormat(tool_calls=family, reasoning="none", special_ids={})
    reading = CompletionSyntax(chat_format=chat_format, tool_use=use, prompt="")
    grammar = completion_grammar(reading, None)
    assert grammar is not None
    return grammar


def call(arguments: Any) -> str:
    """A call as hermes writes it."""
    written = json.dumps({"name": "f", "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


def value_of(schema: dict[str, Any]) -> Any:
    return {"array": [], "object": {}, "integer": 2}.get(schema.get("type", ""), "ab")


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_function_that_is_not_strict_is_kept_to_the_rest(
    check: GrammarCheck, vocabulary: SpecialTokens, keyword: str
) -> None:
    parameters = {"type": "object", "properties": {"a": REFUSED[keyword], "b": STRING}}
    tool = FunctionTool(name="f", parameters={**parameters, "required": ["a", "b"]})
    required = check.compiled(message(ToolUse(tools=(tool,), mode=ToolMode.REQUIRED)))
    right = {"a": value_of(REFUSED[keyword]), "b": "x"}
    assert accepts(vocabulary, required, call(right))
    if keyword != "look-around":  # then none of its schema can be compiled
        assert not accepts(vocabulary, required, call({**right, "b": 1}))
    at_most_one = check.compiled(message(ToolUse(tools=(tool,), is_parallel=False)))
    assert accepts(vocabulary, at_most_one, call(right))


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "glm45", "pythonic", "mistral"])
@pytest.mark.parametrize("mode", ToolMode)
def test_in_every_form_of_calls(check: GrammarCheck, family: str, mode: ToolMode) -> None:
    for keyword, schema in REFUSED.items():
        tool = FunctionTool(name="f", parameters={"properties": {"a": schema}})
        check.compiled(message(ToolUse(tools=(tool,), mode=mode, is_parallel=False), family))
        strict = FunctionTool(name="f", parameters=tool.parameters, is_strict=True)
        words = f"(?s)function 'f'.*{re.escape(keyword)}"
        with pytest.raises(UnsupportedFeatureError, match=words) as caught:
            check.compiled(message(ToolUse(tools=(strict,), mode=mode), family))
        assert caught.value.param == "tools"


def test_a_schema_that_is_wrong_stays_an_error_where_it_is_enforced(check: GrammarCheck) -> None:
    tool = FunctionTool(name="f", parameters={"properties": {"a": {"type": "strnig"}}})
    with refused(InvalidParameterError, "f", param="tools"):
        check.compiled(message(ToolUse(tools=(tool,), mode=ToolMode.REQUIRED)))
