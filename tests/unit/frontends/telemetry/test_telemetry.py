"""Where requests begin and end, for those who count them and write them down."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from loraplex.core.errors import QueueFullError
from loraplex.core.principal import Principal
from loraplex.core.request import GenerateRequest
from loraplex.frontends.telemetry.telemetry import Telemetry, TenantUse
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.wire_request import (
    as_current,
    current_request,
    note_error,
)

REQUEST = GenerateRequest(request_id=1, model="m", prompt="x")
BLUE = Principal("blue")
METRICS = RequestMetrics(())


def begun(telemetry: Telemetry, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return telemetry.begin("http", "GET", "/", "192.0.2.1", headers)


def samples(telemetry: Telemetry) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.values())}": sample.value
        for metric in telemetry.collect()
        for sample in metric.samples
    }


def test_a_request_is_open_until_its_one_end():
    ended = []
    telemetry = Telemetry([ended.append])
    request = begun(telemetry)
    assert telemetry.num_open == {"http": 1}
    request.end("200")
    request.end("500")
    assert telemetry.num_open == {"http": 0}
    assert (ended, request.status) == ([request], "200")
    assert samples(telemetry)["loraplex_wire_requests_total['', '200', 'http']"] == 1


def test_what_a_scrape_reads():
    telemetry = Telemetry()
    for status, number in (("200", 2), ("404", 1)):
        for _ in range(number):
            begun(telemetry).end(status)
    begun(telemetry)
    text = telemetry_text(telemetry)
    assert 'loraplex_open_requests{protocol="http"} 1.0' in text
    assert 'loraplex_wire_requests_total{code="",protocol="http",status="200"} 2.0' in text
    assert 'loraplex_wire_requests_created{code="",protocol="http",status="404"} 1.' in text


def telemetry_text(telemetry: Telemetry) -> str:
    registry = CollectorRegistry()
    registry.register(telemetry)
    return generate_latest(registry).decode()


class Yielding(str):
    """Other threads run whenever it is looked up."""

    __slots__ = ()

    def __hash__(self) -> int:
        time.sleep(0)
        return super().__hash__()


def test_any_thread_may_begin_and_end_one():
    telemetry = Telemetry()

    def work() -> None:
        for _ in range(200):
            telemetry.begin(Yielding("http"), "GET", "/", "", {}).end("200")

    with ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(work) for _ in range(4)]:
            future.result()
    assert telemetry.num_open == {"http": 0}
    assert samples(telemetry)["loraplex_wire_requests_total['', '200', 'http']"] == 800


def test_what_works_for_it_finds_it():
    request = begun(Telemetry())
    with as_current(request):
        note_error(QueueFullError("full"))
        with METRICS.admission(REQUEST, BLUE) as record:
            pass
    assert current_request() is None
    assert (request.tenant, request.error_code) == ("blue", "queue_full")
    assert request.generations == [record]
    with METRICS.admission(REQUEST, BLUE):
        note_error(QueueFullError("nobody's"))
    assert request.generations == [record]


def test_use_by_tenant():
    telemetry = Telemetry()
    for tokens in (3, 4):
        request = begun(telemetry)
        with as_current(request), METRICS.admission(REQUEST, BLUE) as record:
            record.admitted((), 10, 6)
            record.num_output_tokens = tokens
        request.end("200")
    begun(telemetry).end("401")
    use = TenantUse(requests=2, prompts=2, prompt_tokens=20, completion_tokens=7)
    assert telemetry.tenants == {"blue": use}


def test_a_part_of_a_stream_is_not_open_twice():
    telemetry = Telemetry()
    stream = telemetry.begin("grpc", "", "/s/M", "192.0.2.1", {}, route="/s/M")
    part = stream.within()
    assert (part.protocol, part.request_id) == ("grpc-stream", stream.request_id)
    part.end("OK")
    assert telemetry.num_open == {"grpc": 1}
    stream.end("OK")
    assert telemetry.num_open == {"grpc": 0}


def test_a_failing_writer_affects_no_request(caplog):
    ended = []

    def broken(request):
        raise RuntimeError("no disk")

    begun(Telemetry([broken, ended.append]), x_request_id="r-1").end("200")
    assert len(ended) == 1
    assert "request r-1 could not be written down" in caplog.text


@pytest.mark.parametrize("agent", ["", "a" * 1000])
def test_user_agents_are_cut(agent):
    assert begun(Telemetry(), user_agent=agent).user_agent == agent[:200]
