"""Arguments that are no JSON where they are written become JSON."""

import json
from typing import Any

import pytest

from loraplex.core.tools import FunctionTool, ToolUse
from loraplex.serving.text.chat_format import ChatFormat, CompletionSyntax
from loraplex.serving.text.tool_calls.parameters import json_of, properties


def arguments(family: str, text: str, parameters: dict[str, Any] | None = None) -> Any:
    tool = FunctionTool(name="f", parameters=parameters or {})
    reading = CompletionSyntax(
        chat_format=ChatFormat(tool_calls=family), tool_use=ToolUse(tools=(tool,))
    )
    found = reading.reader().push(text, final=True)
    assert found.content == ""
    [call] = found.calls
    assert call.name == "f"
    return json.loads(call.arguments)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("Paris", {"type": "string"}, "Paris"),
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "integer"}, 12),
        ("12", {"type": ["string", "integer"]}, 12),
        ("12", {"type": ["string", "null"]}, "12"),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("1.5", {"type": "number"}, 1.5),
        ("2", {"type": "number"}, 2),
        ("2", {"type": ["string", "number"]}, 2),
        ("2.5", {"type": ["string", "integer"]}, "2.5"),
        ("2", {"anyOf": [{"type": "string"}, {}]}, 2),
        ("true", {"type": "boolean"}, True),
        ("yes", {"type": "boolean"}, "yes"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("x", {"enum": ["x", "y"]}, "x"),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"enum": [1, 2]}, 1),
        ("12", {}, 12),
        ("some words", {}, "some words"),
        ('"quoted"', {}, "quoted"),
        ('"quoted"', {"type": "string"}, '"quoted"'),
        ("", None, ""),
        ("True", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        (" FALSE\n", {"type": "boolean"}, False),
        ("True", {"type": ["boolean", "null"]}, True),
        ("None", {"type": ["boolean", "null"]}, None),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("None", {"type": "string"}, "None"),
        ("True", {"type": "string"}, "True"),
        ("True", {"type": ["string", "boolean"]}, True),
        ("True", {}, "True"),
        ("True", {"anyOf": [{"type": "boolean"}, {"type": "null"}]}, True),
        ("True", {"$ref": "#/$defs/b", "$defs": {"b": {"type": "boolean"}}}, True),
        ("True", {"allOf": [{"$ref": "#/$defs/b"}], "$defs": {"b": {"type": "boolean"}}}, True),
        (
            "True",
            {"anyOf": [{"$ref": "#/definitions/b"}], "definitions": {"b": {"type": "boolean"}}},
            True,
        ),
        ("True", {"const": True}, True),
        ("5", {"const": "5"}, "5"),
        ("12", {"$ref": "#/$defs/s", "$defs": {"s": {"type": "string"}}}, "12"),
        ("12", {"$ref": "#/$defs/s", "$defs": {"s": {"enum": ["12", "13"]}}}, "12"),
        ("12", {"allOf": [{"type": "string"}, {"description": "x"}]}, "12"),
        ("12", {"oneOf": [{"const": "12"}, {"type": "null"}]}, "12"),
        ("12", {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "string"}}}, "12"),
        ("12", {"$ref": "#/$defs/none"}, 12),
        ("12", {"$ref": "elsewhere"}, 12),
        ("12", {"$ref": "#"}, 12),
        ("12", {"type": "string", "nullable": True}, "12"),
        ("null", {"type": "string", "nullable": True}, None),
        ("+5", {"type": "integer"}, 5),
        ("+5", {"type": ["integer", "string"]}, "+5"),
        ("{'a': True,}", {"type": "object"}, {"a": True}),
        ("['a', None]", {"type": "array"}, ["a", None]),
        ("{'a': True}", {"type": "string"}, "{'a': True}"),
        ("{'a': True}", {}, "{'a': True}"),
        ("NaN", {"type": "number"}, "NaN"),
        ("-1e999", {"type": "number"}, "-1e999"),
        ("[1, Infinity]", {}, "[1, Infinity]"),
        ('two\nlines "and" quotes', {"type": "string"}, 'two\nlines "and" quotes'),
    ],
)
def test_text_as_the_schema_wants_it(text: str, schema: dict[str, Any] | None, value: Any) -> None:
    assert json.loads(json_of(text, schema)) == value


def test_references_that_double_with_each_step_end() -> None:
    defs = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 3} for n in range(60)}
    assert json_of("1", {"$ref": "#/$defs/d0", "$defs": defs}) == "1"
    defs = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 3} for n in range(60)}
    assert json_of("1", {"$ref": "#/$defs/d0", "$defs": defs}) == "1"


