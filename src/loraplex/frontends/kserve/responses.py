"""Responses to one request over a stream, whatever made them."""

from abc import abstractmethod
from collections.abc import AsyncIterator

from loraplex.frontends.kserve.messages import InferResponse


class ResponseStream(AsyncIterator[InferResponse]):
    """Close it: that aborts the request if it still runs."""

    @abstractmethod
    async def aclose(self) -> None:
        """Idempotent."""


class OneResponse(ResponseStream):
    """That is there already."""

    def __init__(self, response: InferResponse) -> None:
        self._response: InferResponse | None = response

    async def __anext__(self) -> InferResponse:
        response, self._response = self._response, None
        if response is None:
            raise StopAsyncIteration
        return response

    async def aclose(self) -> None:
        self._response = None
