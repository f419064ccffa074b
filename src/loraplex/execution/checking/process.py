"""Process of a check: compares a backend's ops with torch's, and reports as it goes.

`python -m loraplex.execution.checking.process FD` reads a CheckRequest from standard input and
writes a line for each event to the file descriptor. It may be ended by an op at any time.
"""

import collections
import functools
import importlib
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import torch

from loraplex.execution.checking.trial import MEASURED, Trial, is_quantized
from loraplex.execution.checking.tuning import Tuning, TuningKernels
from loraplex.execution.sizing.capacity import choose_dtype
from loraplex.execution.sizing.kv import windowed
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.weights.stored_head import read_model
from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.dispatch import select_accelerator, select_kernels
from loraplex.kernels.ops import Kernels
from loraplex.kernels.shadow import DeviceRuined, Fault, ShadowKernels
from loraplex.kernels.sizes import CANDIDATES
from loraplex.kernels.torch_ops import TorchOps, replace_ops
from loraplex.models.linear_group import TensorShard
from loraplex.models.sharding import shard

BEST_BACKEND: Final = "loraplex.execution.checking.process:best_backend"
STARTING: Final = ""
"""What a process does before the first op, and before the first measurement of sizes."""
GPU_SECONDS: Final = "loraplex.execution.checking.tuning:gpu_seconds"


class CheckRequest(msgspec.Struct, frozen=True, kw_only=True):
    folder: str
    """Folder of the model."""
    settings: RunnerSettings
    rank: int = 0
    num_ranks: int = 1
    """Ranks that share layers."""
    fallen: tuple[str, ...] = ()
    """Ops that torch computes."""
    backend: str = BEST_BACKEND
    """module:function, as best_backend."""
    num_threads: int | None = None
    """None: torch's own number."""
    sizes: dict[str, str] = {}
    """Sizes of programs that a tuning chose."""
    tunes: bool = False
    """Whether sizes are to be measured once all ops are checked."""
    measure: str = GPU_SECONDS
    """module:function, as tuning.gpu_seconds."""


class Began(msgspec.Struct, frozen=True, tag="began"):
    """An op is about to run."""

    op: str


class Fell(msgspec.Struct, frozen=True, tag="fell"):
    """An op failed; the process goes on with torch's, or ends."""

    op: str
    fault: Fault
    detail: str


class Completed(msgspec.Struct, frozen=True, tag="completed"):
    """All ops were called."""

    calls: dict[str, int]
    differences: dict[str, float]


class Tuned(msgspec.Struct, frozen=True, tag="tuned"):
    """Sizes were measured. It comes after Completed."""

    tuning: Tuning


class NotChecked(msgspec.Struct, frozen=True, tag="not_checked"):
    """Something other than an op failed."""

    reason: str


Event = Began | Fell | Completed | Tuned | NotChecked


def best_backend(
    settings: RunnerSettings, accelerator: Accelerator | None, sizes: Mapping[str, str]
) -> Kernels:
    """Return what a server with these settings, and these sizes of programs, has."""
    return select_kernels(
        torch.device(settings.device),
        accelerator,
        batch_invariant=settings.batch_invariant,
        attention_backend=settings.attention_backend,
        sizes=sizes,
    )


class Reporter:
    """Implements kernels.shadow.Observer."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._calls: collections.Counter[str] = collections.Counter()
        self._differences: dict[str, float] = {}

    def begin(self, op: str) -> None:
        self.send(Began(op))

    def passed(self, op: str, difference: float) -> None:
        self._calls[op] += 1
        self._differences[op] = max(difference, self._differences.get(op, 0.0))

    def fell(self, op: str, fault: Fault, detail: str) -> None:
        self.send(Fell(op, fault, detail))

    def complete(self) -> None:
        self.send(Completed(dict(self._calls), self._differences))

    def send(self, event: Event) -> None:
        # A write of one line to a pipe is whole, and is not lost if the process is.
        os.write(self._descriptor, msgspec.json.encode(event) + b"\n")


def check(request: CheckRequest, reporter: Reporter) -> None:
    """Compare the ops that the steps of the model call. Raises DeviceRuined and any other."""
    settings = request.settings
    if request.num_threads is not None:
        torch.set_num_threads(request.num_threads)
    spec = windowed(settings, read_model(Path(request.folder)))
    spec = shard(spec, TensorShard(request.rank, request.num_ranks))
    accelerator = select_accelerator(torch.device(settings.device))
    device = torch.device(settings.device) if accelerator is None else accelerator.device
    make = functools.partial(_named(request.backend), settings, accelerator)
    rounds = is_quantized(settings, spec)
    shadow = ShadowKernels(
        make(request.sizes),
        device,
        reporter,
        fallen=request.fallen,
        is_quantized=rounds,
        dtype=choose_dtype(settings, spec),
        synchronize=(lambda: None) if accelerator is None else accelerator.synchronize,
    )
    # It has the members of Kernels, and binds most of them when it is made.
    trial = Trial(spec, settings, cast("Kernels", shadow), accelerator)
    trial.run(records=False)
    trial.sample()
    shadow.compares_steps = True
    trial.run(records=True)
    reporter.complete()
    trial.close()
    if not request.tunes:
        return
    reporter.begin(STARTING)
    own = make({})
    replace_ops(own, TorchOps(device), shadow.fallen)
    tuning = TuningKernels(
        own,
        lambda name, size: make({name: size}),
        {name: [str(size) for size in sizes] for name, sizes in CANDIDATES.items()},
        _named(request.measure)(device),
        time.monotonic,
        reporter.begin,
        is_quantized=rounds,
        fallen=shadow.fallen,
    )
    trial = Trial(spec, settings, cast("Kernels", tuning), accelerator, MEASURED)
    trial.measure(tuning.measuring)
    reporter.send(Tuned(tuning.result()))
    trial.close()


def _named(place: str) -> Any:
    """Return a function by the name of its module and its own."""
    module, _, function = place.partition(":")
    return getattr(importlib.import_module(module), function)


def main() -> None:
    reporter = Reporter(int(sys.argv[1]))
    # The parent reports what matters.
    logging.disable()
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=CheckRequest)
    try:
        check(request, reporter)
    except DeviceRuined:
        sys.exit(1)
    except Exception as error:  # a process that ends without an event blames the op that ran
        reporter.send(NotChecked(f"{type(error).__name__}: {error}"))
    # Threads of an op that never ends would be waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