def test_properties_behind_a_reference() -> None:
    own = {"type": "object", "properties": {"a": {"type": "string"}}}
    tool = FunctionTool(name="f", parameters={"$ref": "#/$defs/own", "$defs": {"own": own}})
    assert properties(tool) == {"a": {"$defs": {"own": own}, "type": "string"}}


@pytest.mark.parametrize("key", ["$defs", "definitions"])
def test_definitions_are_seen_by_each_property(key: str) -> None:
    shared = {"p": {"type": "integer"}}
    tool = FunctionTool(
        name="f", parameters={key: shared, "properties": {"a": {"$ref": f"#/{key}/p"}}}
    )
    assert properties(tool) == {"a": {key: shared, "$ref": f"#/{key}/p"}}
    assert properties(None) == {}


def test_xml_keeps_lines_and_takes_the_first_of_two() -> None:
    text = (
        "<tool_call>\n<function=f>\n<parameter=code>\nif a < b:\n    go()\n\n</parameter>\n"
        "<parameter=code>\nother\n</parameter>\n<parameter=n>3</parameter>\n</function>\n"
        "</tool_call>"
    )
    schema = {"properties": {"code": {"type": "string"}}}
    assert arguments("qwen3_coder", text, schema) == {"code": "if a < b:\n    go()\n", "n": 3}


def test_xml_without_its_frame() -> None:
    assert arguments("qwen3_coder", "<function=f><parameter=a>1</parameter></function>") == {"a": 1}


@pytest.mark.parametrize(
    ("source", "values"),
    [
        ("a=1, b=-2.5", {"a": 1, "b": -2.5}),
        ("a='it''s'", {"a": "its"}),
        ("a=\"x, y) ]\", b='\\'q\\''", {"a": "x, y) ]", "b": "'q'"}),
        ("a=True, b=False, c=None", {"a": True, "b": False, "c": None}),
        ("a=true, b=false, c=null", {"a": True, "b": False, "c": None}),
        ("a=[1, [2, 'x']], b=(1, 2)", {"a": [1, [2, "x"]], "b": [1, 2]}),
        ("a={'k': {'l': [1]}, \"m\": None}", {"a": {"k": {"l": [1]}, "m": None}}),
        (" a = 1 , b = 2 ", {"a": 1, "b": 2}),
        ("", {}),
        ("a=+5, b=-(1)", {"a": 5, "b": -1}),
        ("a='one\ntwo'", {"a": "one\ntwo"}),
        ('a=""""one"\ntwo""", b=""', {"a": '"one"\ntwo', "b": ""}),
        ('a="he said "hi" to "b"", b=\'it\'s\'', {"a": 'he said "hi" to "b"', "b": "it's"}),
        (r"a='\d+\n\x41', b=r'\d'", {"a": "\\d+\nA", "b": r"\d"}),
        ("a=1,", {"a": 1}),
    ],
)
def test_python_literals(source: str, values: dict[str, Any]) -> None:
    assert arguments("pythonic", f"[f({source})]") == values


@pytest.mark.parametrize(
    "source",
    [
        "a=1+1",
        "a=f()",
        "a=__import__('os')",
        "a={1: 2}",
        "a=b",
        "a=1j",
        "a=b'x'",
        "1",
        "a=",
        "a=1]",
    ],
)
def test_other_python_is_no_argument(source: str) -> None:
    tool_use = ToolUse(tools=(FunctionTool(name="f"),))
    reading = CompletionSyntax(chat_format=ChatFormat(tool_calls="pythonic"), tool_use=tool_use)
    found = reading.reader().push(f"[f({source})]", final=True)
    assert (found.calls, found.content) == ((), f"[f({source})]")


@pytest.mark.parametrize(
    "nesting",
    ["[" * 5000, "(" * 5000, "{'a':" * 5000, "-" * 5000 + "1", "-" * 100_000 + "1"],
    ids=["lists", "tuples", "dicts", "minus", "more than Python's parser takes"],
)
def test_deep_python_ends(nesting: str) -> None:
    tool_use = ToolUse(tools=(FunctionTool(name="f"),))
    reading = CompletionSyntax(chat_format=ChatFormat(tool_calls="pythonic"), tool_use=tool_use)
    text = f"[f(a={nesting})]"
    found = reading.reader().push(text, final=True)
    assert (found.calls, found.content) == ((), text)


