"""POST /v1/compare: outputs of many adapters side by side, for one prompt or one for each."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any, Final, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.adapter import AdapterChoice, LoadPolicy
from loraplex.core.errors import InvalidParameterError, LoraplexError, ResponseNotFoundError, cut
from loraplex.core.output import RequestOutput
from loraplex.core.principal import Principal
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import MAX_LOGPROBS, SamplingParams
from loraplex.core.task import Generate
from loraplex.frontends.adapter_choices import FIELD, read_choice, read_choices
from loraplex.frontends.field_names import as_sent, named_as_sent
from loraplex.frontends.openai.adapter_fields import ModelTarget
from loraplex.frontends.openai.compare_response import (
    CancelledOutput,
    Compare,
    CompareChunk,
    CompareEntry,
    CompareInput,
    Comparison,
    ComparisonStarted,
    ComparisonWriter,
    Progress,
)
from loraplex.frontends.openai.context import OpenAIContext, json_response, request_id
from loraplex.frontends.openai.convert import (
    begins_a_turn,
    check_priority,
    prompts,
    rendered_chat,
    two_beginnings,
)
from loraplex.frontends.openai.generation import ENDS
from loraplex.frontends.openai.logprobs import TokenTexts
from loraplex.frontends.openai.sampling import COMPARE_SAMPLING, sampling_params, sent_names
from loraplex.frontends.openai.schema import CancelBody, CompareBody, CompareEntryBody
from loraplex.frontends.openai.sse import ChunkStream
from loraplex.frontends.openai.tools import left_out, read_tool_use, served
from loraplex.frontends.openai.unsupported import refuse_unknown, refuse_unsupported
from loraplex.frontends.openapi.operation import (
    ANY_ERROR,
    JSON,
    OF_BODIES,
    Media,
    ResponseDoc,
    described,
    events_of,
    json_body,
    json_of,
)
from loraplex.frontends.streams import until_disconnect, writing_work
from loraplex.serving.admission import check_adapters
from loraplex.serving.compare import (
    Compared,
    RunningComparison,
    begun_comparison,
    comparison_requests,
)
from loraplex.serving.continuation import response_unix_seconds
from loraplex.serving.text.chat_format import CompletionSyntax, completion_grammar

ENTRIES: Final = "entries"


class _Running(NamedTuple):
    """A comparison whose outputs may be cancelled."""

    response_id: str
    tenant: str
    comparison: RunningComparison


class CompareEndpoints:
    def __init__(self, context: OpenAIContext) -> None:
        self._context = context
        self._running: list[_Running] = []
        """Clients choose ids: several may have the same one."""

    @described(
        ResponseDoc(
            200,
            (
                Media(JSON, Comparison),
                events_of(ComparisonStarted, ENDS),
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
        """Outputs of many adapters side by side, for one prompt or for `entries` with a prompt
        each. With stream, an event with the id; events with the tokens of each output; then one
        with `done`, its times and its difference from the base, or its error; last one with the
        usage of all."""
        principal = self._context.principal(request)
        body = await self._context.parse(request, CompareBody)
        _check(body)
        inputs = self._inputs(body)
        target = await self._context.target(body.model, principal)
        if target.key is not None:
            raise InvalidParameterError(
                f"model must be a base model; {body.model!r} is an adapter: name it in adapters",
                param="model",
            )
        backend, client_id = self._context.backend, request_id(request)
        inputs = await self._rendered(body, inputs, target)
        with named_as_sent(sent_names(body)):
            model, sampling = target.model.name, _sampling(body, target)
            requests = comparison_requests(
                backend, [_request(body, each, model, sampling, client_id) for each in inputs]
            )
        about = Compare(
            response_id=f"cmp-{client_id}",
            created=response_unix_seconds(),
            model=model,
            seed=_shared_seed(body, inputs, requests),
            has_entries=body.entries is not None,
        )
        texts = TokenTexts(backend, model)
        writer = ComparisonWriter(about, texts, inputs, num_top=body.logprobs or 0)
        begun = self._begun(about.response_id, requests, principal, inputs)
        if body.stream:
            return ChunkStream(_progress(begun), writer, client_id, work_of=_work_of)
        compared = await until_disconnect(request.receive, _ends(begun))
        errors = [each for each in compared if isinstance(each, LoraplexError)]
        if len(errors) == len(compared):
            raise as_sent(errors[0], inputs[0].names)
        # It has the log probabilities of all outputs, and may parse long ones: not in the loop.
        return await asyncio.to_thread(lambda: json_response(writer.body(compared)))

    @described(
        json_of(CancelledOutput),
        tag="completions",
        body=json_body(CancelBody),
        errors=(*OF_BODIES, ResponseNotFoundError),
    )
    async def cancel(self, request: Request) -> Response:
        """End one output of a running comparison with what it has; the others go on."""
        principal = self._context.principal(request)
        body = await self._context.parse(request, CancelBody, refuse_unknown)
        response_id = request.path_params["id"]
        found = [
            running.comparison
            for running in self._running
            if (running.response_id, running.tenant) == (response_id, principal.tenant)
        ]
        if not found:
            raise ResponseNotFoundError(
                f"there is no comparison {cut(response_id)!r} here, or it has ended", param="id"
            )
        most = max(map(len, found)) - 1
        if not 0 <= body.index <= most:
            raise InvalidParameterError(
                f"index must be in [0, {most}], got {body.index}", param="index"
            )
        is_cancelled = [each.cancel(body.index) for each in found if body.index < len(each)]
        return json_response(
            CancelledOutput(id=response_id, index=body.index, cancelled=any(is_cancelled))
        )

    @asynccontextmanager
    async def _begun(
        self,
        response_id: str,
        requests: Sequence[GenerateRequest],
        principal: Principal,
        inputs: Sequence[CompareInput],
    ) -> AsyncIterator[RunningComparison]:
        """Admit the requests, which can be cancelled by the id until the context ends.

        Raises the error of the first if none of them is admitted.
        """
        async with begun_comparison(self._context.backend, requests, principal) as comparison:
            refusals = comparison.refusals
            if len(refusals) == len(requests):
                raise as_sent(refusals[0], inputs[0].names)
            running = _Running(response_id, principal.tenant, comparison)
            self._running.append(running)
            try:
                yield comparison
            finally:
                self._running.remove(running)

    def _inputs(self, body: CompareBody) -> list[CompareInput]:
        """What each output is made of; malformed ones are refused before anything runs."""
        most = self._context.options.max_prompts
        field, given = (FIELD, body.adapters) if body.entries is None else (ENTRIES, body.entries)
        if given is None:
            raise InvalidParameterError(f"{FIELD} is required", param=FIELD)
        if not 1 <= len(given) <= most:
            raise InvalidParameterError(
                f"{field} must have 1 to {most} entries, one for each output, null for the base "
                f"model; got {len(given)}",
                param=field,
            )
        names = sent_names(body)
        if body.entries is not None:
            return [_own_input(each, i, names) for i, each in enumerate(body.entries)]
        prompt = None if body.prompt is None else prompts(body.prompt, max_prompts=1)[0]
        return [
            CompareInput(
                *(each, _choices(each, f"{FIELD}[{i}]"), prompt, body.messages, None),
                names={**names, "adapter": f"{FIELD}[{i}]"},
            )
            for i, each in enumerate(given)
        ]

    async def _rendered(
        self, body: CompareBody, inputs: Sequence[CompareInput], target: ModelTarget
    ) -> list[CompareInput]:
        """Return the inputs with the prompts of their messages; equal ones are rendered once."""
        readings: dict[int, CompletionSyntax] = {}
        rendered: list[CompareInput] = []
        for each in inputs:
            reading = None
            if each.messages is not None:
                if id(each.messages) not in readings:
                    readings[id(each.messages)] = await self._reading(body, each, target)
                reading = readings[id(each.messages)]
            rendered.append(
                each if reading is None else each._replace(prompt=reading.prompt, reading=reading)
            )
        return rendered

    async def _reading(
        self, body: CompareBody, given: CompareInput, target: ModelTarget
    ) -> CompletionSyntax:
        assert given.messages is not None
        left_out(body.tools)
        tool_use = read_tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
        arguments = {
            "add_generation_prompt": begins_a_turn(body),
            "continue_final_message": bool(body.continue_final_message),
            "template_kwargs": body.chat_template_kwargs,
        }
        try:
            prompt = await rendered_chat(
                self._context.backend,
                target.model,
                given.messages,
                None if body.tool_choice == "none" else served(body.tools),
                arguments,
            )
        except LoraplexError as error:
            # It may name one of the messages, or a part of one.
            param = error.param or ""
            raise as_sent(error, {param: given.path + param}) from None
        return CompletionSyntax(chat_format=target.model.chat, tool_use=tool_use, prompt=prompt)


async def _progress(
    begun: AbstractAsyncContextManager[RunningComparison],
) -> AsyncGenerator[Progress, None]:
    async with begun as comparison:
        yield None
        async with aclosing(comparison.progress()) as progress:
            async for item in progress:
                yield item


async def _ends(begun: AbstractAsyncContextManager[RunningComparison]) -> list[Compared]:
    async with begun as comparison:
        return await comparison.ends()


def _work_of(item: Progress) -> int:
    return 0 if item is None or not isinstance(item[1], RequestOutput) else writing_work(item[1])


def _check(body: CompareBody) -> None:
    """Every refusal that needs neither a model nor an adapter."""
    refuse_unsupported(body)
    refuse_unknown(body)
    check_priority(body)
    if body.entries is None:
        if body.adapters is not None:
            _check_one_input(body, "")
    else:
        for field in (FIELD, "prompt", "messages"):
            if getattr(body, field) is not None:
                raise InvalidParameterError(
                    f"with {ENTRIES}, each of them has its own {field}", param=field
                )
        for index, entry in enumerate(body.entries):
            path = f"{ENTRIES}[{index}]."
            with named_as_sent({name: path + name for name in entry.model_extra or {}}):
                refuse_unknown(entry)
            _check_one_input(entry, path)
    has_prompts = any(each.prompt is not None for each in body.entries or (body,))
    if has_prompts and body.tools:
        raise InvalidParameterError("tools need messages: a prompt has none", param="tools")
    if has_prompts and body.continue_final_message:
        raise InvalidParameterError(
            "continue_final_message needs messages: a prompt has none",
            param="continue_final_message",
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise two_beginnings()
    if not 0 <= (body.logprobs or 0) <= MAX_LOGPROBS:
        raise InvalidParameterError(
            f"logprobs must be in [0, {MAX_LOGPROBS}], got {body.logprobs}", param="logprobs"
        )


def _check_one_input(given: CompareBody | CompareEntryBody, path: str) -> None:
    if (given.prompt is None) == (given.messages is None):
        raise InvalidParameterError(
            f"give either {path}prompt or {path}messages", param=f"{path}prompt"
        )


def _own_input(entry: CompareEntryBody, index: int, sent: Mapping[str, str]) -> CompareInput:
    """Return the input of an entry. sent: names of the fields that all entries share."""
    path = f"{ENTRIES}[{index}]."
    prompt_name = "messages" if entry.prompt is None else "prompt"
    own = {"prompt": path + prompt_name, "seed": f"{path}seed", "adapter": f"{path}{FIELD}"}
    with named_as_sent(own):
        if entry.seed is not None:
            SamplingParams(seed=entry.seed).validate()
        prompt = None if entry.prompt is None else prompts(entry.prompt, max_prompts=1)[0]
    choices = _choices(entry.adapters, f"{path}{FIELD}")
    names = {**sent, **own}
    return CompareInput(entry.adapters, choices, prompt, entry.messages, entry.seed, names, path)


def _choices(entry: Any, path: str) -> tuple[AdapterChoice, ...]:
    if entry is None:
        return ()
    is_list = isinstance(entry, list)
    choices = read_choices(entry, path) if is_list else (read_choice(entry, path),)
    check_adapters(choices)
    return choices


def _request(
    body: CompareBody, given: CompareInput, model: str, sampling: SamplingParams, client_id: str
) -> GenerateRequest:
    reading = given.reading
    if reading is not None:
        sampling = msgspec.structs.replace(
            sampling, grammar=completion_grammar(reading, sampling.grammar)
        )
    if given.seed is not None:
        sampling = msgspec.structs.replace(sampling, seed=given.seed)
    assert given.prompt is not None, "messages are rendered"
    # A template has written the first tokens already.
    adds_special_tokens = body.add_special_tokens
    if adds_special_tokens is None:
        adds_special_tokens = reading is None
    return GenerateRequest(
        request_id=0,
        client_request_id=client_id,
        model=model,
        prompt=given.prompt,
        task=Generate(sampling),
        adapters=given.adapters,
        load_policy=LoadPolicy(body.load_lora_weights or LoadPolicy.AUTO),
        shown_special_ids=(
            () if reading is None else reading.chat_format.shown_ids[reading.tool_use is not None]
        ),
        add_special_tokens=adds_special_tokens,
        priority=body.priority or 0,
        timeout_seconds=body.timeout_seconds,
    )


def _sampling(body: CompareBody, target: ModelTarget) -> SamplingParams:
    fields: dict[str, Any] = {"temperature": COMPARE_SAMPLING.temperature}
    if body.max_tokens is not None:
        fields["max_tokens"] = body.max_tokens
    return sampling_params(body, fields, target.model.vocab_size)


def _shared_seed(
    body: CompareBody, inputs: Sequence[CompareInput], requests: Sequence[GenerateRequest]
) -> int | None:
    """Return the seed of the outputs whose entry has none; None: all have."""
    drawn = (
        request.sampling.seed
        for given, request in zip(inputs, requests, strict=True)
        if given.seed is None
    )
    return next(drawn, body.seed)
