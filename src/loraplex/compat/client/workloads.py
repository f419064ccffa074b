"""What the core benchmark sends: token ids and lengths, from a data set or from a distribution."""

import dataclasses
import itertools
from typing import TypeVar

import numpy as np

from loraplex.compat.client.benchmark_options import BenchmarkOptions
from loraplex.compat.client.codec import FolderCodec
from loraplex.compat.client.dataset import read_dataset
from loraplex.compat.client.flags import Say, check_at_least, check_choice
from loraplex.core.errors import ConfigError

WORKLOADS = ("dataset", "token-norm-dist", "token-from-histogram")
DELAYS = ("constant", "exponential_dist")

FIRST_RANDOM_ID = 10
"""Below are ids with a meaning, in many vocabularies. The original drew from all of int32."""
RANDOM_END_ID, RANDOM_PAD_ID = 1, 0
"""Where no tokenizer says them."""

HISTOGRAMS = {
    "example": (
        {16: 4, 64: 8, 128: 12, 256: 6, 512: 2},
        {8: 6, 32: 12, 64: 8, 128: 4, 256: 2},
    )
}
"""By key, how often which input and output length comes."""


_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class TokenRequest:
    token_ids: list[int]
    num_output_tokens: int
    end_id: int = RANDOM_END_ID
    pad_id: int = RANDOM_PAD_ID


def token_requests(options: BenchmarkOptions, say: Say) -> list[TokenRequest]:
    """As many as --num-requests; a data set has at most those that it has. Raises ConfigError."""
    workload = options.workload.replace("_", "-")
    check_choice("the workload", workload, WORKLOADS)
    check_at_least("--num-requests", options.num_requests, 1)
    if workload == "dataset":
        return _from_dataset(options, say)
    check_at_least("--vocab-size", options.vocab_size, FIRST_RANDOM_ID + 1)
    rng = np.random.default_rng(options.seed)
    if workload == "token-norm-dist":
        inputs, outputs = _normal_lengths(options, rng)
    else:
        inputs, outputs = _histogram_lengths(options, rng)
    return [
        TokenRequest(rng.integers(FIRST_RANDOM_ID, options.vocab_size, i).tolist(), o)
        for i, o in zip(inputs, outputs, strict=True)
        if options.max_input_len is None or i <= options.max_input_len
    ]


def delays(options: BenchmarkOptions, num_requests: int) -> list[float]:
    """Seconds to wait before each request. Raises ConfigError."""
    check_choice("--time-delay-dist", options.time_delay_dist, DELAYS)
    if options.request_rate == -1:
        return [0.0] * num_requests
    if options.request_rate <= 0:
        raise ConfigError(
            f"--request-rate must be above 0, or -1 for all at once, got {options.request_rate}"
        )
    mean = 1.0 / options.request_rate
    if options.time_delay_dist == "constant":
        return [mean] * num_requests
    rng = np.random.default_rng(options.seed)
    return [float(delay) for delay in rng.exponential(mean, num_requests)]


def _from_dataset(options: BenchmarkOptions, say: Say) -> list[TokenRequest]:
    path = _given("--dataset", options.dataset)
    codec = FolderCodec(_given("--tokenizer-dir", options.tokenizer_dir))
    samples = read_dataset(path, options.max_input_len, say, options.op_tokens_per_word)
    requests = []
    num_tokens = num_words = 0
    for sample in itertools.islice(samples, options.num_requests):
        prompt = codec.encode(sample.prompt)
        num_tokens += len(prompt.token_ids)
        num_words += len(sample.prompt.split())
        requests.append(
            TokenRequest(prompt.token_ids, sample.num_output_tokens, prompt.end_id, prompt.pad_id)
        )
    say(f"Tokenizer: Tokens per word =  {round(num_tokens / max(num_words, 1), 3)}")
    return requests


def _normal_lengths(
    options: BenchmarkOptions, rng: np.random.Generator
) -> tuple[list[int], list[int]]:
    def lengths(name: str, mean: int | None, stdev: int | None) -> list[int]:
        center, width = _given(f"--{name}-mean", mean), _given(f"--{name}-stdev", stdev)
        check_at_least(f"--{name}-stdev", width, 0)
        drawn = np.ceil(rng.normal(center, width, options.num_requests))
        return [max(1, int(length)) for length in drawn]

    return (
        lengths("input", options.input_mean, options.input_stdev),
        lengths("output", options.output_mean, options.output_stdev),
    )


def _histogram_lengths(
    options: BenchmarkOptions, rng: np.random.Generator
) -> tuple[list[int], list[int]]:
    key = _given("--histogram-key", options.histogram_key)
    check_choice("--histogram-key", key, tuple(HISTOGRAMS))

    def drawn(counts: dict[int, int]) -> list[int]:
        shares = np.array(list(counts.values()), np.float64) / sum(counts.values())
        lengths: list[int] = rng.choice(list(counts), options.num_requests, p=shares).tolist()
        return lengths

    inputs, outputs = HISTOGRAMS[key]
    return drawn(inputs), drawn(outputs)


def _given(name: str, value: _T | None) -> _T:
    if value is None:
        raise ConfigError(f"this workload needs {name}")
    return value
