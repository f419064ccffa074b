"""Triton's and its backends' families on GET /metrics, line by line."""

import asyncio
import datetime
import json
import logging
import time

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from loraplex.core.errors import ConfigError, InvalidParameterError, QueueFullError, RowFailedError
from loraplex.core.metrics_config import MetricsConfig
from loraplex.core.principal import LOCAL
from loraplex.core.stats import EngineStats, StepRecord
from loraplex.frontends.kserve.messages import InferRequest
from loraplex.frontends.kserve.models.kinds import ENSEMBLE, TENSORRT_LLM, VLLM
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration, ModelOptions
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.kserve.statistics import (
    FailureReason,
    TokenLabels,
    TokenMetrics,
    TokenTimes,
)
from loraplex.frontends.kserve.tensors import numbers, string_tensor
from loraplex.frontends.ops.metrics import metrics_app
from loraplex.serving.request_metrics import RequestMetrics
from support.echo_service import EchoService
from support.naming import naming

STEP = StepRecord(
    step_id=11,
    start_ns=0,
    duration_ns=0,
    num_rows=5,
    num_prefill_rows=2,
    num_prefill_tokens=77,
    num_tokens=80,
    num_adapters=0,
    num_running=2,
    num_waiting=3,
    num_preempted=0,
    blocks_held=5,
    blocks_cached=7,
    blocks_free=8,
    adapter_pages_used=0,
    adapter_copies_started=0,
)
STATS = EngineStats(
    steps=11,
    num_running=2,
    num_waiting=3,
    blocks_held=5,
    blocks_cached=7,
    blocks_free=8,
    cached_tokens=33,
    preemptions=4,
)

TRT_LLM = """\
# HELP nv_trt_llm_request_metrics TRT LLM request metrics
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 5
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 128
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 5
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 2
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 3
# HELP nv_trt_llm_runtime_memory_metrics TRT LLM runtime memory metrics
# TYPE nv_trt_llm_runtime_memory_metrics gauge
nv_trt_llm_runtime_memory_metrics{memory_type="cpu",model="tensorrt_llm",version="1"} 1073774592
nv_trt_llm_runtime_memory_metrics{memory_type="gpu",model="tensorrt_llm",version="1"} 0
nv_trt_llm_runtime_memory_metrics{memory_type="pinned",model="tensorrt_llm",version="1"} 0
# HELP nv_trt_llm_kv_cache_block_metrics TRT LLM KV cache block metrics
# TYPE nv_trt_llm_kv_cache_block_metrics gauge
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 20
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free",model="tensorrt_llm",version="1"} 15
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 5
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 16
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="reused",model="tensorrt_llm",version="1"} 2
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.25
# HELP nv_trt_llm_inflight_batcher_metrics TRT LLM inflight_batcher-specific metrics
# TYPE nv_trt_llm_inflight_batcher_metrics gauge
nv_trt_llm_inflight_batcher_metrics{inflight_batcher_specific_metric="total_context_tokens",model="tensorrt_llm",version="1"} 77
nv_trt_llm_inflight_batcher_metrics{inflight_batcher_specific_metric="generation_requests",model="tensorrt_llm",version="1"} 3
nv_trt_llm_inflight_batcher_metrics{inflight_batcher_specific_metric="micro_batch_id",model="tensorrt_llm",version="1"} 0
nv_trt_llm_inflight_batcher_metrics{inflight_batcher_specific_metric="paused_requests",model="tensorrt_llm",version="1"} 4
# HELP nv_trt_llm_general_metrics General TRT LLM metrics
# TYPE nv_trt_llm_general_metrics gauge
nv_trt_llm_general_metrics{general_type="iteration_counter",model="tensorrt_llm",version="1"} 11
# HELP nv_trt_llm_disaggregated_serving_metrics TRT LLM disaggregated serving metrics
# TYPE nv_trt_llm_disaggregated_serving_metrics counter
nv_trt_llm_disaggregated_serving_metrics{disaggregated_serving_type="kv_cache_transfer_ms",model="tensorrt_llm",version="1"} 0
nv_trt_llm_disaggregated_serving_metrics{disaggregated_serving_type="request_count",model="tensorrt_llm",version="1"} 0
"""  # noqa: E501

