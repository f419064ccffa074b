"""Readable log lines of ended requests: one each, or a sample under load."""

import logging
import threading
from collections.abc import Collection
from typing import Final

from loraplex.core.clock import Clock, SystemClock
from loraplex.serving.wire_request import WireRequest

logger = logging.getLogger(__name__)

SAMPLED_PER_SECOND: Final = 5
_MAX_CHARS: Final = 200
_SECOND_NS: Final = 1_000_000_000
_FIRST_ERROR: Final = 400


class RequestLines:
    """A sink of `Telemetry`. Thread-safe."""

    def __init__(
        self, *, is_sampled: bool, probes: Collection[str] = (), clock: Clock | None = None
    ) -> None:
        """is_sampled: only requests that generate or fail, and a few of them each second.

        probes: paths that are polled, with any status; their lines have the level debug.
        """
        self._probes = frozenset(probes)
        self._is_sampled = is_sampled
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._window_ns = 0
        self._num_logged = 0
        self._num_skipped = 0

    def __call__(self, request: WireRequest) -> None:
        if request.path in self._probes:
            # A probe of a server that starts fails each second: that is no error.
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s", request_line(request))
            return
        if self._is_sampled and not (request.generations or _failed(request)):
            return
        with self._lock:
            num_skipped = self._turn()
        if num_skipped is not None:
            more = f" ({num_skipped} more requests are not listed)" if num_skipped else ""
            logger.info("%s%s", request_line(request), more)

    def _turn(self) -> int | None:
        """Return how many were skipped before; None: this one is skipped, too."""
        now_ns = self._clock.now_ns()
        if not self._is_sampled:
            return 0
        if now_ns - self._window_ns >= _SECOND_NS:
            self._window_ns, self._num_logged = now_ns, 0
        if self._num_logged >= SAMPLED_PER_SECOND:
            self._num_skipped += 1
            return None
        self._num_logged += 1
        num_skipped, self._num_skipped = self._num_skipped, 0
        return num_skipped


def request_line(request: WireRequest) -> str:
    """Return `POST /v1/completions 200, 0.12 s, 12 prompt and 30 output tokens, adapter zh`."""
    name = request.route or request.path
    parts = [
        f"{request.method or request.protocol} {name} {request.status or '-'}",
        f"{(request.ended_ns - request.started_ns) / _SECOND_NS:.3f} s",
    ]
    if request.generations:
        prompt = sum(each.num_prompt_tokens for each in request.generations)
        output = sum(each.num_output_tokens for each in request.generations)
        parts.append(f"{prompt} prompt and {output} output tokens")
        adapters = dict.fromkeys(
            adapter.name for each in request.generations for adapter in each.adapters
        )
        if adapters:
            parts.append(f"adapter {' + '.join(adapters)}")
    if request.tenant:
        parts.append(f"tenant {request.tenant}")
    if request.error_code:
        parts.append(request.error_code)
    return ", ".join(_printable(part) for part in parts)


def _failed(request: WireRequest) -> bool:
    return bool(request.error_code) or (
        request.status.isdecimal() and int(request.status) >= _FIRST_ERROR
    )


def _printable(text: str) -> str:
    """Return a client's text without what would change a terminal or begin another line."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text[:_MAX_CHARS])
