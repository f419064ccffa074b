"""POST /generate, /generate_stream and /."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.errors import (
    InvalidParameterError,
    LoraplexError,
    UnauthenticatedError,
    UnsupportedFeatureError,
)
from loraplex.core.principal import Principal
from loraplex.core.request import GenerateRequest
from loraplex.frontends.field_names import as_sent, named_as_sent
from loraplex.frontends.openai import convert
from loraplex.frontends.openai.adapter_fields import ADAPTER_HEADER, ModelTarget
from loraplex.frontends.openai.body import validated
from loraplex.frontends.openai.context import (
    BY_HEADER,
    DIGESTS,
    OpenAIContext,
    json_response,
    request_id,
)
from loraplex.frontends.openai.convert import rendered_chat
from loraplex.frontends.openai.errors import ErrorBody, error_response, wire_error, wire_row
from loraplex.frontends.openai.logprobs import TokenTexts
from loraplex.frontends.openai.lorax.schema import (
    GenerateBody,
    Generated,
    Parameters,
    StreamedToken,
)
from loraplex.frontends.openai.lorax.writer import LoraxWriter
from loraplex.frontends.openai.schema import CompletionBody, Message
from loraplex.frontends.openai.sse import ChunkStream, output_work
from loraplex.frontends.openai.writers import adapter_headers
from loraplex.frontends.openapi.operation import (
    ANY_ERROR,
    JSON,
    Media,
    ResponseDoc,
    by_status,
    described,
    events_of,
    json_body,
    json_of,
)
from loraplex.frontends.streams import (
    ReadyOutput,
    gather_all,
    generate_all,
    until_disconnect,
    written,
)

_SAME: Final = (
    *("adapter_id", "best_of", "temperature", "top_k", "top_p", "repetition_penalty", "seed"),
    *("stop", "ignore_eos_token", "response_format"),
)
RENAMED: Final = {"max_tokens": "max_new_tokens", "truncate_prompt_tokens": "truncate"}
"""Our name: LoRAX's."""
REFUSED: Final = {
    "merged_adapters": "use adapters of /v1/completions, each with a scale",
    "typical_p": "use top_p",
    "watermark": "no text is marked",
}
"""What to do instead of a field that is not served."""
_HARMLESS: Final = (None, False)
_NAMES: Final = {**RENAMED, "grammar": "response_format"}

_generates = functools.partial(
    described,
    tag="lorax",
    body=json_body(GenerateBody),
    headers=(BY_HEADER,),
    response_headers=(DIGESTS,),
    errors=ANY_ERROR,
)


class LoraxEndpoints:
    """Endpoints of the first base model: a LoRAX server has one."""

    def __init__(self, context: OpenAIContext) -> None:
        self._context = context

    @_generates(json_of(Generated))
    async def generate(self, request: Request) -> Response:
        """Generate text after a prompt; the response has LoRAX's form."""
        principal = self._context.principal(request)
        body = await self._context.parse(request, GenerateBody)
        return await self._whole(request, principal, body, in_list=False)

    @_generates(ResponseDoc(200, (events_of(StreamedToken),)))
    async def generate_stream(self, request: Request) -> Response:
        """Text after a prompt, token by token."""
        principal = self._context.principal(request)
        body = await self._context.parse(request, GenerateBody)
        return await self._stream(request, principal, body)

    @_generates(ResponseDoc(200, (Media(JSON, list[Generated]), events_of(StreamedToken))))
    async def either(self, request: Request) -> Response:
        """Generate text, streamed if `stream` is set. A whole response is a list of one."""
        principal = self._context.principal(request)
        body = await self._context.parse(request, GenerateBody)
        if body.stream:
            return await self._stream(request, principal, body)
        return await self._whole(request, principal, body, in_list=True)

    async def _whole(
        self, request: Request, principal: Principal, body: GenerateBody, *, in_list: bool
    ) -> Response:
        parameters = body.parameters or Parameters()
        with_details = bool(parameters.details)
        completion_request, texts = await self._request(
            request, principal, body, shows_tokens=with_details
        )
        writer = _writer(body, parameters, texts)
        [output] = await until_disconnect(
            request.receive,
            gather_all(self._context.backend, completion_request, principal, _reworded),
        )

        def response() -> Response:
            whole = writer.whole(output, with_details=with_details)
            return json_response([whole] if in_list else whole)

        made = await written(response, output)
        made.headers.update(adapter_headers(output))
        return made

    async def _stream(self, request: Request, principal: Principal, body: GenerateBody) -> Response:
        parameters = body.parameters or Parameters()
        if parameters.decoder_input_details:
            raise InvalidParameterError(
                "decoder_input_details is not for a stream", param="decoder_input_details"
            )
        completion_request, texts = await self._request(request, principal, body, shows_tokens=True)
        writer = _writer(body, parameters, texts)
        ready = ReadyOutput()
        return ChunkStream(
            generate_all(self._context.backend, completion_request, principal, _reworded, ready),
            writer,
            request_id(request),
            LORAX_ERRORS,
            end=b"",
            work_of=output_work,
            ready=ready,
        )

    async def _request(
        self, request: Request, principal: Principal, body: GenerateBody, *, shows_tokens: bool
    ) -> tuple[Sequence[GenerateRequest], TokenTexts]:
        target = await self._context.target(None, principal)
        parameters = body.parameters or Parameters()
        origin = convert.Origin(
            request_id(request),
            self._context.backend.new_request_id,
            request.headers.get(ADAPTER_HEADER, ""),
        )
        with named_as_sent(RENAMED):
            completion = completion_body(
                await self._prompt(body, parameters, target), parameters, shows_tokens=shows_tokens
            )
            [completion_request] = convert.completion_requests(
                completion, target, origin, max_prompts=1
            )
        sampling = msgspec.structs.replace(
            completion_request.sampling, max_tokens=parameters.max_new_tokens
        )
        texts = TokenTexts(self._context.backend, target.model.name)
        return (completion_request.with_sampling(sampling),), texts

    async def _prompt(self, body: GenerateBody, parameters: Parameters, target: ModelTarget) -> str:
        if not parameters.apply_chat_template:
            return body.inputs
        messages = [Message(role="user", content=body.inputs)]
        return await rendered_chat(self._context.backend, target.model, messages)


