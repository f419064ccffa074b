"""POST /v1/compare: one prompt over many adapters, their outputs side by side."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.adapter import AdapterChoice, LoadPolicy
from loraplex.core.errors import InvalidParameterError, LoraplexError
from loraplex.core.output import (
    RequestOutput,
    RequestTiming,
    ResolvedAdapter,
    SequenceOutput,
    TokenLogprob,
)
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import MAX_LOGPROBS, SamplingParams
from loraplex.core.task import Generate
from loraplex.frontends.adapter_choices import FIELD, read_choice, read_choices
from loraplex.frontends.field_names import as_sent, named_as_sent
from loraplex.frontends.openai.adapter_fields import ModelTarget
from loraplex.frontends.openai.context import OpenAIContext, json_response, request_id
from loraplex.frontends.openai.convert import (
    check_priority,
    prompts,
    rendered_chat,
)
from loraplex.frontends.openai.errors import ErrorDetail, error_body
from loraplex.frontends.openai.generation import ENDS
from loraplex.frontends.openai.logprobs import MIN_LOGPROB, TokenTexts, chat_logprobs
from loraplex.frontends.openai.responses import ChatDelta, ChatMessage, ContentLogprob, Usage
from loraplex.frontends.openai.sampling import sampling_params, sent_names
from loraplex.frontends.openai.schema import CompareBody, Message
from loraplex.frontends.openai.sse import ChunkStream
from loraplex.frontends.openai.tools import left_out, read_tool_use, served
from loraplex.frontends.openai.unsupported import refuse_unknown, refuse_unsupported
from loraplex.frontends.openai.writers import ChatParts, delta, message
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
from loraplex.serving.admission import check_adapters
from loraplex.serving.compare import (
    Compared,
    ComparedOutput,
    Difference,
    FirstDifference,
    compare,
    compare_streaming,
    comparison_requests,
)
from loraplex.serving.continuation import response_unix_seconds
from loraplex.serving.text.chat_format import CompletionSyntax, completion_grammar


class DifferingToken(Struct, frozen=True):
    """One of the two tokens, and its log probability by both models."""

    token: str
    token_id: int
    logprob: float | None
    """Log probability under this output's model; null if it is not among its 20 likeliest."""
    base_logprob: float | None


class FirstDifferenceEntry(Struct, frozen=True):
    position: int
    here: DifferingToken
    base: DifferingToken


class DifferenceEntry(Struct, frozen=True):
    num_same_tokens: int
    mean_logprob_difference: float | None
    first: FirstDifferenceEntry | None


class PhaseTimes(Struct, frozen=True, kw_only=True):
    """Phases of one output, one after the other. They add up to `total_ms`."""

    queue_ms: float
    """Time that it waited for a slot and KV blocks."""
    adapter_load_ms: float
    """Time that it waited for its adapters to be read and copied to the device."""
    prefill_ms: float
    """Time from the first step to the first token."""
    decode_ms: float
    """Time from the first token to the last."""
    first_step: int
    """Number of the engine's step which computed it first; equal numbers: one batch."""
    last_step: int
    """Number of the step of the last token. Each engine counts its steps from 1."""
    num_cached_tokens: int
    """Prompt tokens whose KV was cached."""
    restarts: int
    """Engines that died while it was in them."""


class CompareEntry(Struct, frozen=True, kw_only=True):
    """One output, or an `error`."""

    index: int
    done: Literal[True] | UnsetType = UNSET
    """Only in a stream: the last event of this output."""
    asked: Any  # language: quoted
    """The entry of `adapters`, as it was sent."""
    adapters: tuple[ResolvedAdapter, ...] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    """The text as the model wrote it."""
    message: ChatMessage | UnsetType = UNSET
    """Only with messages: content, reasoning and tool calls apart."""
    finish_reason: str | UnsetType = UNSET
    num_tokens: int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    logprob: float | UnsetType = UNSET
    """Log probability of the whole output."""
    logprobs: Sequence[ContentLogprob] | UnsetType = UNSET
    ttft_ms: float | UnsetType = UNSET
    total_ms: float | UnsetType = UNSET
    num_cached_tokens: int | UnsetType = UNSET
    timing: PhaseTimes | UnsetType = UNSET
    versus_base: DifferenceEntry | UnsetType | None = UNSET
    error: ErrorDetail | None = None


