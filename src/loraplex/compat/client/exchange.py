"""One request to a Triton model and all its responses, over a call or over a stream."""

import contextlib
import queue
from collections.abc import Mapping, Sequence
from typing import Any

import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from loraplex.compat.client.tensors import Array, inputs
from loraplex.compat.flags import Flags

CACHE_AND_TIMES = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
)
"""Outputs that return_perf_metrics adds in every model that generates text."""

_OUTPUTS_OF_FLAGS = {
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
    "return_context_logits": ("context_logits",),
    "return_generation_logits": ("generation_logits",),
    "return_perf_metrics": CACHE_AND_TIMES,
}
"""Outputs that a flag adds, by the flag and its tensor."""

_SECONDS_TO_REPORT = 1.0


class Exchange:
    """Requests over one connection; `finish` waits for their responses."""

    def __init__(self, client: Any, model: str) -> None:
        self._client = client
        self._model = model
        self._responses: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
        self.errors: list[InferenceServerException] = []
        self.was_cancelled = False

    def send(self, tensors: Mapping[str, Array], request_id: str, **options: Any) -> None:
        """Send a request, with options of tritonclient's call."""
        raise NotImplementedError

    def cancel(self) -> None:
        raise NotImplementedError

    def finish(self) -> list[Any]:
        """Wait, and return the results in their order. Raises the first error but cancellations."""
        results = self.collect()
        if self.errors:
            raise self.errors[0]
        return results

    def collect(self) -> list[Any]:
        """Wait, and return the results in their order; errors are in `errors`."""
        self._wait()
        results = []
        while not self._responses.empty():
            result, error = self._responses.get()
            if error is None:
                results.append(result)
            elif (error.status() or "").endswith("CANCELLED"):
                self.was_cancelled = True
            else:
                self.errors.append(error)
        return results

    def _wait(self) -> None:
        raise NotImplementedError

    def _received(self, result: Any, error: Any) -> None:
        self._responses.put((result, error))


class Calls(Exchange):
    """Exchange in which each request is a call of its own."""

    def __init__(self, client: Any, model: str, *, compression: str | None = None) -> None:
        super().__init__(client, model)
        self._compression = compression
        self._calls: list[Any] = []

    def send(self, tensors: Mapping[str, Array], request_id: str, **options: Any) -> None:
        call = self._client.async_infer(
            self._model,
            inputs(tensors),
            callback=self._received,
            request_id=request_id,
            compression_algorithm=self._compression,
            **options,
        )
        self._calls.append(call)

    def cancel(self) -> None:
        for call in self._calls:
            call.cancel()

    def _wait(self) -> None:
        received = [self._responses.get() for _ in self._calls]
        for response in received:
            self._responses.put(response)


class Stream(Exchange):
    """Exchange in which all requests share one stream."""

    def __init__(
        self,
        client: Any,
        model: str,
        *,
        timeout: float | None = None,
        compression: str | None = None,
    ) -> None:
        """Open the stream, which ends after `timeout` seconds."""
        super().__init__(client, model)
        self._is_cancelled = False
        client.start_stream(
            callback=self._received, stream_timeout=timeout, compression_algorithm=compression
        )

    def send(self, tensors: Mapping[str, Array], request_id: str, **options: Any) -> None:
        try:
            self._client.async_stream_infer(
                self._model, inputs(tensors), request_id=request_id, **options
            )
        except InferenceServerException as error:
            raise self._reason(error) from None

    def cancel(self) -> None:
        self._is_cancelled = True

    def _reason(self, error: InferenceServerException) -> InferenceServerException:
        """Return the error with which the server ended the stream, which may come a moment later.

        Without it tritonclient only reports that the stream is no longer valid.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                _, cause = self._responses.get(timeout=_SECONDS_TO_REPORT)
                if cause is not None:
                    return InferenceServerException(cause.message(), cause.status())
        return error

    def _wait(self) -> None:
        self._client.stop_stream(cancel_requests=self._is_cancelled)


def requested_names(options: Flags) -> list[str]:
    """Return the names of the outputs that the flags of a program add."""
    groups = [names for flag, names in _OUTPUTS_OF_FLAGS.items() if options.get(flag)]
    return [name for names in groups for name in names]


def requested_outputs(names: Sequence[str]) -> list[Any] | None:
    """Return tritonclient's objects for output names; None requests all outputs."""
    return [triton_grpc.InferRequestedOutput(name) for name in names] or None
