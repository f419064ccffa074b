"""What the owner shows of the other front-end processes."""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from loraplex.frontends.ops.frontend_numbers import FrontendNumbers


class OtherFrontends:
    """Sources of what the processes know; those who run the processes set them."""

    def __init__(self) -> None:
        self.numbers = FrontendNumbers()
        self.restarts = Counter[str]()
        """Number of processes that ended and were replaced, by how they ended."""
        self.requests: Callable[[bytes], Awaitable[Sequence[bytes]]] = _no_pages
        """Function from a RequestQuery to the RequestPage of each process, as JSON; empty for a
        process that does not reply in time."""


async def _no_pages(query: bytes) -> Sequence[bytes]:
    del query
    return ()
