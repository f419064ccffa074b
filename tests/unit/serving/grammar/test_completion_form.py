"""The grammar of a completion: a family's calls pass, and nothing that breaks the request."""

import json
import re
from collections.abc import Sequence
from typing import Any

import llguidance
import msgspec
import pytest

from loraplex.core.errors import InvalidParameterError, RequestError, UnsupportedFeatureError
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.tools import FunctionTool, ToolMode, ToolUse
from loraplex.serving.grammar.check import GrammarCheck, SpecialTokens
from loraplex.serving.text.chat_format import ChatFormat, CompletionSyntax, completion_grammar
from loraplex.serving.text.tool_calls.formats import FORMATS
from support.naming import naming, refused

WEATHER = FunctionTool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
CLOCK = FunctionTool(name="clock", parameters={"properties": {}, "additionalProperties": False})
REQUIRED = ToolUse(tools=(WEATHER, CLOCK), mode=ToolMode.REQUIRED)

FIRST_SPECIAL_ID = 300


class Model:
    """A vocabulary of bytes, and the family's markers, as special tokens or not."""

    def __init__(self, family: str, *, is_special: bool, reasoning: str = "none") -> None:
        markers = FORMATS[family].markers if is_special else ()
        self.special_ids = {m: FIRST_SPECIAL_ID + i for i, m in enumerate(markers)}
        self.chat_format = ChatFormat(
            tool_calls=family, reasoning=reasoning, special_ids=self.special_ids
        )
        names = {token_id: marker.encode() for marker, token_id in self.special_ids.items()}
        self.vocabulary = SpecialTokens(names, 400)
        self.check = GrammarCheck(self.vocabulary)
        self.tokenizer = llguidance.LLTokenizer(self.vocabulary, slices=[])  # type: ignore[arg-type]

    def grammar(
        self, tool_use: ToolUse | None, content: Grammar | None = None, prompt: str = ""
    ) -> Grammar | None:
        reading = CompletionSyntax(chat_format=self.chat_format, tool_use=tool_use, prompt=prompt)
        return completion_grammar(reading, content)

    def takes(
        self, text: str, tool_use: ToolUse | None, content: Grammar | None = None, prompt: str = ""
    ) -> bool:
        """Whether the grammar accepts the text as a whole completion."""
        grammar = self.grammar(tool_use, content, prompt)
        assert grammar is not None
        matcher = llguidance.LLMatcher(self.tokenizer, self.check.compiled(grammar).text)
        tokens = self.tokens(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def tokens(self, text: str) -> Sequence[int]:
        tokens: list[int] = []
        while text:
            marker = next((m for m in self.special_ids if text.startswith(m)), None)
            if marker is None:
                tokens += self.vocabulary(text[0])
                text = text[1:]
            else:
                tokens.append(self.special_ids[marker])
                text = text.removeprefix(marker)
        return tokens


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'

EXAMPLES: dict[str, tuple[str, str, str]] = {
    "hermes": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n'
        "</tool_call>",
        '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"days": 2}}\n</tool_call>',
    ),
    "llama3_json": (
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}',
        '; {"name": "clock", "parameters": {}}',
        '{"name": "get_weather", "parameters": {"days": 2}}',
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar <is>\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        "\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        "<tool_call>\n<function=get_weather>\n<parameter=days>\n2\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
    "glm45": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        "\n<tool_call>clock\n</tool_call>",
        "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    ),
    "mistral_named": (
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}',
        "[TOOL_CALLS]clock[ARGS]{}",
        '[TOOL_CALLS]get_weather[ARGS]{"days": 2}',
    ),
}
"""A call, how another follows, and one whose arguments do not match."""

