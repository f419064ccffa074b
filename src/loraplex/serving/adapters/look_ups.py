"""Limits of looking up names that are unknown: a client's mistakes must not cost others time."""

from typing import Final

from loraplex.core.clock import Clock
from loraplex.core.errors import RateLimitedError

MAX_PER_SECOND: Final = 32
"""Maximum number of look-ups of one tenant in a second."""
_SECOND_NS: Final = 1_000_000_000
_MAX_REMEMBERED: Final = 4096


class LookUps:
    """Names that were looked up in the last second, and the number of look-ups by tenant."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended: dict[tuple[str, str], int] = {}
        """Time of the last look-up, the oldest first."""
        self._begun: dict[str, tuple[int, int]] = {}
        """Begin of a tenant's present second, and the look-ups in it; the oldest first."""

    def begin(self, tenant: str, name: str) -> bool:
        """Whether to look up a name now: not if that was done in the last second.

        Raises RateLimitedError for a tenant which looks up too many names.
        """
        now_ns = self._clock.now_ns()
        ended_ns = self._ended.get((tenant, name))
        if ended_ns is not None and now_ns - ended_ns < _SECOND_NS:
            return False
        began_ns, num_begun = self._begun.get(tenant, (now_ns, 0))
        if now_ns - began_ns >= _SECOND_NS:
            began_ns, num_begun = now_ns, 0
        if num_begun >= MAX_PER_SECOND:
            raise RateLimitedError(
                f"tenant {tenant!r} named more than {MAX_PER_SECOND} unknown adapters in a second; "
                "name adapters that exist, or try again later",
                param="model",
                retry_after_seconds=1.0,
            )
        self._begun.pop(tenant, None)
        self._begun[tenant] = began_ns, num_begun + 1
        if len(self._begun) > _MAX_REMEMBERED:
            del self._begun[next(iter(self._begun))]
        return True

    def end(self, tenant: str, name: str) -> None:
        """Remember a look-up that has ended."""
        self._ended.pop((tenant, name), None)
        self._ended[tenant, name] = self._clock.now_ns()
        if len(self._ended) > _MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]
