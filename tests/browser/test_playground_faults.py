"""The playground while the engine or the server dies."""

import os
import re
import signal

import pytest

from loraplex.testing.running_server import running, serving
from support.engine_kills import (
    HELD_ENGINE_FLAGS,
    engine_pid,
    held_engine,
    wait_until_generated,
)
from support.playground_page import (
    column,
    run,
    send,
    text_of,
    wait_for_states,
    wait_for_text,
    wait_until_done,
    write_for_long,
)

NUM_TOKENS = 1500
"""So many that no output ends before the engine or the server does."""


@pytest.fixture
def server(tmp_path):
    """A server of its own: the tests kill it."""
    with serving(tmp_path, *HELD_ENGINE_FLAGS) as server:
        yield server


def test_an_engine_that_is_killed_leaves_the_outputs_whole(visits, server):
    page = visits.open()
    write_for_long(page, NUM_TOKENS)
    visits.expect_status(503)  # of its health, until the engine is back
    send(page)
    wait_until_generated(server, 20)
    os.kill(engine_pid(server), signal.SIGKILL)
    wait_until_done(page)
    page.get_by_text("The engine was restarted meanwhile, and the output went on.").wait_for()
    interrupted = {name: text_of(page, name) for name in ("Base", "chinese", "japanese")}
    assert f"{NUM_TOKENS:,} tokens" in column(page, "Base").text_content()
    run(page)
    wait_until_done(page)
    assert {name: text_of(page, name) for name in interrupted} == interrupted


def test_a_server_that_is_lost_leaves_the_text_and_can_run_again(visits, server, tmp_path):
    page = visits.open()
    write_for_long(page, NUM_TOKENS)
    send(page)
    wait_until_generated(server, 600)
    with held_engine(server):
        wait_for_text(page, "Base", 40)
        visits.expect_gone()
        visits.expect_status(503)  # of its health, while it starts again
        server.process.kill()
    page.get_by_text("The server was lost. The text that came is kept.").wait_for()
    wait_for_states(page, "cut")
    before = text_of(page, "Base")
    assert len(before) >= 40
    server.process.wait()
    command = [*server.process.args, "--state-dir", str(tmp_path / "again")]
    command += ["--http-port", str(server.http_port)]
    with running(command):
        page.get_by_role("status").get_by_text("ready").wait_for(timeout=60_000)
        page.get_by_role("button", name=re.compile("^Run again")).click()
        wait_until_done(page)
        assert text_of(page, "Base").startswith(before)
