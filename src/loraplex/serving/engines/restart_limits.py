"""Limits of waiting for an engine, and the errors after them."""

from typing import Final, NamedTuple

from loraplex.core.errors import (
    AdapterNotFoundError,
    AdapterTooLargeError,
    CrashingRequestError,
    DeadlineExceededError,
    EngineRestartedError,
    ErrorInfo,
    LoraplexError,
    NotReadyError,
    PromptTooLongError,
)
from loraplex.serving.engines.in_flight_request import InFlightRequest

_REPORT_NS: Final = 200_000_000
"""Time after a deadline in which an engine reports the end itself, with all that it computed."""


_TOO_SMALL: Final = frozenset(
    error.code for error in (PromptTooLongError, AdapterTooLargeError, AdapterNotFoundError)
)
"""Errors of an engine whose memory is too small for a request or its adapter. It does not know an
adapter that was too large."""


class RestartLimits(NamedTuple):
    """How long requests wait for an engine while it is started again."""

    in_flight_seconds: float = 300.0
    """Those that a dead engine had taken."""
    new_seconds: float = 30.0
    """Those that came since then."""

    def end_of_wait(
        self, request: InFlightRequest, now_ns: int, lost_ns: int | None
    ) -> LoraplexError | None:
        """Why a request that no engine knows ends now; None: it goes on waiting.

        lost_ns: when the last engine died; None if one runs and has the request
        soon.
        """
        is_due = request.is_new and not request.waits_for_others
        if is_due and now_ns - request.submitted_ns > self.new_seconds * 1e9:
            return NotReadyError("the engine is being started again", retry_after_seconds=5)
        if lost_ns is not None and now_ns - lost_ns > self.in_flight_seconds * 1e9:
            return engine_gone("could not be started again in time")
        return None


def end_at_deadline(request: InFlightRequest, now_ns: int) -> LoraplexError | None:
    """Return the error of a request whose deadline has passed; None: it goes on.

    An engine in a long step, or one that hangs, does not end its requests in time.
    """
    report_ns = _REPORT_NS if request.is_sent else 0
    if request.deadline_ns is None or now_ns < request.deadline_ns + report_ns:
        return None
    seconds = (request.deadline_ns - request.arrival_ns) / 1e9
    return DeadlineExceededError(
        f"the request did not end within its {seconds:g} seconds; it had "
        f"{request.num_output_tokens} new tokens"
    )


def verdict(request: InFlightRequest) -> LoraplexError | None:
    """An engine died. Why a request that it knew ends with it; None: the next one gets it."""
    if request.is_guilty:
        return CrashingRequestError(
            "the engine crashed or hung again and again at the same place of this request, so the "
            "request was given up; the server's log has the reason"
        )
    if request.is_stuck:
        return engine_gone("died again and again, and this request got nowhere")
    return None


def error_after_restart(error: ErrorInfo) -> ErrorInfo:
    """Return the error of a request that was accepted before its present engine started.

    What had fitted is not the client's mistake: a later engine, or another server, may have more
    memory again.
    """
    if error.code not in _TOO_SMALL:
        return error
    return EngineRestartedError(
        "the engine was restarted with less memory, and the request no longer fits: please send "
        f"it once more ({error.message})",
        retry_after_seconds=5,
    ).to_info()


def engine_gone(what: str) -> EngineRestartedError:
    return EngineRestartedError(
        f"the engine {what}: please send the request once more", retry_after_seconds=5
    )
