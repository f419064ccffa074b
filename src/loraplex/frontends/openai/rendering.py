"""Renders a conversation with the chat template of its model, off the event loop."""

import asyncio
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from loraplex.frontends.openai import convert
from loraplex.frontends.openai.schema import Body, Message
from loraplex.serving.backend import ModelCard, TextBackend

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
            unseen.append(iter(_parts(item)))
            break
        else:
            unseen.pop()
    return False


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Body):
        return (*vars(value).values(), value.model_extra)
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()
