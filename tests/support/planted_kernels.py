"""Backends with ops that fail, as a check of kernels may meet them on a card that is new to us."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch

from loraplex.execution.checking.process import best_backend
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.ops import Kernels
from loraplex.kernels.reference import ReferenceKernels


def sound(settings: RunnerSettings, accelerator: Accelerator | None) -> Kernels:
    del settings, accelerator
    return ReferenceKernels(torch.device("cpu"))


def faulty(settings: RunnerSettings, accelerator: Accelerator | None) -> Kernels:
    """One op of each kind of fault. linear shares its form with others."""
    kernels = sound(settings, accelerator)
    for name, fault in FAULTS.items():
        setattr(kernels, name, fault(getattr(kernels, name)))
    return kernels


def without_biases(settings: RunnerSettings, accelerator: Accelerator | None) -> Kernels:
    """Attention that leaves biases by distance out."""
    kernels = sound(settings, accelerator)
    attend = kernels.paged_attention

    def planted(query: Any, storage: Any, plan: Any, sinks: Any = None, _: Any = None) -> Any:
        return attend(query, storage, plan, sinks)

    vars(kernels)["paged_attention"] = planted
    return kernels


def starts_badly(settings: RunnerSettings, accelerator: Accelerator | None) -> Kernels:
    raise KeyError("no kernels here")


def _off_by_a_little(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def planted(*arguments: Any) -> torch.Tensor:
        result = op(*arguments)
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


def ruinous(settings: RunnerSettings, accelerator: Accelerator | None) -> Kernels:
    """An op of a GPU's backend reads far outside of a tensor, on the device."""
    kernels = best_backend(settings, accelerator)
    gate = kernels.gate

    def planted(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        places = torch.full((1,), 1 << 40, device=x.device)
        return gate(x, *arguments) + x.flatten()[places]

    vars(kernels)["gate"] = planted
    return kernels
