"""Queries to an engine that wait for its replies."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from loraplex.core.errors import LoraplexError, NotReadyError
from loraplex.core.stats import AdapterActivity
from loraplex.engine.messages import QueryAdapters
from loraplex.serving.engines.link import EngineLink

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RECENT_SECONDS: Final = 0.25
"""Time that `recent` waits: a step with long prompts may take seconds."""


_REPLY_SECONDS: Final = 10.0
"""Limit of waiting for a reply: an engine replies between two steps, and not at all if it hangs."""


class EngineQueries(Generic[T]):
    """Queries of one kind. Each gets one reply, or fails when the engine is gone or silent."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[T]] = {}

    async def send(self, send: Callable[[int], None]) -> T:
        """Send a query under its number, and return the reply.

        Raises the error of `fail`, and NotReadyError if no reply comes in time.
        """
        query_id = next(self._ids)
        reply = self._waiting[query_id] = asyncio.get_running_loop().create_future()
        try:
            send(query_id)
            async with asyncio.timeout(_REPLY_SECONDS):
                result: T = await reply
            return result
        except TimeoutError:
            raise NotReadyError(
                f"the engine did not reply within {_REPLY_SECONDS:g} s: it is in a long step, or "
                "hangs and will be restarted",
                retry_after_seconds=5,
            ) from None
        finally:
            del self._waiting[query_id]

    def resolve(self, query_id: int, reply: T) -> bool:
        """Pass a reply to its query; False if that no longer waits."""
        waiting = self._waiting.get(query_id)
        if waiting is None or waiting.done():
            return False
        waiting.set_result(reply)
        return True

    def resolve_all(self, reply: T) -> None:
        """Pass a reply to all waiting queries."""
        for query_id in self._waiting:
            self.resolve(query_id, reply)

    def fail(self, error: LoraplexError) -> None:
        """Fail all waiting queries: no reply will come."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)


class ActivityQueries:
    """Where an engine has its adapters and which requests use them, read between two steps."""

    def __init__(self) -> None:
        self._queries = EngineQueries[AdapterActivity]()
        self._last = AdapterActivity()

    async def current(self, link: EngineLink | None) -> AdapterActivity:
        """Return the present activity, which is empty without an engine.

        Raises NotReadyError if the engine does not reply in time.
        """
        if link is None:
            return AdapterActivity()
        return await self._queries.send(lambda query_id: link.send(QueryAdapters(query_id)))

    async def recent(self, link: EngineLink | None) -> AdapterActivity:
        """Return the present activity, or the last known one while the engine is in a long step."""
        try:
            async with asyncio.timeout(_RECENT_SECONDS):
                self._last = await self.current(link)
        except TimeoutError:
            logger.debug("an engine is in a long step")
        return self._last

    def resolve(self, query_id: int, activity: AdapterActivity) -> None:
        self._queries.resolve(query_id, activity)

    def lose_engine(self) -> None:
        self._queries.resolve_all(AdapterActivity())
