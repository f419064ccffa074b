import asyncio
import itertools
import threading
from typing import Any

import pytest

from loraplex.core.errors import InvalidRequestError
from loraplex.frontends.openai import convert
from loraplex.frontends.openai.convert import is_longer, rendered_chat
from loraplex.frontends.openai.schema import Message
from support.echo_service import EchoService

SHORT = [Message(role="user", content="hi")]
PARTS = [{"type": "text", "text": "p"}] * 60
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"enum": ["e"] * 60}}}


@pytest.fixture
def backend() -> EchoService:
    return EchoService()


class Conversion:
    """Notes the threads in which conversations are converted; may hold them there."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.is_held = False
        self.may_end = threading.Event()
        self._convert = convert.conversation

    def __call__(self, *args: Any) -> Any:
        self.threads.append(threading.current_thread())
        assert not self.is_held or self.may_end.wait(60)
        return self._convert(*args)


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch) -> Conversion:
    noted = Conversion()
    monkeypatch.setattr(convert, "conversation", noted)
    return noted


async def render(backend: EchoService, messages: list[Message], **more: Any) -> str:
    return await rendered_chat(backend, backend.model("echo").card, messages, **more)


async def test_a_short_conversation_is_converted_on_the_event_loop(
    backend: EchoService, conversion: Conversion
) -> None:
    text = await render(backend, SHORT, arguments={"add_generation_prompt": False})
    assert text == await backend.model("echo").chats.render(
        [{"role": "user", "content": "hi"}], add_generation_prompt=False
    )
    assert conversion.threads == [threading.current_thread()]


@pytest.mark.parametrize(
    ("messages", "more"),
    [
        ([Message(role="user", content="x" * 40_000)], {}),
        (SHORT * 30, {}),
        ([Message(role="user", content=PARTS)], {}),
        ([Message(role="user", content="", name="n" * 40_000)], {}),
        (SHORT, {"tools": [TOOL]}),
        (SHORT, {"arguments": {"documents": [{"text": "x" * 40_000}]}}),
        (SHORT, {"arguments": {"template_kwargs": {"k": ["v"] * 99}}}),
    ],
    ids=["text", "messages", "parts", "extra", "tools", "documents", "kwargs"],
)
async def test_the_loop_goes_on_while_a_long_one_is_converted(
    backend: EchoService,
    conversion: Conversion,
    messages: list[Message],
    more: dict[str, Any],
) -> None:
    conversion.is_held = True
    rendering = asyncio.create_task(render(backend, messages, **more))
    while not conversion.threads:
        await asyncio.sleep(0.001)
    assert not rendering.done()
    conversion.may_end.set()
    assert await rendering
    assert conversion.threads != [threading.current_thread()]


async def test_a_long_one_says_what_a_short_one_would(backend: EchoService) -> None:
    wrong = {"role": "tool", "content": "1"}
    for messages in ([*SHORT, wrong], [*SHORT * 40, wrong]):
        with pytest.raises(InvalidRequestError) as raised:
            await render(backend, messages)
        assert raised.value.param == f"messages[{len(messages) - 1}].tool_call_id"


async def test_what_is_said_beside_the_conversation_wins(backend: EchoService) -> None:
    """A dialect writes its tools in its own way."""
    await render(backend, SHORT, tools=None, arguments={"tools": [TOOL]})
    assert [each["tools"] for each in backend.renderings] == [[TOOL]]


class Endless(dict[str, Any]):
    def values(self) -> Any:
        return itertools.repeat("x")


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("x" * 487, False),
        ("x" * 489, True),
        (None, False),
        ([1, 2.5], True),
        (nested(5000), True),
        (Endless(), True),
        (Message(role="", content=""), True),
    ],
)
def test_what_is_long(value: Any, expected: bool) -> None:
    assert is_longer(value, 1000) is expected
