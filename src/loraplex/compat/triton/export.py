"""Writes models for the real Triton's Python backend: each passes its requests on to our server.

A model's folder gets a config.pbtxt with the names, tensors and policy that our server declares for
it, and a model.py with a copy of frontends.kserve.stub next to it.
"""

import dataclasses
import importlib.resources
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

from loraplex.compat.triton.model_folder import CONFIG_FILE
from loraplex.core.errors import ConfigError
from loraplex.core.python_process import module_command
from loraplex.frontends.kserve.models.kinds import VLLM
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration, tensor_config

STUB: Final = "loraplex.frontends.kserve.stub"
COPIED_STUB: Final = "loraplex_stub"
"""Its name next to a model.py."""
MODEL_FILE: Final = "model.py"
BACKEND_FILE: Final = "loraplex.json"
"""File next to the model.py of a backend, with what the models' configurations leave open."""
VLLM_BACKEND: Final = "vllm"

SOCKET: Final = "loraplex_socket"
COMMAND: Final = "loraplex_command"
_MODEL_DIRECTORY: Final = "$$TRITON_MODEL_DIRECTORY"
_MODEL_NAME: Final = "$$TRITON_MODEL_NAME"
_ENVIRONMENT: Final = "EXECUTION_ENV_PATH"
_FLAGS: Final = (
    *("--no-http", "--no-grpc", "--no-metrics", "--stop-with-stdin", "--no-persist-adapters"),
    *("--host=127.0.0.1", "--max-body-bytes=1GiB"),
)
"""Flags of a server that serves Triton alone. It forgets the adapters that requests sent, as the
original backends do, so several servers may share a state directory."""

_MODEL_TEXT: Final = f'''"""Written by `loraplex compat triton export`: loraplex runs it."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from {COPIED_STUB}.model import TritonPythonModel as TritonPythonModel
'''
_ADDED_FIELDS: Final = ("name", "data_type", "dims", "optional")
"""Fields that Triton reads of a tensor which a backend adds to a configuration."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """How the exported models find our server."""

    socket: str = ""
    """Its request socket; empty: one in a folder of the user that Triton runs as."""
    starts_server: bool = True
    """Whether the first model starts it; otherwise it runs already."""
    python: str = sys.executable
    """The Python that loraplex is installed for."""
    server_flags: Sequence[str] = ()
    """Flags of `loraplex compat triton`, in addition to its repository."""
    environment: str = ""
    """A virtual environment, or a packed one, for Triton's Python; empty: what Triton finds."""

    def command(self, *flags: str) -> list[str]:
        """What starts the server, without its socket; nothing if it is not to be started."""
        if not self.starts_server:
            return []
        start = module_command("loraplex", "compat", "triton", python=self.python)
        return [*start, *flags, *_FLAGS, *self.server_flags]


def export_models(
    folder: Path,
    repositories: Sequence[Path],
    declarations: Sequence[ModelDeclaration],
    export: Export,
) -> None:
    """Write a repository with one model for each declaration. Raises ConfigError.

    repositories: those that the declarations are from, which the server will read.
    """
    for declaration in declarations:
        if (folder / declaration.name / CONFIG_FILE).exists():
            raise ConfigError(
                f"{folder / declaration.name} exists already: a repository is written to a new "
                "folder"
            )
    flags = [f"--model-repository={path.expanduser().absolute()}" for path in repositories]
    parameters = _parameters(export, export.command(*flags))
    try:
        for declaration in declarations:
            model = folder / declaration.name
            _write_code(model / declaration.version)
            text = config_text(declaration, parameters)
            (model / CONFIG_FILE).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from error


def export_vllm_backend(directory: Path, export: Export) -> Path:
    """Write the backend `vllm` into a backend directory; its own folder. Raises ConfigError.

    Each of its models is served by a server of its own, which reads the model's folder as it is.
    """
    backend = directory / VLLM_BACKEND
    if backend.exists():
        raise ConfigError(f"{backend} exists already: remove it first")
    command = export.command(
        f"--model-repository={_MODEL_DIRECTORY}/..",
        "--model-control-mode=explicit",
        f"--load-model={_MODEL_NAME}",
    )
    tensors = tensor_config(VLLM)
    defaults = {
        COMMAND: command,
        SOCKET: export.socket,
        "input": [_added(row) for row in tensors["input"]],
        "output": [_added(row) for row in tensors["output"]],
    }
    try:
        _write_code(backend)
        (backend / BACKEND_FILE).write_text(json.dumps(defaults, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror}") from error
    return backend


def config_text(declaration: ModelDeclaration, parameters: Mapping[str, str]) -> str:
    """The config.pbtxt of a model of the Python backend that looks as the declared one."""
    declared = declaration.config or tensor_config(declaration.kind)
    config: dict[str, Any] = {
        "name": declaration.name,
        "backend": "python",
        "max_batch_size": declaration.max_batch_size,
        "input": declared["input"],
        "output": declared["output"],
        "instance_group": [{"count": 1, "kind": "KIND_CPU"}],
        "model_transaction_policy": {"decoupled": bool(declaration.is_decoupled)},
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }
    message = json_format.ParseDict(config, model_config_pb2.ModelConfig())
    return str(text_format.MessageToString(message))


def _parameters(export: Export, command: Sequence[str]) -> dict[str, str]:
    parameters = {"FORCE_CPU_ONLY_INPUT_TENSORS": "yes"}
    if export.socket:
        parameters[SOCKET] = export.socket
    if command:
        parameters[COMMAND] = json.dumps(list(command))
    if export.environment:
        parameters[_ENVIRONMENT] = export.environment
    return parameters


def _added(row: Mapping[str, Any]) -> dict[str, Any]:
    return {field: row[field] for field in _ADDED_FIELDS if field in row}


def _write_code(folder: Path) -> None:
    """A model.py, and the files that it needs."""
    copied = folder / COPIED_STUB
    copied.mkdir(parents=True, exist_ok=True)
    for file in importlib.resources.files(STUB).iterdir():
        if file.name.endswith(".py"):
            (copied / file.name).write_bytes(file.read_bytes())
    (folder / MODEL_FILE).write_text(_MODEL_TEXT, encoding="utf-8")
