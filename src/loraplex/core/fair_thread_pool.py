"""Thread pool in which groups of tasks take turns."""

import collections
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_Task = tuple[Future[Any], Callable[[], Any]]


class FairThreadPool(ThreadPoolExecutor):
    """Thread pool that serves groups of tasks, such as those of a tenant, in turn.

    Of two or more threads no group has all: the first task of another group waits for no task that
    runs, as long as further groups have not taken the other threads.
    """

    def __init__(
        self, num_threads: int, num_threads_of_group: int, thread_name_prefix: str = ""
    ) -> None:
        """Create the pool. num_threads_of_group: maximum of a group that has a name."""
        super().__init__(num_threads, thread_name_prefix)
        self._most_of_group = num_threads_of_group
        self._most_of_nameless = max(1, num_threads - 1)
        self._lock = threading.Lock()
        self._waiting: collections.OrderedDict[str, collections.deque[_Task]]
        self._waiting = collections.OrderedDict()
        """Tasks by group; the first group is the next one."""
        self._num_running: collections.Counter[str] = collections.Counter()
        """Number of threads by group."""
        self._num_postponed = 0
        """Tasks that no thread took when it came for one: their groups had all of theirs."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit a task of the group without a name."""
        return self.submit_for("", fn, *args, **kwargs)

    def submit_for(
        self, group: str, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Submit a task of a group. Raises RuntimeError after shutdown."""
        future: Future[T] = Future()
        task = (future, functools.partial(fn, *args, **kwargs))
        with self._lock:
            self._waiting.setdefault(group, collections.deque()).append(task)
        # The pool's own queue counts the tasks; each is chosen when a thread is free.
        super().submit(self._run_next)
        return future

    def _run_next(self) -> None:
        """Run one task, then those that were postponed until a thread of their group is free."""
        with self._lock:
            chosen = self._choose()
            self._num_postponed += chosen is None
        while chosen is not None:
            group, (future, call) = chosen
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del chosen, future, call  # with all that they refer to
            with self._lock:
                self._num_running[group] -= 1
                if not self._num_running[group]:
                    del self._num_running[group]
                chosen = self._choose() if self._num_postponed else None
                self._num_postponed -= chosen is not None

    def _choose(self) -> tuple[str, _Task] | None:
        """Give a thread to the next group that may have one; its group and its next task."""
        most, running = (self._most_of_nameless, self._most_of_group), self._num_running
        group = next((name for name in self._waiting if running[name] < most[bool(name)]), None)
        if group is None:
            return None
        tasks = self._waiting.pop(group)
        task = tasks.popleft()
        if tasks:
            self._waiting[group] = tasks
        self._num_running[group] += 1
        return group, task
