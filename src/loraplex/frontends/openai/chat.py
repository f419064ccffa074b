"""From a chat body to what the backend is asked, for every route that is answered by a chat."""

from typing import NamedTuple

from loraplex.core.principal import Principal
from loraplex.core.request import GenerateRequest
from loraplex.frontends.openai import convert
from loraplex.frontends.openai.adapter_fields import Target
from loraplex.frontends.openai.rendering import rendered_chat
from loraplex.frontends.openai.room import OpenAIRoom
from loraplex.frontends.openai.schema import ChatBody
from loraplex.frontends.openai.tools import read_tool_use, shown_tools
from loraplex.serving.text.completion_reader import CompletionSyntax


class AskedChat(NamedTuple):
    """The one request of a chat, and how its answers are read."""

    requests: tuple[GenerateRequest, ...]
    reading: CompletionSyntax


async def asked_chat(
    room: OpenAIRoom, body: ChatBody, principal: Principal, origin: convert.Origin
) -> AskedChat:
    """Raises a RequestError for what the body says wrongly, or what its template refuses."""
    convert.check_chat(body)
    tool_use = read_tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    target = room.options.dialect.target(room, body, principal)
    reading = CompletionSyntax(
        chat_format=target.model.chat,
        tool_use=tool_use,
        prompt=await rendered(room, body, target),
        includes_reasoning=body.include_reasoning is not False,
        separates_reasoning=body.separate_reasoning is not False,
    )
    return AskedChat(convert.chat_request(body, target, origin, reading), reading)


async def rendered(room: OpenAIRoom, body: ChatBody, target: Target) -> str:
    """The conversation as the model's chat template writes it."""
    arguments = {
        "add_generation_prompt": convert.begins_a_turn(body),
        "continue_final_message": bool(body.continue_final_message),
        "documents": body.documents,
        **room.options.dialect.rendering(body),
    }
    return await rendered_chat(
        room.backend, target.model, body.messages, shown_tools(body), arguments
    )
