"""POST /v1/completions and /v1/chat/completions."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.principal import Principal
from loraplex.core.request import GenerateRequest
from loraplex.frontends.openai import convert
from loraplex.frontends.openai.answers import (
    Call,
    ChatWriter,
    CompletionWriter,
    adapter_headers,
)
from loraplex.frontends.openai.logprobs import TokenTexts
from loraplex.frontends.openai.room import OpenAIRoom, json_response, request_id
from loraplex.frontends.openai.schema import ChatBody, CompletionBody, GenerationBody
from loraplex.frontends.openai.sse import EventStream
from loraplex.frontends.streams import gather_all, generate_all, until_disconnect


class GenerationEndpoints:
    """Body in, answer or event stream out. A client that goes away aborts its requests."""

    def __init__(self, room: OpenAIRoom) -> None:
        self._room = room

    async def completions(self, request: Request) -> Response:
        principal = self._room.principal(request)
        body = await self._room.body(request, CompletionBody)
        target = self._room.target(body.model, principal)
        requests = convert.completion_requests(
            body, target, self._origin(request), self._room.options.max_prompts
        )
        call = _call(request, "cmpl", body, requests, echo=bool(body.echo))
        writer = CompletionWriter(call, self._texts(requests))
        return await self._answer(request, principal, writer, call, bool(body.stream))

    async def chat_completions(self, request: Request) -> Response:
        principal = self._room.principal(request)
        body = await self._room.body(request, ChatBody)
        convert.check_chat(body)
        target = self._room.target(body.model, principal)
        prompt = self._room.backend.render_chat(
            target.model.name,
            convert.chat_messages(body.messages),
            add_generation_prompt=body.add_generation_prompt is not False,
            template_kwargs=body.chat_template_kwargs,
        )
        requests = convert.chat_request(body, target, self._origin(request), prompt)
        call = _call(request, "chatcmpl", body, requests)
        writer = ChatWriter(call, self._texts(requests))
        return await self._answer(request, principal, writer, call, bool(body.stream))

    async def _answer(
        self,
        request: Request,
        principal: Principal,
        writer: CompletionWriter | ChatWriter,
        call: Call,
        is_stream: bool,
    ) -> Response:
        backend = self._room.backend
        if is_stream:
            outputs = generate_all(backend, call.requests, principal)
            return EventStream(outputs, writer, request_id(request))
        whole = await until_disconnect(
            request.receive, gather_all(backend, call.requests, principal)
        )
        response = json_response(writer.body(whole))
        response.headers.update(adapter_headers(whole[0]))
        return response

    def _origin(self, request: Request) -> convert.Origin:
        return convert.Origin(request_id(request), self._room.backend.new_request_id)

    def _texts(self, requests: tuple[GenerateRequest, ...]) -> TokenTexts:
        return TokenTexts(self._room.backend, requests[0].model)


def _call(
    request: Request,
    prefix: str,
    body: GenerationBody,
    requests: tuple[GenerateRequest, ...],
    **fields: Any,
) -> Call:
    return Call(
        response_id=f"{prefix}-{request_id(request)}",
        created=int(time.time()),
        model=body.model if body.model is not None else requests[0].model,
        requests=requests,
        include_usage=body.include_usage,
        wants_prompt_logprobs=body.prompt_logprobs is not None,
        **fields,
    )
