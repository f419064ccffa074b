"""The loop that serves."""

import asyncio
import sys
import threading

import pytest

from loraplex.app.serving_process import run_on_event_loop
from support.wire_requests import of_tenant


@pytest.mark.skipif(sys.platform == "win32", reason="uvloop has none for it")
def test_it_is_uvloop_and_closed_in_the_end():
    loops = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())

    run_on_event_loop(main())
    (loop,) = loops
    assert type(loop).__module__.split(".")[0] == "uvloop"
    assert loop.is_closed()


def test_tenants_take_turns_in_its_threads():
    order = []

    async def main() -> None:
        held = threading.Event()
        loop = asyncio.get_running_loop()
        holding = [loop.run_in_executor(None, held.wait, 60) for _ in range(64)]
        with of_tenant("c"):  # the server's own tasks leave a thread to tenants
            holding += [loop.run_in_executor(None, held.wait, 60) for _ in range(64)]
        await asyncio.sleep(0.01)
        waiting = []
        for tenant in ("a", "a", "a", "b"):
            with of_tenant(tenant):
                waiting.append(loop.run_in_executor(None, order.append, tenant))
        held.set()
        await asyncio.gather(*holding, *waiting)

    run_on_event_loop(main())
    assert order.index("b") < 2


def test_a_thread_that_computes_holds_up_no_wake_up():
    """Python's own 5 ms would be waited for each time."""
    before = sys.getswitchinterval()

    try:
        run_on_event_loop(asyncio.sleep(0))
        assert sys.getswitchinterval() <= 0.001
    finally:
        sys.setswitchinterval(before)


def test_what_fails_is_raised():
    async def main() -> None:
        raise OSError("no port")

    with pytest.raises(OSError, match="no port"):
        run_on_event_loop(main())
