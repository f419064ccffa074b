"""The event loop of a process that serves."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from loraplex.core.threads import switch_threads_often
from loraplex.serving.tenant_threads import default_executor

try:
    import uvloop
except ImportError:  # a platform that it does not know
    new_event_loop = asyncio.new_event_loop
else:
    new_event_loop = uvloop.new_event_loop


def run(main: Coroutine[Any, Any, None]) -> None:
    """asyncio.run, on the loop that costs a request less; tenants take turns in its threads."""
    switch_threads_often()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.get_loop().set_default_executor(default_executor())
        runner.run(main)
