"""SIGINT and SIGTERM: the comparison ends every process that it started, then itself."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from comparison.processes import ServerProcess

Result = TypeVar("Result")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """A signal ended the comparison; its number is that of the exit status, less 128."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


async def run_until_signal(
    main: Coroutine[Any, Any, Result], report: Callable[[str], None]
) -> Result:
    """Run `main`; when it ends, in whatever way, no process of it is left.

    The first signal cancels `main`, whose processes then get SIGTERM and some time; another one
    kills them. report: prints a line for the user. Needs the main thread, which has the handlers
    of Python's signals. Raises Interrupted after a signal.
    """
    task = asyncio.ensure_future(main)
    received: list[signal.Signals] = []

    def receive(number: signal.Signals) -> None:
        if received:
            ServerProcess.kill_all()
        else:
            task.cancel()
            report(f"{number.name}: ends the processes that were started; a second one kills them")
        received.append(number)

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, receive, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(received[0]) from None
    finally:
        await ServerProcess.stop_all()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
