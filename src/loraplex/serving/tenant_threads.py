"""Threads in which tenants take turns."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from loraplex.core.fair_thread_pool import FairThreadPool
from loraplex.serving.wire_request import current_tenant

P = ParamSpec("P")
T = TypeVar("T")


class TenantThreads(FairThreadPool):
    """Thread pool whose tasks belong to the tenant of the request that submits them.

    Those without a request are the server's own.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self.submit_for(current_tenant(), fn, *args, **kwargs)


def default_executor() -> TenantThreads:
    """Return an executor for an event loop, with as many threads as asyncio's own.

    A tenant has threads for half of the cores: its long texts leave the others to all the rest.
    """
    num_cores = os.cpu_count() or 1
    return TenantThreads(min(32, num_cores + 4), max(1, min(31, num_cores // 2)))
