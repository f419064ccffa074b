"""Reads staged adapters into host memory on a thread of its own, parallel to the steps.

It reads only canonical adapter files that the staging worker wrote. The adapter cache (memory)
decides which adapters are loaded and forgotten.
"""

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from loraplex.adapters.canonical import read_canonical
from loraplex.core.adapter import AdapterHandle, AdapterSource
from loraplex.core.errors import (
    AdapterLoadError,
    DeviceLost,
    ErrorInfo,
    InvalidAdapterError,
    LoraplexError,
)
from loraplex.execution.adapters.agreement import agreed
from loraplex.execution.adapters.host_adapters import HostAdapter, HostAdapters
from loraplex.execution.adapters.host_pieces import host_adapter
from loraplex.kernels.channel import Channel

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class FinishedLoad:
    """Load that ended: the adapter is in the host table, or there is an error."""

    handle: AdapterHandle
    error: ErrorInfo | None = None
    load_ns: int = 0
    """Duration of the load."""


class FileAdapterLoader:
    """Loader with one thread, which loads in the order of the starts. start and poll never wait."""

    def __init__(
        self,
        host: HostAdapters,
        prepare: Callable[[HostAdapter], HostAdapter] = lambda adapter: adapter,
        channel: Channel | None = None,
    ) -> None:
        """prepare: called with each adapter that was read, such as AdapterBank.prepare.

        channel: to the loaders of the other ranks, which load the same adapters in the same order;
        None: there are none.
        """
        self._host = host
        self._channel = channel
        self._prepare = prepare
        self._wanted: queue.SimpleQueue[tuple[AdapterHandle, AdapterSource] | None] = (
            queue.SimpleQueue()
        )
        self._finished: queue.SimpleQueue[FinishedLoad] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="adapter-loader", daemon=True)
        self._thread.start()

    def start(self, handle: AdapterHandle, source: AdapterSource) -> None:
        """Begin to read; returns at once."""
        self._wanted.put((handle, source))

    def poll(self) -> list[FinishedLoad]:
        """Return the loads that ended since the last call."""
        finished = []
        while not self._finished.empty():
            finished.append(self._finished.get())
        return finished

    def discard(self, handle: AdapterHandle) -> None:
        """Forget a host copy. Its load must have ended."""
        self._host.discard(handle)

    def close(self) -> None:
        """End the thread after the load in progress; waiting ones are dropped."""
        self._closing.set()
        self._wanted.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (wanted := self._wanted.get()) is not None and not self._closing.is_set():
            handle, source = wanted
            start_ns = time.monotonic_ns()
            try:
                self._host.put(handle, self._load(source))
            except DeviceLost:
                return  # another rank has ended, and this engine with it
            except LoraplexError as error:
                self._finished.put(FinishedLoad(handle, error.to_info()))
            except Exception as error:
                if self._channel is not None:
                    self._channel.abort(f"loading {source.path} failed: {error}")
                logger.exception("loading %s failed", source.path)
                failure = AdapterLoadError(f"loading adapter {source.digest} failed: {error}")
                self._finished.put(FinishedLoad(handle, failure.to_info()))
            else:
                load_ns = time.monotonic_ns() - start_ns
                self._finished.put(FinishedLoad(handle, load_ns=load_ns))

    def _load(self, source: AdapterSource) -> HostAdapter:
        """Read and prepare an adapter. Raises LoraplexError."""
        if self._channel is None:
            return self._prepare(read_host_adapter(source))
        # All ranks compute DoRA's norms together, or none begins.
        return self._prepare(agreed(self._channel, lambda: read_host_adapter(source)))


def read_host_adapter(source: AdapterSource) -> HostAdapter:
    """Read a canonical adapter file. The tensors share one buffer.

    Raises AdapterLoadError if it is gone or is another adapter.
    """
    try:
        content = read_canonical(Path(source.path))
        adapter = host_adapter(content, source.targets)
    except (InvalidAdapterError, OSError) as error:
        raise AdapterLoadError(f"cannot load adapter {source.digest}: {error}") from error
    if content.digest != source.digest:
        raise AdapterLoadError(
            f"cannot load adapter {source.digest}: {source.path} holds another one, "
            f"{content.digest}"
        )
    return adapter
