"""The newest requests: which are kept, and how they are found."""

import itertools

import msgspec
import pytest

from loraplex.core.errors import (
    AdapterNotFoundError,
    InvalidParameterError,
    InvalidRequestError,
    ModelNotFoundError,
    PromptTooLongError,
    RequestError,
    StepFailedError,
    UnsupportedFeatureError,
)
from loraplex.core.output import FinishReason, RequestTiming, ResolvedAdapter
from loraplex.core.request import GenerateRequest
from loraplex.frontends.openai.errors import raise_errors
from loraplex.frontends.telemetry.recent_requests import (
    MAX_GENERATIONS,
    RecentRequest,
    RecentRequests,
    RequestKind,
    RequestPage,
    RequestQuery,
)
from loraplex.frontends.telemetry.telemetry import Telemetry
from loraplex.serving.wire_request import (
    GenerationRecord,
    TraceParent,
    WireRequest,
    as_current,
    note_subject,
)

MS = 10**6
ZH = ResolvedAdapter("zh", "d1")
SECRET = "the secret prompt"


def recent_requests(most=1000):
    """Requests with ids from 1."""
    return RecentRequests(most, itertools.count(1).__next__)


def generation(*adapters, **fields):
    request = GenerateRequest(request_id=1, model="m", prompt=SECRET)
    return GenerationRecord(request, "acme", started_ns=2 * MS, adapters=adapters, **fields)


def wire(tenant="acme", *records, error=None, status=""):
    return WireRequest(
        protocol="http",
        method="POST",
        path="/v1/completions",
        client="192.0.2.1",
        request_id="r",
        headers={"authorization": f"Bearer {SECRET}"},
        trace_of=lambda headers: TraceParent("1" * 32, ""),
        on_begin=lambda request: None,
        on_end=lambda request: None,
        tenant=tenant,
        error=error,
        status=status,
        generations=list(records),
        started_ns=1 * MS,
        ended_ns=60 * MS if status else 0,
    )


def ended(*adapters, tenant="acme", status="200", error=None):
    return wire(tenant, generation(*adapters), error=error, status=status)


def rows(recent, open_requests=(), **query):
    page = recent.page(RequestQuery(**{"until": 10**15, "limit": 10, **query}), open_requests)
    return [
        [msgspec.json.decode(data, type=RecentRequest) for _, data in part]
        for part in (page.ended, page.open)
    ]


def ids(recent, **query):
    return [row.id for row in rows(recent, **query)[0]]


def test_phases_follow_each_other():
    timing = RequestTiming(
        arrival_ns=5 * MS,
        adapter_load_ns=7 * MS,
        adapter_copy_ns=3 * MS,
        first_scheduled_ns=18 * MS,
        first_token_ns=20 * MS,
        last_token_ns=50 * MS,
        num_cached_tokens=3,
        num_preemptions=1,
        num_restarts=2,
    )
    recent = recent_requests()
    done = {"admitted_ns": 6 * MS, "finish_reasons": {0: FinishReason.STOP}, "timing": timing}
    recent(wire("acme", generation(ZH, **done), generation(**done), status="200"))
    ((one,), _) = rows(recent)
    with_adapter, _ = one.generations
    assert msgspec.structs.astuple(with_adapter.phases) == (3, 10, 3, 2, 30, 10)
    assert (with_adapter.start_ms, with_adapter.restarts, with_adapter.preemptions) == (1, 2, 1)
    assert (one.phase, one.status, one.num_generations) == ("ended", 200, 2)
    assert with_adapter.finish_reasons == ["stop"]


@pytest.mark.parametrize(
    ("fields", "phase"),
    [
        ({}, "admission"),
        ({"admitted_ns": 3 * MS}, "waiting"),
        ({"admitted_ns": 3 * MS, "first_token_ns": 4 * MS}, "decode"),
        ({"admitted_ns": 3 * MS, "first_token_ns": 4 * MS, "ended_ns": 5 * MS}, "write"),
    ],
)
def test_open_requests_have_a_phase(fields, phase):
    _, (one,) = rows(recent_requests(), [wire("acme", generation(**fields)), wire("acme")])
    assert (one.phase, one.id, one.status, one.seconds) == (phase, 0, None, None)
    assert one.generations[0].finish_reasons == []


