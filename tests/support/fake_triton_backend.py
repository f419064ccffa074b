"""What Triton's Python backend gives to a model, without Triton: for tests of what we put there.

It stands for the module triton_python_backend_utils.
"""

import dataclasses
import json
import queue
import threading
from typing import Any

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2


class TritonModelException(Exception):
    pass


class Logger:
    lines: queue.Queue[str] = queue.Queue()

    @classmethod
    def log_warn(cls, text: str) -> None:
        cls.lines.put(text)


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG = "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG"
    UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS = "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS"
    CANCELLED = "CANCELLED"

    def __init__(self, message: str, code: str) -> None:
        self.message = message
        self.code = code


class Tensor:
    """A capsule stands for BF16, which numpy has not."""

    def __init__(self, name: str, array: Any, *, capsule: Any = None) -> None:
        self._name = name
        self._array = array
        self._capsule = capsule

    @classmethod
    def from_dlpack(cls, name: str, capsule: Any) -> "Tensor":
        return cls(name, None, capsule=capsule)

    def name(self) -> str:
        return self._name

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def as_numpy(self) -> Any:
        return self._array

    def to_dlpack(self) -> Any:
        return self._capsule if self._array is None else self._array.__dlpack__()


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        self.outputs = {tensor.name(): tensor for tensor in output_tensors}
        self.error = error


class Sender:
    """Responses of one request, and whether its client has gone."""

    def __init__(self) -> None:
        self.responses: queue.Queue[tuple[InferenceResponse, bool]] = queue.Queue()
        """Responses, each with whether it was the last."""
        self.has_gone = threading.Event()
        self._has_ended = False

    def send(self, response: InferenceResponse, flags: int = 0) -> None:
        assert not self._has_ended, "Response sender has been closed"
        self._has_ended = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self.responses.put((response, self._has_ended))

    def is_cancelled(self) -> bool:
        assert not self._has_ended, "Triton has freed what it would look at"
        return self.has_gone.is_set()

    def all(self) -> list[InferenceResponse]:
        """Waits for the last one."""
        found = [self.responses.get(timeout=60)]
        while not found[-1][1]:
            found.append(self.responses.get(timeout=60))
        return [response for response, _ in found]


@dataclasses.dataclass
class Request:
    tensors: list[Tensor]
    outputs: tuple[str, ...] = ()
    id: str = ""
    said: dict[str, Any] = dataclasses.field(default_factory=dict)
    timeout_us: int = 0
    correlation: int = 0
    sender: Sender = dataclasses.field(default_factory=Sender)

    def get_response_sender(self) -> Sender:
        return self.sender

    def inputs(self) -> list[Tensor]:
        return self.tensors

    def requested_output_names(self) -> set[str]:
        return set(self.outputs)

    def request_id(self) -> str:
        return self.id

    def parameters(self) -> str:
        return json.dumps(self.said) if self.said else ""

    def timeout(self) -> int:
        return self.timeout_us

    def correlation_id(self) -> int:
        return self.correlation

    def flags(self) -> int:
        return TRITONSERVER_REQUEST_FLAG_SEQUENCE_START


def texts(name: str, *values: str) -> Tensor:
    """A BYTES tensor of shape [1, n]."""
    return Tensor(name, np.array([[value.encode() for value in values]], dtype=object))
