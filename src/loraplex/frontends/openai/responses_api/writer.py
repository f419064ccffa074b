"""Writer of Responses API objects from RequestOutputs, whole or event by event."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from loraplex.core.errors import LoraplexError
from loraplex.core.output import FinishReason, SequenceOutput, TokenLogprob
from loraplex.frontends.openai.logprobs import TokenTexts, chat_logprobs
from loraplex.frontends.openai.responses_api import objects as wire
from loraplex.frontends.openai.responses_api.content_logprobs import ContentLogprobs
from loraplex.frontends.openai.responses_api.errors import error_detail, response_error
from loraplex.frontends.openai.responses_api.output_items import OutputItems
from loraplex.frontends.openai.usage import UsageCounter
from loraplex.frontends.openai.writers import Call, adapter_headers
from loraplex.frontends.streams import IndexedOutput
from loraplex.serving.text.completion_reader import CompletionSyntax

Logprobs = Sequence[TokenLogprob]
Keep = Callable[[wire.ResponseObject], None]
"""What is done with a response that has ended."""


class ResponseWriter:
    """One response: always one request with one sequence."""

    def __init__(
        self,
        response: wire.ResponseObject,
        call: Call,
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
        is_all_content = reading.tool_use is None and reading.chat_format.tags is None
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
