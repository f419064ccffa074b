"""Writer of Responses API objects from RequestOutputs, whole or event by event."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from loraplex.core.errors import LoraplexError
from loraplex.core.output import FinishReason, SequenceOutput, TokenLogprob
from loraplex.core.sampling_params import SamplingParams
from loraplex.frontends.openai.logprobs import TokenTexts, chat_logprobs
from loraplex.frontends.openai.responses import ContentLogprob
from loraplex.frontends.openai.responses_api import objects as wire
from loraplex.frontends.openai.responses_api.errors import error_detail, response_error
from loraplex.frontends.openai.responses_api.output_items import OutputItems
from loraplex.frontends.openai.responses_api.schema import ResponsesBody
from loraplex.frontends.openai.responses_api.tools import shown_tools
from loraplex.frontends.openai.writers import CallFields, UsageCounter, adapter_headers
from loraplex.frontends.streams import IndexedOutput
from loraplex.serving.text.chat_format import CompletionDelta, CompletionSyntax
from loraplex.serving.text.reasoning import TAGS

Logprobs = Sequence[TokenLogprob]
Keep = Callable[[wire.ResponseObject], None]
"""What is done with a response that has ended."""


class ResponsesWriter:
    """One response: always one request with one sequence."""

    def __init__(
        self,
        response: wire.ResponseObject,
        call: CallFields,
        texts: TokenTexts,
        reading: CompletionSyntax,
        keep: Keep,
    ) -> None:
        """response: as it is before its first token."""
        self.response = response
        self._call = call
        self._texts = texts
        self._number = itertools.count().__next__
        self._items = OutputItems(self._number)
        self._reader = reading.reader()
        is_all_content = reading.tool_use is None and reading.chat_format.reasoning not in TAGS
        self._logprobs = ContentLogprobs(texts, is_all_content=is_all_content)
        self._usage = UsageCounter(call.notes)
        self._num_reasoning_tokens = 0
        self._finish_reason: FinishReason | None = None
        self._keep = keep
        self._is_begun = False

    def headers(self, first: IndexedOutput) -> Mapping[str, str]:
        return adapter_headers(first[1])

    def chunks(self, item: IndexedOutput) -> Iterator[wire.Event]:
        output = item[1]
        if not self._is_begun:
            self._is_begun = True
            yield wire.Created(sequence_number=self._number(), response=self.response)
            yield wire.InProgress(sequence_number=self._number(), response=self.response)
        self._usage.see(0, output)
        for sequence in output.sequences:
            yield from self._read(sequence)

    def last_chunks(self) -> Iterator[wire.Event]:
        is_whole = self._finish_reason is FinishReason.STOP
        status: wire.Status = "completed" if is_whole else "incomplete"
        yield from self._items.end(status)
        self.response = self._ended(status)
        self._keep(self.response)
        last = wire.Completed if is_whole else wire.Incomplete
        yield last(sequence_number=self._number(), response=self.response)

    def failure(self, error: LoraplexError) -> Iterator[wire.Event]:
        """Instead of last_chunks."""
        detail = error_detail(error)
        yield wire.ErrorEvent(
            sequence_number=self._number(),
            code=detail.code,
            message=detail.message,
            param=detail.param,
        )
        self.response = msgspec.structs.replace(
            self.response,
            status="failed",
            error=response_error(error),
            output=self._items.so_far(),
        )
        yield wire.Failed(sequence_number=self._number(), response=self.response)

    def _read(self, sequence: SequenceOutput) -> Iterator[wire.Event]:
        self._finish_reason = sequence.finish_reason or self._finish_reason
        reason = sequence.finish_reason
        is_cut = reason not in (None, FinishReason.STOP)
        delta = self._reader.push(sequence.text, final=reason is not None, is_cut=is_cut)
        news, end = self._split_end(sequence)
        yield from self._items.add(delta, self._logprobs.of(delta, news))
        if end:
            yield from self._items.add_end(chat_logprobs(end, self._texts).content)
        if not self._items.has_begun:
            self._num_reasoning_tokens += len(sequence.token_ids)

    def _split_end(self, sequence: SequenceOutput) -> tuple[Logprobs, Logprobs]:
        """Log probabilities of the tokens that make the text, and of the end or stop token."""
        is_ended_by_token = (
            sequence.finish_reason is FinishReason.STOP
            and not isinstance(sequence.stop_reason, str)
            and not self._call.requests[0].sampling.include_stop_in_output
        )
        num_end = min(int(is_ended_by_token), len(sequence.logprobs))
        num_news = len(sequence.logprobs) - num_end
        return sequence.logprobs[:num_news], sequence.logprobs[num_news:]

    def _ended(self, status: wire.Status) -> wire.ResponseObject:
        is_cut = self._finish_reason is FinishReason.LENGTH
        return msgspec.structs.replace(
            self.response,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=wire.IncompleteDetails("max_output_tokens") if is_cut else None,
            output=self._items.so_far(),
            usage=self._usage_so_far(),
            loraplex=self._usage.details(),
        )

    def _usage_so_far(self) -> wire.ResponseUsage:
        usage = self._usage.usage()
        details = usage.prompt_tokens_details
        return wire.ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=wire.InputTokensDetails(
                0 if isinstance(details, msgspec.UnsetType) else details.cached_tokens
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=wire.OutputTokensDetails(self._num_reasoning_tokens),
            total_tokens=usage.total_tokens,
        )


class ContentLogprobs:
    """Keeps log probabilities until it is known what their tokens belong to."""

    def __init__(self, texts: TokenTexts, *, is_all_content: bool) -> None:
        """is_all_content: the output is not split."""
        self._texts = texts
        self._is_all_content = is_all_content
        self._waiting: list[TokenLogprob] = []

    def of(self, delta: CompletionDelta, news: Sequence[TokenLogprob]) -> list[ContentLogprob]:
        """Those of delta's content; news: of the tokens that came with it."""
        self._waiting.extend(news)
        if self._is_all_content:
            chosen = self._waiting if delta.content else []
        else:
            chosen = list(self._making(delta.content))
        if delta.content or delta.reasoning or delta.calls:
            self._waiting = []
        return list(chat_logprobs(chosen, self._texts).content)

    def _making(self, content: str) -> Iterator[TokenLogprob]:
        """The tokens that overlap with the last place where the content stands."""
        tokens = [self._texts.bytes_of(logprob.token_id) for logprob in self._waiting]
        start = b"".join(tokens).rfind(content.encode()) if content else -1
        end, at = start + len(content.encode()), 0
        for logprob, token in zip(self._waiting, tokens, strict=True):
            if start >= 0 and at < end and at + len(token) > start:
                yield logprob
            at += len(token)


def begun(body: ResponsesBody, call: CallFields, *, is_kept: bool) -> wire.ResponseObject:
    """What it repeats of the body, with the values that absent fields have."""
    sampling: SamplingParams = call.requests[0].sampling
    text = body.text.model_dump(exclude_none=True) if body.text else {}
    reasoning = body.reasoning.model_dump(exclude_none=True) if body.reasoning else {}
    return wire.ResponseObject(
        id=call.response_id,
        created_at=call.created,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=call.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": None, "summary": None, **reasoning},
        safety_identifier=body.safety_identifier,
        store=is_kept,
        temperature=sampling.temperature,
        text={"format": {"type": "text"}, "verbosity": "medium", **text},
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=shown_tools(body.tools),
        top_logprobs=body.top_logprobs or 0,
        top_p=sampling.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )
