"""Things that are closed together, of which some cannot be closed."""

import asyncio

import pytest

from loraplex.core.closing import close_together


async def test_all_are_closed_before_the_first_error_is_raised():
    closed, gate = [], asyncio.Event()

    async def close(name, error=None):
        if error is not None:
            gate.set()
            raise error
        await gate.wait()
        await asyncio.sleep(0)
        closed.append(name)

    with pytest.raises(OSError, match="first"):
        await close_together(
            *(close("a"), close("b", OSError("first")), close("c"), close("d", ValueError("next")))
        )
    assert sorted(closed) == ["a", "c"]
