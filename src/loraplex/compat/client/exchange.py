"""One request to a Triton model and all that comes back, over a call or over a stream."""

import contextlib
import queue
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from loraplex.compat.client.connection import is_cancelled
from loraplex.compat.client.tensors import Array, inputs

CACHE_AND_TIMES = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
)
"""What return_perf_metrics brings in every model that makes text."""


MILLISECONDS = 1000
_SECONDS_TO_TELL = 1.0


class Exchange(Protocol):
    """Sends requests; `finish` waits for their answers."""

    def send(self, tensors: Mapping[str, Array]) -> None: ...

    def cancel(self) -> None: ...

    def finish(self) -> "Replies": ...


class Replies:
    """What came back: results in their order, without the errors of a cancellation."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.was_cancelled = False

    def add(self, result: Any, error: InferenceServerException | None) -> None:
        """Raises the error, unless it says that we cancelled."""
        if error is None:
            self.results.append(result)
        elif is_cancelled(error):
            self.was_cancelled = True
        else:
            raise error


class Calls:
    """Each request is a call of its own."""

    def __init__(self, client: Any, model: str, request_id: str, **options: Any) -> None:
        """options: as async_infer takes them."""
        self._client = client
        self._model = model
        self._request_id = request_id
        self._options = options
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._calls: list[Any] = []

    def send(self, tensors: Mapping[str, Array]) -> None:
        call = self._client.async_infer(
            self._model,
            inputs(triton_grpc, tensors),
            callback=lambda result, error: self._answers.put((result, error)),
            request_id=self._request_id,
            **self._options,
        )
        self._calls.append(call)

    def cancel(self) -> None:
        for call in self._calls:
            call.cancel()

    def finish(self) -> Replies:
        """Raises the first error that is no cancellation."""
        replies = Replies()
        for _ in self._calls:
            replies.add(*self._answers.get())
        return replies


class Stream:
    """All requests share one stream."""

    def __init__(
        self,
        client: Any,
        model: str,
        request_id: str,
        *,
        timeout: float | None = None,
        compression: str | None = None,
        **options: Any,
    ) -> None:
        """timeout: seconds. options: as async_stream_infer takes them."""
        self._client = client
        self._model = model
        self._request_id = request_id
        self._options = options
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._is_cancelled = False
        client.start_stream(
            callback=lambda result, error: self._answers.put((result, error)),
            stream_timeout=timeout,
            compression_algorithm=compression,
        )

    def send(self, tensors: Mapping[str, Array]) -> None:
        try:
            self._client.async_stream_infer(
                self._model,
                inputs(triton_grpc, tensors),
                request_id=self._request_id,
                **self._options,
            )
        except InferenceServerException as error:
            raise self._why(error) from None

    def cancel(self) -> None:
        self._is_cancelled = True

    def _why(self, error: InferenceServerException) -> InferenceServerException:
        """What the server said when it ended the stream; its reader may tell a moment later."""
        with contextlib.suppress(queue.Empty):
            while True:
                _, said = self._answers.get(timeout=_SECONDS_TO_TELL)
                if said is not None:
                    return InferenceServerException(said.message(), said.status())
        return error

    def finish(self) -> Replies:
        """Raises the first error that is no cancellation."""
        self._client.stop_stream(cancel_requests=self._is_cancelled)
        replies = Replies()
        while not self._answers.empty():
            replies.add(*self._answers.get())
        return replies


def stop_after(
    exchange: Exchange,
    milliseconds: int,
    stop: Mapping[str, Array] | None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Sleep, then send the tensors of a stop request or, without them, cancel."""
    sleep(milliseconds / MILLISECONDS)
    if stop is None:
        exchange.cancel()
    else:
        exchange.send(stop)


def own_request_id() -> str:
    """For who stops a request without having named it: a number, as old servers want."""
    return str(uuid.uuid4().int >> 65)


def requested_outputs(names: Sequence[str]) -> list[Any] | None:
    """None: all that there are."""
    return [triton_grpc.InferRequestedOutput(name) for name in names] or None
