"""Accelerators, which work next to the host: queues of work, and page-locked host memory.

`CudaAccelerator` is a GPU. `HostAccelerator` stands for one where there is none: everything is done
at once, so code that is written for a GPU runs, and is tested, without one."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class DeviceEvent(Protocol):
    """A point in a queue: all that was enqueued before it."""

    def has_passed(self) -> bool: ...

    def wait(self) -> None:
        """Block the host until it has passed."""
        ...


class Graph(Protocol):
    """Recorded work, at fixed addresses."""

    def replay(self) -> None:
        """Enqueue it again in the current queue."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device's own memory."""

    total: int
    free: int
    """Bytes that no process has."""
    reserved: int
    """Tensors of this process, and what it keeps for its next ones."""
    most_reserved: int
    """Since the last `reset_peak`."""


class Accelerator(Protocol):
    """One device with two queues, whose work is done in the order of its enqueuing.

    The queue that a thread enqueues to is chosen by the contexts `compute` and `copies`.
    """

    @property
    def device(self) -> torch.device: ...

    def compute(self) -> AbstractContextManager[None]:
        """Where steps run."""
        ...

    def copies(self) -> AbstractContextManager[None]:
        """Return the queue that copies memory while steps run."""
        ...

    def event(self) -> DeviceEvent:
        """Return an event after all that is in the current queue by now."""
        ...

    def after(self, event: DeviceEvent) -> None:
        """What comes into the current queue from now on waits for an event of the other one."""
        ...

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Enqueue a copy in the current queue, between the device and pinned memory, or within it.

        Neither is to be touched by the host before an event after it has passed.
        """
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros on the host, which the device copies by itself; they take long to make."""
        ...

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Graph]:
        """compute(), and what repeats it: `replay` computes into the very tensor that is returned.

        compute must enqueue the same work at each call, and nothing that waits for the host. What
        it computes the first time may be wrong: replay it.
        """
        ...

    def synchronize(self) -> None:
        """Block the host until the device has nothing more to do."""
        ...

    def memory(self) -> DeviceMemory | None:
        """None: it is the host's, which is everybody's."""
        ...

    def reset_peak(self) -> None:
        """`most_reserved` is of what comes now."""
        ...

    def trim(self) -> None:
        """Free memory that is kept for later tensors."""
        ...


class _Passed:
    """Implements DeviceEvent: on a host nothing is outstanding."""

    def has_passed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _Repetition:
    """Implements Graph by computing again."""

    def __init__(self, compute: Callable[[], torch.Tensor], result: torch.Tensor) -> None:
        self._compute = compute
        self._result = result

    def replay(self) -> None:
        self._result.copy_(self._compute())


class HostAccelerator:
    """Implements Accelerator."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def compute(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def copies(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def event(self) -> DeviceEvent:
        return _Passed()

    def after(self, event: DeviceEvent) -> None:
        event.wait()

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Graph]:
        result = compute()
        return result, _Repetition(compute, result)

    def synchronize(self) -> None:
        pass

    def memory(self) -> DeviceMemory | None:
        return None

    def reset_peak(self) -> None:
        pass

    def trim(self) -> None:
        pass


class _CudaEvent:
    """Implements DeviceEvent."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def has_passed(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class CudaAccelerator:
    """Implements Accelerator for one GPU, by two streams. Its graphs share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._device = torch.device("cuda", index)
        self._compute = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()

    @property
    def device(self) -> torch.device:
        return self._device

    def compute(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._compute)

    def copies(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._copies)

    def event(self) -> DeviceEvent:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return _CudaEvent(event)

    def after(self, event: DeviceEvent) -> None:
        assert isinstance(event, _CudaEvent), "an event of this accelerator"
        torch.cuda.current_stream(self._device).wait_event(event.event)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Graph]:
        """Computes once before it records: kernels are compiled and libraries initialised then."""
        compute()
        torch.cuda.synchronize(self._device)
        if not self._graphs:
            # Torch does not let a pool be used again once its graphs are all gone.
            self._graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile, such as another engine's, must not end the recording.
        with torch.cuda.graph(
            graph,
            pool=self._graph_pool,
            stream=self._compute,
            capture_error_mode="thread_local",
        ):
            result = compute()
        self._graphs.add(graph)
        return result, graph

    def synchronize(self) -> None:
        # Not only our two streams: weights come by the default one.
        torch.cuda.synchronize(self._device)

    def memory(self) -> DeviceMemory | None:
        free, total = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(
            total=int(total),
            free=int(free),
            reserved=int(torch.cuda.memory_reserved(self._device)),
            most_reserved=int(torch.cuda.max_memory_reserved(self._device)),
        )

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def trim(self) -> None:
        self.synchronize()
        torch.cuda.empty_cache()


_HOPPER = (9, 0)


def keeps_products_in_registers(device: torch.device) -> bool:
    """Before Hopper, what products read comes through registers: large tiles do not fit there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < _HOPPER