INFERENCE = """\
# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="echo",version="1"} 2
# HELP nv_inference_count Number of inferences performed (does not include cached requests)
# TYPE nv_inference_count counter
nv_inference_count{model="echo",version="1"} 3
# HELP nv_inference_exec_count Number of model executions performed (does not include cached requests)
# TYPE nv_inference_exec_count counter
nv_inference_exec_count{model="echo",version="1"} 2
# HELP nv_inference_request_failure Number of failed inference requests, all batch sizes
# TYPE nv_inference_request_failure counter
nv_inference_request_failure{model="echo",reason="REJECTED",version="1"} 1
nv_inference_request_failure{model="echo",reason="CANCELED",version="1"} 1
nv_inference_request_failure{model="echo",reason="BACKEND",version="1"} 1
nv_inference_request_failure{model="echo",reason="OTHER",version="1"} 1
# HELP nv_inference_request_duration_us Cumulative inference request duration in microseconds (includes cached requests)
# TYPE nv_inference_request_duration_us counter
# HELP nv_inference_queue_duration_us Cumulative inference queuing duration in microseconds (includes cached requests)
# TYPE nv_inference_queue_duration_us counter
# HELP nv_inference_compute_input_duration_us Cumulative compute input duration in microseconds (does not include cached requests)
# TYPE nv_inference_compute_input_duration_us counter
# HELP nv_inference_compute_infer_duration_us Cumulative compute inference duration in microseconds (does not include cached requests)
# TYPE nv_inference_compute_infer_duration_us counter
# HELP nv_inference_compute_output_duration_us Cumulative inference compute output duration in microseconds (does not include cached requests)
# TYPE nv_inference_compute_output_duration_us counter
# HELP nv_inference_pending_request_count Instantaneous number of pending requests awaiting execution per-model.
# TYPE nv_inference_pending_request_count gauge
nv_inference_pending_request_count{model="echo",version="1"} 0
"""  # noqa: E501

TOKENS = """\
# HELP nv_llm_input_token_len TRT LLM response metrics
# TYPE nv_llm_input_token_len histogram
nv_llm_input_token_len_bucket{model="tensorrt_llm",response_metric_type="total_input_tokens",version="1",le="10"} 3
nv_llm_input_token_len_bucket{model="tensorrt_llm",response_metric_type="total_input_tokens",version="1",le="50"} 3
nv_llm_input_token_len_bucket{model="tensorrt_llm",response_metric_type="total_input_tokens",version="1",le="1000"} 3
nv_llm_input_token_len_bucket{model="tensorrt_llm",response_metric_type="total_input_tokens",version="1",le="+Inf"} 3
nv_llm_input_token_len_sum{model="tensorrt_llm",response_metric_type="total_input_tokens",version="1"} 9
nv_llm_output_token_len_count{model="tensorrt_llm",response_metric_type="total_output_tokens",version="1"} 3
nv_llm_output_token_len_sum{model="tensorrt_llm",response_metric_type="total_output_tokens",version="1"} 24
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{model="echo",version="1"} 9
vllm:generation_tokens_total{model="echo",version="1"} 24
vllm:request_prompt_tokens_bucket{model="echo",version="1",le="2"} 0
vllm:request_prompt_tokens_bucket{model="echo",version="1",le="5"} 3
vllm:request_generation_tokens_bucket{model="echo",version="1",le="5"} 0
vllm:request_generation_tokens_bucket{model="echo",version="1",le="10"} 3
vllm:request_params_n_bucket{model="echo",version="1",le="1"} 3
"""  # noqa: E501


def request(*texts, max_tokens=50, **more):
    texts = texts or ("hi",)
    return InferRequest(
        model="echo",
        inputs=(
            string_tensor("text_input", texts, (len(texts), 1)),
            numbers("max_tokens", "INT32", [[max_tokens]] * len(texts)),
            *(numbers(name, "BOOL", [[value]] * len(texts)) for name, value in more.items()),
        ),
    )


@pytest.fixture
def backend():
    backend = EchoService()
    backend.engine_stats = STATS
    backend.step_records = [STEP]
    return backend


@pytest.fixture
def service(backend):
    return TritonService(backend)


async def scrape(service, accept="text/plain"):
    app = metrics_app(
        service.backend, RequestMetrics(), service.collectors(), service.catalog.has_vllm_gauges
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://metrics"
    ) as client:
        return (await client.get("/metrics", headers={"accept": accept})).text


