"""A conversation as its model's chat template writes it: a long one beside the event loop."""

import asyncio
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from loraplex.frontends.openai import convert
from loraplex.frontends.openai.schema import Body, Message
from loraplex.serving.backend import Backend, ModelCard

_INLINE_SIZE = 32 * 1024
"""What is of less is rendered on the event loop: a thread's hand-over would cost more."""

_VALUE_SIZE = 512
"""Of a value, beside its characters. Some templates look at all messages for each one: it is the
number of messages, more than their text, that takes time."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})


async def rendered_chat(
    backend: Backend,
    card: ModelCard,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    arguments: Mapping[str, Any] = _NOTHING,
) -> str:
    """The prompt text. arguments: of Backend.render_chat, where they win over what is said here.

    Raises a RequestError for messages that cannot be shown, or that the template refuses.
    """
    render = functools.partial(_render, backend, card, messages, tools, arguments)
    if is_longer((messages, tools, arguments), _INLINE_SIZE):
        return await asyncio.to_thread(render)
    return render()


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


def _render(
    backend: Backend,
    card: ModelCard,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    arguments: Mapping[str, Any],
) -> str:
    shown = convert.conversation(messages, tools, card.chat)
    return backend.render_chat(card.name, shown.messages, **{"tools": shown.tools, **arguments})


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Body):
        return (*vars(value).values(), value.model_extra)
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()
