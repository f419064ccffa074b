"""What each family writes is read as the same calls, however the text comes."""

import json
import random
from typing import Any

import pytest

from loraplex.core.tools import FunctionTool, ToolUse
from loraplex.serving.text.chat_format import ChatFormat, CompletionSyntax
from loraplex.serving.text.tool_calls.formats import FORMATS, format_of_template

WEATHER = FunctionTool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
CLOCK = FunctionTool(name="clock")
TOOLS = ToolUse(tools=(WEATHER, CLOCK))

PARIS = {"city": "Paris", "days": 2}
TWO_CALLS = [("get_weather", PARIS), ("clock", {})]

TWO = {
    "hermes": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n'
        '</tool_call>\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    ),
    "llama3_json": (
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}; '
        '{"name": "clock", "parameters": {}}'
    ),
    "pythonic": "[get_weather(city='Paris', days=2), clock()]",
    "mistral": (
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "clock", "arguments": {}}]'
    ),
    "mistral_named": (
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]clock[ARGS]{}'
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
        "<｜tool▁sep｜>clock\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris", "days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "phi4_mini_json": (
        'functools[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "clock", "arguments": {}}]'
    ),
    "granite": (
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "clock", "arguments": {}}]'
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=clock>\n</function>\n</tool_call>"
    ),
    "glm45": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n"
        "<tool_call>clock\n</tool_call>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris", "days": 2}<|tool_call_end|>'
        "<|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "lfm2": "<|tool_call_start|>[get_weather(city='Paris', days=2), clock()]<|tool_call_end|>",
    "nemotron_json": (
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "clock", "arguments": {}}]</TOOLCALL>'
    ),
    "generic": (
        '[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, {"name": "clock"}]'
    ),
}
"""Two calls, as each family writes them."""

WHOLE_OUTPUTS = ("llama3_json", "pythonic", "generic")
"""Families whose calls have no marker: nothing stands before them."""


class Parsed:
    """Parsed content and calls of an output."""

    def __init__(
        self, family: str, pieces: list[str], tools: ToolUse = TOOLS, *, is_cut: bool = False
    ) -> None:
        reader = CompletionSyntax(
            chat_format=ChatFormat(tool_calls=family), tool_use=tools
        ).reader()
        *first, last = pieces or [""]
        deltas = [reader.push(piece) for piece in first] + [
            reader.push(last, final=True, is_cut=is_cut)
        ]
        self.content = "".join(delta.content for delta in deltas)
        self.names: list[str] = []
        self.ids: list[str] = []
        self.arguments: list[str] = []
        for call in (call for delta in deltas for call in delta.calls):
            if call.name is not None:
                assert call.call_id
                assert call.index == len(self.names), "a call begins once, in order"
                self.names.append(call.name)
                self.ids.append(call.call_id)
                self.arguments.append("")
            self.arguments[call.index] += call.arguments
        assert reader.num_calls == len(self.names)

    @property
    def calls(self) -> list[tuple[str, object]]:
        pairs = zip(self.names, self.arguments, strict=True)
        return [(name, json.loads(text)) for name, text in pairs]

    @property
    def seen(self) -> tuple[str, list[str], list[str]]:
        """All but the ids, which are drawn."""
        return self.content, self.names, self.arguments


def test_every_family_has_an_example() -> None:
    assert set(TWO) == set(FORMATS)


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("<tool_call><arg_key>", "glm45"),
        ("<tool_call><function=", "qwen3_coder"),
        ("<tool_call><|tool_call|>", "granite"),
        ("<tool_call>", "hermes"),
        ("<TOOLCALL>", "nemotron_json"),
        ("<|tool_call_start|>", "lfm2"),
        ("<|tool_list_start|>", "lfm2"),
        ("[TOOL_CALLS][ARGS]", "mistral_named"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|/tool|>", "phi4_mini_json"),
        ("func_name1(", "pythonic"),
        ('"parameters": dictionary of argument name and its value', "llama3_json"),
        ("<|python_tag|>", "llama3_json"),
        ("{{ messages }}", "generic"),
    ],
)
def test_the_family_of_a_template(template: str, family: str) -> None:
    assert format_of_template(template).name == family


