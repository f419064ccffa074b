"""Kernel launches of a served model: the cases that kernel_compiler.py compiles.

A group is a module of this package, or any other. Its `cases()` names launches, which run with
fake tensors (fake_gpu.py). Shapes are those of Llama-3.1-8B and Llama-2-7B,
and of Qwen3-30B-A3B for experts.
"""

import importlib
from collections.abc import Callable

Launch = Callable[[], object]
Cases = dict[str, Launch]

GROUPS = (
    "lora",
    "attention",
    "elementwise",
    "convolution",
    "recurrence",
    "sampling",
    "linear",
    "experts",
    "sizes",
)


_FIRST_FP8 = 89


def cases_of(group: str, arch: int, match: str = "") -> Cases:
    """Return the cases of an architecture whose names contain `match`, by name.

    A group that is not in this package is given as module:function.
    """
    module, _, function = group.partition(":")
    if not function:
        module, function = f"{__name__}.{group}", "cases"
    make: Callable[[], Cases] = getattr(importlib.import_module(module), function)
    return {
        name: launch
        for name, launch in make().items()
        if match in name and (arch >= _FIRST_FP8 or "fp8" not in name)
    }
