"""Event loop with a clock that a test can move, so that no test waits for a timeout."""

import asyncio


class SkippingLoop(asyncio.SelectorEventLoop):
    """Event loop on real sockets; `skip` makes its timers due."""

    _num_skipped_seconds = 0.0

    def time(self) -> float:
        return super().time() + self._num_skipped_seconds

    def skip(self, seconds: float) -> None:
        self._num_skipped_seconds += seconds


async def settle() -> None:
    """Wait until what was sent over loopback before this call has been read and handled."""
    for _ in range(30):
        await asyncio.sleep(0)


async def skip(seconds: float) -> None:
    """Move the running SkippingLoop's clock, between two moments at which all is handled."""
    await settle()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippingLoop)
    loop.skip(seconds)
    await settle()
