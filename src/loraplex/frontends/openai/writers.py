"""Writers of OpenAI's response objects from RequestOutputs, whole or chunk by chunk.

A writer lives for one HTTP call. Choices are numbered prompt-major: prompt i, sequence j is choice
i * n + j.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.core.output import (
    FinishReason,
    RequestOutput,
    RequestTiming,
    ResolvedAdapter,
    SequenceOutput,
)
from loraplex.core.request import GenerateRequest
from loraplex.core.tools import CallDelta
from loraplex.frontends.long_json import LongList
from loraplex.frontends.openai.logprobs import (
    NUM_SIMPLE,
    CompletionLogprobWriter,
    TokenTexts,
    chat_logprobs,
    prompt_logprobs,
)
from loraplex.frontends.openai.responses import (
    AdapterUsed,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Details,
    FunctionDelta,
    PromptLogprobs,
    PromptTokensDetails,
    Timing,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from loraplex.frontends.openai.sse import EventTemplate, TextEventWriter
from loraplex.frontends.streams import IndexedOutput
from loraplex.serving.text.chat_format import (
    ALL_IS_CONTENT,
    CompletionDelta,
    CompletionReader,
    CompletionSyntax,
)

BASE_FINGERPRINT = "lp-base"
DIGESTS_HEADER = "x-loraplex-adapter"
"""A response header."""


_ALL: Final = slice(None)
_CHOICES_PIECE: Final = 8
"""Choices that are encoded at a time: each may have the text of a long prompt."""


def _has_text_only(call: "CallFields") -> bool:
    """Whether the chunks in the middle of a stream differ in their text alone."""
    return not (call.wants_logprobs or call.returns_token_ids or call.continuous_usage)


class UsageCounter:
    """Adds up the requests of one call, from their latest outputs."""

    def __init__(self, notes: Sequence[str] = ()) -> None:
        """notes: what was left out of the request."""
        self._notes = list(notes)
        self._latest: dict[int, RequestOutput] = {}

    def see(self, request_index: int, output: RequestOutput) -> None:
        self._latest[request_index] = output

    def usage(self) -> Usage:
        outputs = self._latest.values()
        num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        num_output_tokens = sum(output.num_output_tokens for output in outputs)
        timings = [output.timing for output in outputs if output.timing is not None]
        num_cached_tokens = sum(timing.num_cached_tokens for timing in timings)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_output_tokens,
            total_tokens=num_prompt_tokens + num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(num_cached_tokens) if timings else UNSET,
        )

    def details(self) -> Details | UnsetType:
        """Once all requests have ended."""
        outputs = [self._latest[index] for index in sorted(self._latest)]
        timings = [output.timing for output in outputs]
        if not outputs or None in timings:
            return UNSET
        return Details(
            adapters=[AdapterUsed(a.name, a.digest, a.scale) for a in _adapters_of(outputs)],
            timing=[_timing(timing) for timing in timings if timing is not None],
            notes=self._notes or UNSET,
        )


def _adapters_of(outputs: Sequence[RequestOutput]) -> Iterable[ResolvedAdapter]:
    """Each once: the prompts of one call have the same, or one of their own each."""
    return dict.fromkeys(adapter for output in outputs for adapter in output.adapters)


def _timing(timing: RequestTiming) -> Timing:
    return Timing(
        queue_seconds=timing.queue_seconds,
        adapter_wait_seconds=timing.adapter_wait_seconds,
        adapter_load_seconds=timing.adapter_load_seconds,
        adapter_copy_seconds=timing.adapter_copy_seconds,
        prefill_seconds=timing.prefill_seconds,
        first_token_seconds=timing.first_token_seconds,
        seconds_per_token=timing.seconds_per_token,
        total_seconds=timing.total_seconds,
        preemptions=timing.num_preemptions,
        cached_tokens=timing.num_cached_tokens,
        draft_tokens=timing.num_draft_tokens,
        accepted_draft_tokens=timing.num_accepted_tokens,
        restarts=timing.num_restarts,
    )


class CallFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of the HTTP request that the response repeats or follows."""

    response_id: str
    created: int
    """Unix seconds."""
    model: str
    """Model as the client wrote it."""
    requests: tuple[GenerateRequest, ...]
    """One for each prompt; n and the kinds of log probabilities are the same in all."""
    include_usage: bool = False
    """Whether a stream ends with a chunk with the usage."""
    echo: bool = False
    wants_prompt_logprobs: bool = False
    """Whether they are a field of their own, not only a part of the echo."""
    continuous_usage: bool = False
    """Whether every chunk has the usage so far, with include_usage."""
    returns_token_ids: bool = False
    role: str = "assistant"
    """Role of a chat's message."""
    text_before: str = ""
    """Text that a chat's message begins with: the message that it continues."""
    notes: tuple[str, ...] = ()
    """What was left out of the request."""
    prompt_text: str | UnsetType = UNSET
    """Prompt that a chat's template has rendered."""

    def choice_index(self, request_index: int, sequence_index: int) -> int:
        return request_index * self.requests[0].sampling.n + sequence_index

    def token_ids(self, sequence: SequenceOutput) -> list[int] | UnsetType:
        return list(sequence.token_ids) if self.returns_token_ids else UNSET

    def prompt_token_ids(self, output: RequestOutput) -> Sequence[int] | UnsetType:
        if not self.returns_token_ids:
            return UNSET
        return LongList(output.prompt_token_ids, piece_length=NUM_SIMPLE)

    def chunk_usage(self, counter: UsageCounter) -> Usage | UnsetType | None:
        """What a chunk that is not the last has as its usage."""
        if not self.include_usage:
            return UNSET
        return counter.usage() if self.continuous_usage else None

    @property
    def wants_logprobs(self) -> bool:
        return self.requests[0].sampling.logprobs is not None


