"""launch-triton-server: what is started, and what keeps it from starting."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.compat.triton import tools
from loraplex.compat.triton.tools import Launch, is_server, launch
from loraplex.core.errors import ConfigError
from support.naming import naming


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "running_servers", lambda: iter(()))


def what(repository: Path, **changes: object) -> Launch:
    ports = {"grpc_port": 1, "http_port": 2, "metrics_port": 3}
    return Launch(model_repository=repository, **(ports | changes))  # type: ignore[arg-type]


def test_command(tmp_path: Path) -> None:
    assert what(tmp_path).command == [
        *(sys.executable, "-P", "-m", "loraplex", "compat", "triton"),
        f"--model-repository={tmp_path}",
        *("--grpc-port=1", "--http-port=2", "--metrics-port=3", "--disable-auto-complete-config"),
    ]


def test_another_program(tmp_path: Path) -> None:
    assert what(tmp_path, program="/x/tritonserver").command[0] == "/x/tritonserver"


@pytest.mark.parametrize(
    ("arguments", "response"),
    [
        (["/opt/tritonserver/bin/tritonserver", "--model-repository=/m"], True),
        (["python3", "/w/compat/bin/tritonserver"], True),
        (["/venv/bin/python", "-m", "loraplex", "compat", "triton", "--http-port=1"], True),
        (["/venv/bin/python", "-P", "-m", "loraplex", "compat", "triton", "--x"], True),
        (["/venv/bin/python", "-m", "loraplex", "triton", "--http-port=1"], True),
        (["/venv/bin/python", "/venv/bin/loraplex", "triton"], True),
        (["/venv/bin/python", "/venv/bin/loraplex", "compat", "triton"], True),
        (["/venv/bin/python", "-m", "loraplex", "serve", "triton"], False),
        (["tail", "-f", "/var/log/tritonserver"], False),
        (["vi", "notes", "tritonserver"], False),
        ([""], False),
    ],
)
def test_whose_command_line(arguments: list[str], response: bool) -> None:
    assert is_server(arguments) is response


def test_one_that_runs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "running_servers", lambda: iter((41, 42)))
    with pytest.raises(ConfigError, match=naming(41, 42, "--force")):
        launch(what(tmp_path), force=False)


def test_no_repository(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=naming("repository")):
        launch(what(tmp_path / "no"), force=True)


@pytest.mark.usefixtures("nothing_runs")
def test_no_program(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=naming("/no/such")):
        launch(what(tmp_path, program="/no/such"), force=False)


@pytest.mark.filterwarnings("ignore:subprocess:ResourceWarning")
@pytest.mark.usefixtures("nothing_runs")
def test_it_runs_on_and_writes_its_log(tmp_path: Path) -> None:
    program = tmp_path / "tritonserver"
    program.write_text('#!/bin/sh\necho "$@"\nexec sleep 60\n')
    program.chmod(0o755)
    log = tmp_path / "log.txt"
    words = ["--tritonserver", str(program), "--model_repo", str(tmp_path), "--log"]
    result = CliRunner().invoke(
        app, ["launch-triton-server", *words, "--log-file", str(log), "--world_size=1"]
    )
    assert result.exit_code == 0, result.output
    pid = int(result.stdout.split("process id ")[1].split(":")[0])
    try:
        assert os.getsid(pid) == pid  # no terminal of ours ends it
        for _ in range(100):
            if log.exists() and log.read_text():
                break
            time.sleep(0.05)
        assert "--grpc-port=8001 --http-port=8000 --metrics-port=8002" in log.read_text()
        assert "--log-verbose=3" in log.read_text()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
