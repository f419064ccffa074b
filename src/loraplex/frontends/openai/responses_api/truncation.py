"""truncation: auto. The oldest turns of a conversation are left out until the rest fits."""

import asyncio
from collections.abc import Sequence

from loraplex.core.principal import Principal
from loraplex.frontends.openai.adapter_fields import Target
from loraplex.frontends.openai.chat import rendered
from loraplex.frontends.openai.context import OpenAIContext
from loraplex.frontends.openai.schema import ChatBody, Message


async def fitting(context: OpenAIContext, body: ChatBody, principal: Principal) -> ChatBody:
    """The body with the latest turns that fit in addition to the output.

    System messages at the beginning stay, and so does the last turn: if that is too long, the
    request is refused as any other.
    """
    target = await context.options.dialect.target(context, body, principal)
    max_prompt_tokens = _max_prompt_tokens(body, target)
    choices = [body.model_copy(update={"messages": kept}) for kept in _choices(body.messages)]
    first, last = 0, len(choices) - 1
    while first < last:
        middle = (first + last) // 2
        if await count_tokens(context, choices[middle], target) <= max_prompt_tokens:
            last = middle
        else:
            first = middle + 1
    return choices[first]


async def count_tokens(context: OpenAIContext, body: ChatBody, target: Target) -> int:
    """Number of tokens of the rendered conversation."""
    prompt = await rendered(context, body, target)
    token_ids = await asyncio.to_thread(
        context.backend.model(target.model.name).tokenize,
        prompt,
        add_special_tokens=body.add_special_tokens is True,
    )
    return len(token_ids)


def _max_prompt_tokens(body: ChatBody, target: Target) -> int:
    card = target.model
    max_input = card.max_model_len - (body.max_completion_tokens or 1)
    return max_input if card.max_input_len is None else min(max_input, card.max_input_len)


def _choices(messages: Sequence[Message]) -> list[list[Message]]:
    """All of them, then fewer and fewer: each begins with a turn of the user."""
    num_head = next(
        (i for i, one in enumerate(messages) if one["role"] not in ("system", "developer")), 0
    )
    head, rest = list(messages[:num_head]), list(messages[num_head:])
    starts = [i for i, one in enumerate(rest) if one["role"] == "user" and i > 0]
    return [list(messages), *(head + rest[start:] for start in starts)]