def fingerprint(output: RequestOutput) -> str:
    """Fingerprint of the adapters' digests and scales: it changes whenever the weights do."""
    match output.adapters:
        case ():
            return BASE_FINGERPRINT
        case (ResolvedAdapter(digest=digest, scale=1.0),):
            return f"lp-{digest[:12]}"
    parts = sorted(f"{adapter.digest} {adapter.scale!r}" for adapter in output.adapters)
    return f"lp-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:12]}"


def adapter_headers(*outputs: RequestOutput) -> dict[str, str]:
    """Digests of the adapters that were used; no header for the base model."""
    digests = dict.fromkeys(a.digest for output in outputs for a in output.adapters)
    return {DIGESTS_HEADER: ",".join(digests)} if digests else {}


def _stop_reason(sequence: SequenceOutput) -> str | int | UnsetType:
    """vLLM's: the stop string or token; absent at the model's own end."""
    return UNSET if sequence.stop_reason is None else sequence.stop_reason


class CompletionWriter:
    """Writer of /v1/completions."""

    def __init__(self, call: CallFields, texts: TokenTexts) -> None:
        self._call = call
        self._texts = texts
        self._usage = UsageCounter()
        self._logprob_writers: dict[int, CompletionLogprobWriter] = {}
        self._prompts: dict[int, RequestOutput] = {}
        self._prompt_texts: dict[int, str] = {}
        self._fingerprint = BASE_FINGERPRINT
        self._has_text_only = _has_text_only(call) and not call.wants_prompt_logprobs
        self._templates: dict[tuple[int, int], EventTemplate] = {}
        """Templates by the indices of a request and of its sequence."""

    def headers(self, first: IndexedOutput) -> Mapping[str, str]:
        return adapter_headers(first[1])

    def chunks(self, item: IndexedOutput) -> Iterator[Completion]:
        """One chunk for each choice that has something new."""
        for choice in self._choices(*item):
            if _has_news(choice.text, choice.finish_reason, choice.token_ids) or (
                choice.logprobs and choice.logprobs.tokens
            ):
                yield self._completion([choice], self._call.chunk_usage(self._usage))

    def text_events(self, item: IndexedOutput) -> bytes | None:
        """Implements TextEventWriter."""
        request_index, output = item
        if not self._has_text_only:
            return None
        events = []
        for sequence in output.sequences:
            template = self._template(request_index, sequence)
            if template is None:
                return None
            if sequence.text:
                events.append(template.with_text(sequence.text))
        self._usage.see(request_index, output)
        return b"".join(events)

    def _template(self, request_index: int, sequence: SequenceOutput) -> EventTemplate | None:
        """Return the template of a choice that has begun."""
        key = request_index, sequence.index
        template = self._templates.get(key)
        if template is None and self._call.choice_index(*key) in self._logprob_writers:
            choice = self._choice(request_index, msgspec.structs.replace(sequence, text=""))
            chunk = self._completion([choice], self._call.chunk_usage(self._usage))
            template = self._templates[key] = EventTemplate(chunk, "text")
        return template

    def last_chunks(self) -> Iterator[Completion]:
        if self._call.include_usage:
            yield self._completion([], self._usage.usage(), self._usage.details())

    def body(self, outputs: Sequence[RequestOutput]) -> Completion:
        """Response from one whole output for each request."""
        choices = [c for i, output in enumerate(outputs) for c in self._choices(i, output)]
        if len(choices) <= _CHOICES_PIECE:
            return self._completion(choices, self._usage.usage(), self._usage.details())
        in_pieces: Sequence[CompletionChoice] = LongList(choices, piece_length=_CHOICES_PIECE)
        return self._completion(in_pieces, self._usage.usage(), self._usage.details())

    def _completion(
        self,
        choices: Sequence[CompletionChoice],
        usage: Usage | UnsetType | None,
        details: Details | UnsetType = UNSET,
    ) -> Completion:
        return Completion(
            id=self._call.response_id,
            created=self._call.created,
            model=self._call.model,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage,
            loraplex=details,
        )

    def _choices(self, request_index: int, output: RequestOutput) -> list[CompletionChoice]:
        self._usage.see(request_index, output)
        self._fingerprint = fingerprint(output)
        # The first output of a request has the log probabilities of its prompt.
        self._prompts.setdefault(request_index, output)
        return [self._choice(request_index, sequence) for sequence in output.sequences]

    def _choice(self, request_index: int, sequence: SequenceOutput) -> CompletionChoice:
        index = self._call.choice_index(request_index, sequence.index)
        prompt = self._prompts[request_index]
        is_first = index not in self._logprob_writers
        echoed = is_first and self._call.echo
        return CompletionChoice(
            index=index,
            text=self._prompt_text(request_index) + sequence.text if echoed else sequence.text,
            logprobs=self._logprobs(index, sequence, prompt if echoed else None),
            finish_reason=sequence.finish_reason,
            stop_reason=_stop_reason(sequence),
            prompt_logprobs=_prompt_logprobs(self._call, prompt, self._texts),
            token_ids=self._call.token_ids(sequence),
            prompt_token_ids=self._call.prompt_token_ids(prompt) if is_first else UNSET,
        )

    def _prompt_text(self, request_index: int) -> str:
        request = self._call.requests[request_index]
        if isinstance(request.prompt, str) and request.truncation is None:
            return request.prompt
        if request_index not in self._prompt_texts:
            text = self._texts.decode(self._prompts[request_index].prompt_token_ids)
            self._prompt_texts[request_index] = text
        return self._prompt_texts[request_index]

    def _logprobs(
        self, index: int, sequence: SequenceOutput, echoed: RequestOutput | None
    ) -> CompletionLogprobs | None:
        writer = self._logprob_writers.get(index)
        if writer is None:
            skips = self._call.requests[0].sampling.skip_special_tokens
            writer = CompletionLogprobWriter(self._texts, skips_special_tokens=skips)
            self._logprob_writers[index] = writer
        if not self._call.wants_logprobs:
            return None
        tokens = [(logprob.token_id, logprob) for logprob in sequence.logprobs]
        if echoed is None:
            return writer.write(tokens)
        prompt = zip(echoed.prompt_token_ids, echoed.prompt_logprobs or (), strict=True)
        return writer.write([*prompt, *tokens])


