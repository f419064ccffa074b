"""Renders chats in a sandbox process, so that no template and no chat can stop the event loop."""

import asyncio
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from loraplex.core.errors import InvalidRequestError
from loraplex.serving.sandbox.process import Sandbox, SandboxKind
from loraplex.serving.text.chat_template import NO_TEMPLATE, TOO_BIG, ChatTemplate

MAX_SECONDS: Final = 2.0
"""Processor time for one chat: the longest ones that fit a body take about half of it."""
CHATS: Final = SandboxKind(
    module="loraplex.serving.text.chat_worker",
    work="chats",
    max_seconds=MAX_SECONDS,
    max_bytes=1 << 30,
    error=InvalidRequestError,
    param="messages",
    too_slow=f"the chat template takes more than {MAX_SECONDS:g} s for these messages",
    too_big=TOO_BIG,
)

_INLINE_MESSAGES: Final = 32
"""Shorter chats are written as JSON on the event loop: a thread would take longer."""


class ChatRenderer:
    """Renderer of one model's chats. Those of a tenant wait for each other; no others do."""

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        source: str = "the chat template",
        json_indent: int | None = None,
        kind: SandboxKind = CHATS,
    ) -> None:
        """Take the arguments of `ChatTemplate`.

        Raises ConfigError if a template is not valid Jinja, or needs what is not supported.
        """
        arguments: dict[str, Any] = {
            "templates": dict(templates),
            "special_tokens": dict(special_tokens or {}),
            "source": source,
            "json_indent": json_indent,
        }
        self.text: Final = ChatTemplate(**arguments).text
        """Sources of all templates."""
        self._has_templates = bool(templates)
        self._sandbox = Sandbox(kind, json.dumps(arguments).encode)

    async def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the prompt, as `ChatTemplate.render` makes it of JSON values.

        Raises InvalidRequestError also for a chat that exceeds the limits of time or memory, and
        QueueFullError if too many chats wait.
        """
        if not self._has_templates:
            raise InvalidRequestError(NO_TEMPLATE, param="messages")
        chat = functools.partial(_as_json, {"messages": messages, **options})
        is_short = len(messages) <= _INLINE_MESSAGES
        text = await self._sandbox.run(chat() if is_short else await asyncio.to_thread(chat))
        return text.decode(errors="surrogatepass")

    def close(self) -> None:
        """End the processes; chats that are being rendered fail."""
        self._sandbox.close()


def _as_json(chat: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(chat, ensure_ascii=False, default=dict)
    except RecursionError:
        raise InvalidRequestError(
            "the chat has values that are nested too deep", param="messages"
        ) from None
    return text.encode(errors="surrogatepass")
