"""Templates that try to take time or memory, or to escape: none does.

hostile_templates.txt has them, a name and a line each. Every one is rendered with a short message.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from loraplex.core.errors import ConfigError, InvalidRequestError
from loraplex.serving.local_texts import CHATS, ChatRenderer
from loraplex.serving.text.chat_template import MAX_RENDERED_CHARS, MAX_SOURCE_CHARS, ChatTemplate
from support.naming import refused

MESSAGES = [{"role": "user", "content": "hi " * 100}]
LITTLE_TIME = msgspec.structs.replace(CHATS, max_seconds=0.3)
MAX_CPU_SECONDS = 1.0
"""Most processor time of this process for which its event loop may stand still."""


def twice_each(form: str) -> str:
    """Forty of them, each of which calls the one before it twice."""
    return "".join(form.replace("I", str(i)).replace("H", str(i - 1)) for i in range(1, 40))


LONG = {
    "macro chain": "{% macro m0() %}x{% endmacro %}"
    + twice_each("{% macro mI() %}{{ mH() }}{{ mH() }}{% endmacro %}")
    + "{{ m39() }}",
    "block chain": "{% if false %}{% block b0 %}x{% endblock %}"
    + twice_each("{% block bI %}{{ self.bH() }}{{ self.bH() }}{% endblock %}")
    + "{% endif %}{{ self.b39() }}",
    "call blocks": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 18
    + "x"
    + "{% endcall %}" * 18,
    "many strings in one": "{% set b = 'ab' * 2000000 %}{{ " + " ~ ".join(["b"] * 5000) + " }}",
    "many variables": "{% set b = 'ab' * 2000000 %}"
    + "".join(f"{{% set v{i} = b ~ '{i}' %}}" for i in range(2000)),
    "long text of a macro": "{% macro m() %}"
    + "x" * 100000
    + "{% endmacro %}{% for i in range(90000) %}{% set y = m() %}{% endfor %}",
}

ENDS = {
    *("nested message loops", "power chain", "dag in", "dag count", "dag namespace"),
    *("namespace in itself", "json indent text", "slices", "list of chars", "strip", "trim"),
    *("escape", "urlencode", "maketrans", "encode", "unpack", "time", "empty output"),
    *("dunder by attr", "globals", "dict type", "self", "namespace dunder", "loop internals"),
    *("undefined internals", "search from the right", "split from the right"),
    *("long text of a macro", "dag unique", "many variables", "percents"),
}
"""They may end within the limits, and show nothing."""

QUICK = {
    *("range", "nested string loops", "macro recursion", "times", "power chain", "plus list"),
    *("join", "center", "dunder", "globals", "empty output", "deep json"),
}
"""One for each way to take time or memory; `make soak` runs the others, which take minutes."""


def attacks() -> Iterator[tuple[str, str]]:
    """(name, template)"""
    text = (Path(__file__).parent / "hostile_templates.txt").read_text()
    for block in text.split("\n\n"):
        name, template = block.removeprefix("# ").split("\n", 1)
        yield name, template
    yield from LONG.items()


async def longest_gap(is_over: asyncio.Event) -> float:
    """Return the most processor time that this process used between two turns of its event loop.

    Wall time would depend on what else the machine does.
    """
    gap, last = 0.0, time.process_time()
    while not is_over.is_set():
        await asyncio.sleep(0.01)
        gap, last = max(gap, time.process_time() - last), time.process_time()
    return gap


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10


@pytest.mark.parametrize(
    ("name", "template"),
    [
        pytest.param(*each, id=each[0], marks=() if each[0] in QUICK else pytest.mark.soak)
        for each in attacks()
    ],
)
async def test_bounded(name, template):
    """It ends with an error, and the event loop goes on meanwhile."""
    peak = peak_bytes()
    is_over, text, message = asyncio.Event(), "", ""
    ticking = None
    try:
        renderer = ChatRenderer({"default": template}, kind=LITTLE_TIME)
        ticking = asyncio.create_task(longest_gap(is_over))
        with contextlib.closing(renderer):
            text = await renderer.render(MESSAGES)
    except (ConfigError, InvalidRequestError) as error:
        message = error.message
    is_over.set()
    if message:
        assert "chat template" in message
        assert "MemoryError" not in message
        assert len(message) < 3000
    else:
        assert name in ENDS
        assert len(text) <= MAX_RENDERED_CHARS
        assert not re.search("0x|function|module|class|method", text)
    assert ticking is None or await ticking < MAX_CPU_SECONDS
    assert peak_bytes() - peak < 200 << 20


async def test_the_next_chat_has_a_new_process():
    template = "{% if messages[0].content == 'slow' %}{{ 3 ** 99999999 }}{% endif %}ok"
    renderer = ChatRenderer({"default": template}, kind=LITTLE_TIME)
    try:
        for _ in range(2):
            with refused(InvalidRequestError, 2, param="messages"):
                await renderer.render([{"role": "user", "content": "slow"}])
            assert await renderer.render(MESSAGES) == "ok"
    finally:
        renderer.close()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("x" * (MAX_SOURCE_CHARS + 1), "more than 262144 characters"),
        ("{% include 'x' %}", "Include is not supported"),
        ("{% extends 'x' %}", "Extends is not supported"),
        ("{% import 'x' as y %}", "Import is not supported"),
        ("{% from 'x' import y %}", "FromImport is not supported"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "is not valid"),
        ("{{ " + "9" * 5000 + " }}", "is not valid"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "is not valid"),
        ("{{ 1 | no_such_filter }}", "No filter named 'no_such_filter'"),
    ],
)
def test_not_even_compiled(template, message):
    with pytest.raises(ConfigError, match=message):
        ChatTemplate({"default": template})


def test_compiling_runs_nothing():
    """Serving compiles a template to validate it."""
    start = time.thread_time()
    ChatTemplate({"default": "{{ 3 ** 99999999 }}{% if 3 ** 99999999 %}{% endif %}"})
    ChatTemplate(
        {"default": "{{ 'a' | center(9999999999) }}{% set x = 'a' | center(99999999999) %}"}
    )
    assert time.thread_time() - start < 1


def test_messages_stay_as_they_are():
    """A template's changes to the messages stay within its own rendering."""
    messages = [{"role": "user", "content": "a", "extra": {"list": [1]}}]
    attempts = (
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ messages[0].extra.list.append(2) }}",
        "{{ messages[0].__setitem__('a', 1) }}",
        "{{ messages.sort() }}",
    )
    for attempt in attempts:
        with pytest.raises(InvalidRequestError, match="chat template"):
            ChatTemplate({"default": attempt}).render(messages)
    ChatTemplate({"default": "{{ dict.update(messages[0], a=1) }}"}).render(messages)
    assert messages == [{"role": "user", "content": "a", "extra": {"list": [1]}}]
