"""--llgtrt-compat: requests that llgtrt refuses are refused, and responses have llgtrt's form."""

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from loraplex.core.errors import (
    InvalidParameterError,
    LoraplexError,
    PayloadTooLargeError,
    RequestError,
    UnauthenticatedError,
)
from loraplex.core.output import RequestOutput
from loraplex.frontends.openai.context import GenerationT, TextContext
from loraplex.frontends.openai.llgtrt.dialect import DEFAULT_MAX_TOKENS, LlgtrtDialect
from loraplex.frontends.openai.logprobs import TokenTexts
from loraplex.frontends.openai.schema import (
    ChatBody,
    GenerationBody,
    StreamOptions,
)
from loraplex.frontends.openai.writers import ChatWriter, ResponseWriter
from loraplex.frontends.openapi.operation import JSON, TEXT, Media, ResponseDoc, by_status
from loraplex.frontends.streams import IndexedOutput

_SPECIAL_TOKENS: Mapping[str, Any] = MappingProxyType({"skip_special_tokens": False})
"""An output shows them, such as the one before a tool call."""
SHAPE_STATUSES: Final = (400, 413, 415, 422)


class ShapeError(RequestError):
    """The body is no JSON, or a field is missing or of another type."""

    def __init__(self, message: str, status: int, *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.status = status


class CompatError(msgspec.Struct, frozen=True):
    error: str


class CompatEventDetail(msgspec.Struct, frozen=True):
    message: str
    status_code: int = 500


class CompatErrorEvent(msgspec.Struct, frozen=True):
    error: CompatEventDetail


class CompatErrors:
    def response(self, error: LoraplexError) -> Response:
        if isinstance(error, ShapeError):
            return PlainTextResponse(error.message, error.status)
        if isinstance(error, UnauthenticatedError):
            return Response(status_code=401)
        body = msgspec.json.encode(CompatError(error.message))
        return Response(body, 500, media_type="application/json")

    @property
    def event_type(self) -> type[msgspec.Struct]:
        return CompatErrorEvent

    def responses(self, kinds: Iterable[type[LoraplexError]]) -> Iterable[ResponseDoc]:
        return by_status(row for kind in kinds for row in _rows(kind))

    def events(self, error: LoraplexError) -> tuple[msgspec.Struct, ...]:
        return (CompatErrorEvent(CompatEventDetail(error.message)),)


def _rows(kind: type[LoraplexError]) -> Iterable[tuple[int, Media | None]]:
    if issubclass(kind, UnauthenticatedError):
        return ((401, None),)
    shapes = ((status, Media(TEXT)) for status in SHAPE_STATUSES)
    return ((500, Media(JSON, CompatError)), *shapes)


ROLES: Final = ("system", "user", "assistant", "tool")


class CompatRefusal(NamedTuple):
    field: str
    applies: Callable[[Any], bool]
    """Whether a body uses the feature."""
    message: str


COMPLETION_REFUSALS: Final = (
    CompatRefusal(
        "prompt", lambda body: not _is_one_text(body.prompt), "prompt must be a single string"
    ),
    CompatRefusal("logprobs", lambda body: body.logprobs is not None, "logprobs not supported yet"),
    CompatRefusal(
        "best_of", lambda body: body.best_of not in (None, 1), "best_of not supported yet"
    ),
    CompatRefusal("echo", lambda body: bool(body.echo), "echo not supported yet"),
    CompatRefusal(
        "suffix", lambda body: _extra(body, "suffix") is not None, "suffix not supported yet"
    ),
    CompatRefusal(
        "logit_bias", lambda body: body.logit_bias is not None, "logit_bias not supported yet"
    ),
)

CHAT_REFUSALS: Final = (
    CompatRefusal(
        "logit_bias", lambda body: body.logit_bias is not None, "logit_bias not supported yet"
    ),
    CompatRefusal(
        "top_logprobs",
        lambda body: (body.top_logprobs or 0) > 1,
        "logprobs > 1 not supported yet",
    ),
    CompatRefusal(
        "tool_choice",
        lambda body: isinstance(body.tool_choice, dict),
        "only simple options are currently supported for tool_choice",
    ),
    CompatRefusal("messages", lambda body: _has_image(body), "unexpected ImageUrl"),
)


def refuse(body: GenerationBody, refusals: Sequence[CompatRefusal]) -> None:
    """Raise InvalidParameterError for the first feature that the body uses."""
    for refusal in refusals:
        if refusal.applies(body):
            raise InvalidParameterError(refusal.message, param=refusal.field)


def check_shape(body: GenerationBody) -> None:
    """Raises ShapeError for what its parser does not read."""
    if body.model is None:
        raise ShapeError("model is required", 422, param="model")
    if isinstance(body.stop, str):
        raise ShapeError("stop must be a list of strings", 422, param="stop")
    if not isinstance(body, ChatBody):
        return
    for index, message in enumerate(body.messages):
        role = message["role"]
        if role not in ROLES:
            raise ShapeError(
                f"messages[{index}].role must be one of {', '.join(ROLES)}, got {role!r}",
                422,
                param=f"messages[{index}].role",
            )


def _is_one_text(prompt: Any) -> bool:
    is_list = isinstance(prompt, list)
    return isinstance(prompt[0] if is_list and len(prompt) == 1 else prompt, str)


def _has_image(body: ChatBody) -> bool:
    contents = [message.get("content") for message in body.messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(part["type"] == "image_url" for part in parts)


def _extra(body: GenerationBody, field: str) -> Any:
    return (body.model_extra or {}).get(field)


class CompatUsage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompatResponse(Struct, frozen=True, kw_only=True):
    """A whole response or a chunk, of a completion or a chat."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: None = None
    choices: list[dict[str, Any]]
    usage: CompatUsage | None
    expanded_prompt: str | None


class CompatWriter:
    """Another writer's responses in llgtrt's form."""

    def __init__(self, writer: ResponseWriter, *, is_chat: bool) -> None:
        self._writer = writer
        self._is_chat = is_chat
        self._id = f"cmpl-{uuid.uuid4()}"

    def headers(self, first: IndexedOutput) -> Mapping[str, str]:
        return self._writer.headers(first)

    def chunks(self, item: IndexedOutput) -> Iterator[CompatResponse]:
        for chunk in self._writer.chunks(item):
            choices = [self._chunk_choice(choice) for choice in chunk.choices]
            sent = [choice for choice in choices if _has_content(choice)]
            if sent:
                yield self._response(chunk, sent)

    def last_chunks(self) -> Iterator[CompatResponse]:
        """None: every chunk had the usage."""
        yield from ()

    def body(self, outputs: Sequence[RequestOutput]) -> CompatResponse:
        response = self._writer.body(outputs)
        return self._response(response, [self._choice(choice) for choice in response.choices])

    def _response(self, response: Any, choices: list[dict[str, Any]]) -> CompatResponse:
        usage = response.usage
        expanded = response.expanded_prompt
        return CompatResponse(
            id=self._id,
            created=response.created,
            model=response.model,
            choices=choices,
            usage=CompatUsage(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
            if usage
            else None,
            expanded_prompt=None if expanded is UNSET else expanded,
        )

    def _choice(self, choice: Any) -> dict[str, Any]:
        said = (
            {"message": {"role": "assistant", "content": choice.message.content}}
            if self._is_chat
            else {"text": choice.text}
        )
        return _with_end(choice, said, choice.logprobs)

    def _chunk_choice(self, choice: Any) -> dict[str, Any]:
        if not self._is_chat:
            return self._choice(choice)
        content = choice.delta.content
        text = "" if content is UNSET or content is None else content
        return _with_end(choice, {"delta": {"role": "assistant", "content": text}}, choice.logprobs)


def _with_end(choice: Any, said: Mapping[str, Any], logprobs: Any) -> dict[str, Any]:
    # OpenAI's `refusal` next to the tokens is not llgtrt's.
    shown = None if logprobs is None else {"content": logprobs.content}
    end = choice.finish_reason
    return {"index": choice.index, **said, "logprobs": shown, "finish_reason": end}


def _has_content(choice: Mapping[str, Any]) -> bool:
    said = choice.get("text") or choice.get("delta", {}).get("content")
    return bool(said or choice["finish_reason"] or choice["logprobs"])


_ANY_OBJECT: Final = {"type": "object"}
_FREE_TEXT: Final = "TEXT: /([^{](.|\\n)*)?/"
_TOOLS: Final = "loraplex_tools"
"""Where the body keeps them for its template: no schema has such a field. What a client sends under
this name is taken out."""


def tool_changes(body: ChatBody, start_token: str) -> dict[str, Any]:
    """Fields of the body with the tools turned into a format of the output."""
    if not body.tools:
        return {"tools": None, "tool_choice": None, _TOOLS: None}
    grammar = tools_grammar(body.tools, body.tool_choice or "auto", start_token)
    kept = {"tools": None, "tool_choice": None, _TOOLS: body.tools}
    if grammar is None:
        return kept
    return kept | {"response_format": {"type": "lark_grammar", "lark_grammar": grammar}}


def template_tools(body: ChatBody) -> dict[str, Any]:
    """An argument of Chats.render."""
    tools = getattr(body, _TOOLS, None)
    return {} if tools is None else {"tools": tools}


def tools_grammar(tools: list[Any], choice: str | dict[str, Any], start_token: str) -> str | None:
    """Grammar in Lark; None: the output is free. Raises InvalidParameterError for other choices."""
    match choice:
        case "none":
            return None
        case "required":
            start = f"{start_token} call".lstrip()
            return "\n".join((f"start: {start}", _call(tools)))
        case "auto":
            start = f"{start_token} call".lstrip()
            return "\n".join((f"start: TEXT | {start}", _FREE_TEXT, _call(tools)))
    raise InvalidParameterError(
        f"tool_choice must be one of auto, none, required, got {choice!r}", param="tool_choice"
    )


def _call(tools: list[Any]) -> str:
    calls = [_call_schema(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return f"call: %json {json.dumps(schema)}"


def _call_schema(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidParameterError(
            f'{where} must be an object as {{"type": "function", "function": {{"name": ...}}}}',
            param=where,
        )
    parameters = function.get("parameters")
    is_strict = function.get("strict") is True and isinstance(parameters, dict)
    return {
        "type": "object",
        "properties": {
            "type": {"const": "function"},
            "name": {"const": function["name"]},
            "parameters": parameters if is_strict else _ANY_OBJECT,
        },
        "required": ["type", "name", "parameters"],
        "additionalProperties": False,
    }


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
        self, writer: ResponseWriter, body: GenerationBody, texts: TokenTexts
    ) -> ResponseWriter:
        inner = super().writer(writer, body, texts)
        return CompatWriter(inner, is_chat=isinstance(writer, ChatWriter))


def _length(body: GenerationBody) -> dict[str, Any]:
    return {} if body.max_tokens is not None else {"max_tokens": DEFAULT_MAX_TOKENS}


def _usage(body: GenerationBody) -> dict[str, Any]:
    """Usage options: a stream has it in every chunk."""
    if not body.stream:
        return {"stream_options": None}
    return {"stream_options": StreamOptions(include_usage=True, continuous_usage_stats=True)}