LISTS: dict[str, tuple[str, str, str, str, str]] = {
    "pythonic": (
        "[",
        'get_weather(city="Paris", days=2)',
        ", clock()",
        "]",
        "[get_weather(days=2)]",
    ),
    "mistral": (
        "[TOOL_CALLS][",
        '{"name": "get_weather", "arguments": {"city": "Paris"}}',
        ', {"name": "clock", "arguments": {}}',
        "]",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {}}]',
    ),
    "phi4_mini_json": (
        "functools[",
        '{"name": "get_weather", "arguments": {"city": "Paris"}}',
        ', {"name": "clock", "arguments": {}}',
        "]",
        'functools[{"name": "get_weather", "arguments": {}}]',
    ),
    "lfm2": (
        "<|tool_call_start|>[",
        'get_weather(city="Paris", days=2)',
        ", clock()",
        "]<|tool_call_end|>",
        "<|tool_call_start|>[get_weather(days=2)]<|tool_call_end|>",
    ),
    "nemotron_json": (
        "<TOOLCALL>[",
        '{"name": "get_weather", "arguments": {"city": "Paris"}}',
        ', {"name": "clock", "arguments": {}}',
        "]</TOOLCALL>",
        '<TOOLCALL>[{"name": "get_weather", "arguments": {}}]</TOOLCALL>',
    ),
    "granite": (
        "<|tool_call|>[",
        '{"name": "get_weather", "arguments": {"city": "Paris"}}',
        ', {"name": "clock", "arguments": {}}',
        "]",
        '<|tool_call|>[{"name": "get_weather", "arguments": {}}]',
    ),
    "generic": (
        "[",
        '{"name": "get_weather", "arguments": {"city": "Paris"}}',
        ', {"name": "clock", "arguments": {}}',
        "]",
        '[{"name": "get_weather", "arguments": {}}]',
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        'function<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris"}\n```',
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{}\n"
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        'get_weather<｜tool▁sep｜>{"city": "Paris"}',
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>",
        'functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}',
        "<|tool_call_end|><|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}",
        "<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
}
"""EXAMPLES for families that frame all calls together."""


MARKED = {
    "llama3_json": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
    "pythonic": '<|python_start|>[get_weather(city="Paris")]<|python_end|>',
    "generic": CALL,
}
"""How calls are written where content, too, may be JSON."""


def cases() -> dict[str, tuple[str, str, str]]:
    """Return by family one call, two calls, and one whose arguments do not match."""
    simple = {name: (one, one + more, wrong) for name, (one, more, wrong) in EXAMPLES.items()}
    framed = {
        name: (start + one + end, start + one + more + end, wrong)
        for name, (start, one, more, end, wrong) in LISTS.items()
    }
    return simple | framed


CASES = cases()


@pytest.fixture(params=[False, True], ids=["text", "special"])
def is_special(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_every_family_has_a_case() -> None:
    assert set(CASES) == set(FORMATS)


@pytest.mark.parametrize("family", CASES)
def test_a_required_call(family: str, is_special: bool) -> None:
    model = Model(family, is_special=is_special)
    one, two, wrong = CASES[family]
    assert model.takes(one, REQUIRED)
    assert model.takes(two, REQUIRED)
    assert not model.takes(wrong, REQUIRED)
    assert not model.takes("Hello.", REQUIRED)
    assert not model.takes("", REQUIRED)
    assert not model.takes(one + " and more", REQUIRED)
    assert not model.takes(one.replace("get_weather", "get_whether"), REQUIRED)


@pytest.mark.parametrize("family", CASES)
def test_at_most_one_call(family: str, is_special: bool) -> None:
    model = Model(family, is_special=is_special)
    one, two, _ = CASES[family]
    alone = ToolUse(tools=(WEATHER, CLOCK), is_parallel=False)
    assert model.takes(one, alone)
    assert not model.takes(two, alone)
    assert model.takes("Hello [1] {a} <b>.", alone)
    assert model.takes("", alone)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("generic", "Hello. <tool_call>"),
        ("granite", "Hello. <tool_call>"),
        ("qwen3_coder", "Hello. <function="),
    ],
)
def test_no_call_begins_in_another_way(family: str, is_special: bool, text: str) -> None:
    model = Model(family, is_special=is_special)
    assert not model.takes(text, ToolUse(tools=(WEATHER, CLOCK), is_parallel=False))
    assert not model.takes(f"{text}.", ToolUse(tools=(WEATHER, CLOCK), is_parallel=False))


@pytest.mark.parametrize(
    ("family", "first"), [("generic", "[{<"), ("llama3_json", "{<"), ("pythonic", "[<")]
)
def test_no_content_begins_as_a_call_may(family: str, is_special: bool, first: str) -> None:
    model = Model(family, is_special=is_special)
    alone = ToolUse(tools=(WEATHER, CLOCK), is_parallel=False)
    for char in first:
        assert not model.takes(f"{char}x", alone)
    assert model.takes(f"(x{first}", alone)


