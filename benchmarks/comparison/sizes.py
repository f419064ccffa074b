"""How long workloads are, and what is spent around them, for small models and for large ones.

The short form is for models that compute a few tokens a second on two cores: a run of all its
workloads with two systems stays below half an hour.
"""

import msgspec

from comparison.held_streams import HeldStreams
from comparison.right_answers import CheckSize
from loraplex.bench.workload import Lengths


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a comparison's workloads. Lengths are in tokens."""

    num_adapters: int = 32
    max_num_seqs: int = 64
    max_model_len: int = 512
    stream: tuple[int, int, int] = (2, 128, 128)
    """W1: requests, prompt, output."""
    together: tuple[int, int] = (128, 64)
    """W2, W3: prompt, output."""
    stream_counts: tuple[int, ...] = (8, 32)
    """W2, W3: requests at once."""
    mix: tuple[int, Lengths, Lengths] = (64, Lengths(32, 256), Lengths(16, 128))
    """W4: requests, prompts, outputs."""
    held: HeldStreams = HeldStreams()
    warm_up: tuple[int, int, int] = (8, 128, 8)
    """Requests to the base, prompt, output."""
    warm_up_adapter: tuple[int, int] = (16, 1)
    """Prompt and output of the one request to each adapter."""
    check: CheckSize = CheckSize()
    trial: tuple[int, int] = (128, 32)
    """Prompt and output of the loads that choose a setting of threads."""
    num_trials: int = 3
    """Maximum number of times that such a load is measured."""
    is_short: bool = False


STANDARD = Sizes()
SHORT = Sizes(
    num_adapters=8,
    max_num_seqs=32,
    max_model_len=256,
    stream=(1, 64, 24),
    together=(64, 16),
    stream_counts=(8,),
    mix=(12, Lengths(32, 96), Lengths(8, 24)),
    warm_up=(1, 16, 4),
    warm_up_adapter=(8, 1),
    check=CheckSize(num_adapters=2, num_prompts=1, prompt_tokens=16, output_tokens=6),
    trial=(16, 8),
    num_trials=1,
    is_short=True,
)
