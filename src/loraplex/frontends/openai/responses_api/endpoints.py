"""POST /v1/responses, and what can be done with a response that is kept."""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.errors import (
    InvalidParameterError,
    ResponseNotFoundError,
    UnsupportedFeatureError,
)
from loraplex.core.principal import Principal
from loraplex.frontends.long_json import encoded
from loraplex.frontends.openai.adapter_fields import ModelTarget
from loraplex.frontends.openai.context import (
    BY_HEADER,
    DIGESTS,
    OpenAIContext,
    adopt_request_id,
    json_response,
    request_id,
)
from loraplex.frontends.openai.convert import ChatRequest, chat_request, rendered
from loraplex.frontends.openai.generation import origin
from loraplex.frontends.openai.logprobs import TokenTexts
from loraplex.frontends.openai.responses_api import convert, refusals
from loraplex.frontends.openai.responses_api import objects as wire
from loraplex.frontends.openai.responses_api.errors import StreamErrors, in_own_words
from loraplex.frontends.openai.responses_api.input_items import Item, new_id, read_input
from loraplex.frontends.openai.responses_api.schema import ResponsesBody
from loraplex.frontends.openai.responses_api.store import ResponseStore, StoredResponse
from loraplex.frontends.openai.responses_api.writer import ResponsesWriter, begun
from loraplex.frontends.openai.sampling import value_of
from loraplex.frontends.openai.schema import ChatBody, Message
from loraplex.frontends.openai.sse import ChunkStream, output_work
from loraplex.frontends.openai.tools import left_out
from loraplex.frontends.openai.writers import CallFields
from loraplex.frontends.openapi.operation import (
    ANY_ERROR,
    JSON,
    OF_NAMES,
    Media,
    Parameter,
    ResponseDoc,
    described,
    events_of,
    json_body,
    json_of,
)
from loraplex.frontends.streams import (
    IndexedOutput,
    ReadyOutput,
    done,
    generate_all,
    until_disconnect,
    writing_work,
    written,
)

_EVENTS: Final = "Each has its type as its name, too; response.completed or its like is the last."
MAX_LISTED: Final = 100
DEFAULT_LISTED: Final = 20
LIMIT: Final[Mapping[str, Any]] = {"type": "integer", "minimum": 1, "maximum": MAX_LISTED}
ORDERS: Final[Mapping[str, Any]] = {"type": "string", "enum": ["asc", "desc"]}
_PAGING: Final = (
    Parameter("order", "`asc` or `desc`, the latest first, as it is if absent.", ORDERS),
    Parameter("limit", f"1 to {MAX_LISTED}; {DEFAULT_LISTED} if absent.", LIMIT),
    Parameter("after", "The id of the item before the first one."),
)


