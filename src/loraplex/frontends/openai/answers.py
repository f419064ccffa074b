"""From RequestOutputs to OpenAI's response objects, whole or chunk by chunk.

A writer lives for one HTTP call. Choices are numbered prompt-major: prompt i, sequence j is choice
i * n + j.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.core.output import (
    FinishReason,
    RequestOutput,
    ResolvedAdapter,
    SequenceOutput,
    TokenLogprob,
)
from loraplex.core.request import GenerateRequest
from loraplex.frontends.openai.logprobs import (
    CompletionLogprobWriter,
    TokenTexts,
    chat_logprobs,
    prompt_logprobs,
)
from loraplex.frontends.openai.responses import (
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
    PromptLogprobs,
    Usage,
)
from loraplex.frontends.openai.usage import UsageCounter
from loraplex.frontends.streams import IndexedOutput

BASE_FINGERPRINT = "lp-base"
ADAPTER_HEADER = "x-loraplex-adapter"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer repeats or follows of the HTTP call."""

    response_id: str
    created: int
    """Unix seconds."""
    model: str
    """As the client wrote it."""
    requests: tuple[GenerateRequest, ...]
    """One for each prompt; n and the kinds of log probabilities are the same in all."""
    include_usage: bool = False
    """In a stream: a last chunk with the usage."""
    echo: bool = False
    wants_prompt_logprobs: bool = False
    """As a field of their own, not only as a part of the echo."""

    def choice_index(self, request_index: int, sequence: SequenceOutput) -> int:
        return request_index * self.requests[0].sampling.n + sequence.index

    def shown_logprobs(self, sequence: SequenceOutput) -> tuple[TokenLogprob, ...]:
        """Without the end or stop token, unless it is in the text: as OpenAI's."""
        is_ended_by_token = (
            sequence.finish_reason is FinishReason.STOP
            and not isinstance(sequence.stop_reason, str)
            and not self.requests[0].sampling.include_stop_in_output
        )
        return sequence.logprobs[:-1] if is_ended_by_token else sequence.logprobs

    @property
    def wants_logprobs(self) -> bool:
        return self.requests[0].sampling.logprobs is not None


def fingerprint(output: RequestOutput) -> str:
    """Changes whenever the weights that answer do: from the adapters' digests and scales."""
    match output.adapters:
        case ():
            return BASE_FINGERPRINT
        case (ResolvedAdapter(digest=digest, scale=1.0),):
            return f"lp-{digest[:12]}"
    parts = sorted(f"{adapter.digest} {adapter.scale!r}" for adapter in output.adapters)
    return f"lp-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:12]}"


def adapter_headers(output: RequestOutput) -> dict[str, str]:
    """The digests of the very adapters that answer; no header for the base model."""
    digests = ",".join(adapter.digest for adapter in output.adapters)
    return {ADAPTER_HEADER: digests} if digests else {}


