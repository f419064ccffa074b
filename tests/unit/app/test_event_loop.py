"""The loop that serves."""

import asyncio
import sys

import pytest

from loraplex.app import event_loop


@pytest.mark.skipif(sys.platform == "win32", reason="uvloop has none for it")
def test_it_is_uvloop_and_closed_in_the_end():
    loops = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())

    event_loop.run(main())
    (loop,) = loops
    assert type(loop).__module__.split(".")[0] == "uvloop"
    assert loop.is_closed()


def test_what_fails_is_raised():
    async def main() -> None:
        raise OSError("no port")

    with pytest.raises(OSError, match="no port"):
        event_loop.run(main())