def test_neither_prompts_nor_keys_are_kept():
    recent, request = recent_requests(), ended(ZH)
    recent(request)
    page = recent.page(RequestQuery(until=10, limit=10), [wire("acme", generation())])
    assert len(page.ended) == len(page.open) == 1
    assert SECRET.encode() not in msgspec.json.encode(page)


def test_what_is_not_kept():
    recent = recent_requests()
    recent(wire("", generation(), status="200"))
    recent(wire("", status="401", error=AdapterNotFoundError("no")))
    recent(wire("acme", status="200"))
    assert ids(recent) == []
    recent(wire("acme", status="404", error=AdapterNotFoundError("no")))
    assert ids(recent) == [1]
    nothing = recent_requests(0)
    nothing(ended())
    assert ids(nothing) == []


def test_filters():
    recent, error = recent_requests(), AdapterNotFoundError("no")
    for request in (
        ended(ZH),
        ended(),
        ended(tenant="other"),
        ended(status="404", error=error),
        ended(ZH, status="NOT_FOUND", error=error),
    ):
        recent(request)
    assert ids(recent, tenant="acme") == [1, 2, 4, 5]
    assert ids(recent, adapter="zh") == [1, 5]
    assert ids(recent, adapter="") == [2, 3, 4]
    assert ids(recent, status="ok") == [1, 2, 3]
    assert ids(recent, status="error", adapter="zh") == [5]
    assert ids(recent, status="404") == [4]
    assert ids(recent, status="NOT_FOUND") == [5]
    assert ids(recent, status="open") == []
    opened = [wire("acme", generation(ZH)), wire("other", generation())]
    assert len(rows(recent, opened)[1]) == 2
    assert len(rows(recent, opened, tenant="other", status="open")[1]) == 1
    assert rows(recent, opened, status="ok")[1] == []


def about(adapter, *, is_change=True, status="200", error=None, route="/v1/adapters"):
    request = wire("acme", status=status, error=error)
    request.path = request.route = route
    with as_current(request):
        note_subject("m", adapter, is_change=is_change)
    return request


def test_changes_of_adapters():
    """They are kept whether they fail or not; what only describes one is kept if it fails."""
    recent, error = recent_requests(), AdapterNotFoundError("there is no adapter 'no'")
    recent(ended(ZH))
    recent(about("zh"))
    recent(about("zh", is_change=False))
    recent(about("no", is_change=False, status="404", error=error))
    unreadable = wire("acme", status="400", error=InvalidRequestError("the body is empty"))
    unreadable.route = "/v1/adapters"
    recent(unreadable)
    (first, loaded, missing, bad), _ = rows(recent)
    assert (first.kind, first.model, first.subject, first.message) == (
        "generation",
        "m",
        None,
        None,
    )
    assert (loaded.kind, loaded.model, loaded.subject) == ("adapter", "m", "zh")
    assert (missing.subject, missing.message) == ("no", "there is no adapter 'no'")
    assert (bad.kind, bad.model, bad.subject, bad.message) == (
        "adapter",
        None,
        None,
        "the body is empty",
    )
    assert ids(recent, kind=RequestKind.ADAPTER) == [2, 3, 4]
    assert ids(recent, kind=RequestKind.GENERATION) == [1]
    assert ids(recent, adapter="zh") == [1, 2]
    assert ids(recent, model="m") == [1, 2, 3]
    assert ids(recent, model="other") == []