class ChatWriter:
    """Writer of /v1/chat/completions: always one request."""

    def __init__(
        self, call: CallFields, texts: TokenTexts, reading: CompletionSyntax = ALL_IS_CONTENT
    ) -> None:
        self._call = call
        self._texts = texts
        self._parts = ChatParts(reading)
        self._usage = UsageCounter(call.notes)
        self._begun: set[int] = set()
        self._prompt_is_sent = False
        self._fingerprint = BASE_FINGERPRINT
        self._has_text_only = _has_text_only(call) and reading.is_all_content
        self._templates: dict[int, EventTemplate] = {}
        """Templates by the index of a sequence."""

    def headers(self, first: IndexedOutput) -> Mapping[str, str]:
        return adapter_headers(first[1])

    def chunks(self, item: IndexedOutput) -> Iterator[ChatCompletionChunk]:
        """A chunk with the role when a choice begins, then one whenever it has something new."""
        _, output = item
        self._see(output)
        for sequence in output.sequences:
            for choice in self._chunk_choices(sequence):
                chunk = self._chunk([choice], self._call.chunk_usage(self._usage))
                yield chunk if self._prompt_is_sent else self._with_prompt(chunk, output)

    def text_events(self, item: IndexedOutput) -> bytes | None:
        """Implements TextEventWriter."""
        _, output = item
        begun = self._begun.issuperset(sequence.index for sequence in output.sequences)
        if not self._has_text_only or not begun:
            return None
        self._usage.see(0, output)
        return b"".join(
            self._template(sequence.index).with_text(sequence.text)
            for sequence in output.sequences
            if sequence.text
        )

    def _template(self, index: int) -> EventTemplate:
        """Return the template of a choice that has begun."""
        template = self._templates.get(index)
        if template is None:
            choice = ChatChunkChoice(index, ChatDelta(content=""))
            chunk = self._chunk([choice], self._call.chunk_usage(self._usage))
            template = self._templates[index] = EventTemplate(chunk, "content")
        return template

    def last_chunks(self) -> Iterator[ChatCompletionChunk]:
        if self._call.include_usage:
            yield self._chunk([], self._usage.usage(), self._usage.details())

    def body(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        """Response from the one whole output."""
        [output] = outputs
        self._see(output)
        return ChatCompletion(
            id=self._call.response_id,
            created=self._call.created,
            model=self._call.model,
            system_fingerprint=self._fingerprint,
            choices=[self._choice(sequence) for sequence in output.sequences],
            usage=self._usage.usage(),
            prompt_logprobs=_prompt_logprobs(self._call, output, self._texts),
            prompt_token_ids=self._call.prompt_token_ids(output),
            prompt_text=self._call.prompt_text,
            loraplex=self._usage.details(),
        )

    def _with_prompt(
        self, chunk: ChatCompletionChunk, output: RequestOutput
    ) -> ChatCompletionChunk:
        """The first chunk of all has the requested fields of the prompt."""
        self._prompt_is_sent = True
        return msgspec.structs.replace(
            chunk,
            prompt_token_ids=self._call.prompt_token_ids(output),
            prompt_text=self._call.prompt_text,
        )

    def _see(self, output: RequestOutput) -> None:
        self._usage.see(0, output)
        self._fingerprint = fingerprint(output)

    def _choice(self, sequence: SequenceOutput) -> ChatChoice:
        return ChatChoice(
            index=sequence.index,
            message=message(self._parts.read(sequence), self._call.role, self._call.text_before),
            logprobs=self._logprobs(sequence),
            finish_reason=self._parts.finish_reason(sequence),
            stop_reason=_stop_reason(sequence),
            token_ids=self._call.token_ids(sequence),
        )

    def _logprobs(self, sequence: SequenceOutput, tokens: slice = _ALL) -> ChatLogprobs | None:
        if not self._call.wants_logprobs:
            return None
        return chat_logprobs(sequence.logprobs[tokens], self._texts)

    def _chunk_choices(self, sequence: SequenceOutput) -> Iterator[ChatChunkChoice]:
        if sequence.index not in self._begun:
            self._begun.add(sequence.index)
            first = ChatDelta(role=self._call.role, content=self._call.text_before)
            yield ChatChunkChoice(sequence.index, first)
        news = delta(self._parts.read(sequence))
        if news != ChatDelta() and self._has_hidden_end(sequence):
            # Clients take the tokens of a piece with text for its text.
            text, end = slice(None, -1), slice(-1, None)
            yield ChatChunkChoice(
                index=sequence.index,
                delta=news,
                logprobs=self._logprobs(sequence, text),
                token_ids=self._token_ids(sequence, text),
            )
            yield self._last_chunk_choice(sequence, ChatDelta(), end)
        elif (
            news != ChatDelta()
            or sequence.finish_reason
            or self._token_ids(sequence)
            or (self._call.wants_logprobs and sequence.logprobs)
        ):
            yield self._last_chunk_choice(sequence, news)

    def _last_chunk_choice(
        self, sequence: SequenceOutput, news: ChatDelta, tokens: slice = _ALL
    ) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=sequence.index,
            delta=news,
            logprobs=self._logprobs(sequence, tokens),
            finish_reason=self._parts.finish_reason(sequence),
            stop_reason=_stop_reason(sequence),
            token_ids=self._token_ids(sequence, tokens),
        )

    def _has_hidden_end(self, sequence: SequenceOutput) -> bool:
        """Whether the last log probability is that of a token which ended the text."""
        return (
            self._call.wants_logprobs
            and len(sequence.logprobs) > 0
            and sequence.finish_reason is FinishReason.STOP
            and not isinstance(sequence.stop_reason, str)
            and not self._call.requests[0].sampling.include_stop_in_output
        )

    def _token_ids(self, sequence: SequenceOutput, tokens: slice = _ALL) -> list[int] | UnsetType:
        token_ids = self._call.token_ids(sequence)
        return UNSET if token_ids is UNSET else token_ids[tokens]

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType | None,
        details: Details | UnsetType = UNSET,
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._call.response_id,
            created=self._call.created,
            model=self._call.model,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage,
            loraplex=details,
        )


