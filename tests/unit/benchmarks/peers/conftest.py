"""A small setup of made-up files, and folders that look like a peer's but hold fakes of ours."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from comparison.systems import Adapter, Setup

from loraplex.bench.completions import Exchange
from loraplex.bench.workload import PlannedRequest

TOKENS = tuple(f"<{number}>" for number in range(100))


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    """A model folder with a config alone, and the adapters `a` and `b` (alpha / rank = 2)."""
    model = tmp_path / "model"
    model.mkdir()
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (model / "config.json").write_text(json.dumps(config))
    for name in ("cache", "work"):
        (tmp_path / name).mkdir()
    return Setup(
        model=model,
        tokens=TOKENS,
        adapters=tuple(write_adapter(tmp_path / "adapters", name) for name in "ab"),
        num_resident_adapters=2,
        max_lora_rank=4,
        max_num_seqs=4,
        max_model_len=64,
        num_threads=1,
        cache=tmp_path / "cache",
        work=tmp_path / "work",
        log=tmp_path / "work" / "log",
    )


def write_adapter(folder: Path, name: str, modules: tuple[str, ...] = ("q_proj",)) -> Adapter:
    path = folder / name
    path.mkdir(parents=True)
    config = {"r": 4, "lora_alpha": 8, "target_modules": modules}
    (path / "adapter_config.json").write_text(json.dumps(config))
    (path / "adapter_model.safetensors").write_bytes(b"")
    return Adapter(name=name, path=path, rank=4, alpha=8)


@pytest.fixture
def new_adapter(tmp_path: Path) -> Callable[..., Adapter]:
    """A function (name, modules) -> Adapter that the setup does not have."""
    return lambda name, *modules: write_adapter(tmp_path / "more", name, modules or ("q_proj",))


@pytest.fixture
def exchange() -> Callable[..., Exchange]:
    """A function (adapter, prompt, num_output_tokens) -> Exchange."""
    return lambda adapter=None, prompt=(10, 11), num_output_tokens=3: Exchange(
        PlannedRequest(tuple(prompt), num_output_tokens, adapter, 0.0)
    )


@pytest.fixture
def executable() -> Callable[[Path, str], Path]:
    """A function (path, source): a Python program there, run by this Python."""

    def write(path: Path, source: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{sys.executable}\n{source}")
        path.chmod(0o755)
        return path

    return write


SERVER = Path(__file__).with_name("fake_peer_server.py")


class FakeServer:
    """Sends the lines of its stream, and records its requests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def program(self) -> str:
        """The source of a program that becomes the fake server."""
        return (
            "import os, sys\n"
            f"os.execv({sys.executable!r}, "
            f"[{sys.executable!r}, {str(SERVER)!r}, {str(self.folder)!r}, *sys.argv[1:]])\n"
        )

    def responds_with(self, *lines: str) -> None:
        (self.folder / "stream.json").write_text(json.dumps(lines))

    def requests(self) -> list[list[Any]]:
        """[path, body] of each POST."""
        return [
            json.loads(line) for line in (self.folder / "requests.jsonl").read_text().splitlines()
        ]

    def request_connections(self) -> list[str]:
        """The `Connection` header of each POST."""
        return (self.folder / "connections").read_text().splitlines()

    def command(self) -> list[str]:
        return json.loads((self.folder / "command.json").read_text())

    def environment(self) -> dict[str, str]:
        environment = json.loads((self.folder / "environment.json").read_text())
        # pytest changes it between the start of a fixture and its test.
        return {k: v for k, v in environment.items() if k != "PYTEST_CURRENT_TEST"}

    def flag(self, name: str) -> str:
        command = self.command()
        return command[command.index(name) + 1]


@pytest.fixture
def fake_server(tmp_path: Path) -> FakeServer:
    folder = tmp_path / "server"
    folder.mkdir()
    return FakeServer(folder)
