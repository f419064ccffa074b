"""A clock that stands still until a test moves it."""


class FakeClock:
    """Implements core.clock.Clock."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance(self, nanoseconds: int) -> None:
        """Move forward. Raises ValueError for a negative number: the clock is monotonic."""
        if nanoseconds < 0:
            raise ValueError(f"a monotonic clock cannot go back {-nanoseconds} ns")
        self._now_ns += nanoseconds

    def advance_seconds(self, seconds: float) -> None:
        self.advance(round(seconds * 1e9))