async def traffic(service, backend):
    """Two successes, of three elements; a failure for every reason."""
    await service.infer(request("ab", "cd"), LOCAL)
    async for _ in await service.stream(request("ef", stream=True), LOCAL):
        pass
    with pytest.raises(InvalidParameterError):
        await service.infer(request(max_tokens=0), LOCAL)
    backend.plant(QueueFullError("full"))
    with pytest.raises(QueueFullError):
        await service.infer(request(), LOCAL)
    backend.plant(RowFailedError("broken"), after_outputs=1)
    with pytest.raises(RowFailedError):
        await service.infer(request(), LOCAL)
    stream = await service.stream(request("gh", stream=True), LOCAL)
    await anext(stream)
    await stream.aclose()


async def test_the_engines_numbers_by_the_names_of_tensorrt_llm(service):
    lines = (await scrape(service)).splitlines()
    assert [line for line in TRT_LLM.splitlines() if line not in lines] == []
    names = {line.split("{")[0] for line in TRT_LLM.splitlines() if line[0] != "#"}
    expected = [line for line in TRT_LLM.splitlines() if line[0] != "#"]
    found = [line for line in lines if line.split("{")[0] in names]
    assert len(found) == len(expected) + 1  # the time, which no test can know
    assert any('general_type="timestamp"' in line for line in found)


async def test_the_verbose_log_has_the_engines_numbers(service, caplog):
    """One JSON line a scrape and model, with the original's names: its tests compare the two."""
    with caplog.at_level(logging.DEBUG, logger="loraplex.frontends.kserve.metrics"):
        text = await scrape(service)
    (line,) = [r.message for r in caplog.records if "Active Request Count" in r.message]
    logged = json.loads(line)
    lines = [line for line in text.splitlines() if line.startswith("nv_trt_llm_")]
    assert len(logged) == len(lines)
    assert (logged["Active Request Count"], logged["Paused Requests"]) == (5, 4)
    stamp = datetime.datetime.strptime(logged["Timestamp"] + "Z", "%m-%d-%Y %H:%M:%S.%f%z")
    (said,) = [line.split()[-1] for line in lines if "timestamp" in line]
    assert stamp.timestamp() == float(said) / 1e6


async def test_inference_families(service, backend):
    await traffic(service, backend)
    lines = (await scrape(service)).splitlines()
    assert [line for line in INFERENCE.splitlines() if line not in lines] == []
    micros = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if "_duration_us{" in line and 'model="echo"' in line
    }
    assert len(micros) == 5
    total = micros.pop("nv_inference_request_duration_us")
    assert 0 < sum(micros.values()) <= total


async def test_token_families(service, backend):
    await traffic(service, backend)
    text = await scrape(service)
    missing = [line for line in TOKENS.splitlines() if f"\n{line}" not in text]
    assert missing == []


LATENCIES = """\
vllm:time_to_first_token_seconds_bucket{le="0.02",model="m",version="2"} 0.0
vllm:time_to_first_token_seconds_bucket{le="0.04",model="m",version="2"} 1.0
vllm:time_to_first_token_seconds_bucket{le="10.0",model="m",version="2"} 1.0
vllm:time_per_output_token_seconds_bucket{le="0.05",model="m",version="2"} 0.0
vllm:time_per_output_token_seconds_bucket{le="0.075",model="m",version="2"} 7.0
vllm:time_per_output_token_seconds_count{model="m",version="2"} 7.0
vllm:e2e_request_latency_seconds_bucket{le="1.0",model="m",version="2"} 0.0
vllm:e2e_request_latency_seconds_bucket{le="2.5",model="m",version="2"} 1.0
vllm:e2e_request_latency_seconds_sum{model="m",version="2"} 1.5
"""


def test_latencies():
    metrics = TokenMetrics()
    times = TokenTimes(
        num_prompt_tokens=3,
        num_output_tokens=9,
        num_sequences=2,
        first_token_seconds=0.03,
        seconds_per_token=0.06,
        total_seconds=1.5,
    )
    metrics.observe(TokenLabels(vllm=("m", "2")), times)
    registry = CollectorRegistry()
    registry.register(metrics)
    lines = generate_latest(registry).decode().splitlines()
    assert [line for line in LATENCIES.splitlines() if line not in lines] == []
    assert not any(line.startswith("nv_llm_input_token_len_count") for line in lines)


