"""POST /v1/completions and /v1/chat/completions."""

import functools
from collections.abc import Callable
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.errors import AdapterNotFoundError, LoraplexError
from loraplex.core.principal import Principal
from loraplex.core.request import GenerateRequest
from loraplex.frontends.field_names import as_sent
from loraplex.frontends.openai import convert
from loraplex.frontends.openai.adapter_fields import ADAPTER_HEADER, adapter_field
from loraplex.frontends.openai.context import (
    BY_HEADER,
    DIGESTS,
    TextContext,
    adopt_request_id,
    json_response,
    request_id,
)
from loraplex.frontends.openai.logprobs import TokenTexts
from loraplex.frontends.openai.responses import ChatCompletion, ChatCompletionChunk, Completion
from loraplex.frontends.openai.sampling import sent_names, value_of
from loraplex.frontends.openai.schema import ChatBody, CompletionBody, GenerationBody, StreamOptions
from loraplex.frontends.openai.sse import ChunkStream
from loraplex.frontends.openai.writers import (
    CallFields,
    ChatWriter,
    CompletionWriter,
    ResponseWriter,
    adapter_headers,
)
from loraplex.frontends.openapi.operation import (
    ANY_ERROR,
    JSON,
    Media,
    ResponseDoc,
    described,
    events_of,
    json_body,
)
from loraplex.frontends.streams import (
    IndexedOutput,
    ReadyOutput,
    done,
    gather_all,
    generate_all,
    until_disconnect,
    writing_work,
)
from loraplex.serving.continuation import response_unix_seconds

ENDS = "[DONE]"
"""The data of the last event of a stream."""


class GenerationEndpoints:
    """Endpoints that generate. A client that disconnects aborts its requests."""

    def __init__(self, context: TextContext) -> None:
        self._context = context
        self._dialect = context.options.dialect
        self._read = self._dialect.reader(context)

    @described(
        ResponseDoc(200, (Media(JSON, Completion), events_of(Completion, ENDS))),
        tag="completions",
        body=json_body(CompletionBody),
        headers=(BY_HEADER,),
        response_headers=(DIGESTS,),
        errors=ANY_ERROR,
    )
    async def completions(self, request: Request) -> Response:
        """Text after a prompt. With stream it comes as events."""
        principal = self._context.principal(request)
        body = await self._read(request, CompletionBody)
        if body.request_id or body.rid:
            adopt_request_id(request, value_of(body, "request_id"))
        target = await self._dialect.target(self._context, body, principal)
        requests = convert.completion_requests(
            body, target, origin(self._context, request), self._context.options.max_prompts
        )
        return await self._respond(
            request, principal, body, requests, "cmpl", CompletionWriter, echo=bool(body.echo)
        )

    @described(
        ResponseDoc(200, (Media(JSON, ChatCompletion), events_of(ChatCompletionChunk, ENDS))),
        tag="completions",
        body=json_body(ChatBody),
        headers=(BY_HEADER,),
        response_headers=(DIGESTS,),
        errors=ANY_ERROR,
    )
    async def chat_completions(self, request: Request) -> Response:
        """The next message of a conversation. With stream it comes as events."""
        principal = self._context.principal(request)
        body = await self._read(request, ChatBody)
        if body.request_id or body.rid:
            adopt_request_id(request, value_of(body, "request_id"))
        requests, reading, _, role, notes = await convert.chat_request(
            self._context, body, principal, origin(self._context, request)
        )
        return await self._respond(
            request,
            principal,
            body,
            requests,
            "chatcmpl",
            functools.partial(ChatWriter, reading=reading),
            role=role,
            text_before=convert.echoed_message(body, role) if body.echo else "",
            notes=notes,
            prompt_text=reading.prompt if body.return_prompt_text else UNSET,
        )

    async def _respond(
        self,
        request: Request,
        principal: Principal,
        body: GenerationBody,
        requests: tuple[GenerateRequest, ...],
        prefix: str,
        new_writer: Callable[[CallFields, TokenTexts], ResponseWriter],
        **fields: Any,
    ) -> Response:
        """Run the requests. prefix: of the response's id. fields: those that depend on the route.

        The writer of a whole response is made when all outputs are there.
        """
        options = body.stream_options or StreamOptions()
        call = CallFields(
            response_id=f"{prefix}-{request_id(request)}",
            created=response_unix_seconds(),
            model=body.model if body.model is not None else requests[0].model,
            requests=requests,
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
            returns_token_ids=bool(body.return_token_ids),
            wants_prompt_logprobs=body.prompt_logprobs is not None,
            **fields,
        )
        backend = self._context.backend

        def reworded(error: LoraplexError) -> LoraplexError:
            field = adapter_field(body, request.headers.get(ADAPTER_HEADER, ""))
            if field and isinstance(error, AdapterNotFoundError):
                error = AdapterNotFoundError(f"{field}: {error.message}", param=field)
            names = {"adapter": "adapters" if body.adapters else "model"}
            return as_sent(error, {**names, **sent_names(body)})

        def writer() -> ResponseWriter:
            as_ids = bool(body.return_tokens_as_token_ids)
            texts = TokenTexts(backend, requests[0].model, as_ids=as_ids)
            return self._dialect.writer(new_writer(call, texts), body, texts)

        if body.stream:
            ready = ReadyOutput()
            return ChunkStream(
                generate_all(backend, requests, principal, reworded, ready),
                writer(),
                request_id(request),
                self._dialect.errors,
                work_of=_work_of(call),
                ready=ready,
            )
        whole = await until_disconnect(
            request.receive, gather_all(backend, requests, principal, reworded)
        )
        work = sum(map(_work_of(call), enumerate(whole)))
        response = await done(lambda: json_response(writer().body(whole)), work)
        response.headers.update(adapter_headers(*whole))
        return response


def origin(context: TextContext, request: Request) -> convert.Origin:
    adapter = request.headers.get(ADAPTER_HEADER, "")
    return convert.Origin(request_id(request), context.backend.new_request_id, adapter)


def _work_of(call: CallFields) -> Callable[[IndexedOutput], int]:
    """Return a function that returns the work of an output: the first one of a request has the
    prompt."""
    begun: set[int] = set()

    def work(item: IndexedOutput) -> int:
        index, output = item
        if index in begun:
            return writing_work(output)
        begun.add(index)
        request = call.requests[index]
        repeated = request.sampling.n * len(output.prompt_token_ids) * request.repeated_bytes
        return writing_work(output) + repeated

    return work
