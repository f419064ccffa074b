"""Templates that try to take time or memory, or to get out: none does.

hostile_templates.txt has them, a name and a line each. Every one is rendered with a short message;
the bound is the same for all (`template_meter`).
"""

import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.core.errors import ConfigError, InvalidRequestError
from loraplex.serving.text.chat_template import ChatTemplate
from loraplex.serving.text.template_language import MAX_SOURCE_CHARS
from loraplex.serving.text.template_meter import Meter, metered

MESSAGES = [{"role": "user", "content": "hi " * 100}]
MAX_SECONDS = 8
"""Of processor time; a rendering that uses its allowance up takes a half on the slowest of ours."""
MAX_BYTES = 2**29


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

HARMLESS = {
    *("nested message loops", "power chain", "escape", "urlencode", "empty output"),
    *("dunder by attr", "globals", "self", "loop internals", "undefined internals"),
}
"""They come to an end by themselves, and show nothing."""


def attacks() -> Iterator[tuple[str, str]]:
    """(name, template)"""
    text = (Path(__file__).parent / "hostile_templates.txt").read_text()
    for block in text.split("\n\n"):
        name, template = block.removeprefix("# ").split("\n", 1)
        yield name, template
    yield from LONG.items()


@pytest.fixture
def little_memory():
    """This process gets no more than MAX_BYTES beside what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MAX_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize(("name", "template"), list(attacks()), ids=dict(attacks()))
def test_bounded(name, template, little_memory):
    start = time.thread_time()
    if name in HARMLESS:
        text = ChatTemplate({"default": template}).render(MESSAGES)
        assert len(text) < 100
        assert "<" not in text
    else:
        with pytest.raises((ConfigError, InvalidRequestError), match="chat template") as caught:
            ChatTemplate({"default": template}).render(MESSAGES)
        assert "MemoryError" not in caught.value.message
        assert len(caught.value.message) < 3000
    assert time.thread_time() - start < MAX_SECONDS


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("x" * (MAX_SOURCE_CHARS + 1), "more than 262144 characters"),
        ("{% include 'x' %}", "Include is not served"),
        ("{% extends 'x' %}", "Extends is not served"),
        ("{% import 'x' as y %}", "Import is not served"),
        ("{% from 'x' import y %}", "FromImport is not served"),
        ("{% autoescape true %}{% endautoescape %}", "is not served"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "is not valid"),
        ("{{ " + "9" * 5000 + " }}", "is not valid"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "is not valid"),
        ("{{ 1 | pprint }}", "No filter named 'pprint'"),
    ],
)
def test_not_even_compiled(template, message):
    with pytest.raises(ConfigError, match=message):
        ChatTemplate({"default": template})


def test_each_rendering_has_its_own_allowance():
    template = ChatTemplate(
        {"default": "{% for i in range(300) %}{% set x = 'a' * 50000 %}{% endfor %}x"}
    )
    assert [template.render(MESSAGES) for _ in range(4)] == ["x"] * 4


def test_a_longer_conversation_may_take_more():
    template = ChatTemplate(
        {"default": "{% for i in range(2000) %}{% set x = 'a' * 50000 %}{% endfor %}x"}
    )
    with pytest.raises(InvalidRequestError, match="more work than any conversation needs"):
        template.render(MESSAGES)
    assert template.render(MESSAGES * 1000) == "x"


def test_a_value_weighs_what_its_text_has():
    meter = Meter()
    with metered(meter):
        inner = ["ab"] * 10
        assert meter.weight([inner] * 100) > 100 * meter.weight(inner)
        joined = [inner, *inner]
        meter.note_joined(joined, [inner], inner)
        assert meter.weight(joined) >= 2 * meter.weight(inner)


def test_messages_stay_as_they_are():
    """What a template changes of them, it changes for nobody else."""
    messages = [{"role": "user", "content": "a", "extra": {"list": [1]}}]
    attempts = (
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ messages[0].extra.list.append(2) }}",
        "{{ dict.update(messages[0], a=1) }}",
        "{{ messages[0].__setitem__('a', 1) }}",
        "{{ messages.sort() }}",
    )
    for attempt in attempts:
        with pytest.raises(InvalidRequestError, match="chat template"):
            ChatTemplate({"default": attempt}).render(messages)
    assert messages == [{"role": "user", "content": "a", "extra": {"list": [1]}}]
