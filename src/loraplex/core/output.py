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


class Logits(msgspec.Struct, frozen=True):
    """Logits as a front end gets them: float32 [num_rows, vocab_size] in native order."""

    data: bytes
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
    """When things happened to a request, and how often.

    `..._ns` are nanoseconds on the engine's monotonic clock, 0 where it has not happened;
    `..._seconds` are spans between them, None where one end is missing.
    """

    arrival_ns: int
    adapter_ready_ns: int = 0
    """When the last of its adapters was on the device."""
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    adapter_load_ns: int = 0
    """How long it waited while its adapters were read into host memory; added up over them."""
    adapter_copy_ns: int = 0
    """The same for their copies to the device."""
    num_output_tokens: int = 0
    """Of its longest sequence."""
    num_restarts: int = 0
    """Engines that died while it was in them."""
    num_draft_tokens: int = 0
    """Guesses at its tokens."""
    num_accepted_tokens: int = 0
    """Of those, the right ones."""

    @property
    def queue_seconds(self) -> float | None:
        """From its arrival to its first step: for a slot, KV blocks, and its adapters."""
        return _seconds_between(self.arrival_ns, self.first_scheduled_ns)

    @property
    def adapter_wait_seconds(self) -> float | None:
        """Of queue_seconds, until the last of its adapters was on the device."""
        return _seconds_between(self.arrival_ns, self.adapter_ready_ns)

    @property
    def adapter_load_seconds(self) -> float:
        return self.adapter_load_ns / 1e9

    @property
    def adapter_copy_seconds(self) -> float:
        return self.adapter_copy_ns / 1e9

    @property
    def prefill_seconds(self) -> float | None:
        """From its first step to its first token."""
        return _seconds_between(self.first_scheduled_ns, self.first_token_ns)

    @property
    def first_token_seconds(self) -> float | None:
        """From its arrival to its first token."""
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
        """From its arrival to its last token."""
        return _seconds_between(self.arrival_ns, self.last_token_ns)

    def since(self, earlier: "RequestTiming") -> "RequestTiming":
        """The whole timing of a request of which an engine that died had told `earlier`.

        First things stay what they were; what is counted is added up.
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
        )


def _seconds_between(start_ns: int, end_ns: int) -> float | None:
    return (end_ns - start_ns) / 1e9 if start_ns and end_ns else None


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
    """With the first token, as far as it is known then; and in the finished one."""


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
    logits: tuple[Logits, ...] = ()
    """Of token_ids, in order, if the request returns them."""
    cumulative_logprob: float | None = None
    """Of a beam's whole answer, or of the best of several; else the sum of `logprobs`."""


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
    prompt_logits: tuple[Logits, ...] = ()
    """Of the prompt's positions, in order, if the request returns them."""
