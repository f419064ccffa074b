"""Conversion of a chat body to a backend request, for every route with chats."""

from typing import NamedTuple

from loraplex.core.principal import Principal
from loraplex.core.request import GenerateRequest
from loraplex.frontends.field_names import Reworded, as_sent
from loraplex.frontends.openai import convert
from loraplex.frontends.openai.adapter_fields import Target
from loraplex.frontends.openai.context import TextContext
from loraplex.frontends.openai.faults import raise_all
from loraplex.frontends.openai.rendering import rendered_chat
from loraplex.frontends.openai.sampling import sent_names
from loraplex.frontends.openai.schema import ChatBody
from loraplex.frontends.openai.tools import left_out, read_tool_use, read_tools, shown_tools
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


async def rendered(context: TextContext, body: ChatBody, target: Target) -> str:
    """The conversation as the model's chat template writes it."""
    arguments = {
        "add_generation_prompt": convert.begins_a_turn(body),
        "continue_final_message": bool(body.continue_final_message),
        "documents": body.documents,
        **context.options.dialect.rendering(body),
    }
    tools = shown_tools(body) if body.tools else None
    return await rendered_chat(context.backend, target.model, body.messages, tools, arguments)
