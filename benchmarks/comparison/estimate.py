"""How long a comparison will take, estimated from the limits of the machine before it starts.

The estimate assumes kernels at half of the speed of memory, and float32 products at full speed. A
faster instruction set makes it an upper bound, other work on the machine a lower one.
"""

import itertools
from collections.abc import Iterable, Sequence

from comparison.cases import Case, Stage
from comparison.gguf_model import GGUF_PREFIX, tensor_bytes, tensor_types
from comparison.held_streams import HeldStreams
from comparison.journal import ComparisonSettings, Limits
from comparison.shapes import ModelShape
from comparison.sizes import Sizes
from comparison.systems import System
from loraplex.bench.workload import Workload, generate

_SHARE_OF_BANDWIDTH = 0.5
_COLD_BYTES = 300e6
"""Bytes that a cold start reads in a second."""
_WARM_BYTES = 1e9
_START_SECONDS = 8.0
"""Duration of a start without the weights: imports, pools, the check of the port."""
_NUM_FIRST_STARTS = 3


def token_bytes(shape: ModelShape, weights: str) -> int:
    """Return the bytes of the weights that one decoded token reads: all but an embedding apart.

    weights: as systems name them. 8 bits are one byte for each weight, without scales.
    """
    sizes = shape.tensors()
    read = [name for name in sizes if shape.is_tied or name != "model.embed_tokens.weight"]
    if weights.startswith(GGUF_PREFIX):
        types = tensor_types(shape, weights.removeprefix(GGUF_PREFIX))
        return sum(tensor_bytes(sizes[name], types[name]) for name in read)
    bits = int(weights.partition("-")[0])
    num_weights = shape.num_parameters
    if not shape.is_tied:
        num_weights -= shape.vocab_size * shape.hidden_size
    return num_weights * bits // 8


class Estimate:
    """Seconds of one system's work."""

    def __init__(self, shape: ModelShape, limits: Limits, weights: str) -> None:
        self._num_bytes = limits.token_bytes[weights]
        self._step = self._num_bytes / (_SHARE_OF_BANDWIDTH * limits.read_bytes)
        self._token = 2 * shape.num_parameters / limits.flops

    def load(self, prompts: Iterable[int], outputs: Sequence[int], concurrency: int) -> float:
        """Return the seconds of requests of these lengths, so many of them at once."""
        num_rows = min(concurrency, len(outputs))
        num_steps = max(max(outputs), sum(outputs) / num_rows)
        return sum(prompts) * self._token + num_steps * max(self._step, num_rows * self._token)

    def case(self, case: Case) -> float:
        load = case.load
        if isinstance(load, Workload):
            requests = generate(load, 1, range(2))
            return self.load(
                [len(request.prompt_token_ids) for request in requests],
                [request.num_output_tokens for request in requests],
                load.concurrency or len(requests),
            )
        assert isinstance(load, HeldStreams), "large models have no other workloads"
        seconds = 0.0
        for count in load.rungs:
            seconds += self.load([load.prompt_tokens] * count, [load.output_tokens] * count, count)
            if max(self._step, count * self._token) > load.limit_seconds:
                break
        return seconds

    def start(self, *, is_cold: bool = False) -> float:
        return _START_SECONDS + self._num_bytes / (_COLD_BYTES if is_cold else _WARM_BYTES)

    def trial(self, sizes: Sizes) -> float:
        """Return the seconds of one setting of threads."""
        prompt, output = sizes.trial
        together = self.load([prompt] * 8, [output] * 8, 8)
        once = together + self.load([prompt], [output], 1)
        return self.start() + together + sizes.num_trials * once

    def preparation(self, sizes: Sizes) -> float:
        """Return the seconds of the check and of the warm-up, of the first round."""
        check = sizes.check
        alone, outputs = len(check.subjects), check.output_tokens
        one = self.load([check.prompt_tokens], [outputs], 1)
        mixed = self.load([check.prompt_tokens] * 2 * alone, [outputs] * 2 * alone, 2 * alone)
        return check.num_prompts * (alone * one + mixed)

    def warm_up(self, sizes: Sizes) -> float:
        count, prompt, output = sizes.warm_up
        adapters = [sizes.warm_up_adapter[0]] * sizes.num_adapters
        return self.load([prompt] * count, [output] * count, count) + self.load(adapters, [1], 1)


def estimated_seconds(
    shape: ModelShape,
    limits: Limits,
    systems: Sequence[System],
    stages: Sequence[Stage],
    settings: ComparisonSettings,
    sizes: Sizes,
) -> dict[str, float]:
    """Return the seconds of each system's part in a comparison; making files is not in it."""
    found = {}
    for system in systems:
        one = Estimate(shape, limits, system.weights)
        cases = itertools.chain.from_iterable(stage.cases for stage in stages)
        per_round = one.start() + one.warm_up(sizes) + sum(map(one.case, cases))
        seconds = settings.rounds * per_round + one.preparation(sizes)
        seconds += one.start(is_cold=True) + (_NUM_FIRST_STARTS - 1) * one.start()
        variants = [
            name for name in system.variants if not settings.variants or name in settings.variants
        ]
        if len(variants) > 1:
            seconds += len(variants) * one.trial(sizes)
        found[system.name] = seconds
    return found
