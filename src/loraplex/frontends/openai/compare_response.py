"""Responses of POST /v1/compare, and their writer."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType

from loraplex.core.adapter import AdapterChoice
from loraplex.core.errors import LoraplexError
from loraplex.core.output import (
    FinishReason,
    RequestOutput,
    RequestTiming,
    ResolvedAdapter,
    SequenceOutput,
    TokenLogprob,
)
from loraplex.frontends.field_names import as_sent
from loraplex.frontends.openai.convert import Prompt
from loraplex.frontends.openai.errors import ErrorDetail, error_body
from loraplex.frontends.openai.logprobs import MIN_LOGPROB, TokenTexts, chat_logprobs
from loraplex.frontends.openai.responses import ChatDelta, ChatMessage, ContentLogprob, Usage
from loraplex.frontends.openai.schema import Message
from loraplex.frontends.openai.writers import ChatParts, delta, message
from loraplex.serving.compare import Compared, ComparedOutput, Difference, FirstDifference
from loraplex.serving.text.chat_format import CompletionSyntax


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
    """The entry of `adapters`, or the `adapters` of the entry, as it was sent."""
    adapters: tuple[ResolvedAdapter, ...] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    """The text as the model wrote it."""
    message: ChatMessage | UnsetType = UNSET
    """Only with messages: content, reasoning and tool calls apart."""
    finish_reason: str | UnsetType = UNSET
    """`cancelled`: by POST /v1/compare/{id}/cancel; else as in a completion or a chat."""
    prompt_tokens: int | UnsetType = UNSET
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
    prompt_tokens: int | None
    """Null with `entries`: each output has its own."""
    seed: int | None
    """Seed of all draws, or of those whose entry has none; send it again to draw the same."""
    usage: Usage
    answers: list[CompareEntry] | UnsetType = UNSET  # language: quoted


class ComparisonStarted(Struct, frozen=True, kw_only=True):
    """The first event of a stream: all outputs are admitted, and can be cancelled by this id."""

    id: str
    object: Literal["comparison.started"] = "comparison.started"


class CancelledOutput(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["comparison.cancel"] = "comparison.cancel"
    index: int
    cancelled: bool
    """False: the output had ended already."""


class CompareChunk(Struct, frozen=True, kw_only=True):
    """New tokens of one output."""

    index: int
    text: str
    delta: ChatDelta | UnsetType = UNSET
    """Only with messages: what the tokens add to content, reasoning and tool calls."""
    token_ids: list[int]
    logprobs: Sequence[ContentLogprob]
    finish_reason: str | UnsetType = UNSET


CompareEvent = ComparisonStarted | CompareChunk | CompareEntry | Comparison
Progress = tuple[int, RequestOutput | Compared] | None
"""(index of the output, what is new or its result); None: the outputs are admitted."""
CANCELLED: Final = "cancelled"
"""The finish reason of an output that was cancelled."""


class Compare(Struct, frozen=True, kw_only=True):
    """What the response repeats of its request."""

    response_id: str
    created: int
    """Unix seconds."""
    model: str
    seed: int | None
    has_entries: bool
    """Whether each output has a prompt of its own."""


class CompareInput(NamedTuple):
    """What one output is made of."""

    asked: Any  # language: quoted
    """Its adapters, as they were sent."""
    adapters: tuple[AdapterChoice, ...]
    prompt: Prompt | None
    """None until the messages are rendered."""
    messages: list[Message] | None
    seed: int | None
    """Its own; None: that of the request."""
    names: Mapping[str, str]
    """Our names of fields, and the client's."""
    path: str = ""
    """What its fields' names begin with."""
    reading: CompletionSyntax | None = None
    """How the outputs of rendered messages are parsed."""


class ComparisonWriter:
    """Writer of one response."""

    def __init__(
        self,
        about: Compare,
        texts: TokenTexts,
        inputs: Sequence[CompareInput],
        *,
        num_top: int,
    ) -> None:
        """num_top: how many likely tokens each position shows."""
        self._about = about
        self._texts = texts
        self._inputs = inputs
        self._num_top = num_top
        self._parts = [None if each.reading is None else ChatParts(each.reading) for each in inputs]
        self._ends: dict[int, Compared] = {}

    def headers(self, _first: Progress) -> Mapping[str, str]:
        return {}

    def chunks(self, item: Progress) -> Iterator[CompareEvent]:
        if item is None:
            yield ComparisonStarted(id=self._about.response_id)
            return
        index, output = item
        if isinstance(output, RequestOutput):
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
        return self._comparison([self._whole(*end) for end in self._ends.items()])

    def _comparison(self, entries: list[CompareEntry] | UnsetType = UNSET) -> Comparison:
        found = [each for each in self._ends.values() if isinstance(each, ComparedOutput)]
        num_output_tokens = sum(len(each.token_ids) for each in found)
        num_prompt_tokens = [len(each.prompt_token_ids) for each in found]
        computed = sum(num_prompt_tokens)
        return Comparison(
            id=self._about.response_id,
            created=self._about.created,
            model=self._about.model,
            prompt_tokens=None if self._about.has_entries else next(iter(num_prompt_tokens), 0),
            seed=self._about.seed,
            usage=Usage(computed, num_output_tokens, computed + num_output_tokens),
            answers=entries,
        )

    def _chunk(self, index: int, sequence: SequenceOutput) -> CompareChunk:
        parts = self._parts[index]
        news = UNSET if parts is None else delta(parts.read(sequence))
        reason = sequence.finish_reason if parts is None else parts.finish_reason(sequence)
        if sequence.finish_reason is FinishReason.ABORT:
            reason = CANCELLED
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
        sent = self._inputs[index]
        if isinstance(output, LoraplexError):
            error = error_body(as_sent(output, sent.names)).error
            return CompareEntry(index=index, asked=sent.asked, error=error)
        versus = output.versus_base
        return CompareEntry(
            index=index,
            asked=sent.asked,
            adapters=output.adapters,
            prompt_tokens=len(output.prompt_token_ids),
            num_tokens=len(output.token_ids),
            logprob=max(output.logprob, MIN_LOGPROB),
            ttft_ms=round(output.ttft_ms, 3),
            total_ms=round(output.total_ms, 3),
            num_cached_tokens=output.timing.num_cached_tokens,
            timing=phase_times(output.timing),
            versus_base=None if versus is None else self._difference(versus),
        )

    def _finish_reason(self, index: int, output: ComparedOutput) -> str:
        if output.finish_reason is FinishReason.ABORT:
            return CANCELLED
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