class Comparison(Struct, frozen=True, kw_only=True):
    """All outputs. As the last event of a stream, without them."""

    id: str
    object: Literal["comparison"] = "comparison"
    created: int
    model: str
    prompt_tokens: int
    seed: int | None
    """Seed of all draws; send it again to draw the same."""
    usage: Usage
    answers: list[CompareEntry] | UnsetType = UNSET  # language: quoted


class CompareChunk(Struct, frozen=True, kw_only=True):
    """New tokens of one output."""

    index: int
    text: str
    delta: ChatDelta | UnsetType = UNSET
    """Only with messages: what the tokens add to content, reasoning and tool calls."""
    token_ids: list[int]
    logprobs: Sequence[ContentLogprob]
    finish_reason: str | UnsetType = UNSET


CompareEvent = CompareChunk | CompareEntry | Comparison


class ComparisonWriter:
    """Writer of one response."""

    def __init__(
        self,
        about: "Compare",
        texts: TokenTexts,
        *,
        num_top: int,
        reading: CompletionSyntax | None,
    ) -> None:
        """num_top: how many likely tokens each position shows. reading: of a chat's outputs."""
        self._about = about
        self._texts = texts
        self._num_top = num_top
        self._parts = [None if reading is None else ChatParts(reading) for _ in about.entries]
        self._ends: dict[int, Compared] = {}
        self._num_prompt_tokens = 0

    def headers(self, _first: tuple[int, RequestOutput | Compared]) -> Mapping[str, str]:
        return {}

    def chunks(self, item: tuple[int, RequestOutput | Compared]) -> Iterator[CompareEvent]:
        index, output = item
        if isinstance(output, RequestOutput):
            self._num_prompt_tokens = len(output.prompt_token_ids)
            for sequence in output.sequences:
                yield self._chunk(index, sequence)
            return
        self._ends[index] = output
        entry = self._entry(index, output)
        if isinstance(output, ComparedOutput):
            entry = msgspec.structs.replace(entry, finish_reason=self._finish_reason(index, output))
        yield msgspec.structs.replace(entry, done=True)

    def last_chunks(self) -> Iterator[CompareEvent]:
        yield self._comparison()

    def body(self, compared: Sequence[Compared]) -> Comparison:
        """Return the whole response."""
        self._ends = dict(enumerate(compared))
        self._num_prompt_tokens = next(
            len(each.prompt_token_ids) for each in compared if isinstance(each, ComparedOutput)
        )
        return self._comparison([self._whole(*end) for end in self._ends.items()])

    def _comparison(self, entries: list[CompareEntry] | UnsetType = UNSET) -> Comparison:
        found = [each for each in self._ends.values() if isinstance(each, ComparedOutput)]
        num_output_tokens = sum(len(each.token_ids) for each in found)
        computed = self._num_prompt_tokens * len(found)
        return Comparison(
            id=self._about.response_id,
            created=self._about.created,
            model=self._about.model,
            prompt_tokens=self._num_prompt_tokens,
            seed=self._about.seed,
            usage=Usage(computed, num_output_tokens, computed + num_output_tokens),
            answers=entries,
        )

    def _chunk(self, index: int, sequence: SequenceOutput) -> CompareChunk:
        parts = self._parts[index]
        news = UNSET if parts is None else delta(parts.read(sequence))
        reason = sequence.finish_reason if parts is None else parts.finish_reason(sequence)
        return CompareChunk(
            index=index,
            text=sequence.text,
            delta=news,
            token_ids=list(sequence.token_ids),
            logprobs=self._logprobs(sequence.logprobs),
            finish_reason=UNSET if reason is None else reason,
        )

    def _whole(self, index: int, output: Compared) -> CompareEntry:
        entry = self._entry(index, output)
        if not isinstance(output, ComparedOutput):
            return entry
        parts = self._parts[index]
        read = None if parts is None else parts.read(_sequence(output))
        return msgspec.structs.replace(
            entry,
            text=output.text,
            message=UNSET if read is None else message(read, "assistant", ""),
            finish_reason=self._finish_reason(index, output),
            token_ids=list(output.token_ids),
            logprobs=self._logprobs(output.logprobs),
        )

    def _entry(self, index: int, output: Compared) -> CompareEntry:
        """Return all that is said at the end: in a stream the text has come before."""
        entry = self._about.entries[index]
        if isinstance(output, LoraplexError):
            return CompareEntry(index=index, asked=entry, error=error_body(output).error)
        versus = output.versus_base
        return CompareEntry(
            index=index,
            asked=entry,
            adapters=output.adapters,
            num_tokens=len(output.token_ids),
            logprob=max(output.logprob, MIN_LOGPROB),
            ttft_ms=round(output.ttft_ms, 3),
            total_ms=round(output.total_ms, 3),
            num_cached_tokens=output.timing.num_cached_tokens,
            timing=phase_times(output.timing),
            versus_base=None if versus is None else self._difference(versus),
        )

    def _finish_reason(self, index: int, output: ComparedOutput) -> str:
        parts = self._parts[index]
        found = None if parts is None else parts.finish_reason(_sequence(output))
        return found or output.finish_reason

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Sequence[ContentLogprob]:
        shown = [
            msgspec.structs.replace(token, top=token.top[: self._num_top]) for token in logprobs
        ]
        return chat_logprobs(shown, self._texts).content

    def _difference(self, versus: Difference) -> DifferenceEntry:
        first = None if versus.first is None else self._first(versus.first)
        return DifferenceEntry(versus.num_same_tokens, versus.mean_logprob_difference, first)

    def _first(self, first: FirstDifference) -> FirstDifferenceEntry:
        here, base = (
            DifferingToken(
                self._texts.bytes_of(token_id).decode(errors="replace"), token_id, mine, its
            )
            for token_id, mine, its in (
                (first.token_id, first.token_logprob, first.token_logprob_by_base),
                (first.base_token_id, first.base_token_logprob, first.base_token_logprob_by_base),
            )
        )
        return FirstDifferenceEntry(first.position, here, base)