class ResponsesEndpoints:
    """Body in, response or event stream out. A client that goes away aborts its request."""

    def __init__(self, context: OpenAIContext) -> None:
        self._context = context
        self._store = ResponseStore(context.options.stored_responses)

    @described(
        ResponseDoc(200, (Media(JSON, wire.ResponseObject), events_of(wire.AnyEvent, _EVENTS))),
        tag="responses",
        body=json_body(ResponsesBody),
        headers=(BY_HEADER,),
        response_headers=(DIGESTS,),
        errors=ANY_ERROR,
    )
    async def create(self, request: Request) -> Response:
        """A response to an input. With stream it comes as events."""
        principal = self._context.principal(request)
        body = await self._body(request)
        items = self._conversation(body, principal)
        with in_own_words():
            chat = await self._chat_request(request, body, items, principal)
        writer = self._writer(body, chat, items, principal)
        ready = ReadyOutput()
        outputs = generate_all(
            self._context.backend, chat.requests, principal, chat.reworded, ready
        )
        if body.stream:
            errors = StreamErrors(writer.failure)
            return ChunkStream(
                outputs, writer, request_id(request), errors, b"", _event, output_work, ready
            )
        with in_own_words():
            return await until_disconnect(request.receive, _run(outputs, writer))

    @described(
        json_of(wire.InputTokens),
        tag="responses",
        body=json_body(ResponsesBody),
        errors=(*OF_NAMES, ResponseNotFoundError),
    )
    async def count_input_tokens(self, request: Request) -> Response:
        """How many tokens an input has."""
        principal = self._context.principal(request)
        body = await self._body(request)
        items = self._conversation(body, principal)
        with in_own_words():
            chat = convert.chat_body(body, items)
            target = await self._context.options.dialect.target(self._context, chat, principal)
            num_tokens = await count_tokens(self._context, chat, target)
        return json_response(wire.InputTokens(input_tokens=num_tokens))

    @described(
        json_of(wire.ResponseObject),
        tag="responses",
        query=(Parameter("stream", "True is refused."),),
        errors=(UnsupportedFeatureError, ResponseNotFoundError),
    )
    async def get(self, request: Request) -> Response:
        """A response that is kept."""
        stored = self._stored(request)
        if request.query_params.get("stream") == "true":
            raise UnsupportedFeatureError(
                "stream is not supported here: a response is kept once it is whole", param="stream"
            )
        return Response(stored.response, media_type="application/json")

    @described(json_of(wire.Deleted), tag="responses", errors=(ResponseNotFoundError,))
    async def delete(self, request: Request) -> Response:
        """A response is no longer kept."""
        response_id = request.path_params["response_id"]
        self._store.remove(self._context.principal(request).tenant, response_id)
        return json_response(wire.Deleted(id=response_id))

    @described(tag="responses", errors=(InvalidParameterError, ResponseNotFoundError))
    async def cancel(self, request: Request) -> Response:
        """Refused: there are no responses in the background."""
        self._stored(request)
        raise InvalidParameterError(
            "only a response with background: true can be cancelled, and this one is whole; a "
            "stream is cancelled by closing it",
            param="response_id",
        )

    @described(
        json_of(wire.ItemList),
        tag="responses",
        query=_PAGING,
        errors=(InvalidParameterError, ResponseNotFoundError),
    )
    async def input_items(self, request: Request) -> Response:
        """Input items of a stored response, including earlier ones."""
        items: list[Item] = msgspec.json.decode(self._stored(request).given)
        return json_response(page(items, request.query_params))

    async def _chat_request(
        self, request: Request, body: ResponsesBody, items: list[Item], principal: Principal
    ) -> ChatRequest:
        chat = convert.chat_body(body, items)
        if body.truncation == "auto":
            chat = await fitting(self._context, chat, principal)
        return await chat_request(self._context, chat, principal, origin(self._context, request))

    def _writer(
        self, body: ResponsesBody, chat: ChatRequest, items: list[Item], principal: Principal
    ) -> ResponsesWriter:
        model = chat.requests[0].model
        call = CallFields(
            response_id=new_id("resp"),
            created=int(time.time()),
            model=model if body.model is None else body.model,
            requests=chat.requests,
            notes=left_out(body.tools),
        )
        is_kept = body.store is not False and self._store.is_open

        def keep(response: wire.ResponseObject) -> None:
            if is_kept:
                self._keep(principal, items, response)

        first = begun(body, call, is_kept=is_kept)
        texts = TokenTexts(self._context.backend, model)
        return ResponsesWriter(first, call, texts, chat.reading, keep)

    async def _body(self, request: Request) -> ResponsesBody:
        body = await self._context.parse(request, ResponsesBody)
        self._context.refuse_extra(body, refusals.KNOWN, (convert.check, convert.check_tools))
        if body.request_id or body.rid:
            adopt_request_id(request, value_of(body, "request_id"))
        return body

    def _conversation(self, body: ResponsesBody, principal: Principal) -> list[Item]:
        given = read_input(body.input)
        if body.previous_response_id is None:
            return given
        stored = self._store.get(
            principal.tenant, body.previous_response_id, param="previous_response_id"
        )
        output: list[Item] = msgspec.json.decode(stored.output)
        # A call that was cut is left out, for no result follows it, unless the client sends one.
        with_result = {item["call_id"] for item in given if item["type"] == "function_call_output"}
        kept = [
            item
            for item in output
            if item["type"] != "function_call"
            or item["status"] == "completed"
            or item["call_id"] in with_result
        ]
        return [*msgspec.json.decode(stored.given), *kept, *given]

    def _keep(self, principal: Principal, items: list[Item], response: wire.ResponseObject) -> None:
        texts = (b"".join(encoded(part)) for part in (response, items, response.output))
        self._store.keep(principal.tenant, response.id, StoredResponse(*texts))

    def _stored(self, request: Request) -> StoredResponse:
        tenant = self._context.principal(request).tenant
        return self._store.get(tenant, request.path_params["response_id"])


