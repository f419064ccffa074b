"""Reasoning is separated from the content, however the text is split."""

import pytest

from loraplex.core.tools import FunctionTool, ToolUse
from loraplex.serving.text.chat_format import ChatFormat, CompletionSyntax
from loraplex.serving.text.reasoning import TAGS, ReasoningReader, tags_of_template

THINK = TAGS["think"]


def read(pieces: list[str], prompt: str = "") -> tuple[str, str]:
    reader = ReasoningReader(THINK, prompt)
    parts = [reader.push(piece) for piece in pieces] + [reader.push("", final=True)]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


CASES = [
    ("", "", "", ""),
    ("", "Hello.", "", "Hello."),
    ("", " \n Hello.", "", " \n Hello."),
    ("", "<think>Hm.</think>Hello.", "Hm.", "Hello."),
    ("", "\n<think>\n Hm.\n\nSo.\n</think>\n\n Hello. \n", "Hm.\n\nSo.", "Hello. \n"),
    ("", "<think>never over ", "never over", ""),
    ("", "<think>cut </thi", "cut </thi", ""),
    ("", "<thin air", "", "<thin air"),
    ("", "<thin", "", "<thin"),
    ("", "a <think>b</think>", "", "a <think>b</think>"),
    ("", "<think></think>Hello.", "", "Hello."),
    ("", "<think>a<think>b</think>c</think>", "a<think>b", "c</think>"),
    ("<think>\n", "Hm.</think>Hello.", "Hm.", "Hello."),
    ("<think>", "\nnever over", "never over", ""),
    ("<think>\n\n</think>\n\n", "Hello.", "", "Hello."),
    ("<think>\n\n</think>\n\n", "<think>Hm.</think>", "", "<think>Hm.</think>"),
]


@pytest.mark.parametrize(("prompt", "text", "reasoning", "content"), CASES)
def test_whole_and_character_by_character(
    prompt: str, text: str, reasoning: str, content: str
) -> None:
    assert read([text], prompt) == (reasoning, content)
    assert read(list(text), prompt) == (reasoning, content)
    for cut in range(len(text)):
        assert read([text[:cut], text[cut:]], prompt) == (reasoning, content)


CALL = "<tool_call>\n<function=f>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"Hm.\n{CALL}", "Hm.", CALL),
        (f"<tool_call> is a tag.\n\n{CALL}", "<tool_call> is a tag.", CALL),
        (f"Hm.</think>So. {CALL}", "Hm.", f"So. {CALL}"),
        ("Hm. <tool_call>\n<func", "Hm. <tool_call>\n<func", ""),
    ],
)
def test_a_call_ends_the_reasoning_of_models_that_leave_the_tag_out(
    text: str, reasoning: str, content: str
) -> None:
    for cuts in ([text], list(text)):
        reader = CompletionSyntax(
            chat_format=ChatFormat(tool_calls="qwen3_coder", reasoning="think"),
            tool_use=ToolUse(tools=(FunctionTool(name="f"),)),
            prompt="<think>\n",
        ).reader()
        deltas = [reader.push(piece) for piece in cuts] + [reader.push("", final=True)]
        assert "".join(delta.reasoning for delta in deltas) == reasoning
        assert reader.num_calls == content.count(CALL)
        assert "".join(delta.content for delta in deltas) == content.replace(CALL, "").strip()
    # A request without tools calls nothing.
    assert read([text], "<think>")[0] == text.partition("</think>")[0]


def test_reasoning_comes_at_once() -> None:
    reader = ReasoningReader(THINK, "")
    assert reader.push("<think>one") == ("one", "")
    assert reader.push(" two <") == (" two", "")
    assert reader.push("b></think") == (" <b>", "")
    assert reader.push(">three") == ("", "three")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("", "none"),
        ("{{ messages }}", "none"),
        ("{{ '<think>\\n\\n</think>' }}", "think"),
        ("[THINK]{{ x }}[/THINK]", "mistral"),
    ],
)
def test_what_a_template_marks(template: str, name: str) -> None:
    assert tags_of_template(template) == name
