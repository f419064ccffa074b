"""benchmark_core_model.py: `tensorrt_llm` alone under load, tokens in and tokens out."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from loraplex.compat.client.figures import (
    PERFETTO_FILE,
    TimedRequest,
    figure_table,
    figures_of,
    write_csv,
    write_perfetto,
)
from loraplex.compat.client.files import Say
from loraplex.compat.client.prompts import prompt_tensors
from loraplex.compat.client.tensors import flag_tensors, row
from loraplex.compat.client.wire import Pending, Response, Wire, open_wire
from loraplex.compat.client.workloads import TokenRequest, delays, token_requests
from loraplex.compat.flags import Flags
from loraplex.core.errors import ConfigError

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


def _num_output_tokens(options: Flags, response: Response, num_input: int) -> int:
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
