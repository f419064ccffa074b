"""Reads staged adapters into host memory on a thread of its own, parallel to the steps.

It reads only canonical adapter files that the staging worker wrote, in the pieces that an adapter's
targets name. The adapter cache (memory) decides which adapters are loaded and forgotten. What fails
on one rank fails on all: an adapter is there for every rank, or for none.
"""

import dataclasses
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, TypeVar

import torch

from loraplex.adapters.canonical import CanonicalFile, CanonicalRow, RowKind, read_canonical
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.adapter import (
    AdapterHandle,
    AdapterSource,
    LoraTarget,
    TargetPart,
    each_expert,
)
from loraplex.core.errors import (
    AdapterLoadError,
    DeviceLost,
    ErrorInfo,
    InvalidAdapterError,
    LoraplexError,
)
from loraplex.execution.adapters.host_adapters import (
    HostAdapter,
    HostAdapters,
    HostPart,
    HostWeight,
)
from loraplex.kernels.channel import Channel

_MESSAGE_BYTES: Final = 2048

_T = TypeVar("_T")


def agreed(channel: Channel, attempt: Callable[[], _T]) -> _T:
    """Return attempt()'s result once it succeeded on all ranks, which call this together.

    Raises this rank's LoraplexError, or AdapterLoadError with the message of the first rank that
    has one.
    """
    failure: LoraplexError | None = None
    try:
        result = attempt()
    except LoraplexError as error:
        failure = error
    messages = channel.gather(_message(failure))
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        text = bytes(message.numpy()).rstrip(b"\0").decode(errors="replace")
        if text:
            raise AdapterLoadError(f"rank {rank} of {channel.size}: {text}")
    return result


def _message(failure: LoraplexError | None) -> torch.Tensor:
    text = b"" if failure is None else failure.message.encode()[:_MESSAGE_BYTES]
    return torch.frombuffer(bytearray(text.ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8)


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}
_KINDS = {
    TargetPart.LORA: RowKind.LORA,
    TargetPart.FACTOR: RowKind.MAGNITUDE,
    TargetPart.BIAS: RowKind.BIAS,
    TargetPart.SHIFT: RowKind.LORA,
    TargetPart.ROWS: RowKind.FULL,
    TargetPart.TOKENS: RowKind.TOKENS,
    TargetPart.EMBEDDING_A: RowKind.LORA,
    TargetPart.EMBEDDING_B: RowKind.LORA,
}

_RowsByPlace = Mapping[tuple[int, str, int, RowKind], CanonicalRow]


def host_adapter(content: CanonicalFile, targets: Iterable[LoraTarget]) -> HostAdapter:
    """Return the adapter in the pieces that staging cut.

    Raises InvalidAdapterError if they do not belong to this file: every row must be used whole.
    """
    rows = {(row.target_layer, row.module, row.expert or 0, row.kind): row for row in content.rows}
    weights: list[HostWeight] = []
    parts: list[HostPart] = []
    used = 0
    for target in sorted(each_expert(targets)):
        piece = _piece(target, rows)
        used += _num_values(piece)
        if isinstance(piece, HostWeight):
            weights.append(piece)
        else:
            parts.append(piece)
    held = sum(tensor.num_values for row in content.rows for tensor in row.tensors.values())
    if used != held:
        raise InvalidAdapterError(
            f"it holds another adapter: the pieces that were staged have {used} values of {held}"
        )
    return HostAdapter(content.digest, tuple(weights), tuple(parts))


def _piece(target: LoraTarget, rows: _RowsByPlace) -> HostWeight | HostPart:
    row = rows.get((target.layer, target.module, target.expert, _KINDS[target.part]))
    if row is None:
        raise InvalidAdapterError(f"it has no {target.part} of {target.module}, {target.layer}")
    first, end = target.first, target.first + target.rank
    match target.part:
        case TargetPart.LORA:
            outputs = slice(target.first, target.first + target.out_features)
            b = _tensor(row, "b")[outputs]
            piece: HostWeight | HostPart = HostWeight(target, _tensor(row, "a"), b, row.scale)
        case TargetPart.FACTOR:
            is_quotient = "factor" in row.tensors
            values = _part_of(row, "factor" if is_quotient else "magnitude", target)
            piece = HostPart(target, values, is_quotient=is_quotient)
        case TargetPart.BIAS:
            piece = HostPart(target, _part_of(row, "bias", target))
        case TargetPart.SHIFT:
            piece = HostPart(target, _part_of(row, "bias", target), row.scale)
        case TargetPart.ROWS:
            is_base = "base" in row.tensors
            weight = _tensor(row, "base" if is_base else "weight")
            values = weight.view(-1, target.out_features)[first:end]
            piece = HostPart(target, values, is_base=is_base)
        case TargetPart.TOKENS:
            indices = _tensor(row, "indices")[first:end]
            piece = HostPart(target, _tensor(row, "weight")[first:end], indices=indices)
        case TargetPart.EMBEDDING_A:
            piece = HostPart(target, _tensor(row, "a")[:, first:end].t(), row.scale)
        case TargetPart.EMBEDDING_B:
            piece = HostPart(target, _tensor(row, "b").t())
    _check_shape(piece)
    return piece


def _part_of(row: CanonicalRow, name: str, target: LoraTarget) -> torch.Tensor:
    return _tensor(row, name)[target.first : target.first + target.out_features]


def _tensor(row: CanonicalRow, name: str) -> torch.Tensor:
    raw = row.tensors.get(name, RawTensor("F32", (0,), b""))
    if raw.num_bytes == 0:
        raise InvalidAdapterError(f"{row.origin} has no {name}")
    return torch.frombuffer(raw.data, dtype=_DTYPES[raw.dtype]).view(raw.shape)


def _check_shape(piece: HostWeight | HostPart) -> None:
    target = piece.target
    if isinstance(piece, HostWeight):
        found = [piece.a.shape, piece.b.shape]
        fits = found == [(target.rank, target.in_features), (target.out_features, target.rank)]
    else:
        found = [piece.values.shape]
        shape = (target.rank, target.out_features)
        fits = piece.values.shape == (shape if piece.values.dim() == 2 else shape[1:])
    if not fits:
        raise InvalidAdapterError(
            f"{target.module} of layer {target.layer} has {[list(shape) for shape in found]}, "
            f"staged as {target}"
        )


def _num_values(piece: HostWeight | HostPart) -> int:
    if isinstance(piece, HostPart):
        return piece.values.numel() + (0 if piece.indices is None else piece.indices.numel())
    # A is shared by the pieces of one row.
    return piece.b.numel() + (piece.a.numel() if piece.target.first == 0 else 0)


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
        self._host.pop(handle, None)

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
                if self._channel is None:
                    adapter = read_host_adapter(source)
                else:  # all ranks compute DoRA's norms together, or none begins
                    adapter = agreed(self._channel, functools.partial(read_host_adapter, source))
                self._host[handle] = self._prepare(adapter)
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
