"""A conversation whose last message is not over: the model goes on with it.

A template closes every message, so the last one gets a mark at its end, and the rendered text is
cut where the mark stands.
"""

from collections.abc import Sequence
from typing import Any, Final

from loraplex.core.errors import InvalidRequestError

_MARK: Final = "\ue000continue\ue001"
"""Mark of private characters, for which no template looks."""

_PROBE: Final = " "
"""Text after the mark: a template that strips white space would strip the message's own."""


def with_mark(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Normal messages, the last of which ends with the mark. Raises InvalidRequestError if it has
    no content to go on with."""
    *before, last = messages
    where = f"messages[{len(before)}]"
    content = last.get("content")
    if not content or not isinstance(content, str | list) or last.get("tool_calls"):
        raise InvalidRequestError(
            f"continue_final_message: {where} has no text to continue", param=f"{where}.content"
        )
    if any(_MARK in str(message.get("content")) for message in messages):
        raise InvalidRequestError(
            f"continue_final_message: a message holds {_MARK!r}, which is not for messages",
            param="messages",
        )
    return [*before, {**last, "content": _marked(content)}]


def _marked(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content + _MARK + _PROBE
    *parts, last = content
    return [*parts, {**last, "text": last["text"] + _MARK + _PROBE}]


def cut_at_mark(text: str) -> str:
    """The rendered text up to the mark. Raises InvalidRequestError if the template has left the
    last message out."""
    before, mark, after = text.rpartition(_MARK)
    if not mark:
        raise InvalidRequestError(
            "continue_final_message: the chat template of this model does not write the last "
            "message as it is, so it cannot be continued",
            param="continue_final_message",
        )
    return before if after.startswith(_PROBE) else before.rstrip()
