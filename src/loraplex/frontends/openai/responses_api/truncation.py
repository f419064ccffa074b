"""truncation: auto. The oldest turns of a conversation are left out until the rest fits."""

import asyncio
from collections.abc import Sequence

from loraplex.core.principal import Principal
from loraplex.frontends.openai.adapter_fields import Target
from loraplex.frontends.openai.chat import rendered
from loraplex.frontends.openai.room import OpenAIRoom
from loraplex.frontends.openai.schema import ChatBody, Message


async def fitting(room: OpenAIRoom, body: ChatBody, principal: Principal) -> ChatBody:
    """The body with as many of its latest turns as there is room for beside the answer.

    System messages at the beginning stay, and so does the last turn: if that is too long, the
    request is refused as any other.
    """
    target = room.options.dialect.target(room, body, principal)
    room_tokens = _room(body, target)
    choices = [body.model_copy(update={"messages": kept}) for kept in _choices(body.messages)]
    first, last = 0, len(choices) - 1
    while first < last:
        middle = (first + last) // 2
        if await count_tokens(room, choices[middle], target) <= room_tokens:
            last = middle
        else:
            first = middle + 1
    return choices[first]


async def count_tokens(room: OpenAIRoom, body: ChatBody, target: Target) -> int:
    """Of the rendered conversation."""
    prompt = await rendered(room, body, target)
    token_ids = await asyncio.to_thread(
        room.backend.model(target.model.name).tokenize,
        prompt,
        add_special_tokens=body.add_special_tokens is True,
    )
    return len(token_ids)


def _room(body: ChatBody, target: Target) -> int:
    card = target.model
    beside_answer = card.max_model_len - (body.max_completion_tokens or 1)
    return beside_answer if card.max_input_len is None else min(beside_answer, card.max_input_len)


def _choices(messages: Sequence[Message]) -> list[list[Message]]:
    """All of them, then fewer and fewer: each begins with a turn of the user."""
    num_head = next(
        (i for i, one in enumerate(messages) if one.role not in ("system", "developer")), 0
    )
    head, rest = list(messages[:num_head]), list(messages[num_head:])
    starts = [i for i, one in enumerate(rest) if one.role == "user" and i > 0]
    return [list(messages), *(head + rest[start:] for start in starts)]
