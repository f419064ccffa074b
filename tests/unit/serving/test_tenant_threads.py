"""Threads in which a task belongs to the tenant of its request."""

import asyncio
import threading

from loraplex.serving.tenant_threads import default_executor
from support.wire_requests import of_tenant


async def test_a_tenant_leaves_threads_to_the_others():
    pool = default_executor()
    asyncio.get_running_loop().set_default_executor(pool)
    goes_on = threading.Event()
    with of_tenant("hostile"):
        hostile = [asyncio.ensure_future(asyncio.to_thread(goes_on.wait, 60)) for _ in range(200)]
    with of_tenant("quiet"):
        assert await asyncio.to_thread(pow, 2, 3) == 8
    assert await asyncio.to_thread(pow, 2, 4) == 16  # of no request
    goes_on.set()
    assert all(await asyncio.gather(*hostile))
