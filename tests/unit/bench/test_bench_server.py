import sys
from pathlib import Path

import pytest

from loraplex.bench.session import running_server, serve_command
from loraplex.core.errors import ConfigError
from support.naming import naming

READY = """
print("Started GRPCInferenceService at 127.0.0.1:1", flush=True)
print("Started HTTPService at 127.0.0.1:2", flush=True)
print("Started Metrics Service at 127.0.0.1:3", flush=True)
"""
STAYS = "import time; time.sleep(60)"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


async def test_gives_the_address_and_stops_the_server(tmp_path):
    stopped = tmp_path / "stopped"
    says_goodbye = (
        "import pathlib, signal, sys\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(stopped)!r}).touch(), "
        "sys.exit()))\n"
    )
    async with running_server(python(says_goodbye + READY + STAYS)) as url:
        assert url == "http://127.0.0.1:2"
        assert not stopped.exists()
    assert stopped.exists()


async def test_stops_the_server_after_an_error(tmp_path):
    with pytest.raises(KeyError):
        async with running_server(python(READY + STAYS)):
            raise KeyError


async def test_a_server_that_ends_is_reported():
    with pytest.raises(ConfigError, match=naming(3)):
        async with running_server(python("raise SystemExit(3)")):
            pass


async def test_a_server_that_is_never_ready_is_reported():
    with pytest.raises(ConfigError, match=naming(0.05)):
        async with running_server(python(STAYS), start_seconds=0.05):
            pass


async def test_settings_of_the_environment_do_not_reach_it(monkeypatch):
    monkeypatch.setenv("LORAPLEX_MAX_NUM_SEQS", "1")
    code = "import os; assert 'LORAPLEX_MAX_NUM_SEQS' not in os.environ\n"
    async with running_server(python(code + READY + STAYS)) as url:
        assert url


def test_flags_come_last_so_that_they_win():
    command = serve_command(Path("m"), "name", Path("a"), Path("s"), ["--http-port", "80"])
    assert command[1:6] == ["-P", "-m", "loraplex", "serve", "m"]
    assert command[-2:] == ["--http-port", "80"]
    assert command.index("--http-port") < len(command) - 2
