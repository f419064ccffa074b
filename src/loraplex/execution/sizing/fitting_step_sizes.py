"""Reduces the sizes of a GPU's steps that the operator left open to what its memory allows."""

from collections.abc import Collection, Iterator
from typing import Final

import msgspec
import torch

from loraplex.core.step_sizes import LEAST_SIZES, StepSizes
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.sizing.step_memory import estimated_step_memory
from loraplex.models.spec import ModelSpec

_STEPS_SHARE: Final = 4
"""Steps with open sizes take at most 1 / 4 of what the weights leave: the rest is KV cache."""


def fitting_step_sizes(
    settings: RunnerSettings,
    spec: ModelSpec,
    dtype: torch.dtype,
    left: int,
    is_open: Collection[str],
) -> StepSizes:
    """Halve open sizes until steps take their share of memory, but not below the least sizes.

    left: bytes that the weights leave. is_open: names of the sizes that the operator left open.
    """

    def taken(tried: RunnerSettings) -> int:
        steps = estimated_step_memory(tried, spec, dtype)
        return steps.workspace + steps.graphs

    while taken(settings) * _STEPS_SHARE > left:
        smaller = min(_halved(settings, is_open), key=taken, default=None)
        if smaller is None:
            break
        settings = smaller
    return StepSizes(settings.max_num_seqs, settings.max_num_batched_tokens)


def _halved(settings: RunnerSettings, is_open: Collection[str]) -> Iterator[RunnerSettings]:
    """Yield the settings with one open size halved each."""
    least = {
        "max_num_seqs": LEAST_SIZES.max_num_seqs,
        "max_num_batched_tokens": max(LEAST_SIZES.max_num_batched_tokens, settings.max_num_seqs),
    }
    for name in is_open:
        half = getattr(settings, name) // 2
        if half >= least[name]:
            yield msgspec.structs.replace(settings, **{name: half})
