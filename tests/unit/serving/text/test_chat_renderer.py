"""Chats rendered in a process: what passes through, and what is refused without one."""

import asyncio

import pytest

from loraplex.core.errors import InvalidRequestError, QueueFullError
from loraplex.serving.local_texts import ChatRenderer
from loraplex.serving.sandbox import process
from support.naming import naming, refused
from support.wire_requests import of_tenant

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def renderer():
    made = ChatRenderer(
        {
            "default": "{{ bos_token }}{{ messages[0].content }}{{ value | tojson }}",
            "tool_use": "{{ tools | length }}",
        },
        {"bos_token": "<s>"},
        json_indent=1,
    )
    yield made
    made.close()


@pytest.mark.parametrize(
    ("value", "text"),
    [(10**30, "1" + 30 * "0"), (float("nan"), "NaN"), ("é世", '"é世"'), ([1], "[\n 1\n]")],
)
async def test_values_of_json_pass_as_they_are(renderer, value, text):
    rendered = await renderer.render([USER], template_kwargs={"value": value})
    assert rendered == f"<s>hi{text}"


async def test_half_a_surrogate_pair_is_left_to_the_tokenizer(renderer):
    lone = {"role": "user", "content": "\ud800"}
    assert await renderer.render([lone], template_kwargs={"value": 1}) == "<s>\ud8001"


async def test_options_reach_the_template(renderer):
    assert await renderer.render([USER], tools=[{"a": 1}, {}]) == "2"


async def test_a_refusal_names_its_field(renderer):
    with pytest.raises(InvalidRequestError) as caught:
        await renderer.render([USER, {"role": "bot"}])
    assert caught.value.param == "messages[1].role"


async def test_values_that_are_nested_too_deep(renderer):
    value = []
    for _ in range(100_000):
        value = [value]
    with refused(InvalidRequestError, "nested", param="messages"):
        await renderer.render([USER], template_kwargs={"value": value})


async def test_without_a_template_no_process_starts():
    renderer = ChatRenderer({})
    with refused(InvalidRequestError, "/v1/completions", "chat_template.jinja", param="messages"):
        await renderer.render([USER])
    assert not any(process.is_running for process in renderer._sandbox._processes)


async def test_chats_that_wait_are_bounded(renderer, monkeypatch):
    monkeypatch.setattr(process, "_MAX_WAITING_BYTES", 100)
    with pytest.raises(QueueFullError, match=naming("0 bytes")):
        await renderer.render([{"role": "user", "content": "x" * 200}])


async def test_chats_of_another_tenant_wait_for_no_chat():
    renderer = ChatRenderer({"default": "{{ messages[0].content }}"})
    order = []

    async def render(tenant: str) -> None:
        with of_tenant(tenant):
            await renderer.render([USER])
        order.append(tenant)

    sandbox = renderer._sandbox
    with sandbox._processes[0]._in_use:  # the first chat takes this one, and does not end
        chats = [asyncio.create_task(render("a")) for _ in range(200)]
        while len(sandbox._idle) > 1:
            await asyncio.sleep(0.001)
        await render("b")
        assert order == ["b"]
    await asyncio.gather(*chats)
    renderer.close()


async def test_chats_that_wait_are_bounded_for_each_tenant(renderer, monkeypatch):
    monkeypatch.setattr(process, "_MAX_WAITING_BYTES", 300)
    chat = [{"role": "user", "content": "x" * 200}]
    with of_tenant("a"):
        running = asyncio.create_task(renderer.render(chat, template_kwargs={"value": 1}))
    await asyncio.sleep(0)
    with of_tenant("a"), pytest.raises(QueueFullError):
        await renderer.render(chat, template_kwargs={"value": 1})
    with of_tenant("b"):
        await renderer.render(chat, template_kwargs={"value": 1})
    await running
