"""Spans of requests that came to all kinds of ends."""

import msgspec
import pytest

from loraplex.core.adapter import AdapterChoice, ByName
from loraplex.core.errors import InvalidParameterError, StepFailedError
from loraplex.core.output import FinishReason, RequestTiming, ResolvedAdapter
from loraplex.core.request import GenerateRequest
from loraplex.core.task import Pool
from loraplex.frontends.telemetry.spans import span_tree
from loraplex.serving.wire_request import GenerationRecord, TraceParent, WireRequest

UNIX = 1_700_000_000_000_000_000
MS = 1_000_000
REQUEST = GenerateRequest(
    request_id=1, model="m", prompt="secret", adapters=(AdapterChoice(ByName("a")),)
)
TIMING = RequestTiming(
    arrival_ns=2 * MS,
    adapter_ready_ns=7 * MS,
    first_scheduled_ns=8 * MS,
    first_token_ns=10 * MS,
    last_token_ns=30 * MS,
    adapter_load_ns=4 * MS,
    num_cached_tokens=16,
)


def wire(method: str = "POST", path: str = "/v1/chat/completions", **fields) -> WireRequest:
    return WireRequest(
        protocol="http" if method else "grpc",
        method=method,
        path=path,
        client="192.0.2.1",
        request_id="id",
        headers={},
        trace_of=lambda headers: TraceParent("1" * 32, ""),
        on_begin=lambda request: None,
        on_end=lambda request: None,
        started_ns=1 * MS,
        started_unix_ns=UNIX,
        **fields,
    )


def record(timing: RequestTiming | None = TIMING) -> GenerationRecord:
    record = GenerationRecord(REQUEST, "t", started_ns=1 * MS)
    record.admitted((ResolvedAdapter("a", "d1", 0.5),), 20, now_ns=2 * MS)
    record.first_token_ns, record.num_output_tokens = 11 * MS, 9
    record.timing = timing
    return record


def ended(request: WireRequest, status: str) -> WireRequest:
    request.end(status)
    request.ended_ns = 40 * MS
    return request


def test_the_stages_of_a_request_with_an_adapter():
    one = record()
    one.finish_reasons = {0: FinishReason.STOP}
    one.end(35 * MS)
    tree = span_tree(ended(wire(route="/v1/chat/completions", generations=[one]), "200"))
    assert (tree.name, tree.failure) == ("POST /v1/chat/completions", "")
    assert (tree.start_ns, tree.end_ns) == (UNIX, UNIX + 39 * MS)
    [generation] = tree.children
    assert generation.name == "chat m"
    assert (generation.start_ns, generation.end_ns) == (UNIX, UNIX + 34 * MS)
    reported = generation.attributes
    assert reported["gen_ai.operation.name"] == "chat"
    assert reported["gen_ai.response.finish_reasons"] == ["stop"]
    assert reported["gen_ai.usage.cache_read.input_tokens"] == 16
    assert reported["gen_ai.response.time_to_first_chunk"] == pytest.approx(0.010)
    assert reported["loraplex.adapter.digests"] == ["d1"]
    assert "secret" not in repr(tree)
    spans = [(child.name, child.start_ns, child.end_ns) for child in generation.children]
    assert spans == [
        ("admit", UNIX, UNIX + 1 * MS),
        ("queue", UNIX + 1 * MS, UNIX + 7 * MS),
        ("prefill", UNIX + 7 * MS, UNIX + 9 * MS),
        ("decode", UNIX + 9 * MS, UNIX + 29 * MS),
    ]
    [load] = generation.children[1].children
    assert (load.name, load.end_ns) == ("adapter load", UNIX + 6 * MS)
    assert load.attributes["loraplex.adapter.load_seconds"] == pytest.approx(0.004)


def test_a_client_that_left():
    tree = span_tree(ended(wire(generations=[record(timing=None)]), "200"))
    [generation] = tree.children
    assert generation.end_ns == tree.end_ns
    assert generation.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert [child.name for child in generation.children] == ["admit"]


def test_one_that_was_refused():
    one = GenerationRecord(REQUEST, "t", started_ns=1 * MS)
    one.end(3 * MS, InvalidParameterError("no"))
    tree = span_tree(ended(wire(generations=[one]), "400"))
    assert tree.attributes["error.type"] == "invalid_parameter"
    assert tree.failure == ""
    assert tree.children[0].failure == "invalid_parameter"
    assert tree.children[0].children == ()


@pytest.mark.parametrize(
    ("method", "status", "failure"),
    [
        ("GET", "500", "step_failed"),
        ("GET", "404", ""),
        ("", "INTERNAL", "step_failed"),
        ("", "UNAVAILABLE", "step_failed"),
        ("", "NOT_FOUND", ""),
        ("", "CANCELLED", ""),
    ],
)
def test_whose_fault_it_was(method, status, failure):
    request = wire(method, "/inference.GRPCInferenceService/ModelInfer")
    request.error = StepFailedError("no")
    tree = span_tree(ended(request, status))
    assert tree.failure == failure
    if not method:
        assert tree.name == "inference.GRPCInferenceService/ModelInfer"
        assert tree.attributes["rpc.system.name"] == "grpc"
        assert tree.attributes["rpc.response.status_code"] == status


def test_a_pooled_request_has_no_attributes_of_sampling():
    one = record()
    one.request = msgspec.structs.replace(REQUEST, task=Pool())
    request = wire()
    request.generations.append(one)
    (generation,) = span_tree(ended(request, "200")).children
    assert not [name for name in generation.attributes if name.startswith("gen_ai.request.t")]
    assert generation.attributes["gen_ai.usage.input_tokens"] == 20