class CompletionWriter:
    """Answers of /v1/completions."""

    def __init__(self, call: Call, texts: TokenTexts) -> None:
        self._call = call
        self._texts = texts
        self._usage = UsageCounter()
        self._logprob_writers: dict[int, CompletionLogprobWriter] = {}
        self._prompts: dict[int, RequestOutput] = {}
        self._fingerprint = BASE_FINGERPRINT

    def headers(self, first: IndexedOutput) -> Mapping[str, str]:
        return adapter_headers(first[1])

    def chunks(self, item: IndexedOutput) -> Iterator[Completion]:
        """One chunk for each choice that has something new."""
        usage = None if self._call.include_usage else UNSET
        for choice in self._choices(*item):
            if choice.text or choice.finish_reason or (choice.logprobs and choice.logprobs.tokens):
                yield self._completion([choice], usage)

    def last_chunks(self) -> Iterator[Completion]:
        if self._call.include_usage:
            yield self._completion([], self._usage.usage(), self._usage.details())

    def body(self, outputs: Sequence[RequestOutput]) -> Completion:
        """The answer, from one whole output for each request."""
        choices = [c for i, output in enumerate(outputs) for c in self._choices(i, output)]
        return self._completion(choices, self._usage.usage(), self._usage.details())

    def _completion(
        self,
        choices: list[CompletionChoice],
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
        index = self._call.choice_index(request_index, sequence)
        prompt = self._prompts[request_index]
        is_first = index not in self._logprob_writers
        echoed = is_first and self._call.echo
        return CompletionChoice(
            index=index,
            text=self._prompt_text(request_index) + sequence.text if echoed else sequence.text,
            logprobs=self._logprobs(index, sequence, prompt if echoed else None),
            finish_reason=sequence.finish_reason,
            prompt_logprobs=_prompt_logprobs(self._call, prompt, self._texts),
        )

    def _prompt_text(self, request_index: int) -> str:
        prompt = self._call.requests[request_index].prompt
        return prompt if isinstance(prompt, str) else self._texts.decode(prompt)

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
        logprobs = self._call.shown_logprobs(sequence)
        tokens = [(logprob.token_id, logprob) for logprob in logprobs]
        if echoed is None:
            return writer.write(tokens)
        prompt = zip(echoed.prompt_token_ids, echoed.prompt_logprobs or (), strict=True)
        return writer.write([*prompt, *tokens])


class ChatWriter:
    """Answers of /v1/chat/completions: always one request."""

    def __init__(self, call: Call, texts: TokenTexts) -> None:
        self._call = call
        self._texts = texts
        self._usage = UsageCounter()
        self._begun: set[int] = set()
        self._fingerprint = BASE_FINGERPRINT

    def headers(self, first: IndexedOutput) -> Mapping[str, str]:
        return adapter_headers(first[1])

    def chunks(self, item: IndexedOutput) -> Iterator[ChatCompletionChunk]:
        """A chunk with the role when a choice begins, then one whenever it has something new."""
        _, output = item
        self._see(output)
        usage = None if self._call.include_usage else UNSET
        for sequence in output.sequences:
            for choice in self._chunk_choices(sequence):
                yield self._chunk([choice], usage)

    def last_chunks(self) -> Iterator[ChatCompletionChunk]:
        if self._call.include_usage:
            yield self._chunk([], self._usage.usage(), self._usage.details())

    def body(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        """The answer, from the one whole output."""
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
            loraplex=self._usage.details(),
        )

    def _see(self, output: RequestOutput) -> None:
        self._usage.see(0, output)
        self._fingerprint = fingerprint(output)

    def _choice(self, sequence: SequenceOutput) -> ChatChoice:
        return ChatChoice(
            index=sequence.index,
            message=ChatMessage(sequence.text),
            logprobs=self._logprobs(sequence),
            finish_reason=sequence.finish_reason,
        )

    def _logprobs(self, sequence: SequenceOutput) -> ChatLogprobs | None:
        if not self._call.wants_logprobs:
            return None
        return chat_logprobs(self._call.shown_logprobs(sequence), self._texts)

    def _chunk_choices(self, sequence: SequenceOutput) -> Iterator[ChatChunkChoice]:
        if sequence.index not in self._begun:
            self._begun.add(sequence.index)
            yield ChatChunkChoice(sequence.index, ChatDelta(role="assistant", content=""))
        logprobs = self._logprobs(sequence)
        if sequence.text or sequence.finish_reason or (logprobs and logprobs.content):
            yield ChatChunkChoice(
                index=sequence.index,
                delta=ChatDelta(content=sequence.text) if sequence.text else ChatDelta(),
                logprobs=logprobs,
                finish_reason=sequence.finish_reason,
            )

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


def _prompt_logprobs(
    call: Call, output: RequestOutput, texts: TokenTexts
) -> PromptLogprobs | UnsetType:
    if not call.wants_prompt_logprobs or output.prompt_logprobs is None:
        return UNSET
    return prompt_logprobs(output.prompt_logprobs, texts)