def _has_news(text: str, finish_reason: str | None, token_ids: list[int] | UnsetType) -> bool:
    return bool(text or finish_reason or (token_ids is not UNSET and token_ids))


def _prompt_logprobs(
    call: CallFields, output: RequestOutput, texts: TokenTexts
) -> PromptLogprobs | UnsetType:
    if not call.wants_prompt_logprobs or output.prompt_logprobs is None:
        return UNSET
    return prompt_logprobs(output.prompt_logprobs, texts)


TOOL_CALLS = "tool_calls"
"""Finish reason of a message that ended with calls: the client returns their results."""


class ChatParts:
    """Outputs of one request, by sequence, split into their parts as they come."""

    def __init__(self, reading: CompletionSyntax) -> None:
        self._reading = reading
        self._readers: dict[int, CompletionReader] = {}

    def read(self, sequence: SequenceOutput) -> CompletionDelta:
        """What the sequence's new text brought."""
        reader = self._readers.get(sequence.index)
        if reader is None:
            reader = self._readers[sequence.index] = self._reading.reader()
        reason = sequence.finish_reason
        is_cut = reason not in (None, FinishReason.STOP)
        return reader.push(sequence.text, final=reason is not None, is_cut=is_cut)

    def finish_reason(self, sequence: SequenceOutput) -> str | None:
        """OpenAI's reason: `tool_calls` if there is any, unless the client chose their function."""
        is_stopped = sequence.finish_reason is FinishReason.STOP
        if is_stopped and self._readers[sequence.index].num_calls and not self._reading.is_named:
            return TOOL_CALLS
        return sequence.finish_reason


