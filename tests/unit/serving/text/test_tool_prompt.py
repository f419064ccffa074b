from pathlib import Path
from typing import Any

import pytest

from loraplex.serving.text.chat_messages import with_calls_as_text, with_tools_described
from loraplex.serving.text.chat_template import ChatTemplate
from loraplex.serving.text.tool_calls.formats import FORMATS, format_of_template

TOOL = {"type": "function", "function": {"name": "clock", "description": "The time."}}
USER = {"role": "user", "content": "When?"}


def rendered(messages: list[dict[str, Any]], *, describes_form: bool = True) -> list[Any]:
    return list(with_tools_described(messages, [TOOL], describes_form=describes_form))


def test_in_the_system_message_behind_its_text() -> None:
    system = {"role": "system", "content": "Be brief."}
    first, second = rendered([system, USER])
    assert first["role"] == "system"
    assert first["content"].startswith("Be brief.\n\nYou can call functions.")
    assert '{"name": "clock", "description": "The time."}' in first["content"]
    assert "JSON list" in first["content"]
    assert second == USER


def test_in_the_first_user_message_before_its_text() -> None:
    [only] = rendered([USER], describes_form=False)
    assert only["content"].endswith("\n\nWhen?")
    assert "JSON list" not in only["content"]
    assert USER == {"role": "user", "content": "When?"}


def test_as_a_part_of_parts() -> None:
    part = {"type": "text", "text": "When?"}
    [only] = rendered([{"role": "user", "content": [part]}])
    assert only["content"][1] == part
    assert "clock" in only["content"][0]["text"]


@pytest.mark.parametrize("messages", [[], [{"role": "assistant", "content": "Hi."}]])
def test_as_a_system_message_of_its_own(messages: list[dict[str, Any]]) -> None:
    first, *rest = rendered(messages)
    assert first["role"] == "system"
    assert rest == messages


TEMPLATES = Path(__file__).parent / "chat_templates"


def call(name: str, call_id: str, arguments: Any = '{"zone": "é"}') -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def result(call_id: str, text: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call("clock", "1")]}
THANKS = {"role": "user", "content": "Thanks."}


def test_calls_and_results_are_text() -> None:
    both = {**CALLED, "content": "Hm.", "tool_calls": [call("clock", "1"), call("sun", "2", {})]}
    rendered = with_calls_as_text(
        [USER, both, result("2", "up"), result("1", "noon"), THANKS], FORMATS["generic"].syntax
    )
    assert rendered == [
        USER,
        {
            "role": "assistant",
            "content": 'Hm.\n\n[{"name": "clock", "arguments": {"zone": "é"}}, '
            '{"name": "sun", "arguments": {}}]',
        },
        {
            "role": "user",
            "content": "Result of sun:\n\nup\n\nResult of clock:\n\nnoon\n\nThanks.",
        },
    ]


def test_calls_are_written_as_the_model_is_to_write_them() -> None:
    [only] = with_calls_as_text([CALLED], FORMATS["phi4_mini_json"].syntax)
    assert only["content"] == 'functools[{"name": "clock", "arguments": {"zone": "é"}}]'


def test_results_in_parts() -> None:
    part = {"type": "text", "text": "noon"}
    messages = [CALLED, result("1", [part]), result("3", "late"), THANKS]
    _, rendered = with_calls_as_text(messages, FORMATS["generic"].syntax)
    texts = [part["text"] for part in rendered["content"]]
    assert texts == ["Result of clock:", "noon", "Result of a call:\n\nlate", "Thanks."]


@pytest.mark.parametrize("arguments", ["", '{"a": "\\', "{", "[1]", "1", None, [1]])
def test_arguments_of_a_broken_call_are_none(arguments: Any) -> None:
    message = {**CALLED, "tool_calls": [call("clock", "1", arguments)]}
    [only] = with_calls_as_text([message], FORMATS["generic"].syntax)
    assert only["content"] == '[{"name": "clock", "arguments": {}}]'


@pytest.mark.parametrize("calls", ["x", [1], [{"function": 1}], [{"function": {}}]])
def test_calls_that_are_none_are_left_for_the_template_to_refuse(calls: Any) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    assert with_calls_as_text([message], FORMATS["generic"].syntax) == [message]


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in sorted(TEMPLATES.glob("*.jinja"))
        if "tool_calls" not in path.read_text() and path.stem != "loops"
    ],
    ids=lambda path: path.stem,
)
def test_a_template_that_knows_no_calls_writes_them(path: Path) -> None:
    source = path.read_text()
    template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
    messages = [USER, CALLED, result("1", "noon"), result("2", "late")]
    rendered = with_calls_as_text(messages, format_of_template(source).syntax)
    text = template.render(rendered)
    assert '{"name": "clock", "arguments": {"zone": "é"}}' in text
    assert "noon" in text
    assert "late" in text
