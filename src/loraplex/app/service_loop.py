"""Event loop in a thread of its own, on which a library runs the service."""

import asyncio
import atexit
import contextlib
import os
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar

from loraplex.core.errors import ConfigError, LoraplexError, NotReadyError

P = ParamSpec("P")
T = TypeVar("T")

_END: Final = object()


class ServiceLoop:
    """Loop that does the work of other threads, until it is closed or the interpreter exits."""

    def __init__(self, last_work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start the thread. last_work: returns the work of close()."""
        self._last_work = last_work
        self._process_id = os.getpid()
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
        # A forked child has no thread, and the lock may be held there for ever.
        if os.getpid() != self._process_id:
            return
        with self._lock:
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

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work on the loop for a task of another one; a cancelled task cancels it.

        Raises NotReadyError after close().
        """
        return await asyncio.wrap_future(self._submit(work))

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield the items as they come; an iterator that is closed early cancels their work.

        Raises what the work raises, and NotReadyError after close().
        """
        found: queue.SimpleQueue[Any] = queue.SimpleQueue()

        future = self._feed(items, found.put)
        try:
            while (item := found.get()) is not _END:
                yield item
            future.result()
        finally:
            future.cancel()

    async def iterate_async(self, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Yield the items to a task of another loop, as `iterate` does to a thread."""
        found: asyncio.Queue[Any] = asyncio.Queue()
        soon = asyncio.get_running_loop().call_soon_threadsafe
        future = self._feed(items, lambda item: soon(found.put_nowait, item))
        try:
            while (item := await found.get()) is not _END:
                yield item
            future.result()
        finally:
            future.cancel()

    def check_process(self) -> None:
        """Raise ConfigError in a process that was forked from the one with the threads."""
        if os.getpid() != self._process_id:
            raise ConfigError(
                f"this LLM was made in process {self._process_id} and does not work in process "
                f"{os.getpid()}, which was forked from it: threads are not copied. Make the LLM "
                "in each process, after the fork (in a worker's initializer, without --preload)"
            )

    def _feed(self, items: AsyncGenerator[T, None], put: Callable[[Any], Any]) -> Future[None]:
        """Put the items as they come, and at last _END."""

        async def take_all() -> None:
            try:
                async with contextlib.aclosing(items):
                    async for item in items:
                        put(item)
            finally:
                put(_END)

        return self._submit(take_all())

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            self.check_process()
            with self._lock:
                if self._loop.is_closed():
                    raise NotReadyError("this LLM is closed")
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        except LoraplexError:
            work.close()
            raise

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
