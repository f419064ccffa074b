"""Whatever a model writes in place of a tool call, clients get valid calls or content.

Well-formed calls of each format are broken as models break them, and split as streams split them.
"""

import itertools
import json
import re
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.core.output import FinishReason, SequenceOutput
from loraplex.core.tools import FunctionTool, ToolUse
from loraplex.frontends.long_json import encoded
from loraplex.frontends.openai import convert
from loraplex.frontends.openai.responses_api.input_items import messages_of, read_input
from loraplex.frontends.openai.responses_api.output_items import OutputItems
from loraplex.frontends.openai.writers import ChatParts, delta, message
from loraplex.serving.text.chat_format import ChatFormat, CompletionSyntax
from loraplex.serving.text.chat_template import ChatTemplate
from loraplex.serving.text.tool_calls.formats import FORMATS
from support.examples import examples

TOOLS = ToolUse(
    tools=(
        FunctionTool(
            name="f",
            parameters={
                "properties": {"a": {"type": "string"}, "b": {"anyOf": [{"$ref": "#/$defs/b"}]}},
                "$defs": {"b": {"type": ["boolean", "integer", "null"]}},
            },
        ),
        FunctionTool(name="g"),
    )
)
OBJECTS = (
    '{"a": "x", "b": 2}',
    '{"a": "two\\nlines }] of \\"text\\"", "b": null, "c": [1, {"d": "e"}]}',
    '{"a": "", "b": true}',
    "{}",
)
PYTHON = ("a='x', b=2", 'a="it\'s }] \\"x\\"", c=[1, {"d": "e"}]', "a='', b=True", "")
SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")


class Written(NamedTuple):
    """How a format writes two calls, with places for their arguments, and text that ends them."""

    text: str
    ends: tuple[str, ...] = ()
    arguments: tuple[str, ...] = OBJECTS