def test_how_deep_python_may_be() -> None:
    tool_use = ToolUse(tools=(FunctionTool(name="f"),))
    reading = CompletionSyntax(chat_format=ChatFormat(tool_calls="pythonic"), tool_use=tool_use)
    found = reading.reader().push(f"[f(a={'[' * 129}{']' * 129})]", final=True)
    assert found.calls == ()
    depth = 0
    value = arguments("pythonic", f"[f(a={'[' * 128}{']' * 128})]")["a"]
    while value:
        [value] = value
        depth += 1
    assert depth == 127


@pytest.mark.parametrize(
    "text",
    [
        '{"arguments": {"a": 1}, "name": "f"}',
        '{"name": "f", "parameters": {"a": 1}}',
        '{"id": "x", "type": "function", "name": "f", "arguments": "{\\"a\\": 1}"}',
        '{"name": "f", "index": 0, "extra": {"b": 2}, "arguments": {"a": 1}, "ok": null}',
        '{"name": "f", "name": "g", "arguments": {"a": 1}, "parameters": {"a": 2}}',
        '{"parameters": {"a": 1}, "arguments": {"a": 2}, "name": "f", "name": "g"}',
    ],
)
def test_json_calls_in_any_order(text: str) -> None:
    assert arguments("hermes", f"<tool_call>{text}</tool_call>") == {"a": 1}


@pytest.mark.parametrize("text", ['{"name": "f"}', '{"name": "f", "arguments": null}'])
def test_json_calls_without_arguments(text: str) -> None:
    assert arguments("hermes", f"<tool_call>{text}</tool_call>") == {}


@pytest.mark.parametrize(
    "text", ["[1]", "1", "none", "[" * 5000, ""], ids=["list", "number", "word", "deep", "empty"]
)
def test_arguments_in_a_string_that_is_no_object(text: str) -> None:
    call = f'<tool_call>{{"name": "f", "arguments": {json.dumps(text)}}}</tool_call>'
    reading = CompletionSyntax(
        chat_format=ChatFormat(tool_calls="hermes"),
        tool_use=ToolUse(tools=(FunctionTool(name="f"),)),
    )
    found = reading.reader().push(call, final=True)
    assert (found.calls, found.content) == ((), call)


def test_a_call_has_sixteen_keys_at_most() -> None:
    more = "".join(f', "k{index}": {index}' for index in range(15))
    assert arguments("hermes", f'<tool_call>{{"name": "f"{more}}}</tool_call>') == {}
    call = f'<tool_call>{{"name": "f"{more}, "l": 0}}</tool_call>'
    reading = CompletionSyntax(
        chat_format=ChatFormat(tool_calls="hermes"),
        tool_use=ToolUse(tools=(FunctionTool(name="f"),)),
    )
    found = reading.reader().push(call, final=True)
    assert (found.calls, found.content) == ((), call)


def test_ids_that_the_model_writes() -> None:
    tool_use = ToolUse(tools=(FunctionTool(name="f"),))
    kimi = CompletionSyntax(chat_format=ChatFormat(tool_calls="kimi_k2"), tool_use=tool_use)
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    assert kimi.reader().push(text, final=True).calls[0].call_id == "functions.f:3"
    mistral = CompletionSyntax(chat_format=ChatFormat(tool_calls="mistral"), tool_use=tool_use)
    text = "[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}"
    assert mistral.reader().push(text, final=True).calls[0].call_id == "abcDEF123"
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}]'
    call_id = mistral.reader().push(text, final=True).calls[0].call_id
    assert call_id is not None
    assert len(call_id) == 9
    assert call_id.isalnum()


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3_coder", '<function=f>\n<parameter=a>\n"\\ud800"\n</parameter>\n</function>'),
        ("pythonic", '[f(a="\\ud800")]'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
    ],
)
def test_half_a_character_stays_escaped(family: str, text: str) -> None:
    tool = FunctionTool(name="f")
    reading = CompletionSyntax(
        chat_format=ChatFormat(tool_calls=family), tool_use=ToolUse(tools=(tool,))
    )
    [call] = reading.reader().push(text, final=True).calls
    assert call.arguments.encode() == b'{"a": "\\ud800"}'


def test_a_name_of_any_characters() -> None:
    text = '[f(città="Roma", a-b=1)]'
    assert arguments("pythonic", text) == {"città": "Roma", "a-b": 1}


def test_a_property_that_may_be_anything() -> None:
    tool = FunctionTool(name="f", parameters={"properties": {"a": True, "b": False}})
    assert properties(tool) == {"a": {}}
