"""Thread pool in which tenants take turns."""

import collections
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from loraplex.serving.wire_request import current_tenant

P = ParamSpec("P")
T = TypeVar("T")

_Task = tuple[Future[Any], Callable[[], Any]]


class FairThreadPool(ThreadPoolExecutor):
    """Thread pool that serves the tenants in turn, whatever the number of their tasks.

    A task belongs to the tenant of the request that submits it; those without a request belong to
    one more. It waits for the running tasks, and for one of each other tenant.
    """

    def __init__(self, num_threads: int | None = None, thread_name_prefix: str = "") -> None:
        """Create the pool. num_threads: None for the number of asyncio's default executor."""
        super().__init__(num_threads, thread_name_prefix)
        self._lock = threading.Lock()
        self._waiting: collections.OrderedDict[str, collections.deque[_Task]]
        self._waiting = collections.OrderedDict()
        """Tasks by tenant; the first tenant is the next one."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        task = (future, functools.partial(fn, *args, **kwargs))
        with self._lock:
            self._waiting.setdefault(current_tenant(), collections.deque()).append(task)
        # The pool's own queue counts the tasks; each is chosen when a thread is free.
        super().submit(self._run_next)
        return future

    def _run_next(self) -> None:
        with self._lock:
            tenant, tasks = self._waiting.popitem(last=False)
            future, call = tasks.popleft()
            if tasks:
                self._waiting[tenant] = tasks
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