@pytest.mark.parametrize("arguments", ["5", "[]", '"x"', "null"])
def test_arguments_are_an_object_whatever_the_schema_says(arguments: str) -> None:
    model = Model("hermes", is_special=False)
    tool_use = ToolUse(tools=(FunctionTool(name="f"),), mode=ToolMode.REQUIRED)
    call = '<tool_call>\n{"name": "f", "arguments": ARGUMENTS}\n</tool_call>'
    assert model.takes(call.replace("ARGUMENTS", "{}"), tool_use)
    assert not model.takes(call.replace("ARGUMENTS", arguments), tool_use)


@pytest.mark.parametrize("space", ["", " ", "\n    ", "\r\n  "], ids=["no", "one", "line", "crlf"])
def test_space_in_arguments(space: str) -> None:
    text = CALL.replace('{"city": "Paris"}', f'{{{space}"city":{space}"Paris"{space}}}')
    assert Model("hermes", is_special=False).takes(text, REQUIRED)


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("", True),
        ("a=1", True),
        ("b=1", True),
        ("a=1, b=2", True),
        ("a=1, a=2", False),
        ("b=1, a=2", False),
        (", a=1", False),
    ],
)
def test_arguments_that_may_be_left_out_in_python(text: str, is_right: bool) -> None:
    number = {"type": "integer"}
    tool = FunctionTool(name="f", parameters={"properties": {"a": number, "b": number}})
    tool_use = ToolUse(tools=(tool,), mode=ToolMode.REQUIRED)
    assert Model("pythonic", is_special=False).takes(f"[f({text})]", tool_use) is is_right


def test_kimi_counts_beyond_nine(is_special: bool) -> None:
    one, _, _ = CASES["kimi_k2"]
    model = Model("kimi_k2", is_special=is_special)
    assert model.takes(one.replace("get_weather:0", "get_weather:12"), REQUIRED)
    assert not model.takes(one.replace("get_weather:0", "get_weather:"), REQUIRED)


@pytest.mark.parametrize(
    ("family", "start", "end", "behind"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=a>\n",
            "</parameter>",
            "</function>\n</tool_call>",
        ),
        (
            "glm45",
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>",
            "</arg_value>",
            "</tool_call>",
        ),
    ],
)
@pytest.mark.parametrize(
    "schema", [{"properties": {"a": {"type": "string"}}, "required": ["a"]}, {}]
)
def test_no_value_holds_the_marker_of_its_end(
    family: str, start: str, end: str, behind: str, schema: dict[str, Any], is_special: bool
) -> None:
    model = Model(family, is_special=is_special)
    tools = (FunctionTool(name="f", parameters=schema),)
    tool_use = ToolUse(tools=tools, mode=ToolMode.REQUIRED)
    assert model.takes(f"{start}x < y\n{end}\n{behind}", tool_use)
    assert not model.takes(f"{start}x{end} y\n{end}\n{behind}", tool_use)
    for other in ("<parameter=", "</function>") if family == "qwen3_coder" else ("<arg_key>",):
        assert not model.takes(f"{start}x{other}y\n{end}\n{behind}", tool_use)


FRAMES = {
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n<parameter=a>\n",
        "\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm45": (
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>",
        "</arg_value>\n</tool_call>",
    ),
}
"""What is around the one argument of a call, for families that write texts without quotes."""


def one_text(schema: dict[str, Any], **more: Any) -> ToolUse:
    parameters = {"properties": {"a": {"type": "string", **schema}}, "required": ["a"]}
    return ToolUse(tools=(FunctionTool(name="f", parameters=parameters, **more),))