def _reworded(error: LoraplexError) -> LoraplexError:
    return as_sent(error, _NAMES)


def _writer(body: GenerateBody, parameters: Parameters, texts: TokenTexts) -> LoraxWriter:
    return LoraxWriter(
        texts,
        text_before=body.inputs if parameters.return_full_text else "",
        seed=parameters.seed,
        num_alternatives=parameters.return_k_alternatives or 0,
    )


def completion_body(prompt: str, parameters: Parameters, *, shows_tokens: bool) -> CompletionBody:
    """Raises InvalidParameterError for a value of another type, UnsupportedFeatureError for a field
    that is not served."""
    _refuse(parameters)
    fields: dict[str, Any] = {name: getattr(parameters, name) for name in _SAME}
    fields |= {ours: getattr(parameters, name) for ours, name in RENAMED.items()}
    if not _samples(parameters):
        fields["temperature"] = 0.0
    if shows_tokens:
        fields["logprobs"] = parameters.return_k_alternatives or 0
    if parameters.decoder_input_details:
        fields["prompt_logprobs"] = 0
    return validated(
        CompletionBody,
        fields
        | {
            "prompt": prompt,
            "include_stop_str_in_output": True,
            "add_special_tokens": not parameters.apply_chat_template,
        },
    )


def _samples(parameters: Parameters) -> bool:
    given = (parameters.temperature, parameters.top_k, parameters.top_p)
    return bool(parameters.do_sample) or any(value is not None for value in given)


def _refuse(parameters: Parameters) -> None:
    for name, value in (parameters.model_extra or {}).items():
        if name in REFUSED and value not in _HARMLESS:
            raise UnsupportedFeatureError(f"{name} is not supported; {REFUSED[name]}", param=name)


class ErrorText(msgspec.Struct, frozen=True):
    error: str
    error_type: str


class LoraxErrors:
    """Statuses are those of the OpenAI routes, but a wrong field is 422."""

    def response(self, error: LoraplexError) -> Response:
        response = error_response(error)
        status = _status(response.status_code)
        headers = {
            name: value
            for name, value in response.headers.items()
            if name in ("retry-after", "connection")
        }
        return Response(msgspec.json.encode(_text(error)), status, headers, "application/json")

    def events(self, error: LoraplexError) -> tuple[ErrorText, ...]:
        return (_text(error),)

    @property
    def event_type(self) -> type[msgspec.Struct]:
        return ErrorText

    def responses(self, kinds: Iterable[type[LoraplexError]]) -> Iterable[ResponseDoc]:
        return by_status((_status(wire_row(kind).status), _media(kind)) for kind in kinds)


def _status(openais: int) -> int:
    return 422 if openais == 400 else openais


def _media(kind: type[LoraplexError]) -> Media:
    """Form of an error: authentication errors have OpenAI's."""
    return Media(JSON, ErrorBody if issubclass(kind, UnauthenticatedError) else ErrorText)


def _text(error: LoraplexError) -> ErrorText:
    status = wire_error(error).status
    if status in (429, 503):
        return ErrorText(error.message, "overloaded")
    return ErrorText(error.message, "validation" if status < 500 else "generation")


LORAX_ERRORS = LoraxErrors()
