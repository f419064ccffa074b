"""Conversion of a Responses API body to a chat body: pure functions, and every refusal."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from loraplex.core.errors import InvalidParameterError, UnsupportedFeatureError
from loraplex.frontends.openai.body import validated
from loraplex.frontends.openai.responses_api import refusals
from loraplex.frontends.openai.responses_api.input_items import MAX_ITEMS, Item, messages_of
from loraplex.frontends.openai.responses_api.schema import ResponsesBody
from loraplex.frontends.openai.responses_api.tools import chat_choice, chat_tools
from loraplex.frontends.openai.schema import ChatBody
from loraplex.frontends.openai.unsupported import refuse_unsupported

LOGPROBS: Final = "message.output_text.logprobs"
INCLUDABLE: Final = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""All but the first are about what is never there."""
MAX_PAIRS: Final = 16
MAX_KEY: Final = 64
MAX_VALUE: Final = 512
"""Limits of metadata; the last two in characters."""

_OWN_WAY: Final = frozenset(
    {"tools", "tool_choice", "stream", "stream_options", "top_logprobs", "user"}
)
_SHARED: Final = tuple(
    name
    for name in ResponsesBody.model_fields
    if name in ChatBody.model_fields and name not in {*_OWN_WAY, *refusals.RENAMED}
)
"""Fields that mean the same in both."""


def check(body: ResponsesBody) -> None:
    """Every refusal that needs neither model nor conversation."""
    refuse_unsupported(body, refusals.BY_FIELD)
    for field, advice in refusals.RENAMED.items():
        if getattr(body, field) is not None:
            raise InvalidParameterError(f"{field} is for chats; {advice}", param=field)
    if body.background:
        raise UnsupportedFeatureError("background is not supported; use stream", param="background")
    if body.stream_options is not None and not body.stream:
        raise InvalidParameterError(
            "stream_options is only for stream: true", param="stream_options"
        )
    for name in body.include or ():
        if name not in INCLUDABLE:
            raise InvalidParameterError(
                f"include must have none but {', '.join(INCLUDABLE)}; got {name[:64]!r}",
                param="include",
            )
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise InvalidParameterError(
            f"max_output_tokens must be at least 1, got {body.max_output_tokens}",
            param="max_output_tokens",
        )
    _check_metadata(body.metadata or {})


def check_tools(body: ResponsesBody) -> None:
    chat_tools(body.tools)


def includes_logprobs(body: ResponsesBody) -> bool:
    return LOGPROBS in (body.include or ())


def chat_body(body: ResponsesBody, items: Sequence[Item]) -> ChatBody:
    """What a chat with the whole conversation `items` would send, of a checked body."""
    if len(items) > MAX_ITEMS:
        raise InvalidParameterError(
            f"input and what precedes it have {len(items)} items; at most {MAX_ITEMS} are allowed",
            param="input",
        )
    shared = {name: getattr(body, name) for name in _SHARED}
    return validated(
        ChatBody,
        {
            **{name: value for name, value in shared.items() if value is not None},
            "messages": messages_of(items, body.instructions),
            "max_completion_tokens": body.max_output_tokens,
            "response_format": _response_format(body.text.format if body.text else None),
            "tools": chat_tools(body.tools),
            "tool_choice": chat_choice(body.tool_choice),
            "reasoning_effort": body.reasoning.effort if body.reasoning else None,
            **_logprobs(body),
        },
    )


def _logprobs(body: ResponsesBody) -> dict[str, Any]:
    """Log probability fields; top_logprobs is checked even if it is not used."""
    if not includes_logprobs(body) and 0 <= (body.top_logprobs or 0) <= 20:
        return {}
    return {"logprobs": True, "top_logprobs": body.top_logprobs}


def _response_format(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """text.format, whose schema is not nested."""
    kind = (given or {}).get("type")
    match kind:
        case None if not given:
            return None
        case "text":
            return None
        case "json_object":
            return {"type": "json_object"}
        case "json_schema" if given is not None and isinstance(given.get("schema"), dict | bool):
            return {"type": "json_schema", "json_schema": dict(given)}
        case "json_schema":
            raise InvalidParameterError(
                "text.format.schema must be a JSON schema", param="text.format.schema"
            )
    raise InvalidParameterError(
        f"text.format.type must be text, json_object or json_schema, got {str(kind)[:64]!r}; for "
        "other grammars there is structured_outputs",
        param="text.format.type",
    )


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_PAIRS:
        raise InvalidParameterError(
            f"metadata has {len(metadata)} pairs; at most {MAX_PAIRS} are allowed",
            param="metadata",
        )
    for key, value in metadata.items():
        if len(key) > MAX_KEY or len(value) > MAX_VALUE:
            raise InvalidParameterError(
                f"metadata: a key has up to {MAX_KEY} characters and its value up to {MAX_VALUE}, "
                f"{key[:MAX_KEY]!r} has {len(key)} and {len(value)}",
                param="metadata",
            )
