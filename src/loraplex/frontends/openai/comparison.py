"""Response of POST /v1/compare, whole or as events."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from loraplex.core.errors import LoraplexError
from loraplex.core.output import (
    RequestOutput,
    RequestTiming,
    ResolvedAdapter,
    SequenceOutput,
    TokenLogprob,
)
from loraplex.frontends.openai.chat_parts import ChatParts, delta, message
from loraplex.frontends.openai.errors import ErrorDetail, error_body
from loraplex.frontends.openai.logprobs import MIN_LOGPROB, TokenTexts, chat_logprobs
from loraplex.frontends.openai.responses import ChatDelta, ChatMessage, ContentLogprob, Usage
from loraplex.serving.compare import Compared, ComparedOutput, Difference, FirstDifference
from loraplex.serving.text.completion_reader import CompletionSyntax


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
