"""A server that the models inside Triton start, share and let go."""

import os
import queue
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loraplex.frontends.kserve.stub.connection import ConnectionLost
from loraplex.frontends.kserve.stub.link import Link
from loraplex.frontends.kserve.stub.server import ServerProcess, ServerUnavailable, default_socket
from support.eventually import eventually
from support.naming import naming

# The server gets no PYTHONPATH, which in a process of Triton's is Triton's.
_RUN = (
    f"import runpy, sys; sys.path[:0] = {sys.path!r}; "
    "runpy.run_module({!r}, run_name='__main__', alter_sys=True)"
)
ECHO_SERVER = [sys.executable, "-c", _RUN.format("support.served_socket")]


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "socket")


def link(server, name="ensemble"):
    said = queue.Queue()
    link = Link(
        server, name, start_seconds=60, report=said.put, each_tick=lambda: None, tick_seconds=0.1
    )
    link.said, link.server = said, server
    return link


def server_pid(path):
    """Return the id of the process that has the log open for writing."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if f"--request-socket={path}".encode() in command and b"served_socket" in command:
            return int(folder.name)
    return None


def test_the_first_starts_the_server_and_the_last_ends_it(path):
    links = [link(ServerProcess(path, ECHO_SERVER)) for _ in range(3)]
    with ThreadPoolExecutor() as threads:
        for opened in [threads.submit(each.open) for each in links]:
            opened.result()
    pid = server_pid(path)
    assert pid is not None
    starter = next(i for i, each in enumerate(links) if each.server.pid == pid)
    links.pop(starter).close()
    links.pop().close()
    time.sleep(1)
    assert server_pid(path) == pid
    links[0].close()
    assert eventually(lambda: server_pid(path) is None)


def test_a_killed_server_is_started_again(path):
    one = link(ServerProcess(path, ECHO_SERVER))
    one.open()
    first = server_pid(path)
    os.kill(first, signal.SIGKILL)
    assert "has ended" in one.said.get(timeout=60)
    assert eventually(lambda: server_pid(path) not in (None, first))
    assert one.said.get(timeout=60) == "the server is there again"
    one.close()
    assert eventually(lambda: server_pid(path) is None)


@pytest.mark.slow
def test_the_next_server_has_a_leash_of_all_too(path):
    links = [link(ServerProcess(path, ECHO_SERVER)) for _ in range(2)]
    for each in links:
        each.open()
    os.kill(server_pid(path), signal.SIGKILL)
    for each in links:
        while each.said.get(timeout=60) != "the server is there again":
            pass
    pid = server_pid(path)
    starter = next(i for i, each in enumerate(links) if each.server.pid == pid)
    links[starter].close()
    time.sleep(1.5)
    assert server_pid(path) == pid
    links[1 - starter].close()
    assert eventually(lambda: server_pid(path) is None)


def test_a_server_that_cannot_start_says_why(path):
    program = "import sys; print('first line'); sys.exit('no such engine')"
    one = link(ServerProcess(path, [sys.executable, "-c", program]))
    with pytest.raises(ServerUnavailable, match=naming("exit status 1", "no such engine")):
        one.open()
    one.close()
    lost = link(ServerProcess(path, ["/nowhere/python"]))
    with pytest.raises(ServerUnavailable, match=naming("/nowhere/python")):
        lost.open()


def test_the_server_does_not_get_tritons_libraries(path, monkeypatch, tmp_path):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/triton/libs")
    seen = tmp_path / "seen"
    program = f"import os; open({str(seen)!r}, 'w').write(os.environ.get('LD_LIBRARY_PATH', ''))"
    with pytest.raises(ServerUnavailable):
        link(ServerProcess(path, [sys.executable, "-c", program])).open()
    assert seen.read_text() == ""


def test_the_default_socket_is_private_and_the_same_for_one_command(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = default_socket(["a", "b"])
    assert path == default_socket(["a", "b"]) != default_socket(["a", "c"])
    folder = Path(path).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(ServerUnavailable, match=naming(folder)):
        default_socket(["a", "b"])


def test_without_a_connection_requests_are_refused(path):
    with pytest.raises(ConnectionLost, match="is not there yet"):
        link(ServerProcess(path)).submit(None, print)


@pytest.mark.parametrize("ending", ["lock", "log"])
def test_a_link_beside_the_socket_is_not_followed(tmp_path, ending):
    other = tmp_path / "other"
    other.write_text("keep me")
    (tmp_path / f"s.{ending}").symlink_to(other)
    with pytest.raises(ServerUnavailable):
        ServerProcess(str(tmp_path / "s"), ["true"]).connect(print, lambda: False)
    assert other.read_text() == "keep me"
