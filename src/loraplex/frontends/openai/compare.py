"""POST /v1/compare: one prompt over many adapters, their outputs side by side."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.adapter import AdapterChoice
from loraplex.core.errors import InvalidParameterError, LoraplexError
from loraplex.core.output import RequestOutput
from loraplex.core.request import GenerateRequest, check_adapters
from loraplex.core.sampling_params import MAX_LOGPROBS, SamplingParams
from loraplex.core.task import Generate
from loraplex.frontends.adapter_choices import FIELD, read_choice, read_choices
from loraplex.frontends.field_names import as_sent
from loraplex.frontends.openai.adapter_fields import Target
from loraplex.frontends.openai.comparison import (
    Compare,
    CompareChunk,
    CompareEntry,
    Comparison,
    ComparisonWriter,
)
from loraplex.frontends.openai.context import OpenAIContext, json_response, request_id
from loraplex.frontends.openai.convert import (
    check_priority,
    load_policy,
    prompts,
)
from loraplex.frontends.openai.generation import ENDS
from loraplex.frontends.openai.logprobs import TokenTexts
from loraplex.frontends.openai.rendering import rendered_chat
from loraplex.frontends.openai.sampling import sampling_params, sent_names
from loraplex.frontends.openai.schema import CompareBody, Message
from loraplex.frontends.openai.sse import EventStream
from loraplex.frontends.openai.tools import left_out, read_tool_use, served
from loraplex.frontends.openai.unsupported import refuse_unknown, refuse_unsupported
from loraplex.frontends.openapi.operation import (
    ANY_ERROR,
    JSON,
    Media,
    ResponseDoc,
    described,
    events_of,
    json_body,
)
from loraplex.frontends.streams import until_disconnect, writing_work
from loraplex.serving.compare import (
    Compared,
    ComparedOutput,
    compare,
    compare_streaming,
    comparison_requests,
)
from loraplex.serving.continuation import response_unix_seconds
from loraplex.serving.text.completion_grammar import completion_grammar
from loraplex.serving.text.completion_reader import CompletionSyntax

Progress = tuple[int, RequestOutput | Compared]
"""(index of the output, what is new or its result)."""


class CompareEndpoints:
    def __init__(self, context: OpenAIContext) -> None:
        self._context = context

    @described(
        ResponseDoc(
            200,
            (
                Media(JSON, Comparison),
                events_of(CompareChunk, ENDS),
                events_of(CompareEntry, ENDS),
                events_of(Comparison, ENDS),
            ),
        ),
        tag="completions",
        body=json_body(CompareBody),
        errors=ANY_ERROR,
    )
    async def compare(self, request: Request) -> Response:
        """One prompt over many adapters, their outputs side by side. With stream, events with the
        tokens of each output; then one with `done`, its times and its difference from the base, or
        its error; last one with the usage of all."""
        principal = self._context.principal(request)
        body = await self._context.parse(request, CompareBody)
        _check(body)
        choices = self._choices(body)
        target = await self._context.target(body.model, principal)
        if target.key is not None:
            raise InvalidParameterError(
                f"model must be a base model; {body.model!r} is an adapter: name it in adapters",
                param="model",
            )
        backend = self._context.backend
        generation, reading = await self._request(body, target, request_id(request))
        requests = comparison_requests(backend, generation, choices)
        about = Compare(
            response_id=f"cmp-{request_id(request)}",
            created=response_unix_seconds(),
            model=target.model.name,
            seed=requests[0].sampling.seed,
            entries=body.adapters,
        )
        texts = TokenTexts(backend, target.model.name)
        writer = ComparisonWriter(about, texts, num_top=body.logprobs or 0, reading=reading)
        names = sent_names(body)
        if body.stream:
            progress = _begun(compare_streaming(backend, requests, principal), names)
            return EventStream(progress, writer, request_id(request), work_of=_work_of)
        compared = await until_disconnect(request.receive, compare(backend, requests, principal))
        if not any(isinstance(each, ComparedOutput) for each in compared):
            errors = (error for error in compared if isinstance(error, LoraplexError))
            raise as_sent(next(errors), names)
        # It has the log probabilities of all outputs, and may parse long ones: not in the loop.
        return await asyncio.to_thread(lambda: json_response(writer.body(compared)))

    def _choices(self, body: CompareBody) -> list[tuple[AdapterChoice, ...]]:
        """Adapters of each output; malformed ones are refused before anything runs."""
        most = self._context.options.max_prompts
        if not 1 <= len(body.adapters) <= most:
            raise InvalidParameterError(
                f"adapters must have 1 to {most} entries, one for each output, null for the base "
                f"model; got {len(body.adapters)}",
                param=FIELD,
            )
        choices = [_choice(entry, f"{FIELD}[{i}]") for i, entry in enumerate(body.adapters)]
        for adapters in choices:
            check_adapters(adapters)
        return choices

    async def _request(self, body: CompareBody, target: Target, client_id: str) -> "_PromptRequest":
        sampling = _sampling(body, target)
        reading = None
        if body.messages is None:
            assert body.prompt is not None
            [prompt] = prompts(body.prompt, max_prompts=1)
        else:
            reading = await self._reading(body, body.messages, target)
            prompt = reading.prompt
            grammar = completion_grammar(reading, sampling.grammar)
            sampling = msgspec.structs.replace(sampling, grammar=grammar)
        # A template has written the first tokens already.
        adds_special_tokens = body.add_special_tokens
        if adds_special_tokens is None:
            adds_special_tokens = reading is None
        request = GenerateRequest(
            request_id=0,
            client_request_id=client_id,
            model=target.model.name,
            prompt=prompt,
            task=Generate(sampling),
            load_policy=load_policy(body),
            shown_special_ids=() if reading is None else reading.shown_ids,
            add_special_tokens=adds_special_tokens,
            priority=body.priority or 0,
            timeout_seconds=body.timeout_seconds,
        )
        return _PromptRequest(request, reading)

    async def _reading(
        self, body: CompareBody, messages: list[Message], target: Target
    ) -> CompletionSyntax:
        left_out(body.tools)
        tool_use = read_tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
        arguments = {
            "add_generation_prompt": body.add_generation_prompt is not False,
            "template_kwargs": body.chat_template_kwargs,
        }
        prompt = await rendered_chat(
            self._context.backend,
            target.model,
            messages,
            None if body.tool_choice == "none" else served(body.tools),
            arguments,
        )
        return CompletionSyntax(chat_format=target.model.chat, tool_use=tool_use, prompt=prompt)


class _PromptRequest(NamedTuple):
    """The request without adapters, and how its outputs are parsed if it is a chat."""

    request: GenerateRequest
    reading: CompletionSyntax | None


async def _begun(
    progress: AsyncGenerator[Progress, None], names: Mapping[str, str]
) -> AsyncGenerator[Progress, None]:
    """Hold errors back until there is an output; raise the first of them if there is none."""
    errors: list[tuple[int, LoraplexError]] = []
    has_output = False
    async with aclosing(progress):
        async for index, item in progress:
            if isinstance(item, LoraplexError) and not has_output:
                errors.append((index, item))
                continue
            if not has_output:
                has_output = True
                for error in errors:
                    yield error
            yield index, item
    if not has_output:
        raise as_sent(errors[0][1], names)


def _work_of(item: Progress) -> int:
    return writing_work(item[1]) if isinstance(item[1], RequestOutput) else 0


def _check(body: CompareBody) -> None:
    """Every refusal that needs neither a model nor an adapter."""
    refuse_unsupported(body.model_extra)
    refuse_unknown(body)
    check_priority(body)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidParameterError("give either prompt or messages", param="prompt")
    if body.messages is None and body.tools:
        raise InvalidParameterError("tools need messages: a prompt has none", param="tools")
    if not 0 <= (body.logprobs or 0) <= MAX_LOGPROBS:
        raise InvalidParameterError(
            f"logprobs must be in [0, {MAX_LOGPROBS}], got {body.logprobs}", param="logprobs"
        )


def _choice(entry: Any, path: str) -> tuple[AdapterChoice, ...]:
    if entry is None:
        return ()
    return read_choices(entry, path) if isinstance(entry, list) else (read_choice(entry, path),)


def _sampling(body: CompareBody, target: Target) -> SamplingParams:
    """Greedy, if nothing else is said: then only the adapters differ."""
    fields: dict[str, Any] = {} if body.temperature is not None else {"temperature": 0.0}
    if body.max_tokens is not None:
        fields["max_tokens"] = body.max_tokens
    return sampling_params(body, fields, target.model.vocab_size)
