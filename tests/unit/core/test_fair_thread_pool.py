"""Groups take turns in threads, however many tasks one of them has, and none has all threads."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from loraplex.core.fair_thread_pool import FairThreadPool


class Tasks:
    """Tasks of groups, and the order in which they ran, once they may."""

    def __init__(self, num_threads: int) -> None:
        self.pool = FairThreadPool(num_threads, max(1, num_threads - 1))
        self.ran: list[str] = []
        self.may_run: dict[str, threading.Event] = {}

    def submit(self, group: str) -> Future[None]:
        self.may_run.setdefault(group, threading.Event())
        return self.pool.submit_for(group, self._run, group)

    def _run(self, group: str) -> None:
        assert self.may_run[group].wait(60)
        self.ran.append(group)

    def let_run(self, *groups: str) -> None:
        """Let the tasks of these groups, or of all, go on."""
        for group in groups or self.may_run:
            self.may_run[group].set()


@pytest.fixture
def tasks_in() -> Iterator[Callable[[int], Tasks]]:
    """A function (number of threads) -> Tasks."""
    made = []

    def make(num_threads: int) -> Tasks:
        made.append(Tasks(num_threads))
        return made[-1]

    yield make
    for tasks in made:
        tasks.let_run()
        tasks.pool.shutdown()


def running(task: Future[None]) -> Future[None]:
    while not task.running():
        pass
    return task


def test_another_group_waits_for_one_task_of_each(tasks_in):
    tasks = tasks_in(1)
    running(tasks.submit("a"))
    submitted = [tasks.submit("a") for _ in range(10_000)]
    submitted += [tasks.submit(group) for group in ("b", "c", "b")]
    tasks.let_run()
    for each in submitted:
        each.result(60)
    assert tasks.ran[:6] == ["a", "a", "b", "c", "a", "b"]
    assert len(tasks.ran) == 10_004


@pytest.mark.parametrize("num_threads", [2, 3])
def test_no_group_has_all_threads(tasks_in, num_threads):
    """What has no thread is not lost: it runs when the group has one again."""
    tasks = tasks_in(num_threads)
    first = running(tasks.submit("a"))
    hostile = [tasks.submit("a") for _ in range(100)]
    other = tasks.submit("b")
    tasks.let_run("b")
    other.result(60)
    assert tasks.ran == ["b"]
    for task in hostile[: num_threads - 2]:
        running(task)
    assert not any(task.running() for task in hostile[num_threads - 2 :])
    tasks.let_run()
    for each in (first, *hostile):
        each.result(60)
    assert tasks.ran == ["b", *["a"] * 101]


def test_tasks_of_a_group_run_one_after_another_in_two_threads(tasks_in):
    tasks = tasks_in(2)
    order: list[int] = []
    done = [tasks.pool.submit_for("a", order.append, number) for number in range(1000)]
    for each in done:
        each.result(60)
    assert order == [*range(1000)]


def test_a_cancelled_task_does_not_run(tasks_in):
    tasks = tasks_in(1)
    first = running(tasks.submit("a"))
    cancelled, last = tasks.submit("a"), tasks.submit("b")
    assert cancelled.cancel()
    assert not first.cancel()
    tasks.let_run()
    last.result(60)
    assert tasks.ran == ["a", "b"]


async def test_it_is_an_executor_of_the_event_loop():
    loop = asyncio.get_running_loop()
    loop.set_default_executor(FairThreadPool(4, 1))
    assert await asyncio.gather(*(asyncio.to_thread(pow, 2, n) for n in range(50))) == [
        2**n for n in range(50)
    ]
    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(divmod, 1, 0)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_what_was_submitted_before_the_shutdown_runs(tasks_in, num_threads):
    tasks = tasks_in(num_threads)
    submitted = [tasks.submit("a") for _ in range(3)]
    tasks.pool.shutdown(wait=False)
    tasks.let_run()
    for each in submitted:
        each.result(60)
    with pytest.raises(RuntimeError):
        tasks.submit("a")