@pytest.mark.parametrize("family", TWO)
def test_two_calls_at_once(family: str) -> None:
    parsed = Parsed(family, [TWO[family]])
    assert parsed.calls == TWO_CALLS
    assert parsed.content == ""
    assert len(set(parsed.ids)) == 2


@pytest.mark.parametrize("family", TWO)
def test_character_by_character(family: str) -> None:
    assert Parsed(family, list(TWO[family])).seen == Parsed(family, [TWO[family]]).seen


@pytest.mark.parametrize("family", sorted(set(TWO) - set(WHOLE_OUTPUTS)))
def test_text_before_calls_is_content(family: str) -> None:
    parsed = Parsed(family, ["I look it up [a] <b> {c}.\n\n", TWO[family], "\n"])
    assert parsed.content == "I look it up [a] <b> {c}."
    assert parsed.calls == TWO_CALLS


@pytest.mark.parametrize("family", sorted(set(TWO) - set(WHOLE_OUTPUTS)))
def test_text_behind_calls_is_content(family: str) -> None:
    parsed = Parsed(family, ["Hm.\n\n", TWO[family], "\n\nDone."])
    assert parsed.content == "Hm.\n\nDone."
    assert parsed.calls == TWO_CALLS
    assert Parsed(family, [TWO[family], "\n\nDone.\n"]).content == "Done."


@pytest.mark.parametrize("between", ["", "\n", " ; ", ";"])
def test_calls_of_llama_with_any_separator_or_none(between: str) -> None:
    text = TWO["llama3_json"].replace("; ", between)
    for pieces in ([text], list(text)):
        parsed = Parsed("llama3_json", pieces)
        assert parsed.calls == TWO_CALLS
        assert parsed.content == ""


@pytest.mark.parametrize("family", TWO)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello.",
        " \n Hello. \n",
        "<tool_call",
        "<tool_call>",
        "<tool_call>none</tool_call>",
        '{"name": 1}',
        '{"name": "somebody", "arguments": {"a": 1}}',  # language: quoted
        "[1, 2]",
        "[",
        "{",
        "[TOOL_CALLS]",
        "import functools",
        "functools[0]",
        "<|python_tag|>print(1)",
        "<|tool_call|>",
        "<｜tool▁calls▁begin｜>",
        "<|tool_calls_section_begin|>",
        "<tool_call><function=",
        "[get_weather(",
        "[other(a=1)]",
        "<|tool_call_start|>[",
        "<|tool_call_start|>none<|tool_call_end|>",
        "<TOOLCALL>[",
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a b", "arguments": {}}</tool_call>',
    ],
)
def test_what_is_no_call_is_content(family: str, text: str) -> None:
    for pieces in ([text], list(text), [text, ""]):
        parsed = Parsed(family, pieces)
        if not parsed.names:
            assert parsed.content == text


@pytest.mark.parametrize("family", sorted(set(TWO) - {"pythonic", "lfm2", "qwen3_coder", "glm45"}))
def test_arguments_come_as_they_are_written(family: str) -> None:
    reader = CompletionSyntax(chat_format=ChatFormat(tool_calls=family), tool_use=TOOLS).reader()
    deltas = [call for char in TWO[family] for call in reader.push(char).calls]
    first = [call for call in deltas if call.index == 0]
    assert first[0].name == "get_weather"
    assert len(first) > 7, "a piece for each character of a string"


@pytest.mark.parametrize("family", TWO)
def test_every_cut_is_the_beginning_of_the_whole(family: str) -> None:
    """A stream that max_tokens ends yields nothing that the whole does not have."""
    whole = Parsed(family, [TWO[family]])
    for length in range(len(TWO[family])):
        parsed = Parsed(family, [TWO[family][:length]], is_cut=True)
        for name, arguments, own in zip(
            parsed.names, parsed.arguments, whole.arguments, strict=False
        ):
            assert name in whole.names
            assert own.startswith(arguments)
        if parsed.names:
            assert parsed.content == ""
        else:
            assert TWO[family].startswith(parsed.content)
            assert parsed.content == TWO[family][:length]


