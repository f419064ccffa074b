"""Our server and the real Triton over the same repository, until a test ends."""

import contextlib
import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.testing.running_server import PORT_FLAGS, running
from support.real_triton import running_triton

VLLM_MODEL = "vllm_model"
_DEVICE = "--device=cpu"
_EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")


class Repository(StrEnum):
    """What is served."""

    UNARY = "unary"
    """TensorRT-LLM's five models, with one response to each request."""
    DECOUPLED = "decoupled"
    """The same, which stream."""
    VLLM = "vllm"
    """A model of the vLLM backend."""


@dataclasses.dataclass(frozen=True)
class Address:
    """Each as `host:port`, as tritonclient takes them."""

    http: str
    grpc: str


@dataclasses.dataclass(frozen=True)
class Pair:
    ours: Address
    real: Address


@contextlib.contextmanager
def both_serving(program: Path, repository: Repository, folder: Path) -> Iterator[Pair]:
    """Both are ready, and clients may load and unload. program: the real tritonserver."""
    path = folder / "repository"
    if repository is Repository.VLLM:
        _write_vllm(path)
    else:
        _write_five(path, folder / "loras", is_decoupled=repository is Repository.DECOUPLED)
    with _ours(path, folder) as ours, _real(program, repository, path, folder) as real:
        yield Pair(ours, real)


def _write_five(path: Path, loras: Path, *, is_decoupled: bool) -> None:
    for task_id, name in ((1, "chinese"), (2, "japanese")):
        shutil.copytree(ADAPTER_PATHS[name], loras / str(task_id))
    flags = ["--decoupled"] if is_decoupled else []
    _triton("init", path, f"--model={BASE_PATH}", f"--lora-dir={loras}", *flags)


def _write_vllm(path: Path) -> None:
    model = path / VLLM_MODEL
    files = model / "1"
    files.mkdir(parents=True)
    (model / "config.pbtxt").write_text(
        'backend: "vllm"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n'
    )
    arguments = {"model": str(BASE_PATH), "enable_lora": "true", "max_lora_rank": 16}
    (files / "model.json").write_text(json.dumps(arguments))
    (files / "multi_lora.json").write_text(json.dumps({"chinese": str(ADAPTER_PATHS["chinese"])}))


def _triton(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "loraplex", "compat", "triton", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def _ours(path: Path, folder: Path) -> Iterator[Address]:
    command = [
        sys.executable,
        "-m",
        "loraplex",
        "compat",
        "triton",
        f"--model-repository={path}",
        _DEVICE,
    ]
    command += [*PORT_FLAGS, "--host=127.0.0.1", f"--state-dir={folder / 'state'}", *_EXPLICIT]
    with (folder / "ours.txt").open("w") as lines, running(command, lines) as server:
        yield Address(f"127.0.0.1:{server.http_port}", f"127.0.0.1:{server.grpc_port}")


@contextlib.contextmanager
def _real(program: Path, repository: Repository, path: Path, folder: Path) -> Iterator[Address]:
    flags = [f"--server-flag={_DEVICE}", f"--server-flag=--state-dir={folder / 'exported-state'}"]
    flags.append(f"--request-socket={folder / 'socket'}")
    backends = None
    served = path
    if repository is Repository.VLLM:
        backends = folder / "backends"
        _triton("export", f"--backend-directory={backends}", *flags)
    else:
        served = folder / "exported"
        _triton("export", served, f"--model-repository={path}", *flags)
    log = folder / "triton.log"
    with running_triton(program, served, log, *_EXPLICIT, backend_directory=backends) as triton:
        yield Address(triton.http, triton.grpc)
