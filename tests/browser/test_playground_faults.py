"""The playground while the engine or the server dies."""

import os
import re
import signal

import pytest
from playwright.sync_api import expect

from loraplex.testing.running_server import running, serving
from support.engine_kills import (
    HELD_ENGINE_FLAGS,
    engine_pid,
    held_engine,
    wait_until_generated,
)
from support.playground_page import (
    MESSAGE,
    OUTPUTS,
    column,
    run,
    say,
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
    expect(column(page, "Base")).to_contain_text(f"{NUM_TOKENS:,} tok")
    run(page)
    wait_until_done(page)
    assert {name: text_of(page, name) for name in interrupted} == interrupted


def test_a_server_that_is_busy_says_when_and_the_message_can_be_sent_again(visits):
    page = visits.open()
    visits.expect_status(429)
    error = {"error": {"message": "too many requests of acme", "code": "rate_limited"}}
    page.route(
        "**/v1/compare",
        lambda route: route.fulfill(status=429, json=error, headers={"retry-after": "9"}),
    )
    say(page, MESSAGE)
    wait_for_states(page, "failed")
    alert = column(page, "chinese").get_by_role("alert")
    expect(alert).to_contain_text("too many requests of acme")
    alert.get_by_text(re.compile(r"It takes requests again in \d s\.")).wait_for()
    page.unroute("**/v1/compare")
    alert.get_by_role("button", name="Try again").click()
    column(page, "chinese").get_by_text(OUTPUTS["chinese"]).wait_for()
    expect(column(page, "Base")).to_have_attribute("data-state", "failed")


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
        page.get_by_role("status").get_by_text("ready").first.wait_for(timeout=60_000)
        run(page)
        wait_until_done(page)
        assert text_of(page, "Base").startswith(before)