@pytest.mark.parametrize("family", FRAMES)
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"pattern": "^[A-Z]{2}$"}, ["AB"], ["ABC", "ab", "A", "", "AB\n", " AB"]),
        ({"pattern": "b+"}, ["b", "abba", "a\nb"], ["a", ""]),
        ({"pattern": "^a"}, ["a", "a b\nc"], ["ba", ""]),
        ({"pattern": "a$"}, ["a", "b a"], ["ab", "a\n"]),
        ({"pattern": "x|y/[/]z"}, ["x", "1y//z2"], ["y", "y/z"]),
        ({"pattern": "^(x|y)$"}, ["x", "y"], ["xy", "z"]),
        ({"minLength": 2}, ["ab", "a\nb", "<<<"], ["a", ""]),
        ({"const": "x"}, ["x"], ["y", '"x"', ""]),
        ({"enum": ["a b", "c"]}, ["a b", "c"], ["d", '"c"', ""]),
        ({"maxLength": 3}, ["", "abc", "世界人"], ["abcd", "世界人民"]),
        ({"minLength": 1, "maxLength": 2, "pattern": "^é*$"}, ["é", "éé"], ["", "ééé", "e"]),
    ],
    ids=str,
)
def test_what_a_strict_schema_says_of_a_text_without_quotes(
    family: str, is_special: bool, schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    model = Model(family, is_special=is_special)
    start, end = FRAMES[family]
    tool_use = one_text(schema, is_strict=True)
    for text in right:
        assert model.takes(f"{start}{text}{end}", tool_use), text
    for text in wrong:
        assert not model.takes(f"{start}{text}{end}", tool_use), text
    marker = end.split(">")[0] + ">"
    assert not model.takes(f"{start}{marker}{end}", tool_use)


@pytest.mark.parametrize("family", FRAMES)
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"$ref": "#/$defs/two"}, {"ab": "ab", "12": "12"}, ["a"]),
        ({"allOf": [{"$ref": "#/$defs/two"}]}, {"12": "12"}, ["a"]),
        ({"anyOf": [{"$ref": "#/$defs/two"}, {"type": "null"}]}, {"12": "12", "null": None}, ["a"]),
        ({"type": ["string", "null"], "maxLength": 2}, {"": "", "null": None}, ["abc"]),
        ({"anyOf": [{"enum": ["x"]}, {"type": "boolean"}]}, {"x": "x", "true": True}, ['"x"', "y"]),
    ],
    ids=str,
)
def test_a_text_that_is_one_of_several(
    family: str, schema: dict[str, Any], right: dict[str, Any], wrong: list[str]
) -> None:
    """What the grammar lets through is read as the schema has it."""
    model = Model(family, is_special=False)
    start, end = FRAMES[family]
    parameters = {
        "properties": {"a": schema},
        "required": ["a"],
        "$defs": {"two": {"type": "string", "minLength": 2}},
    }
    tool = FunctionTool(name="f", parameters=parameters, is_strict=True)
    tool_use = ToolUse(tools=(tool,))
    reading = CompletionSyntax(chat_format=model.chat_format, tool_use=tool_use)
    for text, value in right.items():
        assert model.takes(f"{start}{text}{end}", tool_use), text
        [call] = reading.reader().push(f"{start}{text}{end}", final=True).calls
        assert json.loads(call.arguments) == {"a": value}
    for text in wrong:
        assert not model.takes(f"{start}{text}{end}", tool_use), text


@pytest.mark.parametrize("family", FRAMES)
def test_alternatives_of_alternatives_are_not_kept_to(family: str) -> None:
    model = Model(family, is_special=False)
    inner = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    parameters = {"properties": {"a": {"anyOf": [inner, {"type": "integer"}]}}}
    tool = FunctionTool(name="f", parameters=parameters, is_strict=True)
    with refused(InvalidParameterError, "'f'", "'a'", "anyOf", param="tools"):
        model.takes("", ToolUse(tools=(tool,)))


@pytest.mark.parametrize("family", FRAMES)
@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"format": "date"}, "format 'date'"),
        ({"pattern": "^a|b$"}, "pattern '^a|b$'"),
        ({"pattern": "(x)|y$"}, "pattern '(x)|y$'"),
    ],
    ids=str,
)
def test_what_no_grammar_of_such_texts_keeps_to(
    family: str, schema: dict[str, Any], named: str
) -> None:
    """A strict tool is refused; one that is only required is called with any text."""
    model = Model(family, is_special=False)
    start, end = FRAMES[family]
    with pytest.raises(InvalidParameterError) as raised:
        model.takes("", one_text(schema, is_strict=True))
    assert raised.value.param == "tools"
    assert re.search(naming(named, "a", "f"), raised.value.message)
    required = msgspec.structs.replace(one_text(schema), mode=ToolMode.REQUIRED)
    assert model.takes(f"{start}anything{end}", required)


@pytest.mark.parametrize("family", CASES)
def test_a_strict_function_where_the_model_decides(family: str, is_special: bool) -> None:
    model = Model(family, is_special=is_special)
    one, _, wrong = CASES[family]
    strict = FunctionTool(name=WEATHER.name, parameters=WEATHER.parameters, is_strict=True)
    tool_use = ToolUse(tools=(strict, CLOCK))
    assert model.takes(one, tool_use)
    assert not model.takes(wrong, tool_use)
    assert model.takes("Hello.", tool_use)
    if FORMATS[family].syntax.trigger:
        assert model.takes("Hello.\n" + one, tool_use)
        assert not model.takes("Hello.\n" + wrong, tool_use)