class Compare(Struct, frozen=True, kw_only=True):
    """What the response repeats of its request."""

    response_id: str
    created: int
    """Unix seconds."""
    model: str
    seed: int | None
    entries: list[Any]
    """The field `adapters`, as it was sent."""


def phase_times(timing: RequestTiming) -> PhaseTimes:
    """Return the phases of a request: what has not happened took no time."""
    before_ns, load_ns = timing.before_first_step_ns, timing.adapters_moving_ns
    return PhaseTimes(
        queue_ms=round((before_ns - load_ns) / 1e6, 3),
        adapter_load_ms=round(load_ns / 1e6, 3),
        prefill_ms=round(max(0, timing.first_token_ns - timing.first_scheduled_ns) / 1e6, 3),
        decode_ms=round(max(0, timing.last_token_ns - timing.first_token_ns) / 1e6, 3),
        first_step=timing.first_step,
        last_step=timing.last_step,
        num_cached_tokens=timing.num_cached_tokens,
        restarts=timing.num_restarts,
    )


def _sequence(output: ComparedOutput) -> SequenceOutput:
    return SequenceOutput(0, output.text, output.token_ids, output.logprobs, output.finish_reason)


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
        names = sent_names(body)
        with named_as_sent(names):
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
        if body.stream:
            progress = _begun(compare_streaming(backend, requests, principal), names)
            return ChunkStream(progress, writer, request_id(request), work_of=_work_of)
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

    async def _request(
        self, body: CompareBody, target: ModelTarget, client_id: str
    ) -> "_PromptRequest":
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
            load_policy=LoadPolicy(body.load_lora_weights or LoadPolicy.AUTO),
            shown_special_ids=(
                ()
                if reading is None
                else reading.chat_format.shown_ids(has_tools=reading.tool_use is not None)
            ),
            add_special_tokens=adds_special_tokens,
            priority=body.priority or 0,
            timeout_seconds=body.timeout_seconds,
        )
        return _PromptRequest(request, reading)

    async def _reading(
        self, body: CompareBody, messages: list[Message], target: ModelTarget
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
    refuse_unsupported(body)
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


def _sampling(body: CompareBody, target: ModelTarget) -> SamplingParams:
    """Greedy, if nothing else is said: then only the adapters differ."""
    fields: dict[str, Any] = {} if body.temperature is not None else {"temperature": 0.0}
    if body.max_tokens is not None:
        fields["max_tokens"] = body.max_tokens
    return sampling_params(body, fields, target.model.vocab_size)
