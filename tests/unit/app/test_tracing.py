"""Traces of a whole server, as a collector on loopback gets them."""

import asyncio
import http.server
import itertools
import sys
import threading
import time
import urllib.request

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from loraplex.core.errors import ConfigError
from loraplex.frontends.telemetry import otlp
from support.fake_engine_process import FakeEngineSettings
from support.naming import naming

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OTLP/HTTP receiver; it responds with `status`."""

    def __init__(self, status: int = 200) -> None:
        self.spans: list = []
        self.resources: list[dict[str, str]] = []
        self.paths: list[str] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.take(self.path, body)
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(attributes_of(resource.resource))
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def named(self, name: str):
        [span] = [span for span in self.spans if span.name == name]
        return span

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def attributes_of(holder) -> dict:
    def value_of(value):
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [value_of(each) for each in value.array_value.values]
        return getattr(value, kind)

    return {each.key: value_of(each.value) for each in holder.attributes}


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.close()


async def test_a_completion_in_the_callers_trace(collector, run):
    server = run(FakeEngineSettings(step_seconds=0.01), otlp_endpoint=collector.url)
    await server.until_ready()
    before_ns = time.time_ns()
    data = b'{"model": "m", "prompt": "secret", "max_tokens": 4, "ignore_eos": true}'
    headers = {
        "content-type": "application/json",
        "traceparent": f"00-{TRACE}-{CALLER}-01",
        "tracestate": "vendor=1",
        "x-request-id": "my-id",
    }
    request = urllib.request.Request(server.url("/v1/completions"), data, headers)
    await asyncio.to_thread(lambda: urllib.request.urlopen(request).read())
    after_ns = time.time_ns()
    server.signal()
    await server.ended()
    assert set(collector.paths) == {"/v1/traces"}
    assert collector.resources[0]["service.name"] == "loraplex"

    root = collector.named("POST /v1/completions")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, CALLER)
    assert root.trace_state == "vendor=1"
    assert root.kind == root.SPAN_KIND_SERVER
    reported = attributes_of(root)
    assert reported["http.response.status_code"] == 200
    assert reported["http.route"] == "/v1/completions"
    assert reported["loraplex.request_id"] == "my-id"
    assert reported["loraplex.tenant"] == "default"

    generation = collector.named("text_completion m")
    assert generation.parent_span_id == root.span_id
    reported = attributes_of(generation)
    assert reported["gen_ai.operation.name"] == "text_completion"
    assert reported["gen_ai.request.model"] == "m"
    assert reported["gen_ai.request.max_tokens"] == 4
    assert reported["gen_ai.usage.output_tokens"] == 4
    assert reported["gen_ai.usage.input_tokens"] > 0
    assert reported["gen_ai.response.finish_reasons"] == ["length"]

    names = ["admit", "queue", "prefill", "decode"]
    stages = [collector.named(name) for name in names]
    assert {stage.parent_span_id for stage in stages} == {generation.span_id}
    for one, following in itertools.pairwise(stages[1:]):
        assert one.end_time_unix_nano == following.start_time_unix_nano
    assert stages[-1].end_time_unix_nano - stages[-1].start_time_unix_nano > 0.02e9
    for span in (root, generation, *stages):
        assert span.trace_id.hex() == TRACE
        assert before_ns <= span.start_time_unix_nano <= span.end_time_unix_nano <= after_ns
    assert not any(b"secret" in span.SerializeToString() for span in collector.spans)


async def test_a_trace_of_its_own_is_the_one_in_the_log(collector, run, tmp_path):
    log = tmp_path / "log"
    server = run(otlp_endpoint=collector.url + "/v1/traces", access_log=str(log))
    await server.until_ready()
    await server.complete(model="nobody")
    await server.get("/v2/health/ready")
    server.signal()
    await server.ended()
    span = collector.named("POST /v1/completions")
    assert span.parent_span_id == b""
    assert f'"trace_id":"{span.trace_id.hex()}"' in log.read_text()
    assert attributes_of(span)["error.type"] == "model_not_found"
    assert span.status.code == span.status.STATUS_CODE_UNSET
    other = collector.named("GET /v2/health/ready")
    assert other.trace_id != span.trace_id


async def test_a_trace_that_is_not_sampled_has_no_spans(collector, run):
    server = run(otlp_endpoint=collector.url)
    await server.until_ready()
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-00"}
    request = urllib.request.Request(server.url("/health/live"), headers=headers)
    await asyncio.to_thread(lambda: urllib.request.urlopen(request).read())
    server.signal()
    await server.ended()
    assert collector.spans == []


async def test_a_collector_that_fails_changes_nothing(run):
    collector = Collector(status=400)
    server = run(otlp_endpoint=collector.url)
    await server.until_ready()
    assert (await server.complete(max_tokens=2))[0] == 200
    server.signal()
    await server.ended()
    collector.close()
    assert collector.paths


async def test_a_collector_that_is_not_there(run, monkeypatch):
    monkeypatch.setattr(otlp, "_CLOSE_SECONDS", 0.2)
    server = run(otlp_endpoint="http://127.0.0.1:1")
    await server.until_ready()
    assert (await server.complete(max_tokens=2))[0] == 200
    server.signal()
    await server.ended()


async def test_without_the_extra(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, otlp.__name__)
    server = run(otlp_endpoint="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=naming("otlp_endpoint", "opentelemetry-sdk")):
        await server.ended()


async def test_triton_reports_that_traces_go_elsewhere(collector, run):
    server = run(otlp_endpoint=collector.url)
    await server.until_ready()
    status, text = await server.get("/v2/trace/setting")
    assert status == 200
    assert '"trace_mode":"opentelemetry"' in text.replace(": ", ":")
    assert '"trace_rate":"1"' in text.replace(": ", ":")