def listing(*errors):
    with pytest.raises(RequestError) as caught:
        raise_errors(errors)
    return caught.value


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ModelNotFoundError("there is no 'zz'", param="model"), "there is no 'zz'"),
        (StepFailedError("xyz " * 150), "xyz " * 125),
        (InvalidParameterError("top_k must be 1, got 2", param="top_k"), "top_k must be 1, got 2"),
        (PromptTooLongError("the prompt has 9 tokens", param="prompt"), "the prompt has 9 tokens"),
        (
            UnsupportedFeatureError("messages[0].content[0] has type 'x'", param="messages[0]"),
            "messages[0].content[0] has type 'x'",
        ),
        (
            InvalidRequestError(f"the body must be an object, got {SECRET}"),
            "the body must be an object",
        ),
        (InvalidRequestError(f"the template: {SECRET}", param="messages"), None),
        *(
            (
                InvalidParameterError(f"it must be a text, got {SECRET}", param=param),
                "it must be a text",
            )
            for param in (
                *("prompt", "messages[3].content", "entries[2].prompt", "entries[2].messages[0]"),
                *("input", "inputs", "text_input", "QUERY", "documents[0].text", "prompt[1]"),
            )
        ),
        (
            listing(
                InvalidParameterError("top_k must be 1, got 2", param="top_k"),
                InvalidParameterError(f"it must be a text, got {SECRET}", param="prompt"),
            ),
            "top_k must be 1; it must be a text",
        ),
    ],
)
def test_messages_have_nothing_of_a_prompt(error, shown):
    recent = recent_requests()
    recent(wire("acme", status="400", error=error))
    recent(wire("acme", generation(error=error), status="400"))
    for row in rows(recent)[0]:
        assert row.message == shown


def test_later_ones_after_a_cursor():
    recent = recent_requests()
    for _ in range(5):
        recent(ended())
    assert ids(recent, limit=2) == [4, 5]
    assert ids(recent, limit=2, after=1) == [2, 3]
    assert ids(recent, after=3, until=4) == [4]


def test_ids_rise_though_the_clock_goes_back():
    times = iter((100, 50, 200, 60))
    recent = RecentRequests(10, lambda: next(times))
    for _ in range(3):
        recent(ended())
    assert ids(recent) == [100, 101, 200]
    assert recent.now() == 200


def test_a_busy_tenant_does_not_displace_others():
    recent = recent_requests(10)
    recent(ended(tenant="quiet"))
    for _ in range(100):
        recent(ended(tenant="busy"))
    assert ids(recent, limit=100) == [1, *range(93, 102)]


def test_memory_is_bounded():
    recent = recent_requests(10)
    large = [ResolvedAdapter("x" * 256, "d" * 64)] * 8
    for _ in range(10):
        recent(wire("acme", *[generation(*large)] * 100, status="200"))
    ((*kept,), _) = rows(recent)
    assert 1 <= len(kept) < 10
    assert all(row.num_generations == 100 for row in kept)
    assert all(len(row.generations) == MAX_GENERATIONS for row in kept)


def test_pages_of_processes_are_joined():
    one, two = recent_requests(), recent_requests()
    for recent in (one, two, two):
        recent(ended())
    for query, expected in (
        (RequestQuery(until=9, limit=2), [1, 2]),
        (RequestQuery(until=9, limit=2, after=0), [1, 1]),
    ):
        pages = [recent.page(query, [wire("acme", generation())]) for recent in (one, two)]
        page = RequestPage.joined(pages, query)
        assert [number for number, _ in page.ended] == expected
        assert page.num_open == len(page.open) == 2


def test_rows_of_the_same_microsecond_are_joined():
    rows_of_one = [(1, msgspec.Raw(b"{}"))]
    page = RequestPage(ended=rows_of_one, open=rows_of_one, num_open=1)
    joined = RequestPage.joined([page, page], RequestQuery(until=9, limit=9))
    assert [number for number, _ in joined.ended + joined.open] == [1, 1, 1, 1]


def test_telemetry_knows_what_is_open():
    telemetry = Telemetry()
    stream = telemetry.begin("grpc", "", "/s/M", "", {})
    part = stream.within()
    assert telemetry.open_requests == [stream, part]
    part.end("OK")
    assert telemetry.open_requests == [stream]
    stream.end("OK")
    assert telemetry.open_requests == []