ALSO_CLOCK = [
    ("hermes", '<tool_call> {"name": "clock"} \n</tool_call>'),
    ("granite", '<|tool_call|> [ {"name": "clock"} ]'),
    ("granite", '<tool_call>[{"name": "clock"}]'),
    ("phi4_mini_json", 'functools[ {"name": "clock"} ]'),
    ("mistral", '[TOOL_CALLS] {"name": "clock"}'),
    ("mistral", "[TOOL_CALLS] clock[ARGS] {}"),
    ("llama3_json", ' <|python_tag|> {"name": "clock"} '),
    ("generic", ' [ {"name": "clock"} ]'),
    ("generic", 'So: <tool_call>{"name": "clock"}</tool_call>'),
    ("pythonic", " <|python_start|> [ clock( ) ] <|python_end|>"),
    ("qwen3_coder", "<tool_call> <function=clock> </function> </tool_call>"),
    ("glm45", "<tool_call>\n clock \n</tool_call>"),
    ("lfm2", "<|tool_call_start|> [ clock( ) ] <|tool_call_end|>"),
    ("lfm2", '<|tool_call_start|>[{"name": "clock"}]<|tool_call_end|>'),
    ("lfm2", '<|tool_call_start|>{"name": "clock", "arguments": {}}<|tool_call_end|>'),
    ("lfm2", "<|tool_call_start|>[clock()]<|tool_call_end|>[clock()]<|tool_call_end|>"),
    ("nemotron_json", '<TOOLCALL> [ {"name": "clock"} ] </TOOLCALL>'),
    ("nemotron_json", '<TOOLCALL>{"name": "clock"}</TOOLCALL>'),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜> clock \n```json\n{}\n"
        "``` \n<｜tool▁call▁end｜>\n<｜tool▁calls▁end｜>",
    ),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> clock <｜tool▁sep｜> {} <｜tool▁call▁end｜> "
        "<｜tool▁calls▁end｜>",
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|> <|tool_call_begin|> functions.clock:0 "
        "<|tool_call_argument_begin|> {} <|tool_call_end|> <|tool_calls_section_end|>",
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>clock:12<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
]


@pytest.mark.parametrize(
    ("family", "text"),
    ALSO_CLOCK,
    ids=[f"{family}-{number}" for number, (family, _) in enumerate(ALSO_CLOCK)],
)
def test_how_models_write_it_too(family: str, text: str) -> None:
    for pieces in ([text], list(text)):
        parsed = Parsed(family, pieces)
        assert parsed.calls == [("clock", {})]
        assert parsed.content == ("So:" if text.startswith("So:") else "")


def test_behind_the_calls_of_lfm2_a_bracket_is_content() -> None:
    for text in ("[1] A source.", "[1", "[1] <|tool_call_start|>no<|tool_call_end|>"):
        for is_cut in (False, True):
            for pieces in ([TWO["lfm2"], text], list(TWO["lfm2"] + text)):
                parsed = Parsed("lfm2", pieces, is_cut=is_cut)
                assert (parsed.calls, parsed.content) == (TWO_CALLS, text)


def test_the_id_of_kimi_is_without_space() -> None:
    _, text = next(case for case in ALSO_CLOCK if case[0] == "kimi_k2")
    assert Parsed("kimi_k2", [text]).ids == ["functions.clock:0"]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("llama3_json", '{"name": "somebody", "parameters": {}}'),  # language: quoted
        ("generic", '{"name": "somebody", "arguments": {}}'),  # language: quoted
        ("generic", '[{"name": "somebody", "arguments": {}}]'),  # language: quoted
        ("pythonic", "[somebody()]"),
    ],
    ids=["llama3_json", "generic", "generic list", "pythonic"],
)
def test_without_a_marker_just_known_names_are_calls(family: str, text: str) -> None:
    parsed = Parsed(family, [text])
    assert (parsed.names, parsed.content) == ([], text)


def test_behind_the_tag_of_llama_any_name_is_a_call() -> None:
    text = '<|python_tag|>{"name": "somebody", "parameters": {"a": 1}}'  # language: quoted
    assert Parsed("llama3_json", [text]).calls == [("somebody", {"a": 1})]


def test_a_key_of_glm_with_space_has_its_schema() -> None:
    text = (
        "<tool_call>get_weather\n<arg_key> city </arg_key>\n<arg_value>12</arg_value>\n</tool_call>"
    )
    assert Parsed("glm45", [text]).calls == [("get_weather", {"city": "12"})]