async def test_names_stay_as_they_are_in_openmetrics(service):
    text = await scrape(service, "application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    assert '\nnv_inference_count{model="echo",version="1"} 0' in text
    assert "nv_inference_count_total" not in text


async def check_one_is_left_after_its_first_response(service, model):
    """A stream that is pending until then counts as cancelled for the model."""
    counts = service.counts.of(model)
    stream = await service.stream(request(stream=True), LOCAL)
    assert counts.num_pending == 1
    await anext(stream)
    assert counts.num_pending == 0
    await stream.aclose()
    assert counts.failures[FailureReason.CANCELED] == 1


async def test_pending_requests(service):
    await check_one_is_left_after_its_first_response(service, "echo")


async def test_tensorrt_llm_has_waiting_requests_and_responds_for_an_ensemble(backend):
    config = MetricsConfig(histogram_latencies=True, summary_latencies=True)
    service = TritonService(backend, metrics=config)
    await check_one_is_left_after_its_first_response(service, "tensorrt_llm")
    await service.infer(request(), LOCAL)
    lines = (await scrape(service)).splitlines()
    labels = 'model="tensorrt_llm",version="1"'
    assert f"nv_inference_request_success{{{labels}}} 1" in lines
    assert f"nv_inference_request_summary_us_count{{{labels}}} 1" in lines
    name = "nv_inference_first_response_histogram_ms_count"
    assert f"{name}{{{labels}}} 2" in lines


async def test_an_abandoned_stream_counts_as_cancelled(service):
    stream = await service.stream(request(stream=True), LOCAL)
    await stream.aclose()
    await stream.aclose()
    counts = service.counts.of("echo")
    assert (counts.num_pending, counts.failures[FailureReason.CANCELED]) == (0, 1)
    assert counts.times["fail"].count == 1


@pytest.mark.parametrize("kind", [VLLM, ENSEMBLE])
async def test_the_log_has_the_vllm_backends_words_of_a_cancelled_request(backend, caplog, kind):
    said = [
        "[vllm] Cancelling the request 7",
        "[vllm] Successfully cancelled the request 7",
    ]
    declared = ModelDeclaration(name="m", kind=kind, base_model="echo")
    service = TritonService(backend, declarations=[declared])
    numbered = [string_tensor("text_input", ["hi"], (1,))]
    if kind is ENSEMBLE:
        numbered.append(numbers("max_tokens", "INT32", [9]))
    sent = InferRequest(model="m", inputs=tuple(numbered), request_id="7")
    caplog.set_level(logging.DEBUG, logger="loraplex.frontends.kserve.inference")
    await service.infer(sent, LOCAL)
    assert caplog.messages == []
    stream = await service.stream(sent, LOCAL)
    await stream.aclose()
    await stream.aclose()
    assert caplog.messages == (said if kind is VLLM else [])
    caplog.clear()
    backend.delay_seconds = 3600
    task = asyncio.create_task(service.infer(sent, LOCAL))
    admitted = len(backend.requests) + 1
    while len(backend.requests) < admitted:
        await asyncio.sleep(0)
    for _ in range(20):  # its admission ends after a few turns of the loop
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert caplog.messages == (said if kind is VLLM else [])


@pytest.mark.parametrize(("reports", "num_lines"), [(True, 1), (False, 0)])
async def test_models_of_vllm_report_if_they_say_so(backend, reports, num_lines):
    declarations = [
        ModelDeclaration(
            name="vllm_model",
            kind=VLLM,
            base_model="echo",
            version="3",
            is_decoupled=True,
            options=ModelOptions(reports_metrics=reports),
        ),
        ModelDeclaration(name="ensemble", kind=ENSEMBLE, base_model="echo", max_batch_size=8),
    ]
    service = TritonService(backend, declarations=declarations)
    text = InferRequest(model="vllm_model", inputs=(string_tensor("text_input", ["hi"], (1,)),))
    async for _ in await service.stream(text, LOCAL):
        pass
    lines = (await scrape(service)).splitlines()
    line = 'vllm:prompt_tokens_total{model="vllm_model",version="3"} 3'
    assert lines.count(line) == num_lines
    gauges = [line for line in lines if line.startswith("vllm:num_requests_running{")]
    assert len(gauges) == num_lines
    assert len([line for line in lines if line.startswith("vllm:lora_requests_info{")]) == num_lines
    assert all(line[0] == "#" or not line.startswith("vllm:") for line in lines) is not reports
    assert not any(line.startswith("nv_llm_input_token_len_count") for line in lines)


async def values(service, name):
    """Return the samples of the model `echo` by labels."""
    lines = (await scrape(service)).splitlines()
    found = [line.rsplit(" ", 1) for line in lines if line.startswith(f"{name}{{")]
    return {labels: float(value) for labels, value in found if 'model="echo"' in labels}


async def test_summaries_and_histograms_are_there_if_they_are_wanted(backend):
    config = MetricsConfig(summary_latencies=True, histogram_latencies=True, quantiles=(0.5, 0.99))
    service = TritonService(backend, metrics=config)
    started = time.monotonic()
    await traffic(service, backend)
    elapsed = time.monotonic() - started
    phases = ("request", "queue", "compute_input", "compute_infer", "compute_output")
    for phase in phases:
        name = f"nv_inference_{phase}_summary_us"
        assert list((await values(service, f"{name}_count")).values()) == [2]
        of_counter = await values(service, f"nv_inference_{phase}_duration_us")
        assert list((await values(service, f"{name}_sum")).values()) == list(of_counter.values())
        low, high = (await values(service, name)).values()
        assert low <= high <= next(iter(of_counter.values()))
    name = "nv_inference_first_response_histogram_ms"
    buckets = await values(service, f"{name}_bucket")
    assert [labels.split('le="')[1].split('"')[0] for labels in buckets] == [
        *("100", "500", "2000", "5000", "+Inf")
    ]
    counts = list(buckets.values())  # a response is in the buckets of its time and all longer ones
    assert counts == sorted(counts)
    assert counts[-1] == 3  # two successes, and a stream that was left after one
    (milliseconds,) = (await values(service, f"{name}_sum")).values()
    assert milliseconds <= 3 * 1000 * elapsed


async def test_latencies_without_counters(backend):
    text = await scrape(TritonService(backend, metrics=MetricsConfig(counter_latencies=False)))
    assert "_duration_us" not in text
    assert "_summary_us" not in text
    assert "nv_inference_first_response" not in text


async def test_static_batches_have_a_family_of_their_own(backend):
    declarations = [
        ModelDeclaration(
            name=name,
            kind=TENSORRT_LLM,
            base_model="echo",
            max_batch_size=8,
            options=ModelOptions(is_static=name == "static"),
        )
        for name in ("static", "inflight")
    ]
    lines = (await scrape(TritonService(backend, declarations=declarations))).splitlines()
    assert [line for line in lines if line.startswith("nv_trt_llm_v1_metrics{")] == [
        f'nv_trt_llm_v1_metrics{{model="static",v1_specific_metric="{label}",version="1"}} {value}'
        for label, value in (
            ("total_context_tokens", 77),
            ("total_generation_tokens", 3),
            ("empty_generation_slots", 5),
        )
    ]
    batches = [line for line in lines if line.startswith("nv_trt_llm_inflight_batcher_metrics{")]
    assert len(batches) == 4
    assert all('model="inflight"' in line for line in batches)


async def test_token_families_are_there_before_the_first_request(service):
    lines = (await scrape(service)).splitlines()
    zero = 'response_metric_type="total_input_tokens",version="1"} 0'
    assert f'nv_llm_input_token_len_count{{model="tensorrt_llm",{zero}' in lines
    assert 'vllm:generation_tokens_total{model="echo",version="1"} 0' in lines


def with_buckets(*buckets, family="nv_inference_first_response_histogram_ms"):
    control = {"metric_identifier": {"family": family}, "histogram_options": {"buckets": buckets}}
    config = {"model_metrics": {"metric_control": [control]}}
    return [ModelDeclaration(name="echo", kind=ENSEMBLE, base_model="echo", config=config)]


@pytest.mark.parametrize(
    ("declarations", "bounds"),
    [
        (with_buckets(5, 20.5), ["5", "20.5", "+Inf"]),
        (with_buckets(), ["100", "500", "2000", "5000", "+Inf"]),
        (with_buckets(5, family="another"), ["100", "500", "2000", "5000", "+Inf"]),
    ],
)
async def test_buckets_of_a_model_s_own(backend, declarations, bounds):
    metrics = MetricsConfig(histogram_latencies=True)
    service = TritonService(backend, metrics=metrics, declarations=declarations)
    buckets = await values(service, "nv_inference_first_response_histogram_ms_bucket")
    assert [labels.split('le="')[1].split('"')[0] for labels in buckets] == bounds


def test_buckets_that_do_not_grow(backend):
    with pytest.raises(ConfigError, match=naming("echo", "model_metrics", 5)):
        TritonService(backend, declarations=with_buckets(5, 5))
