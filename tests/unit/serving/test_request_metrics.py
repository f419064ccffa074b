"""What is counted for which request."""

import msgspec
import pytest
from prometheus_client import generate_latest

from loraplex.core.errors import EngineRestartedError, InvalidRequestError, ModelNotFoundError
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.output import (
    FinishReason,
    RequestOutput,
    RequestTiming,
    ResolvedAdapter,
    SequenceOutput,
)
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Pool, PoolKind
from loraplex.serving.request_metrics import MAX_LABELS, RequestMetrics
from loraplex.serving.wire_request import GenerationRecord

REQUEST = GenerateRequest(request_id=1, model="base", prompt="Hi")
MS = 1_000_000


def record(tenant="tenant") -> GenerationRecord:
    return GenerationRecord(REQUEST, tenant, 0)


class ScriptedOutputs:
    """Gives outputs, or raises, each at its time."""

    adapters = ()
    num_prompt_tokens = 3

    def __init__(self, clock, steps) -> None:
        self._clock = clock
        self._steps = list(steps)
        self.is_closed = False

    async def __anext__(self) -> RequestOutput:
        if not self._steps:
            raise StopAsyncIteration
        at_ms, item = self._steps.pop(0)
        self._clock.time_ns = at_ms * MS
        if isinstance(item, Exception):
            raise item
        return item

    async def aclose(self) -> None:
        self.is_closed = True


class Lease:
    """Lease of no tenant."""

    def end(self, num_tokens=0, *, is_error=False) -> None:
        pass


class SettableClock:
    time_ns = 0

    def now_ns(self) -> int:
        return self.time_ns


def output(*sequences, total=0, finished=False, adapters=(), timing=None) -> RequestOutput:
    """`sequences`: (index, number of tokens, finish reason)."""
    return RequestOutput(
        request_id=1,
        client_request_id="",
        model="base",
        adapters=tuple(ResolvedAdapter(name, "d" * 64) for name in adapters),
        prompt_token_ids=(1, 2, 3),
        sequences=tuple(
            SequenceOutput(index, "", (7,) * num_tokens, (), reason)
            for index, num_tokens, reason in sequences
        ),
        num_output_tokens=total,
        finished=finished,
        timing=timing,
    )


@pytest.fixture
def clock():
    return SettableClock()


@pytest.fixture
def metrics(clock):
    return RequestMetrics(clock=clock)


async def run(metrics, clock, steps) -> list[RequestOutput]:
    return [
        o async for o in metrics.observe(REQUEST, ScriptedOutputs(clock, steps), record(), Lease())
    ]


def value(metrics, name, **labels) -> float | None:
    return metrics.registry.get_sample_value(f"loraplex_{name}", {"model": "base", **labels})


async def test_a_request(metrics, clock):
    timing = RequestTiming(
        arrival_ns=5 * MS,
        adapter_ready_ns=15 * MS,
        first_scheduled_ns=25 * MS,
        first_token_ns=29 * MS,
        num_restarts=1,
    )
    outputs = [
        output((0, 1, None), total=1, adapters=["fr"]),
        output((0, 2, None), total=3, adapters=["fr"]),
        output((0, 0, FinishReason.LENGTH), total=3, finished=True, adapters=["fr"], timing=timing),
    ]
    given = await run(metrics, clock, zip((30, 50, 60), outputs, strict=True))
    assert given == outputs
    of_adapter = {"adapter": "fr"}
    assert value(metrics, "requests_total", finish_reason="length", **of_adapter) == 1
    assert value(metrics, "prompt_tokens_total", **of_adapter) == 3
    assert value(metrics, "generation_tokens_total", **of_adapter) == 3
    assert value(metrics, "adapter_time_to_first_token_seconds_count", **of_adapter) == 1
    assert value(metrics, "time_to_first_token_seconds_sum") == pytest.approx(0.030)
    assert value(metrics, "request_queue_time_seconds_sum") == pytest.approx(0.020)
    assert value(metrics, "request_adapter_wait_time_seconds_sum") == pytest.approx(0.010)
    assert value(metrics, "request_prefill_time_seconds_sum") == pytest.approx(0.004)
    assert value(metrics, "restarted_requests_total") == 1
    assert value(metrics, "inter_token_latency_seconds_count") == 2
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.020)
    assert value(metrics, "e2e_request_latency_seconds_sum") == pytest.approx(0.060)
    assert value(metrics, "request_queue_time_seconds_sum") == pytest.approx(0.020)


async def test_tokens_are_counted_ten_times_a_second_and_at_the_end(metrics, clock):
    times_ms = (10, 60, 105, 170, 190)
    steps = [(at, output((0, 1, None), total=n)) for n, at in enumerate(times_ms, start=1)]
    observed = metrics.observe(REQUEST, ScriptedOutputs(clock, steps), record(), Lease())
    numbers = []
    for _ in times_ms:
        await anext(observed)
        numbers.append(value(metrics, "generation_tokens_total", adapter=""))
    assert numbers == [0, 0, 3, 3, 3]
    assert value(metrics, "inter_token_latency_seconds_count") == 2
    await observed.aclose()
    assert value(metrics, "generation_tokens_total", adapter="") == 5
    assert value(metrics, "inter_token_latency_seconds_count") == 4