def message(part: CompletionDelta, role: str, text_before: str) -> ChatMessage:
    """The whole message; text_before: what its content begins with."""
    calls = _whole_calls(part.calls)
    content = text_before + part.content
    return ChatMessage(
        content=content if content or not calls else None,
        role=role,
        reasoning_content=part.reasoning or UNSET,
        reasoning=part.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def delta(part: CompletionDelta) -> ChatDelta:
    return ChatDelta(
        content=part.content or UNSET,
        reasoning_content=part.reasoning or UNSET,
        reasoning=part.reasoning or UNSET,
        tool_calls=[_call_delta(call) for call in part.calls] or UNSET,
    )


def _call_delta(call: CallDelta) -> ToolCallDelta:
    begins = call.name is not None
    return ToolCallDelta(
        index=call.index,
        id=UNSET if call.call_id is None else call.call_id,
        type="function" if begins else UNSET,
        function=FunctionDelta(call.arguments, UNSET if call.name is None else call.name),
    )


def _whole_calls(deltas: Sequence[CallDelta]) -> list[ToolCall]:
    """Tool calls in the order of their index; a delta with a name begins one."""
    arguments: dict[int, list[str]] = {}
    for part in deltas:
        arguments.setdefault(part.index, []).append(part.arguments)
    return [
        ToolCall(
            id=part.call_id or "",
            function=CalledFunction(part.name, "".join(arguments[part.index])),
        )
        for part in deltas
        if part.name is not None
    ]


class ResponseWriter(Protocol):
    """Writer of the response to one call: whole, or chunk by chunk."""

    def headers(self, first: IndexedOutput) -> Mapping[str, str]: ...

    def chunks(self, item: IndexedOutput) -> Iterable[Any]: ...

    def last_chunks(self) -> Iterable[Any]: ...

    def body(self, outputs: Sequence[RequestOutput]) -> Any:
        """A msgspec.Struct, as the chunks are."""
        ...


class ExpandedPromptWriter:
    """Another writer's responses with `expanded_prompt`: in a stream, in the first chunk.

    It is the first prompt's if there are several.
    """

    def __init__(self, writer: ResponseWriter, texts: TokenTexts) -> None:
        self._writer = writer
        self._texts = texts
        self._is_sent = False

    def headers(self, first: IndexedOutput) -> Mapping[str, str]:
        return self._writer.headers(first)

    def chunks(self, item: IndexedOutput) -> Iterator[Any]:
        for chunk in self._writer.chunks(item):
            yield chunk if self._is_sent else self._with_prompt(chunk, item[1])
            self._is_sent = True

    def text_events(self, item: IndexedOutput) -> bytes | None:
        """Implements TextEventWriter."""
        if not self._is_sent or not isinstance(self._writer, TextEventWriter):
            return None
        return self._writer.text_events(item)

    def last_chunks(self) -> Iterator[Any]:
        yield from self._writer.last_chunks()

    def body(self, outputs: Sequence[RequestOutput]) -> Any:
        return self._with_prompt(self._writer.body(outputs), outputs[0])

    def _with_prompt(self, response: Any, output: RequestOutput) -> Any:
        text = self._texts.decode(output.prompt_token_ids, skip_special_tokens=False)
        return msgspec.structs.replace(response, expanded_prompt=text)
