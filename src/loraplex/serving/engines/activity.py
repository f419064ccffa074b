"""What an engine says about its adapters when it is asked."""

import asyncio
import logging

from loraplex.core.errors import NotReadyError
from loraplex.core.stats import AdapterActivity
from loraplex.engine.messages import QueryAdapters
from loraplex.serving.engines.link import EngineLink
from loraplex.serving.engines.questions import EngineQuestions

logger = logging.getLogger(__name__)

_RECENT_SECONDS = 0.25


class EngineActivity:
    """Where the adapters are and for whom, asked between two steps."""

    def __init__(self) -> None:
        self._questions = EngineQuestions[AdapterActivity]()
        self._last = AdapterActivity()

    async def ask(self, link: EngineLink | None) -> AdapterActivity:
        """Empty while there is no engine."""
        if link is None:
            return AdapterActivity()
        try:
            return await self._questions.ask(lambda query_id: link.send(QueryAdapters(query_id)))
        except NotReadyError:
            return AdapterActivity()

    async def recent(self, link: EngineLink | None) -> AdapterActivity:
        """ask(), or what it was last while the engine is in a long step."""
        try:
            async with asyncio.timeout(_RECENT_SECONDS):
                self._last = await self.ask(link)
        except TimeoutError:
            logger.debug("an engine is in a long step")
        return self._last

    def answer(self, query_id: int, activity: AdapterActivity) -> None:
        self._questions.answer(query_id, activity)

    def lose_engine(self, gone: NotReadyError) -> None:
        self._questions.fail(gone)
