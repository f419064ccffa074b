"""Backends with ops that fail, as a check of kernels may meet them on a card that is new to us."""

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from loraplex.execution.checking.process import best_backend
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.ops import Kernels
from loraplex.kernels.reference import ReferenceKernels
from loraplex.kernels.sizes import CANDIDATES


def sound(
    settings: RunnerSettings, accelerator: Accelerator | None, sizes: Mapping[str, str]
) -> Kernels:
    del settings, accelerator, sizes
    return ReferenceKernels(torch.device("cpu"))


def faulty(
    settings: RunnerSettings, accelerator: Accelerator | None, sizes: Mapping[str, str]
) -> Kernels:
    """One op of each kind of fault. linear shares its form with others."""
    kernels = sound(settings, accelerator, sizes)
    for name, fault in FAULTS.items():
        setattr(kernels, name, fault(getattr(kernels, name)))
    return kernels


def without_biases(
    settings: RunnerSettings, accelerator: Accelerator | None, sizes: Mapping[str, str]
) -> Kernels:
    """Attention that leaves biases by distance out."""
    kernels = sound(settings, accelerator, sizes)
    attend = kernels.paged_attention

    def planted(query: Any, storage: Any, plan: Any, sinks: Any = None, _: Any = None) -> Any:
        return attend(query, storage, plan, sinks)

    vars(kernels)["paged_attention"] = planted
    return kernels


def starts_badly(
    settings: RunnerSettings, accelerator: Accelerator | None, sizes: Mapping[str, str]
) -> Kernels:
    raise KeyError("no kernels here")


def _off_by_a_little(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def planted(*arguments: Any, **options: Any) -> torch.Tensor:
        result = op(*arguments, **options)
        result[-1, -1] += 0.2 * result.abs().max()
        return result

    return planted


def _raising(op: Callable[..., Any]) -> Callable[..., Any]:
    def planted(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("out of resource: shared memory\nsecond line")

    return planted


def _hanging(op: Callable[..., Any]) -> Callable[..., Any]:
    def planted(*arguments: Any, **options: Any) -> Any:
        threading.Event().wait()

    return planted


def _crashing(op: Callable[..., Any]) -> Callable[..., Any]:
    def planted(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSEGV)

    return planted


FAULTS = {
    "gate": _off_by_a_little,
    "linear": _raising,
    "rotary": _hanging,
    "add_rms_norm": _crashing,
}


def ruinous(
    settings: RunnerSettings, accelerator: Accelerator | None, sizes: Mapping[str, str]
) -> Kernels:
    """An op of a GPU's backend reads far outside of a tensor, on the device."""
    kernels = best_backend(settings, accelerator, sizes)
    gate = kernels.gate

    def planted(x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        places = torch.full((1,), 1 << 40, device=x.device)
        return gate(x, *arguments, **options) + x.flatten()[places]

    vars(kernels)["gate"] = planted
    return kernels


_SLOW, _QUICK = map(str, CANDIDATES["many_rows"])
_WRONG, _RAISING = map(str, CANDIDATES["attention_programs"])


class _Work:
    """Units of work that planted ops have done: they stand for time."""

    units = 0.0


class _WithSizes(ReferenceKernels):
    def size_of(self, op: str, arguments: Sequence[Any]) -> str | None:
        del arguments
        return {"linear": "many_rows", "gate": "attention_programs"}.get(op)


def with_sizes(
    settings: RunnerSettings, accelerator: Accelerator | None, sizes: Mapping[str, str]
) -> Kernels:
    """Products with the size `many_rows`: ours, one that is slow, and one that is quick.

    The sizes of `gate` are wrong, and raise.
    """
    del settings, accelerator
    kernels = _WithSizes(torch.device("cpu"))
    units = {_SLOW: 3.0, _QUICK: 0.5}.get(sizes.get("many_rows", ""), 1.0)
    vars(kernels)["linear"] = _working(kernels.linear, units)
    gate = {_WRONG: _off_by_a_little, _RAISING: _raising}.get(sizes.get("attention_programs", ""))
    vars(kernels)["gate"] = _working(gate(kernels.gate) if gate else kernels.gate, 1.0)
    return kernels


def with_a_size_that_crashes(
    settings: RunnerSettings, accelerator: Accelerator | None, sizes: Mapping[str, str]
) -> Kernels:
    kernels = with_sizes(settings, accelerator, sizes)
    if sizes.get("attention_programs") == _RAISING:
        vars(kernels)["gate"] = _crashing(kernels.gate)
    return kernels


def _working(op: Callable[..., Any], units: float) -> Callable[..., Any]:
    def planted(*arguments: Any, **options: Any) -> Any:
        _Work.units += units
        return op(*arguments, **options)

    return planted


def work_done(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Measure units of work in place of seconds: as execution.checking.tuning.gpu_seconds."""
    del device

    def measure(work: Callable[[], object]) -> float:
        before = _Work.units
        work()
        return _Work.units - before

    return measure
