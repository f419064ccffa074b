"""Closing of several things, of which each is closed even if others cannot be."""

import asyncio
from collections.abc import Awaitable


async def close_together(*closings: Awaitable[object]) -> None:
    """Await all closings, also when some fail; then raise the first error.

    `asyncio.gather` returns at the first error, while the other closings still run.
    """
    results = await asyncio.gather(*closings, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
