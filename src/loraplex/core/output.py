"""What comes back: from the engine once a step, and from serving once a step with text."""

import enum

import msgspec

from loraplex.core.errors import ErrorInfo
from loraplex.core.request import RequestId


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprob(msgspec.Struct, frozen=True):
    """One position: the token, its natural log probability, and the most likely ones.

    Taken from the model's own distribution (before temperature, penalties and cuts).
    """

    token_id: int
    logprob: float
    rank: int
    """1 is the most likely token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log probability), most likely first."""


class LogitsFile(msgspec.Struct, frozen=True):
    """Logits, too large for a message: float32 [num_rows, vocab_size] in native order.

    Whoever takes it in reads and deletes the file.
    """

    path: str
    num_rows: int


class SequenceDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one step added to one sequence of a request."""

    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended it, when finish_reason is STOP. It is the last of token_ids."""
    logits: tuple[LogitsFile, ...] = ()
    """Of token_ids, in order, if the request returns them."""
    cumulative_logprob: float | None = None
    """Of a beam's whole answer, in its only delta; other sequences' is the sum of their own."""


class RequestTiming(msgspec.Struct, frozen=True):
    """Nanoseconds on the engine's monotonic clock; 0 where it has not happened."""

    arrival_ns: int
    adapter_ready_ns: int = 0
    """When the last of its adapters was on the device."""
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""


class EngineOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one step did for one request. Exactly one output of a request is `finished`."""

    request_id: RequestId
    deltas: tuple[SequenceDelta, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Once, with the first token: one entry per prompt token, None for the first."""
    prompt_logits: tuple[LogitsFile, ...] = ()
    """Of the prompt's positions, in order, if the request returns them."""
    finished: bool = False
    error: ErrorInfo | None = None
    timing: RequestTiming | None = None


class ResolvedAdapter(msgspec.Struct, frozen=True):
    """The very adapter that answered."""

    name: str
    digest: str
    scale: float = 1.0


class SequenceOutput(msgspec.Struct, frozen=True):
    """New text and tokens of one sequence since the last output.

    `token_ids` holds every generated token, a stop or end token too. `text` ends before the stop
    string or token, unless the request asked to include it.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    """The stop string or stop token that matched; None for the end-of-text token."""


class RequestOutput(msgspec.Struct, frozen=True):
    """What a front end gets from the iterator of a request: increments, in order."""

    request_id: RequestId
    client_request_id: str
    model: str
    adapters: tuple[ResolvedAdapter, ...]
    prompt_token_ids: tuple[int, ...]
    sequences: tuple[SequenceOutput, ...]
    num_output_tokens: int
    """Tokens generated so far over all sequences."""
    finished: bool
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    timing: RequestTiming | None = None
    """Set in the last output."""
