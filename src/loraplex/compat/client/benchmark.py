"""benchmark_core_model.py: `tensorrt_llm` alone under load, tokens in and tokens out.

Its requests are token ids and lengths, from a data set or from a distribution; its figures are a
table, a CSV file and a Perfetto trace.
"""

import contextlib
import csv
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loraplex.compat.client.request_parts import (
    Encoded,
    FolderCodec,
    Say,
    flag_tensors,
    prompt_tensors,
    read_dataset,
    row,
)
from loraplex.compat.client.wire import Pending, Wire, WireResponse, open_wire
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


PERFETTO_FILE = "prfetto_dump.json"
"""The original's spelling."""
_CONCURRENCY = "Avg. InFlight requests"


@dataclasses.dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request with its times in seconds of one clock."""

    start: float
    end: float
    num_input_tokens: int
    num_output_tokens: int

    @property
    def latency_ms(self) -> float:
        return (self.end - self.start) * 1e3


def figures_of(requests: Sequence[TimedRequest]) -> dict[str, float]:
    """Return the figures of the requests, at least one, by the table's names in its order."""
    latencies = sorted(request.latency_ms for request in requests)
    num = len(requests)
    begin = min(request.start for request in requests)
    seconds = max(max(request.end for request in requests) - begin, 1e-9)
    num_output = sum(request.num_output_tokens for request in requests)
    return {
        "Requests/Sec": num / seconds,
        "OP tokens/sec": num_output / seconds,
        "Avg. latency (ms)": sum(latencies) / num,
        "P99 latency (ms)": latencies[math.ceil(num * 0.99) - 1],
        "P90 latency (ms)": latencies[math.ceil(num * 0.90) - 1],
        "Avg. IP tokens per request": sum(r.num_input_tokens for r in requests) / num,
        "Avg. OP tokens per request": num_output / num,
        # Only in the CSV file. The original has 0 here.
        _CONCURRENCY: sum(latencies) / 1e3 / seconds,
        "Total latency (ms)": seconds * 1e3,
        "Total requests": num,
    }


def figure_table(figures: dict[str, float]) -> list[str]:
    """Return the lines of the founding example's table, with centred cells."""
    shown = [(name, f"{value:.2f}") for name, value in figures.items() if name != _CONCURRENCY]
    rows = [("Stat", "Value"), *shown]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = [
        "|" + "|".join(f" {c:^{w}} " for c, w in zip(cells, widths, strict=True)) + "|"
        for cells in rows
    ]
    return [rule, lines[0], rule, *lines[1:], rule]


def write_csv(figures: dict[str, float], path: str) -> None:
    """Write a header and a row. Raises ConfigError."""
    names = [name.replace(" IP ", " Input ").replace(". OP ", ". Output ") for name in figures]
    with _write_errors("--op-stats-csv"), Path(path).open("w", newline="") as file:
        csv.writer(file).writerows([names, [f"{value:.2f}" for value in figures.values()]])


def write_perfetto(requests: Sequence[TimedRequest], path: Path) -> None:
    """Write complete events in the format of Chrome's about:tracing. Raises ConfigError."""
    begin = min(request.start for request in requests)
    events = [
        {
            "name": f"req_{index}",
            "cat": "batch",
            "ph": "X",
            "ts": (request.start - begin) * 1e6,
            "dur": (request.end - request.start) * 1e6,
            "pid": "1",
            "args": {"isl": request.num_input_tokens, "osl": request.num_output_tokens},
        }
        for index, request in enumerate(requests)
    ]
    with _write_errors("--dump-perfetto-trace"):
        path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


@contextlib.contextmanager
def _write_errors(flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag}: {error}") from error


DEFAULT_MODEL = "tensorrt_llm"
NUM_WARM_UP = 10
WARM_UP_TOKENS = 100