def test_every_cut_of_a_call_with_more_keys() -> None:
    text = (
        '<tool_call>{"name": "clock", "arguments": {}, "id": "a", "n": 12, "ok": null}</tool_call>'
    )
    for length in range(text.index("}") + 1, len(text)):
        parsed = Parsed("hermes", [text[:length]])
        assert (parsed.calls, parsed.content) == ([("clock", {})], "")


CLOCK_CALL = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'


def test_a_cut_after_a_broken_call_does_not_depend_on_how_the_text_came() -> None:
    broken = '[{"arguments": {}, "name": "clock"[1'
    at_once, in_pieces = (Parsed("generic", texts, is_cut=True) for texts in ([broken], [*broken]))
    assert at_once.calls == in_pieces.calls == [("clock", {})]
    assert at_once.content == in_pieces.content == "[1"


@pytest.mark.parametrize("cut", ["<tool_", "<tool_call>", '<tool_call>{"name": "cl'])
def test_a_cut_is_dropped_behind_a_call_and_content_behind_content(cut: str) -> None:
    assert Parsed("hermes", [CLOCK_CALL, "\n" + cut]).content == ""
    assert Parsed("hermes", [CLOCK_CALL, " Done. " + cut]).content == "Done. " + cut


def test_a_call_that_breaks_ends_there() -> None:
    broken = '<tool_call>{"name": "clock", "arguments": {"a": 1} oops}</tool_call>'
    for pieces in ([broken], list(broken)):
        parsed = Parsed("hermes", pieces)
        assert parsed.calls == [("clock", {"a": 1})]
        assert parsed.content == "oops}"