PARAMETERS = (
    "<parameter=a>\nx\n</parameter>\n<parameter=b>\n2\n</parameter>\n",
    "<parameter=a>\ntwo\nlines > 1\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n",
    "",
)
PAIRS = (
    "<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n",
    "<arg_key>a</arg_key>\n<arg_value>two\nlines</arg_value>\n",
    "",
)
LIST = '[{"name": "f", "arguments": %s}, {"arguments": %s, "name": "g"}]'
WRITTEN = {
    "hermes": Written(
        '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": %s}\n</tool_call>',
        ("</tool_call>",),
    ),
    "llama3_json": Written('{"name": "f", "parameters": %s}; {"name": "g", "parameters": %s}'),
    "pythonic": Written("[f(%s), g(%s)]", ("<|python_end|>",), PYTHON),
    "mistral": Written(f"[TOOL_CALLS]{LIST}"),
    "mistral_named": Written("[TOOL_CALLS]f[ARGS]%s[TOOL_CALLS]g[ARGS]%s"),
    "deepseek_v3": Written(
        f"{SECTION[0]}{DEEPSEEK[0]}function{DEEPSEEK[1]}f\n```json\n%s\n```{DEEPSEEK[2]}\n"
        f"{DEEPSEEK[0]}function{DEEPSEEK[1]}g\n```json\n%s\n```{DEEPSEEK[2]}{SECTION[1]}",
        (DEEPSEEK[2], SECTION[1]),
    ),
    "deepseek_v31": Written(
        f"{SECTION[0]}{DEEPSEEK[0]}f{DEEPSEEK[1]}%s{DEEPSEEK[2]}"
        f"{DEEPSEEK[0]}g{DEEPSEEK[1]}%s{DEEPSEEK[2]}{SECTION[1]}",
        (DEEPSEEK[2], SECTION[1]),
    ),
    "phi4_mini_json": Written(f"functools{LIST}"),
    "granite": Written(f"<|tool_call|>{LIST}"),
    "qwen3_coder": Written(
        "<tool_call>\n<function=f>\n%s</function>\n</tool_call>\n"
        "<tool_call>\n<function=g>\n%s</function>\n</tool_call>",
        ("</tool_call>",),
        PARAMETERS,
    ),
    "glm45": Written(
        "<tool_call>f\n%s</tool_call>\n<tool_call>g\n%s</tool_call>", ("</tool_call>",), PAIRS
    ),
    "kimi_k2": Written(
        f"{KIMI[0]}<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>%s<|tool_call_end|>"
        "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>%s<|tool_call_end|>"
        f"{KIMI[1]}",
        ("<|tool_call_end|>", KIMI[1]),
    ),
    "lfm2": Written(
        "<|tool_call_start|>[f(%s), g(%s)]<|tool_call_end|>", ("<|tool_call_end|>",), PYTHON
    ),
    "nemotron_json": Written(f"<TOOLCALL>{LIST}</TOOLCALL>", ("</TOOLCALL>",)),
    "generic": Written(LIST),
}
FAULTS = (
    ('"x"', '"\\d+"'), ('"x"', '"say "x" now"'), ('"x"', "'x'"), ('"x"', "x"), ('"x"', '"x'),
    ("x", "\\d"), ("x", "a\nb\tc"), ("x", "\x01"), ("2", "+5"), ("2", "None"), ("2", "True"),
    ("2", "02"), ("2", ""), ("2", "NaN"), ("null", "None"), ("true", "True"), ("}", ",}"),
    ("}", ""), ("}", "}}"), ("]", ",]"), ("]", ""), (",", ""), (",", ",,"), (": ", " "), (":", "="),
    ('"a"', "a"), ('"name"', '"nam"'), ('"f"', '""'), ("f", ""), ('"', ""), ("'", ""), ("(", ""),
    (")", ""), ("[", ""), ("<arg_value>", ""), ("</arg_value>", ""), ("</arg_key>", ""),
    ("</parameter>", ""), ("<parameter=a>", "<parameter=>"), ("<parameter=a>", "<parameter="),
    ("</function>", ""), ("</tool_call>", ""), ("<tool_call>", ""), (DEEPSEEK[2], ""),
    (DEEPSEEK[0], ""), (SECTION[0], ""), ("<|tool_call_end|>", ""), (KIMI[0], ""), ("```", ""),
    ("[TOOL_CALLS]", ""), ("[ARGS]", ""),
    ("<|tool_call_start|>", ""), ("<TOOLCALL>", ""), ("</TOOLCALL>", ""),
)  # fmt: skip
"""What models write, and what instead."""


@st.composite
def near_calls(draw: st.DrawFn, family: str) -> str:
    written = WRITTEN[family]
    arguments = draw(st.tuples(*[st.sampled_from(written.arguments)] * 2))
    text = written.text % arguments
    markers = [*FORMATS[family].markers, *written.ends]
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["fault", "fault", "fault", "stray", "cut", "repeat"]))
        at = draw(st.integers(0, len(text)))
        if kind == "fault":
            there = [fault for fault in FAULTS if fault[0] in text]
            if there:
                old, new = draw(st.sampled_from(there))
                places = [found.start() for found in re.finditer(re.escape(old), text)]
                at = draw(st.sampled_from(places))
                text = text[:at] + new + text[at + len(old) :]
        elif kind == "stray" and markers:
            inside = list(re.finditer("|".join(map(re.escape, markers)), text))
            at = next((s.end() for s in inside if s.start() < at < s.end()), at)
            text = text[:at] + draw(st.sampled_from(markers)) + text[at:]
        elif kind == "cut":
            text = text[:at]
        else:
            end = draw(st.integers(at, len(text)))
            text = text[:end] + text[at:end] + text[end:]
    return draw(st.sampled_from(["", "Well.\n"])) + text + draw(st.sampled_from(["", "\nBye."]))


CASES = st.sampled_from(sorted(WRITTEN)).flatmap(
    lambda family: st.tuples(st.just(family), near_calls(family))
)


def outputs(text: str, cuts: list[int], reason: FinishReason) -> list[SequenceOutput]:
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)] or [""]
    return [
        SequenceOutput(
            index=0,
            text=piece,
            token_ids=(1,),
            logprobs=(),
            finish_reason=reason if number == len(pieces) - 1 else None,
        )
        for number, piece in enumerate(pieces)
    ]


