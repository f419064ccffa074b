"""Event loop in a thread of its own, on which a library runs the service."""

import asyncio
import atexit
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar

from loraplex.core.errors import NotReadyError

P = ParamSpec("P")
T = TypeVar("T")

_END: Final = object()


class ServiceLoop:
    """Loop that does the work of other threads, until it is closed or the interpreter exits."""

    def __init__(self, last_work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start the thread. last_work: returns the work of close()."""
        self._last_work = last_work
        self._loop = asyncio.new_event_loop()
        self._threads = _Threads()
        self._loop.set_default_executor(self._threads)
        self._lock = threading.RLock()
        """Held while work is given to the loop, and while the loop ends."""
        self._thread = threading.Thread(target=self._run, name="loraplex-serving", daemon=True)
        self._thread.start()
        # A daemon thread must not compute while the interpreter is torn down around it.
        atexit.register(self.close)

    def close(self) -> None:
        """Do the last work and end the thread. Safe to call twice."""
        with self._lock:
            # The thread is not there in a child that was forked, which exits like any process.
            if self._loop.is_closed() or not self._thread.is_alive():
                return
            atexit.unregister(self.close)
            try:
                self.wait(self._last_work())
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work on the loop; an interrupt of this thread cancels it.

        Raises NotReadyError after close().
        """
        future = self._submit(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield the items as they come; an iterator that is closed early cancels their work.

        Raises what the work raises, and NotReadyError after close().
        """
        found: queue.SimpleQueue[Any] = queue.SimpleQueue()

        async def take_all() -> None:
            try:
                async with contextlib.aclosing(items):
                    async for item in items:
                        found.put(item)
            finally:
                found.put(_END)

        future = self._submit(take_all())
        try:
            while (item := found.get()) is not _END:
                yield item
            future.result()
        finally:
            future.cancel()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._loop.is_closed():
                work.close()
                raise NotReadyError("this LLM is closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        """Run the loop until it is stopped; then end its remaining tasks and threads."""
        loop = self._loop
        asyncio.set_event_loop(loop)
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        # loop.shutdown_default_executor() starts a thread, which fails while the interpreter exits.
        self._threads.shutdown()
        loop.close()


class _Threads(ThreadPoolExecutor):
    """Thread pool that still works while the interpreter exits.

    `concurrent.futures` refuses new work before the handlers of `atexit` run, and so before the
    loop is closed: the caller's thread does it then.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            if threading.main_thread().is_alive():
                raise
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
