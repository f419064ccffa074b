"""Engines that start before serving needs them: each is returned once, or stopped."""

import contextlib
import gc
import logging
import subprocess
import sys
from collections.abc import Awaitable

import pytest

from loraplex.app.launch import engine_process, started_engines
from loraplex.core.config import Config, ModelConfig
from loraplex.core.errors import ConfigError
from loraplex.engine.messages import EngineCommand, EngineEvent
from loraplex.serving.engines.link import EngineLink, LinkFactory, ProcessLink

ONE = ModelConfig(path="/one")
TWO = ModelConfig(path="/two")


class Link:
    """An engine that does nothing."""

    def __init__(self, model: ModelConfig, epoch: int) -> None:
        self.model = model
        self.epoch = epoch
        self.is_closed = False

    def send(self, command: EngineCommand) -> None: ...

    async def receive(self) -> EngineEvent:
        raise AssertionError

    def progress(self) -> None: ...

    def kill(self, problem: str) -> None:
        raise AssertionError

    async def close(self) -> None:
        self.is_closed = True


class Launcher:
    def __init__(self, failure: Exception | None = None) -> None:
        self.links: list[Link] = []
        self.failure = failure

    def __call__(self, model: ModelConfig) -> LinkFactory:
        async def start(epoch: int) -> EngineLink:
            if self.failure is not None:
                raise self.failure
            self.links.append(Link(model, epoch))
            return self.links[-1]

        return start


def config(**models: ModelConfig) -> Config:
    return Config(models=models)


async def test_all_start_at_once_and_are_handed_out():
    launcher = Launcher()
    async with started_engines(config(one=ONE, two=TWO), launcher) as launch:
        assert [link.model for link in launcher.links] == [ONE, TWO]
        assert await launch(TWO)(1) is launcher.links[1]
        assert await launch(ONE)(1) is launcher.links[0]
        assert len(launcher.links) == 2
    assert not any(link.is_closed for link in launcher.links)


async def test_the_second_engine_of_a_model_is_a_new_one():
    launcher = Launcher()
    async with started_engines(config(one=ONE), launcher) as launch:
        factory = launch(ONE)
        first, second = await factory(1), await factory(2)
    assert first is not second
    assert [link.epoch for link in launcher.links] == [1, 2]


async def test_equal_models_have_an_engine_each():
    launcher = Launcher()
    async with started_engines(config(one=ONE, same=ONE), launcher) as launch:
        handed_out = {id(await launch(ONE)(1)), id(await launch(ONE)(1))}
    assert handed_out == {id(link) for link in launcher.links}
    assert len(handed_out) == 2


async def test_what_was_not_handed_out_is_stopped():
    launcher = Launcher()
    with contextlib.suppress(ConfigError):
        async with started_engines(config(one=ONE, two=TWO), launcher) as launch:
            await launch(ONE)(1)
            raise ConfigError("the port is taken")
    assert [link.is_closed for link in launcher.links] == [False, True]


@pytest.mark.parametrize("failure", [ConfigError("no place"), OSError("no process")])
async def test_a_failure_is_reported_when_the_engine_is_needed(failure: Exception):
    async with started_engines(config(one=ONE), Launcher(failure)) as launch:
        with pytest.raises(type(failure)):
            await launch(ONE)(1)


async def test_a_process_is_reported_its_model(monkeypatch: pytest.MonkeyPatch):
    reported = []

    def start(command: list[str], settings: bytes, epoch: int) -> Awaitable[EngineLink]:
        reported.append((command[1:], settings, epoch))
        return Launcher()(ONE)(epoch)

    monkeypatch.setattr(ProcessLink, "start", start)
    await engine_process(ONE, "warning")(7)
    ((command, settings, epoch),) = reported
    assert [*command] == ["-P", "-m", "loraplex.app.engine_process", "warning"]
    assert b"/one" in settings
    assert epoch == 7


def test_log_lines_have_the_ids_of_their_request():
    from loraplex.app.launch import _with_request
    from loraplex.frontends.telemetry.telemetry import Telemetry
    from loraplex.serving.wire_request import as_current

    line = logging.LogRecord("x", logging.INFO, "", 0, "text", (), None)
    assert _with_request(line)
    assert line.request == ""
    headers = {"x-request-id": "r-1", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    with as_current(Telemetry().begin("http", "GET", "/", "", headers)):
        assert _with_request(line)
    assert line.request == f" [r-1 {'a' * 32}]"


def test_what_a_ready_server_has_is_no_more_looked_at_for_garbage(monkeypatch):
    from loraplex.app.launch import _print_settled

    reported = []
    monkeypatch.setattr(gc, "freeze", lambda: reported.append("frozen"))
    _print_settled(reported.append, "ready")
    assert reported == ["frozen", "ready"]


@pytest.mark.skipif(sys.platform != "linux", reason="processes have such names on Linux")
def test_a_process_is_found_by_its_name() -> None:
    program = (
        "import subprocess; from loraplex.app.launch import name_process\n"
        "name_process('tritonserver')\n"
        "print(open('/proc/self/comm').read(), end='')\n"
        "print(subprocess.run(['cat', '/proc/self/comm'], capture_output=True, text=True).stdout)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["tritonserver", "cat"], "its children keep their own names"
