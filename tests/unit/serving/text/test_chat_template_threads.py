"""One template is rendered by many threads at once: each rendering is what it is alone."""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from loraplex.core.errors import InvalidRequestError
from loraplex.serving.text.chat_template import ChatTemplate

FILES = Path(__file__).parent / "chat_templates"
FAMILIES = sorted(path.stem for path in FILES.glob("*.jinja"))
NUM_THREADS = 8

STATEFUL = (
    "{% set ns = namespace(n=0, text='') %}{% set dash = joiner('-') %}"
    "{% set turn = cycler('a', 'b') %}"
    "{% macro shown(m) %}{{ dash() }}{{ m.role }}={{ m.content | upper }}{% endmacro %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.text = ns.text ~ turn.next() %}"
    "{{ shown(m) }}{{ ns.n }}{{ loop.cycle('x', 'y') }}{% for i in range(40) %}{{ i }}{% endfor %}"
    "{{ {'m': m, 'n': ns.n} | tojson }}{% endfor %}{{ ns.text }}"
)
"""Whatever of Jinja keeps something between two calls."""

COSTLY = (
    "{% for m in messages %}{% for i in range(1000) %}{{ m.content }}{% endfor %}{% endfor %}"
    "{% if messages[0].content == 'hostile' %}"
    "{% for i in range(4000) %}{% for c in messages[1].content %}{% endfor %}{% endfor %}"
    "{% endif %}"
)


@pytest.fixture(autouse=True)
def threads_that_switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def conversation(number: int) -> list[dict[str, Any]]:
    turns = [("user", "assistant")[i % 2] for i in range(2 * (number % 5) + 1)]
    return [
        {"role": role, "content": f"{number}.{i} <{'é' * number}> {{{{ 1 }}}}"}
        for i, role in enumerate(turns)
    ]


def outcome(template: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    try:
        return template.render(messages)
    except InvalidRequestError as error:
        return f"refused: {error.message}"


def check_at_once(template: ChatTemplate, given: list[list[dict[str, Any]]]) -> list[str]:
    alone = [outcome(template, messages) for messages in given]
    barrier = threading.Barrier(NUM_THREADS)

    def render_all(shift: int) -> list[str]:
        barrier.wait(10)
        rendered = [outcome(template, one) for one in given[shift:] + given[:shift]]
        return rendered[len(given) - shift :] + rendered[: len(given) - shift]

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for rendered in pool.map(render_all, range(NUM_THREADS)):
            assert rendered == alone
    return alone


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    source = (FILES / f"{family}.jinja").read_text()
    template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
    texts = check_at_once(template, [conversation(number) for number in range(12)])
    assert len(set(texts)) > 1


def test_what_a_template_keeps_is_its_rendering_s_own() -> None:
    texts = check_at_once(
        ChatTemplate({"default": STATEFUL}), [conversation(number) for number in range(12)]
    )
    assert len(set(texts)) == 12


def test_every_rendering_pays_from_its_own_meter() -> None:
    """Together they cost more than one may; and one that costs too much is refused alone."""
    hostile = [{"role": "user", "content": text} for text in ("hostile", "x" * 1000)]
    given = [[{"role": "user", "content": str(i) * 2000}] for i in range(NUM_THREADS)]
    texts = check_at_once(ChatTemplate({"default": COSTLY}), [hostile, *given])
    assert [text.startswith("refused: ") for text in texts] == [True] + [False] * NUM_THREADS


def test_deep_recursion_ends_in_a_thread_too() -> None:
    """Its stack may be smaller than the main thread's."""
    template = ChatTemplate({"default": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}"})
    with ThreadPoolExecutor(2) as pool:
        for text in pool.map(lambda _: outcome(template, conversation(1)), range(4)):
            assert text.startswith("refused: the chat template failed")
