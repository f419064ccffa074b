"""The model that Triton's Python backend calls: it passes requests on to a serving process.

Requests run at the same time: execute() only sends them, their responses come in other threads. It
works for decoupled models and for those with one response alike.
"""

import json
import os
import threading
from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as backend

from .connection import Connection, ConnectionLost, MessageTooLarge
from .link import Link
from .server import ServerProcess, ServerUnavailable, default_socket
from .tensors import TensorSpecs, from_wire
from .wire import Infer, Parameter, RequestFailure, Response

SOCKET = "loraplex_socket"
COMMAND = "loraplex_command"
START_SECONDS = "loraplex_start_seconds"
_DEFAULT_START_SECONDS = 1200.0
_CHECK_SECONDS = 0.1
"""How often clients' cancellations are looked for."""
_DEFAULTS_FILE = "loraplex.json"
"""File of a backend directory with what a model's configuration does not set."""
_FINAL = backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL

_CODES = {
    "INVALID_ARGUMENT": "INVALID_ARG",
    "NOT_FOUND": "NOT_FOUND",
    "UNAVAILABLE": "UNAVAILABLE",
    "DEADLINE_EXCEEDED": "UNAVAILABLE",
    "RESOURCE_EXHAUSTED": "UNAVAILABLE",
    "UNIMPLEMENTED": "UNSUPPORTED",
    "ALREADY_EXISTS": "ALREADY_EXISTS",
    "CANCELLED": "CANCELLED",
    "INTERNAL": "INTERNAL",
}
"""Triton's code by the kind of a failure; for others it is UNKNOWN."""


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Add the tensors that the configuration does not declare, as the original backend does."""
        defaults = _defaults()
        if "input" not in defaults:
            return auto_complete_model_config
        config = auto_complete_model_config.as_dict()
        declared = {field: {row["name"] for row in config[field]} for field in ("input", "output")}
        for row in defaults["input"]:
            if row["name"] not in declared["input"]:
                auto_complete_model_config.add_input(row)
        for row in defaults["output"]:
            if row["name"] not in declared["output"]:
                auto_complete_model_config.add_output(row)
        auto_complete_model_config.set_model_transaction_policy({"decoupled": True})
        auto_complete_model_config.set_max_batch_size(0)
        return auto_complete_model_config

    def initialize(self, args: Mapping[str, str]) -> None:
        """Join or start the serving process. Raises TritonModelException, with its last lines."""
        config = json.loads(args["model_config"])
        self._name = args["model_name"]
        self._specs = TensorSpecs(config)
        self._is_unary = not config.get("model_transaction_policy", {}).get("decoupled", False)
        self._calls: set[_TritonCall] = set()
        self._lock = threading.Lock()
        settings = _Settings(config, args)
        try:
            server = ServerProcess(settings.socket, settings.command)
            self._link = Link(
                server,
                self._name,
                start_seconds=settings.start_seconds,
                report=lambda text: backend.Logger.log_warn(f"loraplex, {self._name}: {text}"),
                each_tick=self._cancel_unwanted,
                tick_seconds=_CHECK_SECONDS,
            )
            self._open()
        except (ServerUnavailable, ConnectionLost) as error:
            raise backend.TritonModelException(f"loraplex, {self._name}: {error}") from error

    def _open(self) -> None:
        try:
            self._link.open()
        except BaseException:
            self._link.close()
            raise

    def execute(self, requests: Any) -> None:
        for request in requests:
            call = _TritonCall(request.get_response_sender(), self)
            try:
                with self._lock:
                    self._calls.add(call)
                call.submitted(*self._link.submit(self._message(request), call.respond))
            except (ConnectionLost, MessageTooLarge) as error:
                kind = "UNAVAILABLE" if isinstance(error, ConnectionLost) else "INVALID_ARGUMENT"
                call.respond(RequestFailure(kind=kind, message=str(error)))
            except Exception as error:
                # The backend would respond to a request whose sender may have been used already.
                call.respond(
                    RequestFailure(kind="INTERNAL", message=f"{type(error).__name__}: {error}")
                )

    def finalize(self) -> None:
        """Every request has ended by now, or ends here."""
        self._link.close()

    @property
    def outputs(self) -> frozenset[str]:
        """Names of those that the configuration has; Triton takes no others."""
        return self._specs.outputs

    def ended(self, call: "_TritonCall") -> None:
        with self._lock:
            self._calls.discard(call)

    def _cancel_unwanted(self) -> None:
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.cancel_if_unwanted()

    def _message(self, request: Any) -> Infer:
        names = frozenset(request.requested_output_names())
        is_all = names >= self._specs.outputs
        return Infer(
            id=0,
            model=self._name,
            request_id=str(request.request_id()),
            inputs=tuple(self._specs.to_wire(tensor) for tensor in request.inputs()),
            requested=() if is_all else tuple(sorted(names)),
            parameters=_parameters(request),
            is_unary=self._is_unary,
        )


class _TritonCall:
    """One request of Triton's. Its sender must not be called after the last response: Triton
    frees then what it reads.
    """

    def __init__(self, sender: Any, model: TritonPythonModel) -> None:
        self._sender = sender
        self._model = model
        self._lock = threading.Lock()
        self._has_ended = False
        self._is_cancelled = False
        self._place: tuple[Connection, int] | None = None

    def submitted(self, connection: Connection, number: int) -> None:
        self._place = connection, number

    def respond(self, message: Response | RequestFailure) -> None:
        is_end = isinstance(message, RequestFailure) or message.is_final
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = is_end
            try:
                response = self._response(message)
            except Exception as error:  # responses that Triton does not take end the request, too
                self._has_ended = is_end = True
                text = f"{type(error).__name__}: {error}"
                response = self._response(RequestFailure(kind="INTERNAL", message=text))
            self._sender.send(response, flags=_FINAL if is_end else 0)
        if is_end:
            self._model.ended(self)

    def cancel_if_unwanted(self) -> None:
        with self._lock:
            if self._has_ended or self._is_cancelled or self._place is None:
                return
            self._is_cancelled = bool(self._sender.is_cancelled())
        if self._is_cancelled:
            connection, number = self._place
            connection.cancel(number)

    def _response(self, message: Response | RequestFailure) -> Any:
        outputs = [from_wire(t, backend) for t in message.outputs if t.name in self._model.outputs]
        if isinstance(message, RequestFailure):
            error = backend.TritonError(message.message, _code(message.kind))
            return backend.InferenceResponse(outputs, error)
        return backend.InferenceResponse(outputs)


class _Settings:
    """Settings of a model's configuration; its gaps are filled by the backend directory."""

    def __init__(self, config: Mapping[str, Any], args: Mapping[str, str]) -> None:
        said = {key: row["string_value"] for key, row in config.get("parameters", {}).items()}
        defaults = _defaults()
        command = json.loads(said[COMMAND]) if COMMAND in said else defaults.get(COMMAND, [])
        places = {
            "$$TRITON_MODEL_DIRECTORY": os.path.abspath(args["model_repository"]),
            "$$TRITON_MODEL_NAME": args["model_name"],
        }
        self.command = [_filled(part, places) for part in command]
        self.start_seconds = float(said.get(START_SECONDS, _DEFAULT_START_SECONDS))
        socket = said.get(SOCKET) or defaults.get(SOCKET, "")
        self.socket = _filled(socket, places) or default_socket(self.command)


def _filled(text: str, places: Mapping[str, str]) -> str:
    for name, value in places.items():
        text = text.replace(name, value)
    return text


def _defaults() -> dict[str, Any]:
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), _DEFAULTS_FILE)
    try:
        with open(path, encoding="utf-8") as file:
            values: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return {}
    return values


def _parameters(request: Any) -> dict[str, Parameter]:
    """Those of the request, and what Triton has taken out of them."""
    parameters: dict[str, Parameter] = json.loads(request.parameters() or "{}")
    if request.timeout():
        parameters["timeout"] = int(request.timeout())
    if request.correlation_id():
        flags = request.flags()
        parameters["sequence_id"] = request.correlation_id()
        parameters["sequence_start"] = bool(
            flags & backend.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        )
        parameters["sequence_end"] = bool(flags & backend.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
    return parameters


def _code(kind: str) -> Any:
    return getattr(backend.TritonError, _CODES.get(kind, "UNKNOWN"))