def whole_message(family: str, sequences: list[SequenceOutput]) -> dict[str, Any]:
    """What the client has at the end: a message, or the sum of the deltas."""
    parts = ChatParts(reading(family))
    if len(sequences) == 1:
        found = message(parts.read(sequences[0]), "assistant", "")
        calls = [(call.function.name, call.function.arguments) for call in found.tool_calls or ()]
        return {"content": found.content or "", "calls": calls}
    content, calls = "", []
    for sequence in sequences:
        chunk = delta(parts.read(sequence))
        content += chunk.content or ""
        for call in chunk.tool_calls or ():
            if call.function.name:
                assert call.index == len(calls)
                calls.append((call.function.name, ""))
            name, arguments = calls[call.index]
            calls[call.index] = (name, arguments + call.function.arguments)
    return {"content": content, "calls": calls}


def reading(family: str) -> CompletionSyntax:
    return CompletionSyntax(chat_format=ChatFormat(tool_calls=family), tool_use=TOOLS)


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=int), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
@examples(6)
@given(case=CASES, cuts=st.lists(st.integers(0, 1000), max_size=20))
def test_a_response_is_valid_and_may_be_sent_back(
    reason: FinishReason, case: tuple[str, str], cuts: list[int]
) -> None:
    family, text = case
    whole = whole_message(family, outputs(text, [], reason))
    assert whole_message(family, outputs(text, cuts, reason)) == whole
    calls, content = whole["calls"], whole["content"]
    for name, arguments in calls if reason is FinishReason.STOP else calls[:-1]:
        assert name
        assert is_object(arguments), arguments
    if not calls:
        assert content == text
    assert_no_half_marker(family, content, text, bool(calls))
    check_history(family, text, calls, content)
    check_response_items(family, text, reason)


def assert_no_half_marker(family: str, content: str, text: str, has_calls: bool) -> None:
    """Check that nothing of the frame of a call is content."""
    if not has_calls:
        return
    for end in WRITTEN[family].ends:
        before = content.partition(end)[0]
        # Calls of Python's and those in a list have no marker of their own: what is left of a
        # broken one begins with its name or its bracket.
        of_list = ("{",) if LIST in WRITTEN[family].text else ("f(", "g(")
        starts = (*FORMATS[family].markers, "<function=", *of_list)
        assert end not in content or any(s in before for s in starts) or text.startswith(before), (
            content
        )


TEMPLATES = [
    ChatTemplate({"default": source})
    for source in (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% for key, value in c.function.arguments.items() %}{{ key }}{{ value }}{% endfor %}"
        "{% endfor %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls is defined }}{% endfor %}",
    )
]


def check_history(family: str, text: str, calls: list[tuple[str, str]], content: str) -> None:
    sent: list[Any] = [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": content or (None if calls else ""),
            "tool_calls": [
                {"id": f"c{n}", "type": "function", "function": {"name": f, "arguments": a}}
                for n, (f, a) in enumerate(calls)
            ],
        },
        *(
            {"role": "tool", "tool_call_id": f"c{number}", "content": "ok"}
            for number in range(len(calls))
        ),
    ]
    for writes_calls in (True, False):
        chat_format = ChatFormat(tool_calls=family, writes_calls=writes_calls)
        shown = convert.conversation(sent, None, chat_format)
        for template in TEMPLATES:
            template.render(shown.messages)


def check_response_items(family: str, text: str, reason: FinishReason) -> None:
    items = OutputItems(itertools.count().__next__)
    is_cut = reason is FinishReason.LENGTH
    found = reading(family).reader().push(text, final=True, is_cut=is_cut)
    list(items.add(found))
    list(items.end("incomplete" if is_cut else "completed"))
    output = [json.loads(b"".join(encoded(item))) for item in items.so_far()]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
        for item in output
        if item["type"] == "function_call"
    ]
    given_back = read_input([{"role": "user", "content": "?"}, *output, *results])
    messages: Any = messages_of(given_back, None)
    for template in TEMPLATES:
        template.render(convert.chat_messages(messages))
