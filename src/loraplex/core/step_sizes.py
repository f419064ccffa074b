"""Sizes of a step where the operator leaves them open: by the device, before its memory counts."""

import os
from typing import Final, NamedTuple


class StepSizes(NamedTuple):
    max_num_seqs: int
    max_num_batched_tokens: int


LEAST_SIZES: Final = StepSizes(64, 512)
"""Sizes on small machines, and on a GPU with little memory."""
_GPU_SIZES: Final = StepSizes(256, 8192)
_MOST_ON_CPU: Final = StepSizes(256, 2048)
_PER_CORE: Final = StepSizes(4, 16)
"""Sizes for each core: with larger ones a step takes longer for hardly more tokens a second."""


def default_step_sizes(device: str, num_cores: int) -> StepSizes:
    """Return the sizes for a device. num_cores: of a CPU, that the arithmetic uses."""
    if device != "cpu":
        return _GPU_SIZES
    return StepSizes(
        *(
            min(max(least, num_cores * each), most)
            for least, each, most in zip(LEAST_SIZES, _PER_CORE, _MOST_ON_CPU, strict=True)
        )
    )


def wanted_step_sizes(
    device: str, num_threads: int | None, seqs: int | None, tokens: int | None
) -> StepSizes:
    """Return the sizes of a model: those that are set, and defaults that agree with them.

    num_threads: the setting. Each sequence needs a token in a step.
    """
    default = default_step_sizes(device, num_threads or len(os.sched_getaffinity(0)))
    if seqs is None:
        seqs = min(default.max_num_seqs, tokens or default.max_num_seqs)
    return StepSizes(seqs, tokens or max(default.max_num_batched_tokens, seqs))