async def test_sequences_of_a_request_have_their_own_pace(metrics, clock):
    steps = [
        (10, output((0, 1, None), (1, 1, None), total=2)),
        (20, output((0, 1, None), total=3)),
        (40, output((0, 1, FinishReason.STOP), (1, 1, FinishReason.STOP), total=5, finished=True)),
    ]
    await run(metrics, clock, steps)
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "inter_token_latency_seconds_count") == 3
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.010 + 0.020 + 0.030)
    assert value(metrics, "requests_total", adapter="", finish_reason="stop") == 1
    assert value(metrics, "generation_tokens_total", adapter="") == 5


async def test_an_error_in_mid_stream(metrics, clock):
    steps = [(10, output((0, 1, None), total=1)), (20, EngineRestartedError("gone"))]
    with pytest.raises(EngineRestartedError):
        await run(metrics, clock, steps)
    assert value(metrics, "errors_total", code="engine_restarted") == 1
    assert value(metrics, "requests_total", adapter="", finish_reason="error") == 1
    assert value(metrics, "e2e_request_latency_seconds_count") is None


async def test_a_client_that_leaves(metrics, clock):
    inner = ScriptedOutputs(clock, [(10, output((0, 1, None), total=1))])
    observed = metrics.observe(REQUEST, inner, record(), Lease())
    await anext(observed)
    await observed.aclose()
    await observed.aclose()
    assert inner.is_closed
    assert value(metrics, "requests_total", adapter="", finish_reason="abort") == 1


async def test_closing_a_finished_request_counts_nothing(metrics, clock):
    steps = [(1, output((0, 1, FinishReason.STOP), total=1, finished=True))]
    observed = metrics.observe(REQUEST, ScriptedOutputs(clock, steps), record(), Lease())
    await anext(observed)
    await observed.aclose()
    assert value(metrics, "requests_total", adapter="", finish_reason="abort") is None
    assert value(metrics, "requests_total", adapter="", finish_reason="stop") == 1


async def test_adapter_labels_are_bounded(metrics, clock):
    for number in [*range(MAX_LABELS + 50), 0]:
        last = output((0, 1, FinishReason.STOP), total=1, finished=True, adapters=[f"a{number}"])
        await run(metrics, clock, [(1, last)])
    tokens = [
        sample
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "loraplex_generation_tokens_total"
    ]
    assert len(tokens) == MAX_LABELS + 1
    assert value(metrics, "generation_tokens_total", adapter="other") == 50
    assert value(metrics, "generation_tokens_total", adapter="a0") == 2


async def test_tenants_wait_each_in_its_own_series_up_to_a_bound(metrics, clock):
    timing = RequestTiming(arrival_ns=1 * MS, first_scheduled_ns=21 * MS)
    last = output((0, 1, FinishReason.STOP), total=1, finished=True, timing=timing)
    for number in [*range(MAX_LABELS + 50), 0]:
        outputs = metrics.observe(
            REQUEST, ScriptedOutputs(clock, [(1, last)]), record(f"t{number}"), Lease()
        )
        assert [one async for one in outputs] == [last]
    name = "tenant_queue_time_seconds"
    assert value(metrics, f"{name}_sum", tenant="t0") == pytest.approx(0.040)
    assert value(metrics, f"{name}_count", tenant=f"t{MAX_LABELS - 1}") == 1
    assert value(metrics, f"{name}_count", tenant=f"t{MAX_LABELS}") is None
    assert value(metrics, f"{name}_count", tenant="other") == 50


async def test_two_adapters_are_one_label(metrics, clock):
    last = output((0, 1, FinishReason.STOP), total=1, finished=True, adapters=["a", "b"])
    await run(metrics, clock, [(1, last)])
    assert value(metrics, "generation_tokens_total", adapter="a+b") == 1


def test_names_that_clients_make_up_are_no_labels():
    metrics = RequestMetrics(models=["base"])
    for number in range(5):
        metrics.observe_error(f"made-up-{number}", ModelNotFoundError("no"))
    metrics.observe_error("base", InvalidRequestError("no"))
    sample = metrics.registry.get_sample_value
    name = "loraplex_errors_total"
    assert sample(name, {"model": "", "code": "model_not_found"}) == 5
    assert sample(name, {"model": "base", "code": "invalid_request"}) == 1
    assert b"made-up" not in generate_latest(metrics.registry)


def test_two_of_them_do_not_share_anything():
    one, two = RequestMetrics(models=["m"]), RequestMetrics(models=["m"])
    one.observe_error("m", InvalidRequestError("no"))
    assert b'code="invalid_request"' not in generate_latest(two.registry)


async def test_requests_by_what_they_want_of_a_prompt(metrics, clock):
    pools = (
        Pool(),
        Pool(PoolKind.MEAN),
        Pool(PoolKind.SCORE, normalize=False),
        Pool(PoolKind.LOGITS, normalize=False, token_ids=(3, 4)),
    )
    for pool in pools:
        request = msgspec.structs.replace(REQUEST, task=pool)
        metrics.observe(request, ScriptedOutputs(clock, []), record(), Lease())
    metrics.observe(REQUEST, ScriptedOutputs(clock, []), record(), Lease())
    for task, count in (("embed", 2), ("classify", 1), ("score", 1), ("generate", None)):
        assert value(metrics, "pooled_requests_total", task=task) == count


async def test_requests_with_a_grammar(metrics, clock):
    sampling = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a"))
    request = REQUEST.with_sampling(sampling)
    metrics.observe(request, ScriptedOutputs(clock, []), record(), Lease())
    metrics.observe(REQUEST, ScriptedOutputs(clock, []), record(), Lease())
    assert value(metrics, "constrained_requests_total", kind="regex") == 1