@pytest.mark.parametrize("family", CASES)
def test_a_format_binds_where_nothing_is_called(family: str, is_special: bool) -> None:
    model = Model(family, is_special=is_special)
    one, _, _ = CASES[family]
    content = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "required": ["x"]}))
    tool_use = ToolUse(tools=(WEATHER,))
    assert model.takes('{"x": 1}', tool_use, content)
    assert not model.takes("Hello.", tool_use, content)
    assert not model.takes('{"y": 1}', tool_use, content)
    assert model.takes(MARKED.get(family, one), tool_use, content)


def test_reasoning_that_the_prompt_began() -> None:
    model = Model("hermes", is_special=False, reasoning="think")
    one, _, _ = CASES["hermes"]
    prompt = "<|assistant|><think>\n"
    assert model.takes(f"Hm, <b>.</think>\n\n{one}", REQUIRED, prompt=prompt)
    assert not model.takes(one, REQUIRED, prompt=prompt)
    assert not model.takes("Hm.</think>\n\nHello.", REQUIRED, prompt=prompt)


def test_reasoning_that_the_completion_may_begin() -> None:
    model = Model("hermes", is_special=False, reasoning="think")
    one, _, _ = CASES["hermes"]
    assert model.takes(f"<think>\nHm.</think>\n\n{one}", REQUIRED)
    assert model.takes(one, REQUIRED)
    closed = "<think>\n\n</think>\n\n"
    assert not model.takes(f"<think>\nHm.</think>\n\n{one}", REQUIRED, prompt=closed)


def test_a_format_behind_reasoning() -> None:
    model = Model("hermes", is_special=False, reasoning="think")
    content = Grammar(GrammarKind.REGEX, "a+")
    assert model.takes("So.</think>\n\naaa", None, content, "<think>\n")
    assert not model.takes("So.</think>\n\nb", None, content, "<think>\n")
    assert model.takes("aaa", None, content)


def test_no_grammar_where_the_text_alone_will_do() -> None:
    model = Model("hermes", is_special=False)
    assert model.grammar(None) is None
    assert model.grammar(ToolUse(tools=(WEATHER,))) is None
    content = Grammar(GrammarKind.REGEX, "a+")
    assert model.grammar(None, content) is content


@pytest.mark.parametrize(
    ("parameters", "kind", "words"),
    [
        (
            {"properties": {"a": {"type": "strnig"}}},
            InvalidParameterError,
            "function 'f'.*properties/a",
        ),
        ({"properties": {"a": {"not": {}}}}, UnsupportedFeatureError, "function 'f'"),
    ],
)
def test_a_schema_that_cannot_be_kept_to_is_named(
    parameters: dict[str, Any], kind: type[RequestError], words: str
) -> None:
    model = Model("hermes", is_special=False)
    tool = FunctionTool(name="f", parameters=parameters, is_strict=True)
    grammar = model.grammar(ToolUse(tools=(WEATHER, tool), mode=ToolMode.REQUIRED))
    assert grammar is not None
    with pytest.raises(kind, match=words) as caught:
        model.check.compiled(grammar)
    assert caught.value.param == "tools"


def test_a_text_that_is_no_grammar_of_a_completion() -> None:
    model = Model("hermes", is_special=False)
    with refused(InvalidParameterError, "grammar", param="grammar"):
        model.check.compiled(Grammar(GrammarKind.MESSAGE, "{"))


@pytest.mark.parametrize("family", CASES)
def test_what_is_not_required_may_be_left_out(family: str) -> None:
    model = Model(family, is_special=False)
    one, _, _ = CASES[family]
    days = (', "days": 2', ", days=2", "<parameter=days>\n2\n</parameter>\n")
    days += ("<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n",)
    for part in days:
        one = one.replace(part, "")
    assert "days" not in one
    assert model.takes(one, REQUIRED)


def test_a_function_that_is_not_strict_stays_free_where_the_model_decides() -> None:
    model = Model("hermes", is_special=False)
    _, _, wrong = CASES["hermes"]
    assert model.takes(wrong, ToolUse(tools=(WEATHER,), is_parallel=False))