HERMES = '<tool_call>\n{"name": "clock", "arguments": %s}\n</tool_call>'
LLAMA = '{"name": "clock", "parameters": %s}'
MISTRAL = '[TOOL_CALLS][{"name": "clock", "arguments": %s}]'
GENERIC = '[{"name": "clock", "arguments": %s}]'
QWEN = "<tool_call>\n<function=clock>\n%s</function>\n</tool_call>"
GLM = "<tool_call>clock\n%s</tool_call>"
LFM2 = "<|tool_call_start|>[clock(%s)]<|tool_call_end|>"
PARAMETER = "<parameter=a>\nx\n</parameter>\n"
PAIR = "<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n"
BROKEN: list[tuple[str, str, Any]] = [
    *[
        (family, frame % arguments, value)
        for family, frame in (
            ("hermes", HERMES),
            ("llama3_json", LLAMA),
            ("mistral", MISTRAL),
            ("generic", GENERIC),
            ("mistral_named", "[TOOL_CALLS]clock[ARGS]%s"),
            ("granite", f"<|tool_call|>{GENERIC}"),
            ("phi4_mini_json", f"functools{GENERIC}"),
            ("nemotron_json", f"<TOOLCALL>{GENERIC}</TOOLCALL>"),
            ("deepseek_v31", "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>%s<｜tool▁call▁end｜>"),
            (
                "kimi_k2",
                "<|tool_call_begin|>clock:0<|tool_call_argument_begin|>%s<|tool_call_end|>",
            ),
        )
        for arguments, value in (
            (r'{"a": "\d+"}', {"a": r"\d+"}),
            ('{"a": None, "b": True,}', {"a": None, "b": True}),
            ('{"a": "he said "hi"", "b": +5}', {"a": 'he said "hi"', "b": 5}),
            ('{"a": "x', {"a": "x"}),
        )
        if family in ("hermes", "deepseek_v31", "kimi_k2") or arguments.endswith("}")
    ],
    ("hermes", (HERMES % '{"a": "x"}').replace("</tool_call>", ""), {"a": "x"}),
    ("hermes", (HERMES % '{"a": "x"}').replace("}}", "}"), {"a": "x"}),
    ("hermes", HERMES % '{"a": "x"}}', {"a": "x"}),
    ("hermes", f"{HERMES % '{}'}</tool_call>", {}),
    ("hermes", f"<tool_call>{HERMES % '{}'}", {}),
    ("hermes", "<tool_call>{'name': 'clock', 'arguments': {'a': 'x'}}</tool_call>", {"a": "x"}),
    ("hermes", HERMES % r'"{\"a\": \"\\d\"}"', {"a": r"\d"}),
    ("hermes", HERMES % "None", {}),
    ("hermes", '<tool_call>{"name": "clock", "arguments": "{}"</tool_call>', {}),
    ("mistral", MISTRAL[:-1] % "{}", {}),
    ("mistral_named", "[TOOL_CALLS]clock{}", {}),
    ("llama3_json", "<|python_tag|><|python_tag|>" + LLAMA % '{"a": 1', {"a": 1}),
    ("pythonic", '[clock(a="x\ny", b=+5),]', {"a": "x\ny", "b": 5}),
    ("pythonic", '<|python_start|>[clock(a="say "x"")]', {"a": 'say "x"'}),
    ("lfm2", LFM2 % 'a="x\ny", b=+5', {"a": "x\ny", "b": 5}),
    ("lfm2", LFM2 % "a='it's', b=['x', {\"c\": true}]", {"a": "it's", "b": ["x", {"c": True}]}),
    ("lfm2", (LFM2 % "a='x'").replace("<|tool_call_end|>", ""), {"a": "x"}),
    ("lfm2", f"<|tool_call_start|>{LFM2 % ''}", {}),
    ("nemotron_json", f"<TOOLCALL>{GENERIC % '{}'}", {}),
    ("qwen3_coder", QWEN % PARAMETER.replace("</parameter>\n", ""), {"a": "x"}),
    (
        "qwen3_coder",
        QWEN % f"{PARAMETER.replace('</parameter>', '')}<parameter=b>2</parameter>",
        {"a": "x\n", "b": 2},
    ),
    ("qwen3_coder", QWEN % f"<parameter=>\ny\n</parameter>\n{PARAMETER}", {"a": "x"}),
    ("qwen3_coder", QWEN % f"<parameter=\ny\n</parameter>\n{PARAMETER}", {"a": "x"}),
    ("qwen3_coder", QWEN % f"{PARAMETER}oops\n", {"a": "x"}),
    ("qwen3_coder", QWEN % '<parameter="a"\nx\n</parameter>', {"a": "x"}),
    ("qwen3_coder", QWEN % '{"a": "\\d"}', {"a": "\\d"}),
    ("qwen3_coder", (QWEN % PARAMETER).removeprefix("<tool_call>\n"), {"a": "x"}),
    ("qwen3_coder", (QWEN % PARAMETER).replace("</tool_call>", ""), {"a": "x"}),
    ("qwen3_coder", (QWEN % PARAMETER).replace("</function>\n", ""), {"a": "x"}),
    ("qwen3_coder", "<function=clock>\n<parameter=a>\nx", {"a": "x"}),
    ("glm45", GLM % PAIR.replace("<arg_value>", ""), {"a": "x"}),
    ("glm45", GLM % PAIR.replace("</arg_value>", ""), {"a": "x"}),
    ("glm45", GLM % PAIR.replace("</arg_key>\n", ""), {"a": "x"}),
    ("glm45", GLM % f"<arg_key>b</arg_key>\n{PAIR}oops\n", {"a": "x"}),
    ("glm45", GLM % f"<arg_key></arg_key><arg_value>y</arg_value>{PAIR}", {"a": "x"}),
    ("glm45", (GLM % PAIR).replace("</tool_call>", ""), {"a": "x"}),
    ("glm45", f"{GLM % PAIR}</tool_call>", {"a": "x"}),
    ("glm45", GLM.partition("%s")[0] + f"{PAIR}<arg_key>b</arg_key>\n<a", {"a": "x", "b": "<a"}),
    ("kimi_k2", "<|tool_calls_section_begin|>clock:0<|tool_call_argument_begin|>{}", {}),
]


