"""benchmark_core_model.py: `tensorrt_llm` alone under load, tokens in and tokens out."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from loraplex.compat.client.benchmark_figures import (
    PERFETTO_FILE,
    TimedRequest,
    figures_of,
    write_perfetto,
)
from loraplex.compat.client.benchmark_options import BenchmarkOptions
from loraplex.compat.client.flags import Say
from loraplex.compat.client.tensors import Array, row
from loraplex.compat.client.wire import Pending, Wire, WireAnswer, open_wire
from loraplex.compat.client.workloads import TokenRequest, delays, token_requests
from loraplex.core.errors import ConfigError

DEFAULT_MODEL = "tensorrt_llm"
NUM_WARM_UP = 10
WARM_UP_TOKENS = 100


def run(options: BenchmarkOptions, say: Say) -> int:
    """1 if requests failed or all took longer than --check-perf allows. Raises ConfigError."""
    _check(options)
    requests = token_requests(options, say)
    waits = delays(options, len(requests))
    if not requests:
        raise ConfigError("--max-input-len leaves no request")
    with open_wire(
        options.protocol,
        options.url,
        options.concurrency,
        is_streamed=options.decoupled,
        stream_timeout=options.stream_timeout,
    ) as wire:
        say("[INFO] Warm up for benchmarking.")
        _warm_up(options, wire, requests)
        say(f"[INFO] Start benchmarking on {len(requests)} prompts.")
        begin = time.perf_counter()
        timed, errors = _load(options, wire, requests, waits)
        total_ms = (time.perf_counter() - begin) * 1000
    if errors:
        say(f"[ERROR] {len(errors)} of {len(requests)} requests failed, the first: {errors[0]}")
        return 1
    say(f"[INFO] Total Latency: {round(total_ms, 3)} ms")
    say(f"[INFO] Total request latencies: {sum(r.latency_ms for r in timed)} ms")
    figures = figures_of(timed)
    for line in figures.lines():
        say(line)
    if options.verbose:
        for index, request in enumerate(timed):
            say(
                f"request {index}: {request.num_input_tokens} tokens in, "
                f"{request.num_output_tokens} out, {request.latency_ms:.3f} ms"
            )
    if options.op_stats_csv is not None:
        figures.write_csv(options.op_stats_csv)
    if options.dump_perfetto_trace:
        write_perfetto(timed, Path(PERFETTO_FILE))
    return 0 if _is_fast_enough(options, total_ms, say) else 1


def _check(options: BenchmarkOptions) -> None:
    if options.test_llmapi:
        raise ConfigError("--test-llmapi: the llmapi model is not served; leave it out")
    if options.check_perf_key is not None and options.check_perf_json is None:
        raise ConfigError("--check-perf-key needs --check-perf-json")
    if options.check_perf_json is not None:
        _reference_ms(options)


def _warm_up(options: BenchmarkOptions, wire: Wire, requests: Sequence[TokenRequest]) -> None:
    """Raises ConfigError: what fails here would fail all."""
    first = requests[0]
    request = TokenRequest(first.token_ids, WARM_UP_TOKENS, first.end_id, first.pad_id)
    for pending in [_submit(options, wire, index, request) for index in range(NUM_WARM_UP)]:
        pending.result()


def _load(
    options: BenchmarkOptions,
    wire: Wire,
    requests: Sequence[TokenRequest],
    waits: Sequence[float],
) -> tuple[list[TimedRequest], list[str]]:
    """(the answered requests in their order, errors)."""
    sent: list[tuple[float, Pending]] = []
    for index, (request, wait) in enumerate(zip(requests, waits, strict=True)):
        time.sleep(wait)
        sent.append((time.perf_counter(), _submit(options, wire, index, request)))
    timed, errors = [], []
    for request, (start, pending) in zip(requests, sent, strict=True):
        try:
            answer = pending.result()
        except ConfigError as error:
            errors.append(error.message)
        else:
            num_input = len(request.token_ids)
            num_output = _num_output_tokens(options, answer, num_input)
            timed.append(TimedRequest(start, answer.end, num_input, num_output))
    return timed, errors


def _submit(options: BenchmarkOptions, wire: Wire, index: int, request: TokenRequest) -> Pending:
    models = options.tensorrt_llm_model_name or (DEFAULT_MODEL,)
    return wire.submit(models[index % len(models)], _tensors(options, request), str(index))


def _tensors(options: BenchmarkOptions, request: TokenRequest) -> dict[str, Array]:
    tensors = {
        "input_ids": row(request.token_ids, np.int32),
        "input_lengths": row([len(request.token_ids)], np.int32),
        "request_output_len": row([request.num_output_tokens], np.int32),
        "end_id": row([request.end_id], np.int32),
        "pad_id": row([request.pad_id], np.int32),
    }
    if options.decoupled:
        tensors["streaming"] = row([True], np.bool_)
    if options.exclude_input_in_output:
        tensors["exclude_input_in_output"] = row([True], np.bool_)
    return tensors


def _num_output_tokens(options: BenchmarkOptions, answer: WireAnswer, num_input: int) -> int:
    """New tokens: a stream has only those, a whole answer may begin with the prompt."""
    num_tokens = sum(int(piece["sequence_length"][0, 0]) for piece in answer.pieces)
    has_prompt = not (options.decoupled or options.exclude_input_in_output)
    return max(num_tokens - num_input, 0) if has_prompt else num_tokens


# ---------------------------------------------------------------- --check-perf


def _is_fast_enough(options: BenchmarkOptions, total_ms: float, say: Say) -> bool:
    if options.check_perf_json is None:
        return True
    reference = _reference_ms(options)
    limit = reference + options.check_perf_atol + options.check_perf_rtol * reference
    if total_ms <= limit:
        return True
    say(
        f"[ERROR] {total_ms:.3f} ms are more than {limit:.3f} ms: {reference} ms of "
        f"{options.check_perf_json}, and what --check-perf-atol and --check-perf-rtol allow"
    )
    return False


def _reference_ms(options: BenchmarkOptions) -> float:
    path, key = options.check_perf_json or "", options.check_perf_key
    if key is None:
        raise ConfigError("--check-perf-json needs --check-perf-key")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return float(content[key])
    except KeyError as error:
        raise ConfigError(f"--check-perf-key: {path} has no key {key!r}") from error
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--check-perf-json: {path} has no latency under {key!r}") from error
