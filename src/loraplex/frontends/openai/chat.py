"""Chats, for every route that has them: a body becomes a backend request, and its conversation the
text of the model's chat template, off the event loop.
"""

import asyncio
import functools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from loraplex.core.principal import Principal
from loraplex.core.request import GenerateRequest
from loraplex.frontends.field_names import Reworded, as_sent
from loraplex.frontends.openai import convert
from loraplex.frontends.openai.adapter_fields import ModelTarget
from loraplex.frontends.openai.context import TextContext
from loraplex.frontends.openai.errors import raise_all
from loraplex.frontends.openai.sampling import sent_names
from loraplex.frontends.openai.schema import ChatBody, Message
from loraplex.frontends.openai.tools import left_out, read_tool_use, read_tools, shown_tools
from loraplex.serving.backend import ModelCard, TextBackend
from loraplex.serving.text.completion_reader import CompletionSyntax


class ChatRequest(NamedTuple):
    """The one request of a chat, and how its outputs are parsed."""

    requests: tuple[GenerateRequest, ...]
    reading: CompletionSyntax
    reworded: Reworded
    """Names the client's fields in an error."""
    notes: tuple[str, ...] = ()
    """What was left out of it."""


async def chat_request(
    context: TextContext, body: ChatBody, principal: Principal, origin: convert.Origin
) -> ChatRequest:
    """Convert a body. Raises a RequestError for an invalid body, or one its template refuses."""
    tool_use = None
    if not body.tools and body.tool_choice is None:
        convert.check_chat(body)
    else:
        raise_all([lambda: convert.check_chat(body), lambda: read_tools(body.tools)])
        tool_use = read_tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    target = await context.options.dialect.target(context, body, principal)
    reading = CompletionSyntax(
        chat_format=target.model.chat,
        tool_use=tool_use,
        prompt=await rendered(context, body, target),
        includes_reasoning=body.include_reasoning is not False,
        separates_reasoning=body.separate_reasoning is not False,
    )
    requests = convert.chat_request(body, target, origin, reading)
    notes = left_out(body.tools) if body.tools else ()
    return ChatRequest(requests, reading, lambda error: as_sent(error, sent_names(body)), notes)


async def rendered(context: TextContext, body: ChatBody, target: ModelTarget) -> str:
    """The conversation as the model's chat template writes it."""
    arguments = {
        "add_generation_prompt": convert.begins_a_turn(body),
        "continue_final_message": bool(body.continue_final_message),
        "documents": body.documents,
        **context.options.dialect.rendering(body),
    }
    tools = shown_tools(body) if body.tools else None
    return await rendered_chat(context.backend, target.model, body.messages, tools, arguments)


_INLINE_SIZE = 32 * 1024
"""Smaller conversations are converted on the event loop: a thread's hand-over would cost more."""

_VALUE_SIZE = 512
"""Cost of a value in addition to its characters: the number of messages, more than their text, is
what takes time to convert."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})


async def rendered_chat(
    backend: TextBackend,
    card: ModelCard,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    arguments: Mapping[str, Any] = _NOTHING,
) -> str:
    """The prompt text. arguments: of Backend.render_chat, where they win over what is said here.

    Raises a RequestError for messages that cannot be shown, or that the template refuses.
    """
    show = functools.partial(convert.conversation, messages, tools, card.chat)
    is_long = is_longer((messages, tools, arguments), _INLINE_SIZE)
    shown = await asyncio.to_thread(show) if is_long else show()
    return await backend.model(card.name).render_chat(
        shown.messages, **{"tools": shown.tools, **arguments}
    )


def is_longer(value: Any, size: int) -> bool:
    """Whether messages and values of JSON are of more than this size; sees no more of them."""
    unseen: list[Iterator[Any]] = [iter((value,))]
    while unseen:
        for item in unseen[-1]:
            size -= _VALUE_SIZE + (len(item) if isinstance(item, str) else 0)
            if size < 0:
                return True
            parts = item.values() if isinstance(item, Mapping) else item
            unseen.append(iter(parts if isinstance(item, Mapping | list | tuple) else ()))
            break
        else:
            unseen.pop()
    return False