@pytest.mark.parametrize(("family", "text", "value"), BROKEN)
def test_a_call_that_models_break_is_repaired(family: str, text: str, value: Any) -> None:
    for pieces in ([text], list(text), [text, ""]):
        parsed = Parsed(family, pieces)
        assert parsed.calls == [("clock", value)]
        assert parsed.content == ""


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", HERMES % "{nothing}"),
        ("hermes", HERMES % '"{nothing}"'),
        ("hermes", "</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {"a": "x"}}</tool_call>'),
        ("mistral_named", "[TOOL_CALLS]clock[ARGS]nothing"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>clock<｜tool▁call▁end｜>"),
        ("kimi_k2", "<|tool_call_begin|><|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("pythonic", "[clock(a=1, b=now())]"),
        ("lfm2", LFM2 % "a=1, b=now()"),
        ("lfm2", "<|tool_call_start|>clock<|tool_call_end|>"),
        ("nemotron_json", "<TOOLCALL>[nothing]</TOOLCALL>"),
        ("qwen3_coder", QWEN.replace("clock", "") % PARAMETER),
        ("qwen3_coder", QWEN % "oops"),
        ("glm45", GLM.replace("clock", "") % PAIR),
        ("glm45", "<tool_call>clock\n"),
    ],
)
def test_what_cannot_be_repaired_is_content(family: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert Parsed(family, pieces).seen == (text, [], [])
    # After a call, too.
    first = TWO[family]
    if family != "pythonic":
        parsed = Parsed(family, [first, "\n\nSo: ", text])
        assert parsed.calls == TWO_CALLS
        assert parsed.content == f"So: {text}".removesuffix(" </tool_call>").rstrip()


def test_a_call_that_breaks_behind_another_is_content() -> None:
    text = '[TOOL_CALLS][{"name": "clock", "arguments": {}}, {"other": 1}]'
    assert Parsed("mistral", [text]).content == '{"other": 1}]'
    assert Parsed("pythonic", ["[clock(), clock(a=now())]"]).content == "clock(a=now())]"


@pytest.mark.parametrize("name", ["", "a b", "é", "a" * 257], ids=["empty", "space", "é", "long"])
def test_what_is_no_name(name: str) -> None:
    text = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
    parsed = Parsed("hermes", [text])
    assert (parsed.names, parsed.content) == ([], text)


@pytest.mark.parametrize("name", ["a.b-c_1", "a" * 256], ids=["signs", "long"])
def test_names_that_no_tool_has(name: str) -> None:
    """The client finds that there is no such tool."""
    assert Parsed("hermes", [CLOCK_CALL.replace("clock", name)]).names == [name]


@pytest.mark.parametrize("before", ["[", "[clock("], ids=["function", "argument"])
def test_a_long_word_is_not_held_back_for_a_name(before: str) -> None:
    reader = CompletionSyntax(
        chat_format=ChatFormat(tool_calls="pythonic"), tool_use=TOOLS
    ).reader()
    assert reader.push(before + "a" * 256).content == ""
    assert reader.push("a").content.endswith("a" * 257)


PIECES = (
    "<tool_call>", "</tool_call>", "<tool_", "call>", "<function=get_weather>", "<parameter=city>",
    "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    '{"name": ', '"get_weather"', ', "arguments": ', '{"city": "a"}', "}", "{", "[", "]", "; ",
    "[TOOL_CALLS]", "[ARGS]", "clock", "get_weather(", "city=", "'x'", ")", ", ", "functools[",
    "<|tool_call|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "\n",
    "```json\n", "```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_start|>", "<TOOLCALL>", "</TOOLCALL>",
    "<|tool_call_begin|>", "functions.clock:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    " ", "text", '"', "\\", "1", "-", "e", "true", "null", "<|python_tag|>", "[CALL_ID]",
)  # fmt: skip


def _near_call(family: str, source: random.Random) -> str:
    """A right text with faults, or pieces in any order."""
    if source.random() < 0.3:
        return "".join(source.choices(PIECES, k=source.randint(1, 20)))
    text = TWO[family]
    for _ in range(source.randint(0, 3)):
        at = source.randrange(len(text) + 1)
        end = min(len(text), at + source.choice((0, 0, 1, 3, 20)))
        text = text[:at] + source.choice(("", *PIECES)) + text[end:]
    return source.choice(("", "Well.\n", " ")) + text + source.choice(("", " bye", "\n"))


def _split(text: str, source: random.Random) -> list[str]:
    cuts = sorted(source.choices(range(len(text) + 1), k=source.randint(0, len(text) // 2)))
    bounds = zip([0, *cuts], [*cuts, len(text)], strict=True)
    return [text[start:end] for start, end in bounds] + [""] * source.randrange(2)


@pytest.mark.parametrize("family", TWO)
def test_any_split_of_any_text_gives_the_same(family: str) -> None:
    source = random.Random(family)
    for _ in range(300):
        text = _near_call(family, source)
        whole = Parsed(family, [text])
        assert Parsed(family, _split(text, source)).seen == whole.seen, text
        if not whole.names:
            assert whole.content == text
        for arguments in whole.arguments:
            assert isinstance(json.loads(arguments), dict)
