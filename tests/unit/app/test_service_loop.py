"""Event loop of a library: its thread ends, whatever its last work does."""

import pytest

from loraplex.app.service_loop import ServiceLoop


def test_the_thread_ends_though_the_last_work_fails():
    async def fail():
        raise OSError("planted")

    loop = ServiceLoop(fail)
    with pytest.raises(OSError, match="planted"):
        loop.close()
    assert not loop._thread.is_alive()
    loop.close()