def run(options: Flags, say: Say) -> int:
    """Return 1 if requests failed or took longer than --check-perf allows. Raises ConfigError."""
    reference_ms = _reference_ms(options)
    requests = token_requests(options, say)
    waits = delays(options, len(requests))
    if not requests:
        raise ConfigError("--max-input-len leaves no request")
    with open_wire(options, options.concurrency, is_streamed=options.decoupled) as wire:
        say("[INFO] Warm up for benchmarking.")
        warm_up = TokenRequest(requests[0].prompt, WARM_UP_TOKENS)
        for pending in [_submit(options, wire, index, warm_up) for index in range(NUM_WARM_UP)]:
            pending.result()
        say(f"[INFO] Start benchmarking on {len(requests)} prompts.")
        begin = time.perf_counter()
        timed, errors = _load(options, wire, requests, waits)
        total_ms = (time.perf_counter() - begin) * 1000
    if errors:
        say(f"[ERROR] {len(errors)} of {len(requests)} requests failed, the first: {errors[0]}")
        return 1
    _report(options, timed, total_ms, say)
    return 0 if _is_fast_enough(options, reference_ms, total_ms, say) else 1


def _load(
    options: Flags, wire: Wire, requests: Sequence[TokenRequest], waits: Sequence[float]
) -> tuple[list[TimedRequest], list[str]]:
    """Send the requests. Return those with a response, in their order, and the errors."""
    sent: list[tuple[float, Pending]] = []
    for index, (request, wait) in enumerate(zip(requests, waits, strict=True)):
        time.sleep(wait)
        sent.append((time.perf_counter(), _submit(options, wire, index, request)))
    timed, errors = [], []
    for request, (start, pending) in zip(requests, sent, strict=True):
        try:
            response = pending.result()
        except ConfigError as error:
            errors.append(error.message)
        else:
            num_input = len(request.token_ids)
            num_output = _num_output_tokens(options, response, num_input)
            timed.append(TimedRequest(start, response.end, num_input, num_output))
    return timed, errors


def _submit(options: Flags, wire: Wire, index: int, request: TokenRequest) -> Pending:
    models = options.tensorrt_llm_model_name or (DEFAULT_MODEL,)
    tensors = prompt_tensors(request.prompt) | flag_tensors(options)
    tensors["request_output_len"] = row([request.num_output_tokens])
    if options.decoupled:
        tensors["streaming"] = row([True], np.bool_)
    return wire.submit(models[index % len(models)], tensors, str(index))


def _num_output_tokens(options: Flags, response: WireResponse, num_input: int) -> int:
    """Count the new tokens: a stream has only those, a whole output may begin with the prompt."""
    num_tokens = sum(int(piece["sequence_length"][0, 0]) for piece in response.pieces)
    has_prompt = not (options.decoupled or options.exclude_input_in_output)
    return max(num_tokens - num_input, 0) if has_prompt else num_tokens


def _report(options: Flags, timed: Sequence[TimedRequest], total_ms: float, say: Say) -> None:
    say(f"[INFO] Total Latency: {round(total_ms, 3)} ms")
    say(f"[INFO] Total request latencies: {sum(r.latency_ms for r in timed)} ms")
    figures = figures_of(timed)
    for line in figure_table(figures):
        say(line)
    if options.verbose:
        for index, request in enumerate(timed):
            say(
                f"request {index}: {request.num_input_tokens} tokens in, "
                f"{request.num_output_tokens} out, {request.latency_ms:.3f} ms"
            )
    if options.op_stats_csv is not None:
        write_csv(figures, options.op_stats_csv)
    if options.dump_perfetto_trace:
        write_perfetto(timed, Path(PERFETTO_FILE))


def _reference_ms(options: Flags) -> float | None:
    """Return the latency of --check-perf-json. Raises ConfigError."""
    path, key = options.check_perf_json, options.check_perf_key
    if path is None:
        if key is not None:
            raise ConfigError("--check-perf-key needs --check-perf-json")
        return None
    if key is None:
        raise ConfigError("--check-perf-json needs --check-perf-key")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return float(content[key])
    except KeyError as error:
        raise ConfigError(f"--check-perf-key: {path} has no key {key!r}") from error
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--check-perf-json: {path} has no latency under {key!r}") from error


def _is_fast_enough(options: Flags, reference_ms: float | None, total_ms: float, say: Say) -> bool:
    if reference_ms is None:
        return True
    limit_ms = reference_ms + options.check_perf_atol + options.check_perf_rtol * reference_ms
    if total_ms <= limit_ms:
        return True
    say(
        f"[ERROR] {total_ms:.3f} ms are more than {limit_ms:.3f} ms: {reference_ms} ms of "
        f"{options.check_perf_json}, and what --check-perf-atol and --check-perf-rtol allow"
    )
    return False
