"""Reads staged adapters into host memory on a thread of its own, beside the steps.

Reads only normal files that the staging worker wrote. Which adapters are loaded and forgotten is
decided by the adapter cache (memory).
"""

import dataclasses
import logging
import queue
import threading
from pathlib import Path

import torch

from loraplex.adapters.normal import NormalRow, lora_target, read_normal
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.adapter import AdapterHandle, AdapterSource
from loraplex.core.errors import AdapterLoadError, ErrorInfo, InvalidAdapterError, LoraplexError
from loraplex.execution.host_adapters import HostAdapter, HostAdapters, HostWeight

logger = logging.getLogger(__name__)

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclasses.dataclass(frozen=True, slots=True)
class FinishedLoad:
    """One load that ended: in the host table, or with an error."""

    handle: AdapterHandle
    error: ErrorInfo | None = None


class FileAdapterLoader:
    """One thread, loads in the order of their starts. start and poll never wait for it."""

    def __init__(self, host: HostAdapters) -> None:
        self._host = host
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
        """The loads that ended since the last call."""
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
            try:
                self._host.put(handle, read_host_adapter(source))
            except LoraplexError as error:
                self._finished.put(FinishedLoad(handle, error.to_info()))
            except Exception as error:
                logger.exception("loading %s failed", source.path)
                failure = AdapterLoadError(f"loading adapter {source.digest} failed: {error}")
                self._finished.put(FinishedLoad(handle, failure.to_info()))
            else:
                self._finished.put(FinishedLoad(handle))


def read_host_adapter(source: AdapterSource) -> HostAdapter:
    """Read a normal file. The tensors share one buffer.

    Raises AdapterLoadError if it is gone or is not the adapter that was asked for.
    """
    try:
        content = read_normal(Path(source.path))
        weights = tuple(_weight(row) for row in content.rows)
    except (InvalidAdapterError, OSError) as error:
        raise AdapterLoadError(f"cannot load adapter {source.digest}: {error}") from error
    adapter = HostAdapter(content.digest, tuple(sorted(weights, key=lambda w: w.target)))
    if content.digest != source.digest or adapter.targets != source.targets:
        raise AdapterLoadError(
            f"cannot load adapter {source.digest}: {source.path} holds another one, "
            f"{content.digest}"
        )
    return adapter


def _weight(row: NormalRow) -> HostWeight:
    target = lora_target(row)
    return HostWeight(target, _tensor(row.tensors["a"]), _tensor(row.tensors["b"]), row.scale)


def _tensor(raw: RawTensor) -> torch.Tensor:
    return torch.frombuffer(raw.data, dtype=_DTYPES[raw.dtype]).view(raw.shape)
