"""Outputs of a request: from the engine once a step, and from serving once a step with text.

Tens of thousands of them may wait for the end of a request. They hold values only and form no
cycles, so the garbage collector leaves them out: its visits would stop all streams for 10 ms.
"""

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Final, Self, TypeVar, cast, overload

import msgspec

from loraplex.core.errors import ErrorInfo
from loraplex.core.request import RequestId


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """One position: the token, its natural log probability, and the most likely ones.

    Taken from the model's own distribution (before temperature, penalties and cuts).
    """

    token_id: int
    logprob: float
    rank: int
    """1 is the most likely token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log probability), most likely first."""


LOGPROBS_PIECE: Final = 128
"""Positions whose log probabilities are decoded at a time."""
_PIECE_ENCODER: Final = msgspec.msgpack.Encoder()
_PIECE_DECODER: Final = msgspec.msgpack.Decoder(list[TokenLogprob | None])
_Logprob = TypeVar("_Logprob", bound=TokenLogprob | None)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PackedLogprobs(Sequence[_Logprob]):
    """Many log probabilities that come at once, in the order of their positions.

    They stay encoded until they are read, a piece at a time, and take no time of the event loops
    that pass them on. It is equal to a sequence of the same elements.
    """

    num_positions: int
    num_values: int
    """Number of tokens that the positions list, together."""
    pieces: tuple[bytes, ...]
    """Each LOGPROBS_PIECE positions, as msgpack. Of the last one only the first may count."""

    @classmethod
    def of(cls, logprobs: Sequence[_Logprob]) -> Self:
        starts = range(0, len(logprobs), LOGPROBS_PIECE)
        return cls(
            len(logprobs),
            sum(1 + len(logprob.top) for logprob in logprobs if logprob is not None),
            tuple(_PIECE_ENCODER.encode(logprobs[i : i + LOGPROBS_PIECE]) for i in starts),
        )

    def __len__(self) -> int:
        return self.num_positions

    def __iter__(self) -> Iterator[_Logprob]:
        for index, _ in enumerate(self.pieces):
            yield from self._piece(index)

    @overload
    def __getitem__(self, index: int) -> _Logprob: ...
    @overload
    def __getitem__(self, index: slice) -> list[_Logprob]: ...
    def __getitem__(self, index: int | slice) -> _Logprob | list[_Logprob]:
        if isinstance(index, slice):
            return list(self)[index]
        piece, place = divmod(range(self.num_positions)[index], LOGPROBS_PIECE)
        return self._piece(piece)[place]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def _piece(self, index: int) -> list[_Logprob]:
        num_left = self.num_positions - index * LOGPROBS_PIECE
        return cast("list[_Logprob]", _PIECE_DECODER.decode(self.pieces[index])[:num_left])


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PromptLogprobs(PackedLogprobs[TokenLogprob | None]):
    """Log probabilities of the tokens of a prompt, None for the first."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class BeamLogprobs(PackedLogprobs[TokenLogprob]):
    """Log probabilities of the tokens of a hypothesis of beam search."""

    def first(self, num_positions: int) -> "BeamLogprobs":
        """Return those of the first positions, without decoding them."""
        if num_positions >= self.num_positions:
            return self
        num_values = self.num_values * num_positions // self.num_positions
        num_pieces = -(-num_positions // LOGPROBS_PIECE)
        return BeamLogprobs(num_positions, num_values, self.pieces[:num_pieces])


class LogitsFile(msgspec.Struct, frozen=True):
    """Logits, too large for a message: float32 [num_rows, vocab_size] in native order.

    The receiver reads and deletes the file.
    """

    path: str
    num_rows: int


class Logits(msgspec.Struct, frozen=True):
    """Logits in memory for a front end: float32 [num_rows, vocab_size] in native order."""

    data: bytes
    num_rows: int


class SequenceDelta(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Tokens that one step added to one sequence of a request."""

    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | BeamLogprobs = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended it, when finish_reason is STOP. It is the last of token_ids."""
    logits: tuple[LogitsFile, ...] = ()
    """Logits of token_ids, in order, if the request returns them."""
    cumulative_logprob: float | None = None
    """Log probability of a whole beam search hypothesis; for other sequences sum `logprobs`."""
    pooled: bytes = b""
    """The vector of a pooled sequence, in its only delta: float32, little-endian."""


class RequestTiming(msgspec.Struct, frozen=True):
    """Times and counts of a request's events.

    `..._ns` are nanoseconds on the engine's monotonic clock, 0 for an event that has not happened;
    `..._seconds` are spans between them, None if one end is missing.
    """

    arrival_ns: int
    adapter_ready_ns: int = 0
    """Time when the last of its adapters was on the device."""
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    """Time of the first token, or of the vector of a pooled request."""
    last_token_ns: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    adapter_load_ns: int = 0
    """Time that it waited for its adapters to be read into host memory, summed over them."""
    adapter_copy_ns: int = 0
    """Time that it waited for their copies to the device, summed over them."""
    num_output_tokens: int = 0
    """Number of tokens of its longest sequence."""
    num_restarts: int = 0
    """Number of engines that died with this request."""
    num_draft_tokens: int = 0
    """Number of draft tokens proposed for it."""
    num_accepted_tokens: int = 0
    """Number of those draft tokens that were accepted."""
    first_step: int = 0
    """Number of the first step with a row of it in its newest engine, whose steps count from 1."""
    last_step: int = 0
    """Number of the step of its newest token there."""

    @property
    def queue_seconds(self) -> float | None:
        """Time from arrival to the first step, spent waiting for a slot, KV blocks and adapters."""
        return _seconds_between(self.arrival_ns, self.first_scheduled_ns)

    @property
    def adapter_wait_seconds(self) -> float | None:
        """Part of queue_seconds until the last of its adapters was on the device."""
        return _seconds_between(self.arrival_ns, self.adapter_ready_ns)

    @property
    def before_first_step_ns(self) -> int:
        """Time from arrival to the first step; 0 if there was none."""
        return max(0, self.first_scheduled_ns - self.arrival_ns)

    @property
    def adapters_moving_ns(self) -> int:
        """Part of before_first_step_ns in which its adapters were read or copied."""
        return min(self.before_first_step_ns, self.adapter_load_ns + self.adapter_copy_ns)

    @property
    def adapter_load_seconds(self) -> float:
        return self.adapter_load_ns / 1e9

    @property
    def adapter_copy_seconds(self) -> float:
        return self.adapter_copy_ns / 1e9

    @property
    def prefill_seconds(self) -> float | None:
        """Time from the first step to the first token."""
        return _seconds_between(self.first_scheduled_ns, self.first_token_ns)

    @property
    def first_token_seconds(self) -> float | None:
        """Time from arrival to the first token."""
        return _seconds_between(self.arrival_ns, self.first_token_ns)

    @property
    def seconds_per_token(self) -> float | None:
        """The mean time between two tokens of its longest sequence; None below two tokens."""
        seconds = _seconds_between(self.first_token_ns, self.last_token_ns)
        if seconds is None or self.num_output_tokens < 2:
            return None
        return seconds / (self.num_output_tokens - 1)

    @property
    def total_seconds(self) -> float | None:
        """Time from arrival to the last token."""
        return _seconds_between(self.arrival_ns, self.last_token_ns)

    def since(self, earlier: "RequestTiming") -> "RequestTiming":
        """Return the whole timing of a request whose former engine had reported `earlier`.

        First events keep their times, and counts are summed.
        """
        was_scheduled = bool(earlier.first_scheduled_ns)
        return msgspec.structs.replace(
            self,
            arrival_ns=earlier.arrival_ns,
            adapter_ready_ns=earlier.adapter_ready_ns if was_scheduled else self.adapter_ready_ns,
            first_scheduled_ns=earlier.first_scheduled_ns or self.first_scheduled_ns,
            first_token_ns=earlier.first_token_ns or self.first_token_ns,
            last_token_ns=self.last_token_ns or earlier.last_token_ns,
            num_preemptions=earlier.num_preemptions + self.num_preemptions,
            num_cached_tokens=(earlier if was_scheduled else self).num_cached_tokens,
            adapter_load_ns=earlier.adapter_load_ns + self.adapter_load_ns,
            adapter_copy_ns=earlier.adapter_copy_ns + self.adapter_copy_ns,
            num_output_tokens=max(earlier.num_output_tokens, self.num_output_tokens),
            num_draft_tokens=earlier.num_draft_tokens + self.num_draft_tokens,
            num_accepted_tokens=earlier.num_accepted_tokens + self.num_accepted_tokens,
            first_step=self.first_step or earlier.first_step,
            last_step=self.last_step if self.first_step else earlier.last_step,
        )


def _seconds_between(start_ns: int, end_ns: int) -> float | None:
    return (end_ns - start_ns) / 1e9 if start_ns and end_ns else None


class EngineOutput(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Output of one step for one request. Exactly one output of a request is `finished`."""

    request_id: RequestId
    deltas: tuple[SequenceDelta, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    """One entry per prompt token, None for the first; sent once, with the first token."""
    prompt_logits: tuple[LogitsFile, ...] = ()
    """Logits of the prompt's positions, in order, if the request returns them."""
    finished: bool = False
    error: ErrorInfo | None = None
    timing: RequestTiming | None = None
    """Set with the first token, as far as it is known then, and in the finished output."""


class ResolvedAdapter(msgspec.Struct, frozen=True):
    """The exact adapter version that computed the output."""

    name: str
    digest: str
    scale: float = 1.0


class SequenceOutput(msgspec.Struct, frozen=True, gc=False):
    """New text and tokens of one sequence since the last output.

    `token_ids` has every generated token, including a stop or end token. `text` ends before the
    stop string or token, unless the request includes it (`include_stop_in_output`).
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | BeamLogprobs
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    """The stop string or stop token that matched; None for the end-of-text token."""
    logits: tuple[Logits, ...] = ()
    """Logits of token_ids, in order, if the request returns them."""
    cumulative_logprob: float | None = None
    """Set for a beam search hypothesis or the best of several outputs; else sum `logprobs`."""
    has_end_token: bool = False
    """Whether the last of token_ids is an end token of the model or of an adapter, and ended it."""


class RequestOutput(msgspec.Struct, frozen=True, gc=False):
    """One increment that a front end reads from the iterator of a request."""

    request_id: RequestId
    client_request_id: str
    model: str
    adapters: tuple[ResolvedAdapter, ...]
    prompt_token_ids: tuple[int, ...]
    """Input of an encoder, then what the decoder begins with; without an encoder the prompt."""
    sequences: tuple[SequenceOutput, ...]
    num_output_tokens: int
    """Tokens generated so far over all sequences."""
    finished: bool
    prompt_logprobs: PromptLogprobs | None = None
    timing: RequestTiming | None = None
    """Set in the last output."""
    prompt_logits: tuple[Logits, ...] = ()
    """Logits of the prompt's positions, in order, if the request returns them."""
    pooled: bytes = b""
    """The vector of a pooled request, in its only output: float32, little-endian."""
    num_encoder_tokens: int = 0
    """How many of prompt_token_ids are the encoder's."""

    @property
    def text(self) -> str:
        """New text of the first sequence."""
        return "".join(sequence.text for sequence in self.sequences if sequence.index == 0)


class Pooled(msgspec.Struct, frozen=True):
    """Result of a pooled request."""

    adapters: tuple[ResolvedAdapter, ...]
    prompt_token_ids: tuple[int, ...]
    vector: bytes
    """Float32, little-endian."""
    timing: RequestTiming | None
