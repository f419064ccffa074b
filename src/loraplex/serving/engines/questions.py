"""Questions to an engine that wait for its answers."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

from loraplex.core.errors import LoraplexError

T = TypeVar("T")


class EngineQuestions(Generic[T]):
    """Of one kind. Every question is answered once, or fails when the engine is gone."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[T]] = {}

    async def ask(self, send: Callable[[int], None]) -> T:
        """Send a question under its number, and wait. Raises what `fail` is told."""
        query_id = next(self._ids)
        answer = self._waiting[query_id] = asyncio.get_running_loop().create_future()
        try:
            send(query_id)
            told: T = await answer
            return told
        finally:
            del self._waiting[query_id]

    def answer(self, query_id: int, answer: T) -> bool:
        """False if nobody waits for it (any longer)."""
        waiting = self._waiting.get(query_id)
        if waiting is None or waiting.done():
            return False
        waiting.set_result(answer)
        return True

    def fail(self, error: LoraplexError) -> None:
        """No answer will come."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)
