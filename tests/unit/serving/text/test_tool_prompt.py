from typing import Any

import pytest

from loraplex.serving.text.tool_prompt import with_tools_told

TOOL = {"type": "function", "function": {"name": "clock", "description": "The time."}}
USER = {"role": "user", "content": "When?"}


def told(messages: list[dict[str, Any]], *, tells_form: bool = True) -> list[Any]:
    return list(with_tools_told(messages, [TOOL], tells_form=tells_form))


def test_in_the_system_message_behind_its_text() -> None:
    system = {"role": "system", "content": "Be brief."}
    first, second = told([system, USER])
    assert first["role"] == "system"
    assert first["content"].startswith("Be brief.\n\nYou can call functions.")
    assert '{"name": "clock", "description": "The time."}' in first["content"]
    assert "JSON list" in first["content"]
    assert second == USER


def test_in_the_first_user_message_before_its_text() -> None:
    [only] = told([USER], tells_form=False)
    assert only["content"].endswith("\n\nWhen?")
    assert "JSON list" not in only["content"]
    assert USER == {"role": "user", "content": "When?"}


def test_as_a_part_of_parts() -> None:
    part = {"type": "text", "text": "When?"}
    [only] = told([{"role": "user", "content": [part]}])
    assert only["content"][1] == part
    assert "clock" in only["content"][0]["text"]


@pytest.mark.parametrize("messages", [[], [{"role": "assistant", "content": "Hi."}]])
def test_as_a_system_message_of_its_own(messages: list[dict[str, Any]]) -> None:
    first, *rest = told(messages)
    assert first["role"] == "system"
    assert rest == messages
