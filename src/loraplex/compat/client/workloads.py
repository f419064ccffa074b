"""The core benchmark's requests: token ids and lengths, from a data set or from a distribution."""

import dataclasses
import itertools
from typing import Any

import numpy as np

from loraplex.compat.client.files import Say, read_dataset
from loraplex.compat.client.prompts import Encoded, FolderCodec
from loraplex.compat.flags import Flags, check_at_least
from loraplex.core.errors import ConfigError

WORKLOADS = ("dataset", "token-norm-dist", "token-from-histogram")

FIRST_RANDOM_ID = 10
"""Many vocabularies have special tokens below it. The original drew from all of int32."""
RANDOM_END_ID, RANDOM_PAD_ID = 1, 0

HISTOGRAMS = {
    "example": (
        {16: 4, 64: 8, 128: 12, 256: 6, 512: 2},
        {8: 6, 32: 12, 64: 8, 128: 4, 256: 2},
    )
}
"""Frequencies of the input and output lengths, by key."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenRequest:
    prompt: Encoded
    num_output_tokens: int

    @property
    def token_ids(self) -> list[int]:
        return self.prompt.token_ids


def token_requests(options: Flags, say: Say) -> list[TokenRequest]:
    """Return --num-requests requests, or those of a smaller data set. Raises ConfigError."""
    workload = options.workload.replace("_", "-")
    if workload not in WORKLOADS:
        raise ConfigError(
            f"the workload must be one of {', '.join(WORKLOADS)}, got {options.workload!r}"
        )
    check_at_least("--num-requests", options.num_requests, 1)
    if workload == "dataset":
        return _from_dataset(options, say)
    check_at_least("--vocab-size", options.vocab_size, FIRST_RANDOM_ID + 1)
    rng = np.random.default_rng(options.seed)
    lengths = _normal_lengths if workload == "token-norm-dist" else _histogram_lengths
    inputs, outputs = lengths(options, rng)

    def random_prompt(length: int) -> Encoded:
        token_ids = rng.integers(FIRST_RANDOM_ID, options.vocab_size, length).tolist()
        return Encoded(token_ids, RANDOM_END_ID, RANDOM_PAD_ID)

    return [
        TokenRequest(random_prompt(num_input), num_output)
        for num_input, num_output in zip(inputs, outputs, strict=True)
        if options.max_input_len is None or num_input <= options.max_input_len
    ]


def delays(options: Flags, num_requests: int) -> list[float]:
    """Return the seconds to wait before each request. Raises ConfigError."""
    if in_turn := options.time_bet_reqs:
        return list(itertools.islice(itertools.cycle(in_turn), num_requests))
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
    return list(map(float, rng.exponential(mean, num_requests)))


def _from_dataset(options: Flags, say: Say) -> list[TokenRequest]:
    path, folder = _given(options, "dataset"), _given(options, "tokenizer_dir")
    codec = FolderCodec(folder)
    samples = read_dataset(path, options.max_input_len, say, options.op_tokens_per_word)
    samples = list(itertools.islice(samples, options.num_requests))
    requests = [TokenRequest(codec.encode(s.prompt), s.num_output_tokens) for s in samples]
    num_tokens = sum(len(request.token_ids) for request in requests)
    num_words = sum(len(sample.prompt.split()) for sample in samples)
    say(f"Tokenizer: Tokens per word =  {round(num_tokens / max(num_words, 1), 3)}")
    return requests


def _normal_lengths(options: Flags, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    def lengths(mean_key: str, deviation_key: str) -> list[int]:
        mean, deviation = _given(options, mean_key), _given(options, deviation_key)
        check_at_least(_spelling(deviation_key), deviation, 0)
        drawn = np.ceil(rng.normal(mean, deviation, options.num_requests))
        return [max(1, int(length)) for length in drawn]

    return lengths("input_mean", "input_stdev"), lengths("output_mean", "output_stdev")


def _histogram_lengths(options: Flags, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    key = _given(options, "histogram_key")
    if key not in HISTOGRAMS:
        raise ConfigError(f"--histogram-key must be one of {', '.join(HISTOGRAMS)}, got {key!r}")

    def drawn(counts: dict[int, int]) -> list[int]:
        shares = np.array(list(counts.values()), np.float64) / sum(counts.values())
        lengths: list[int] = rng.choice(list(counts), options.num_requests, p=shares).tolist()
        return lengths

    inputs, outputs = HISTOGRAMS[key]
    return drawn(inputs), drawn(outputs)


def _given(options: Flags, key: str) -> Any:
    value = options.get(key)
    if value is None:
        raise ConfigError(f"this workload needs {_spelling(key)}")
    return value


def _spelling(key: str) -> str:
    return f"--{key.replace('_', '-')}"