async def _run(outputs: AsyncGenerator[IndexedOutput, None], writer: ResponsesWriter) -> Response:
    """Run to the end without sending events. Return the whole response."""
    headers: Mapping[str, str] = {}
    work = 0
    async with aclosing(outputs):
        async for item in outputs:
            headers = writer.headers(item)
            work += writing_work(item[1])
            await written(functools.partial(_exhaust, writer.chunks(item)), item[1])

    def whole() -> Response:
        _exhaust(writer.last_chunks())
        return json_response(writer.response)

    response = await done(whole, work)
    response.headers.update(headers)
    return response


def _exhaust(events: Any) -> None:
    for _ in events:
        pass


def _event(event: wire.Event) -> bytes:
    """Event with its name in a line of its own, as OpenAI's."""
    name = str(event.__struct_config__.tag).encode()
    return b"".join((b"event: ", name, b"\ndata: ", *encoded(event), b"\n\n"))


def page(items: Sequence[Item], query: Mapping[str, str]) -> wire.ItemList:
    """OpenAI's paging: newest first unless `order` is asc; `limit` items after the id `after`."""
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise InvalidParameterError(f"order must be asc or desc, got {order[:64]!r}", param="order")
    limit = query.get("limit", str(DEFAULT_LISTED))
    if limit not in map(str, range(1, MAX_LISTED + 1)):
        raise InvalidParameterError(
            f"limit must be in [1, {MAX_LISTED}], got {limit[:64]!r}", param="limit"
        )
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        places = [i for i, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise InvalidParameterError(f"after: there is no item {after[:80]!r}", param="after")
        ordered = ordered[places[0] + 1 :]
    shown = ordered[: int(limit)]
    return wire.ItemList(
        data=list(shown),
        first_id=shown[0]["id"] if shown else None,
        last_id=shown[-1]["id"] if shown else None,
        has_more=len(ordered) > len(shown),
    )


async def fitting(context: OpenAIContext, body: ChatBody, principal: Principal) -> ChatBody:
    """The body with the latest turns that fit in addition to the output.

    System messages at the beginning stay, and so does the last turn: if that is too long, the
    request is refused as any other.
    """
    target = await context.options.dialect.target(context, body, principal)
    max_prompt_tokens = _max_prompt_tokens(body, target)
    choices = [body.model_copy(update={"messages": kept}) for kept in _choices(body.messages)]
    first, last = 0, len(choices) - 1
    while first < last:
        middle = (first + last) // 2
        if await count_tokens(context, choices[middle], target) <= max_prompt_tokens:
            last = middle
        else:
            first = middle + 1
    return choices[first]


async def count_tokens(context: OpenAIContext, body: ChatBody, target: ModelTarget) -> int:
    """Number of tokens of the rendered conversation."""
    prompt = await rendered(context, body, target)
    token_ids = await asyncio.to_thread(
        context.backend.model(target.model.name).tokenize,
        prompt,
        add_special_tokens=body.add_special_tokens is True,
    )
    return len(token_ids)


def _max_prompt_tokens(body: ChatBody, target: ModelTarget) -> int:
    card = target.model
    max_input = card.max_model_len - (body.max_completion_tokens or 1)
    return max_input if card.max_input_len is None else min(max_input, card.max_input_len)


def _choices(messages: Sequence[Message]) -> list[list[Message]]:
    """All of them, then fewer and fewer: each begins with a turn of the user."""
    num_head = next(
        (i for i, one in enumerate(messages) if one["role"] not in ("system", "developer")), 0
    )
    head, rest = list(messages[:num_head]), list(messages[num_head:])
    starts = [i for i, one in enumerate(rest) if one["role"] == "user" and i > 0]
    return [list(messages), *(head + rest[start:] for start in starts)]
