"""Mistakes that are reported before anything is loaded."""

import contextlib
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.adapters.state_files import StateLock
from loraplex.app.start_checks import check_start, check_weights_fit
from loraplex.core.config import AdapterConfig, Config, ModelConfig
from loraplex.core.errors import ConfigError
from loraplex.core.server_config import ServerConfig
from loraplex.core.state_places import state_place
from support.naming import naming
from support.tiny_decoder import TINY_DECODER

MODEL = ModelConfig(path="/")


@pytest.fixture
def problem(tmp_path: Path) -> Callable[..., str]:
    """Return the message of check_start for settings of a model and of the server."""

    def of(model: ModelConfig = MODEL, **server: object) -> str:
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
        settings = ServerConfig(**{"state_dir": str(tmp_path / "state"), **ports, **server})
        with pytest.raises(ConfigError) as caught:
            check_start(Config(server=settings, models={"m": model}))
        return caught.value.message

    return of


def test_a_missing_adapter(tmp_path: Path, problem: Callable[..., str]) -> None:
    (tmp_path / "chinese").mkdir()
    wrong = tmp_path / "chinees"
    adapters = {"zh": AdapterConfig(path=str(wrong))}
    assert re.search(
        naming("zh", wrong, tmp_path / "chinese"), problem(ModelConfig(path="/", adapters=adapters))
    )


def test_adapters_that_may_be_missing_or_are_elsewhere(tmp_path: Path) -> None:
    adapters = {
        "optional": AdapterConfig(path="/nowhere", optional=True),
        "hub": AdapterConfig(path="hf://owner/name"),
        "here": AdapterConfig(path=str(tmp_path)),
    }
    settings = ServerConfig(state_dir=str(tmp_path), http_port=0, grpc_port=0, metrics_port=0)
    model = ModelConfig(path="/", adapters=adapters)
    check_start(Config(server=settings, models={"m": model}))
    # It can be started afterwards: nothing stays locked.
    check_start(Config(server=settings, models={"m": model}))


@pytest.mark.parametrize("setting", ["adapter_dirs", "lora_root", "multi_lora", "chat_template"])
def test_other_missing_paths(setting: str, problem: Callable[..., str]) -> None:
    value = ("/nowhere/at/all",) if setting == "adapter_dirs" else "/nowhere/at/all"
    assert "/nowhere/at/all" in problem(ModelConfig(path="/", **{setting: value}))


@pytest.mark.parametrize("setting", ["http_port", "grpc_port", "metrics_port"])
def test_a_port_in_use(setting: str, problem: Callable[..., str]) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        message = problem(host="127.0.0.1", **{setting: port})
    assert re.search(naming("127.0.0.1", port), message)


def test_a_locked_state_directory(tmp_path: Path, problem: Callable[..., str]) -> None:
    with contextlib.closing(StateLock.own(tmp_path)):
        message = problem(state_dir=str(tmp_path))
    assert re.search(naming("process", "--state-dir"), message)
    assert re.search(naming("--state-dir", f"{tmp_path}-2"), message)


def test_a_wrong_model_is_reported_before_a_port_in_use(
    tmp_path: Path, problem: Callable[..., str]
) -> None:
    wrong = tmp_path / "no" / "model"
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        message = problem(ModelConfig(path=str(wrong)), http_port=other.getsockname()[1])
    assert re.search(naming(wrong), message)


@pytest.mark.parametrize("path", ["/", "owner/name"])
def test_the_checks_make_no_state_for_a_new_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config = Config(
        server=ServerConfig(http_port=0, grpc_port=0, metrics_port=0),
        models={"m": ModelConfig(path=path)},
    )
    check_start(config)
    assert not list(tmp_path.rglob("*"))
    with (
        contextlib.closing(StateLock.own(state_place(config))),
        pytest.raises(ConfigError, match=naming("process")),
    ):
        check_start(config)


def test_memory_that_does_not_hold_the_weights() -> None:
    model = ModelConfig(path="/", dtype="float32", memory_bytes=1000)
    with pytest.raises(ConfigError) as caught:
        check_weights_fit(model, TINY_DECODER, 1000)
    message = caught.value.message
    assert re.search(naming("memory_bytes", "1000 B"), message)
    assert re.search(
        naming("--memory", "--quantization", "int8", "int4", "memory_bytes", 1000), message
    )
    assert caught.value.param == "memory_bytes"


def test_memory_that_holds_them() -> None:
    check_weights_fit(ModelConfig(path="/"), TINY_DECODER, 1 << 30)
