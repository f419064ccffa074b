"""--llgtrt-compat: requests that llgtrt refuses are refused, and responses have llgtrt's form."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from loraplex.core.errors import InvalidParameterError, PayloadTooLargeError, RequestError
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
from loraplex.frontends.openai.llgtrt.dialect import BodyT, LlgtrtDialect
from loraplex.frontends.openai.logprobs import TokenTexts
from loraplex.frontends.openai.schema import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    StreamOptions,
)
from loraplex.frontends.openai.writers import Call, ChatWriter

if TYPE_CHECKING:
    from loraplex.frontends.openai.context import TextContext

MAX_TOKENS = 16
_SPECIAL_TOKENS: Mapping[str, Any] = MappingProxyType({"skip_special_tokens": False})
"""An output shows them, such as the one before a tool call."""


class CompatDialect(LlgtrtDialect):
    """Each difference from LlgtrtDialect has a row in `differences`."""

    errors = CompatErrors()
    unready_status = 500
    is_ready_at_once = True

    async def read(self, context: "TextContext", request: Request, schema: type[BodyT]) -> BodyT:
        if "json" not in request.headers.get("content-type", "").lower():
            raise ShapeError("the body must be sent as Content-Type: application/json", 415)
        try:
            body = await super().read(context, request, schema)
        except PayloadTooLargeError as error:
            raise ShapeError(error.message, 413) from error
        except RequestError as error:
            status = 422 if isinstance(error, InvalidParameterError) else 400
            raise ShapeError(error.message, status, param=error.param) from error
        check_shape(body)
        return body

    def completion_changes(self, body: CompletionBody) -> dict[str, Any]:
        refuse(body, COMPLETION_REFUSALS)
        changes = super().completion_changes(body) | _length(body) | _usage(body)
        return {**changes, **_SPECIAL_TOKENS}

    def chat_changes(self, body: ChatBody) -> dict[str, Any]:
        refuse(body, CHAT_REFUSALS)
        length = _length(body) if body.max_completion_tokens is None else {}
        tools = tool_changes(body, self.json_start_token)
        # An output is one text, whatever it consists of.
        plain = {"separate_reasoning": False, **_SPECIAL_TOKENS}
        return super().chat_changes(body) | length | _usage(body) | tools | plain

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
