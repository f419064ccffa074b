"""Files of the current folder with names of modules do not run in any process of a server."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from loraplex.demo import ADAPTER_PATHS
from loraplex.testing.running_server import MODEL, RunningServer, serving

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("server")]

FLAGS = {
    "ranks": ("--tensor-parallel-size=2",),
    "front ends": ("--frontend-processes=2",),
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
PACKAGES = (
    *("http", "torch", "numpy", "msgspec", "zmq", "starlette", "uvicorn", "httptools", "grpc"),
    *("jinja2", "tokenizers", "safetensors", "huggingface_hub", "fsspec", "httpx", "llguidance"),
    *("prometheus_client", "google", "typer", "pydantic", "loraplex", "sitecustomize"),
)


@pytest.fixture
def hostile_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Current folder with a file for each module; one that runs leaves its name in `ran`."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in {*sys.stdlib_module_names, *PACKAGES}:
        line = f"open({str(tmp_path / 'ran')!r}, 'a').write({name + ' '!r})\n"
        (folder / f"{name}.py").write_text(line)
    monkeypatch.chdir(folder)
    return tmp_path


def pickled_adapter(folder: Path) -> Path:
    """An adapter whose weights are a .bin file, which torch reads."""
    shutil.copytree(ADAPTER_PATHS["chinese"], folder)
    weights = folder / "adapter_model.safetensors"
    tensors: dict[str, np.ndarray] = load_file(weights)
    copies = {name: torch.from_numpy(value) for name, value in tensors.items()}
    torch.save(copies, folder / "adapter_model.bin")
    weights.unlink()
    return folder


def send_all_kinds(server: RunningServer, adapter: Path) -> None:
    status, body = server.post("/v1/adapters", {"name": "bin", "path": str(adapter)})
    assert status == 201, body
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    for fields in ({"model": "bin"}, {"model": MODEL, "response_format": FORMAT}):
        status, body = server.post("/v1/chat/completions", chat | fields)
        assert status == 200, json.dumps(body)


@pytest.mark.parametrize("kind", FLAGS)
def test_no_process_of_a_server_runs_files_of_the_current_folder(
    hostile_folder: Path, kind: str
) -> None:
    adapter = pickled_adapter(hostile_folder / "adapter")
    roots = ("--allowed-adapter-roots", str(hostile_folder))
    with serving(hostile_folder / "state", *FLAGS[kind], *roots) as server:
        send_all_kinds(server, adapter)
    assert not (hostile_folder / "ran").exists(), (hostile_folder / "ran").read_text()
