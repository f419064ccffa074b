"""--llgtrt-compat: requests that llgtrt refuses are refused, and responses have llgtrt's form."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from starlette.requests import Request

from loraplex.core.errors import InvalidParameterError, PayloadTooLargeError, RequestError
from loraplex.frontends.openai.context import GenerationT, TextContext
from loraplex.frontends.openai.expanded_prompt import ResponseWriter
from loraplex.frontends.openai.llgtrt.compat_errors import CompatErrors, ShapeError
from loraplex.frontends.openai.llgtrt.compat_refusals import (
    CHAT_REFUSALS,
    COMPLETION_REFUSALS,
    check_shape,
    refuse,
)
from loraplex.frontends.openai.llgtrt.compat_responses import CompatWriter
from loraplex.frontends.openai.llgtrt.compat_tools import template_tools, tool_changes
from loraplex.frontends.openai.llgtrt.dialect import LlgtrtDialect
from loraplex.frontends.openai.logprobs import TokenTexts
from loraplex.frontends.openai.schema import (
    ChatBody,
    GenerationBody,
    StreamOptions,
)
from loraplex.frontends.openai.writers import Call, ChatWriter

MAX_TOKENS = 16
_SPECIAL_TOKENS: Mapping[str, Any] = MappingProxyType({"skip_special_tokens": False})
"""An output shows them, such as the one before a tool call."""


class CompatDialect(LlgtrtDialect):
    """Each difference from LlgtrtDialect has a row in `differences`."""

    errors = CompatErrors()
    unready_status = 500
    is_ready_at_once = True

    async def parse(
        self, context: TextContext, request: Request, schema: type[GenerationT]
    ) -> GenerationT:
        if "json" not in request.headers.get("content-type", "").lower():
            raise ShapeError("the body must be sent as Content-Type: application/json", 415)
        try:
            body = await super().parse(context, request, schema)
        except PayloadTooLargeError as error:
            raise ShapeError(error.message, 413) from error
        except RequestError as error:
            status = 422 if isinstance(error, InvalidParameterError) else 400
            raise ShapeError(error.message, status, param=error.param) from error
        check_shape(body)
        return body

    def changes(self, body: GenerationBody) -> dict[str, Any]:
        if not isinstance(body, ChatBody):
            refuse(body, COMPLETION_REFUSALS)
            return {**super().changes(body), **_length(body), **_usage(body), **_SPECIAL_TOKENS}
        refuse(body, CHAT_REFUSALS)
        length = _length(body) if body.max_completion_tokens is None else {}
        tools = tool_changes(body, self.json_start_token)
        # An output is one text, whatever it consists of.
        plain = {"separate_reasoning": False, **_SPECIAL_TOKENS}
        return super().changes(body) | length | _usage(body) | tools | plain

    def rendering(self, body: ChatBody) -> dict[str, Any]:
        return {**template_tools(body), **super().rendering(body)}

    def writer(
        self, writer: ResponseWriter, call: Call, body: GenerationBody, texts: TokenTexts
    ) -> ResponseWriter:
        inner = super().writer(writer, call, body, texts)
        return CompatWriter(inner, is_chat=isinstance(writer, ChatWriter))


def _length(body: GenerationBody) -> dict[str, Any]:
    return {} if body.max_tokens is not None else {"max_tokens": MAX_TOKENS}


def _usage(body: GenerationBody) -> dict[str, Any]:
    """Usage options: a stream has it in every chunk."""
    if not body.stream:
        return {"stream_options": None}
    return {"stream_options": StreamOptions(include_usage=True, continuous_usage_stats=True)}
