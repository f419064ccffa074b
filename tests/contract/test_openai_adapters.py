"""Several adapters in a request and /v1/compare over sockets, before an EchoService."""

import json
from collections.abc import Callable, Iterator, Mapping

import httpx
import pytest
from starlette.applications import Starlette

from loraplex.core.adapter import ByDigest, ByName, ByTaskId
from loraplex.core.errors import StepFailedError
from loraplex.core.principal import LOCAL, Principal
from loraplex.frontends.openai import openai_fallback_routes, openai_routes
from support.echo_service import EchoService
from support.eventually import eventually
from support.served import served

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def backend() -> EchoService:
    backend = EchoService()
    for task_id, name in enumerate(("fr", "legal", "org/de")):
        backend.register(name, task_id=task_id)
    return backend


@pytest.fixture(scope="module")
def http(backend: EchoService) -> Iterator[httpx.Client]:
    app = Starlette()
    app.routes.extend(openai_routes(backend))
    app.routes.extend(openai_fallback_routes())
    with served(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def digest(backend: EchoService, name: str) -> str:
    return next(card.digest for card in backend.adapters(LOCAL) if card.name == name)


def send(http: httpx.Client, path: str = "/v1/completions", **body) -> httpx.Response:
    prompt = {"messages": HELLO} if "chat" in path else {"prompt": "hi"}
    response = http.post(path, json=prompt | {"max_tokens": 99} | body)
    assert response.status_code == 200, response.text
    return response


def test_several_adapters(backend: EchoService, http: httpx.Client):
    legal = digest(backend, "legal")
    adapters = ["fr", {"digest": legal, "scale": -0.5}, {"task_id": 2, "scale": 2}]
    response = send(http, adapters=adapters, model="echo")
    assert response.json()["choices"][0]["text"] == "echo+fr+legal+org/de: hi"
    digests = [digest(backend, name) for name in ("fr", "legal", "org/de")]
    assert response.headers["x-loraplex-adapter"] == ",".join(digests)
    chosen = backend.requests[-1].adapters
    assert [choice.key for choice in chosen] == [ByName("fr"), ByDigest(legal), ByTaskId(2)]
    assert [choice.scale for choice in chosen] == [1.0, -0.5, 2.0]


def test_in_chat_and_in_streams(http: httpx.Client):
    chat = send(http, "/v1/chat/completions", adapters=["fr", "legal"])
    assert chat.json()["choices"][0]["message"]["content"].startswith("echo+fr+legal: ")
    stream = send(http, adapters=["fr", "legal"], stream=True)
    assert len(stream.headers["x-loraplex-adapter"].split(",")) == 2


def test_one_adapter_with_a_scale(backend: EchoService, http: httpx.Client):
    for body in ({"model": "fr"}, {"lora_model": "fr"}, {"model": "fr", "lora_model": "fr"}):
        send(http, lora_scale=0.25, **body)
        [choice] = backend.requests[-1].adapters
        assert (choice.key, choice.scale) == (ByName("fr"), 0.25)


@pytest.mark.parametrize("nothing", [None, []])
def test_no_adapters_are_none(backend: EchoService, http: httpx.Client, nothing):
    send(http, adapters=nothing, model="fr")
    assert [choice.key for choice in backend.requests[-1].adapters] == [ByName("fr")]
    send(http, adapters=nothing)
    assert backend.requests[-1].adapters == ()


def test_the_fingerprint_follows_digests_and_scales(http: httpx.Client):
    def fingerprint(*adapters) -> str:
        return send(http, adapters=list(adapters)).json()["system_fingerprint"]

    half = {"name": "fr", "scale": 0.5}
    prints = [
        fingerprint(),
        fingerprint("fr"),
        fingerprint(half),
        fingerprint("fr", "legal"),
        fingerprint(half, "legal"),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint("legal", half) == prints[-1]
    assert prints[1] == send(http, model="fr").json()["system_fingerprint"]


def test_a_comparison(backend: EchoService, http: httpx.Client):
    requested = [None, "fr", [{"name": "fr", "scale": 0.5}, "legal"], {"task_id": 9}]
    body = send(http, "/v1/compare", adapters=requested, logprobs=2, seed=7).json()
    assert body["object"] == "comparison"
    assert (body["model"], body["prompt_tokens"], body["seed"]) == ("echo", 3, 7)
    base, fr, both, unknown = body["answers"]
    assert [response["asked"] for response in body["answers"]] == requested
    assert [response["index"] for response in body["answers"]] == [0, 1, 2, 3]
    texts = [response["text"] for response in (base, fr, both)]
    assert texts == ["echo: hi", "echo+fr: hi", "echo+fr+legal: hi"]
    assert (base["adapters"], base["versus_base"], base["error"]) == ([], None, None)
    assert both["adapters"] == [
        {"name": "fr", "digest": digest(backend, "fr"), "scale": 0.5},
        {"name": "legal", "digest": digest(backend, "legal"), "scale": 1.0},
    ]
    assert fr["num_tokens"] == len(fr["logprobs"]) == len("echo+fr: hi") + 1
    assert fr["logprob"] == sum(token["logprob"] for token in fr["logprobs"])
    assert {len(token["top_logprobs"]) for token in fr["logprobs"]} == {2}
    first = fr["versus_base"]["first"]
    assert (fr["versus_base"]["num_same_tokens"], first["position"]) == (4, 4)
    assert (first["here"]["token"], first["base"]["token"]) == ("+", ":")
    # Each adapter takes 0.5 from all log probabilities.
    assert fr["versus_base"]["mean_logprob_difference"] == -0.5
    # Echo's twenty likeliest tokens of "+" are its successors: ":" is 15 after it, "+" is none.
    assert first["base"]["logprob"] == first["here"]["logprob"] - 15
    assert first["here"]["base_logprob"] is None
    assert {"ttft_ms", "total_ms", "num_cached_tokens"} <= fr.keys()
    assert unknown["error"]["code"] == "adapter_not_found"
    assert unknown["error"]["param"] == "adapters[3]"
    assert unknown.keys() == {"index", "asked", "error"}


def test_greedy_is_the_default_and_the_seed_is_reported(backend: EchoService, http: httpx.Client):
    send(http, "/v1/compare", adapters=[None, "fr"])
    assert {request.sampling.temperature for request in backend.requests[-2:]} == {0.0}
    body = send(http, "/v1/compare", adapters=[None, "fr"], temperature=0.7, top_p=0.5).json()
    for request in backend.requests[-2:]:
        assert (request.sampling.temperature, request.sampling.top_p) == (0.7, 0.5)
        assert request.sampling.seed == body["seed"]


def test_a_conversation_is_compared(backend: EchoService, http: httpx.Client):
    body = {"messages": HELLO, "adapters": [None, "fr"], "max_tokens": 99}
    responses = http.post("/v1/compare", json=body).json()["answers"]
    assert responses[1]["text"] == "echo+fr: user: hello\nassistant: "
    assert not backend.requests[-1].add_special_tokens


def test_the_last_message_of_a_compared_conversation_is_continued(
    backend: EchoService, http: httpx.Client
):
    messages = [*HELLO, {"role": "assistant", "content": "hey, "}]
    for more in ({"messages": messages, "adapters": [None]}, {"entries": [{"messages": messages}]}):
        body = {**more, "max_tokens": 4, "continue_final_message": True}
        assert http.post("/v1/compare", json=body).status_code == 200
        assert str(backend.requests[-1].prompt).endswith("assistant: hey, ")
    for change in ({"add_generation_prompt": True}, {"prompt": "a", "messages": None}):
        body = {"messages": messages, "adapters": [None], "continue_final_message": True}
        refused = http.post("/v1/compare", json=body | change)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "continue_final_message"


def test_a_failure_in_the_middle_is_one_response(backend: EchoService, http: httpx.Client):
    backend.plant(StepFailedError("a step failed"), after_outputs=1)
    base, fr = send(http, "/v1/compare", adapters=[None, "fr"]).json()["answers"]
    assert base["error"]["message"] == "a step failed"
    assert (fr["text"], fr["versus_base"]) == ("echo+fr: hi", None)


def test_if_all_fail_the_request_does(http: httpx.Client):
    response = http.post("/v1/compare", json={"prompt": "hi", "adapters": ["no", "nor"]})
    assert response.status_code == 404
    assert "'no'" in response.json()["error"]["message"]


def events(response: httpx.Response) -> list[dict]:
    """The events of a stream that ended well, parsed."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *found, end = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert end == "[DONE]"
    return [json.loads(event) for event in found]


TIMES = {"ttft_ms", "total_ms", "timing"}


def test_a_streamed_comparison_is_the_same_as_a_whole_one(backend: EchoService, http: httpx.Client):
    body = {"adapters": ["fr", None, {"task_id": 9}], "logprobs": 2, "seed": 7}
    whole = send(http, "/v1/compare", **body).json()
    started, *found, last = events(send(http, "/v1/compare", **body, stream=True))
    assert started == {"id": last["id"], "object": "comparison.started"}
    for entry in whole["answers"]:
        mine = [event for event in found if event["index"] == entry["index"]]
        *chunks, end = mine
        assert end.pop("done") is True
        if entry["error"]:
            assert mine == [entry]
            continue
        assert "".join(chunk["text"] for chunk in chunks) == entry.pop("text")
        for field in ("token_ids", "logprobs"):
            assert [each for chunk in chunks for each in chunk[field]] == entry.pop(field)
        assert chunks[-1]["finish_reason"] == entry["finish_reason"] == "stop"
        assert {*end} == {*entry}
        assert {key: end[key] for key in end if key not in TIMES} == {
            key: entry[key] for key in entry if key not in TIMES
        }
    assert last["usage"] == whole["usage"]
    assert last["usage"]["completion_tokens"] == len("echo: hi") + len("echo+fr: hi") + 2
    assert (last["seed"], last["prompt_tokens"]) == (7, whole["prompt_tokens"])
    assert "answers" not in last


def test_an_error_is_an_event_and_the_others_go_on(backend: EchoService, http: httpx.Client):
    backend.plant(StepFailedError("a step failed"), after_outputs=1)
    found = events(send(http, "/v1/compare", adapters=["legal", "fr", None], stream=True))
    ends = {event["index"]: event for event in found if event.get("done")}
    assert ends[0]["error"]["message"] == "a step failed"
    assert ends[1]["versus_base"]["num_same_tokens"] == len("echo")
    assert ends[2]["versus_base"] is None


def test_a_streamed_comparison_without_any_output_is_refused(http: httpx.Client):
    body = {"prompt": "hi", "adapters": ["no", "nor"], "stream": True}
    response = http.post("/v1/compare", json=body)
    assert response.status_code == 404
    assert "'no'" in response.json()["error"]["message"]


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
}


def test_a_compared_chat_has_its_tool_calls_apart(backend: EchoService, http: httpx.Client):
    call = '{"name": "weather", "arguments": {"city": "Rome"}}'
    body = {"messages": HELLO, "adapters": [None], "tools": [WEATHER], "tool_choice": "required"}
    for stream in (False, True):
        backend.scripts.append([call])
        response = http.post("/v1/compare", json={**body, "max_tokens": 99, "stream": stream})
        if stream:
            _, *chunks, end, _ = events(response)
            deltas = [call for c in chunks for call in c["delta"].get("tool_calls", [])]
            name = next(c["function"]["name"] for c in deltas if "name" in c["function"])
            arguments = "".join(c["function"]["arguments"] for c in deltas)
            assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == ""
        else:
            [end] = response.json()["answers"]
            [found] = end["message"]["tool_calls"]
            name, arguments = found["function"]["name"], found["function"]["arguments"]
            assert end["text"] == call
        assert (name, json.loads(arguments)) == ("weather", {"city": "Rome"})
        assert end["finish_reason"] == "tool_calls"


def test_tools_need_messages(http: httpx.Client):
    body = {"prompt": "hi", "adapters": [None], "tools": [WEATHER]}
    response = http.post("/v1/compare", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


def test_a_compared_request_has_its_timeout(backend: EchoService, http: httpx.Client):
    send(http, "/v1/compare", adapters=[None, "fr"], timeout_seconds=5.0)
    assert {request.timeout_seconds for request in backend.requests[-2:]} == {5.0}


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
LONG = {"role": "user", "content": "x" * 5000}


def test_entries_have_prompts_of_their_own_in_one_batch(backend: EchoService, http: httpx.Client):
    entries = [
        {"messages": HELLO},
        {"adapters": "fr", "messages": [*HELLO, {"role": "assistant", "content": "hey"}]},
        {"adapters": ["fr", "legal"], "prompt": "ho", "seed": 5},
        {"adapters": {"name": "fr", "scale": 0.5}, "messages": HELLO},
        {"adapters": {"task_id": 9}, "prompt": [104, 105]},
    ]
    body = {"entries": entries, "max_tokens": 99, "temperature": 0.5}
    whole = http.post("/v1/compare", json=body).json()
    found = whole["answers"]
    assert [each["asked"] for each in found] == [each.get("adapters") for each in entries]
    assert found[0]["text"] == "echo: user: hello\nassistant: "
    assert found[1]["text"] == "echo+fr: user: hello\nassistant: hey\nassistant: "
    assert found[2]["text"] == "echo+fr+legal: ho"
    assert found[4]["error"]["code"] == "adapter_not_found"
    assert ["message" in each for each in found] == [True, True, False, True, False]
    # Only the fourth continues what the base does.
    assert [each.get("versus_base") is not None for each in found] == [False] * 3 + [True, False]
    requests = backend.requests[-5:]
    assert len({id(request.batch) for request in requests}) == 1
    seeds = [request.sampling.seed for request in requests]
    assert (seeds[2], seeds[0]) == (5, whole["seed"])
    assert len({*seeds}) == 2
    assert [request.add_special_tokens for request in requests] == [False, False, True, False, True]
    assert whole["prompt_tokens"] is None
    tokens = [each["prompt_tokens"] for each in found[:4]]
    assert tokens[2] == 3
    assert whole["usage"]["prompt_tokens"] == sum(tokens)
    *_, last = events(http.post("/v1/compare", json=body | {"stream": True, "seed": whole["seed"]}))
    assert last["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"adapters": [None]}, "adapters"),
        ({"prompt": "hi"}, "prompt"),
        ({"messages": HELLO}, "messages"),
        ({"entries": []}, "entries"),
        ({"entries": [{"prompt": "a"}, {}]}, "entries[1].prompt"),
        ({"entries": [{"prompt": "a"}, {"prompt": "a", "messages": HELLO}]}, "entries[1].prompt"),
        ({"entries": [{"prompt": ["a", "b"]}]}, "entries[0].prompt"),
        ({"entries": [{"prompt": "a", "seed": 2**64}]}, "entries[0].seed"),
        ({"entries": [{"prompt": "a", "n": 2}]}, "entries[0].n"),
        ({"entries": [{"prompt": "a", "adapters": ["fr", 5]}]}, "entries[0].adapters[1]"),
        ({"entries": [{"messages": []}]}, "entries[0].messages"),
        ({"entries": [{"messages": [{"content": "a"}]}]}, "entries[0].messages[0].role"),
        ({"entries": [{"messages": [*HELLO, IMAGE]}]}, "entries[0].messages[1].content[0]"),
        ({"entries": [{"prompt": "a" * 5000}]}, "entries[0].prompt"),
        ({"entries": [{"messages": [LONG]}]}, "entries[0].messages"),
        ({"entries": [{"prompt": "a"}], "tools": [WEATHER]}, "tools"),
    ],
)
def test_refused_entries(http: httpx.Client, change: dict, param: str):
    response = http.post("/v1/compare", json={"entries": [{"prompt": "hi"}]} | change)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def read_until(lines: Iterator[str], is_wanted: Callable[[dict], bool]) -> dict:
    """Read the events of a stream up to the first that is wanted, and return it."""
    for line in lines:
        if line.startswith("data: {") and is_wanted(event := json.loads(line[6:])):
            return event
    raise AssertionError("the stream has ended")


def test_one_output_is_cancelled_and_the_others_go_on(backend: EchoService, http: httpx.Client):
    backend.delay_seconds = 0.01
    body = {"messages": HELLO, "adapters": [None, "fr"], "ignore_eos": True, "max_tokens": 4000}
    try:
        with http.stream("POST", "/v1/compare", json={**body, "stream": True}) as response:
            lines = response.iter_lines()
            comparison = read_until(lines, lambda _: True)["id"]
            read_until(lines, lambda event: event["index"] == 1)
            path = f"/v1/compare/{comparison}/cancel"
            assert http.post(path, json={"index": 1}).json() == {
                "id": comparison,
                "object": "comparison.cancel",
                "index": 1,
                "cancelled": True,
            }
            last = read_until(lines, lambda event: event["index"] == 1 and "finish_reason" in event)
            assert last["finish_reason"] == "cancelled"
            end = read_until(lines, lambda event: "done" in event)
            assert (end["index"], end["finish_reason"]) == (1, "cancelled")
            assert 0 < end["num_tokens"] < 4000
            assert not http.post(path, json={"index": 1}).json()["cancelled"], "it has ended"
            read_until(lines, lambda event: event["index"] == 0)
            assert http.post(path, json={"index": 0}).json()["cancelled"]
            end = read_until(lines, lambda event: "done" in event)
            assert (end["index"], end["finish_reason"]) == (0, "cancelled")
            read_until(lines, lambda event: "usage" in event)
    finally:
        backend.delay_seconds = 0
    gone = http.post(path, json={"index": 0})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "response_not_found")


def test_what_may_be_cancelled(backend: EchoService, http: httpx.Client):
    backend.delay_seconds = 0.01
    body = {"prompt": "hi", "adapters": [None], "ignore_eos": True, "max_tokens": 4000}
    headers = {"x-request-id": "mine"}
    path = "/v1/compare/cmp-mine/cancel"
    try:
        with http.stream(
            "POST", "/v1/compare", json={**body, "stream": True}, headers=headers
        ) as response:
            lines = response.iter_lines()  # the response is closed with it
            assert read_until(lines, lambda _: True)["id"] == "cmp-mine"
            for index in (-1, 1):
                wrong = http.post(path, json={"index": index})
                assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "index")
            for wrong_body, param in ({}, "index"), ({"index": 0, "no": 1}, "no"):
                wrong = http.post(path, json=wrong_body)
                assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, param)
            assert http.post("/v1/compare/cmp-other/cancel", json={"index": 0}).status_code == 404
            assert http.post(path, json={"index": 0}).json()["cancelled"]
    finally:
        backend.delay_seconds = 0


def test_another_tenants_comparison_is_not_there(backend: EchoService):
    def authenticate(headers: Mapping[str, str]) -> Principal:
        return Principal(headers["x-tenant"])

    app = Starlette(routes=openai_routes(backend, authenticate=authenticate))
    backend.delay_seconds = 0.01
    body = {"prompt": "hi", "adapters": [None], "ignore_eos": True, "max_tokens": 4000}
    mine, other = {"x-tenant": "mine"}, {"x-tenant": "other"}
    try:
        with served(app) as url, httpx.Client(base_url=url, timeout=60) as client:
            request = client.build_request(
                "POST", "/v1/compare", json={**body, "stream": True}, headers=mine
            )
            response = client.send(request, stream=True)
            lines = response.iter_lines()
            comparison = read_until(lines, lambda _: True)["id"]
            path = f"/v1/compare/{comparison}/cancel"
            assert client.post(path, json={"index": 0}, headers=other).status_code == 404
            assert client.post(path, json={"index": 0}, headers=mine).json()["cancelled"]
            response.close()
    finally:
        backend.delay_seconds = 0


def test_a_client_that_leaves_a_streamed_comparison_aborts_all(
    backend: EchoService, http: httpx.Client
):
    backend.delay_seconds = 0.01
    body = {"prompt": "hi", "adapters": [None, "fr"], "ignore_eos": True, "max_tokens": 4000}
    try:
        with http.stream("POST", "/v1/compare", json={**body, "stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            ids = [request.request_id for request in backend.requests[-2:]]
        assert eventually(lambda: set(ids) <= set(backend.aborted))
    finally:
        backend.delay_seconds = 0


def test_two_versions_are_compared(backend: EchoService, http: httpx.Client):
    for path in ("/one", "/two"):
        body = {"name": "mine", "path": path, "replace": True}
        assert http.post("/v1/adapters", json=body).status_code == 201
    now, old = (
        http.get("/v1/adapters/mine", params=query).json() for query in ({}, {"version": 1})
    )
    assert (now["version"], now["source"], old["version"], old["source"]) == (2, "/two", 1, "/one")
    assert {"content", "warnings", "notes", "rank", "num_bytes"} <= old.keys()
    requested = [{"digest": old["digest"]}, {"digest": now["digest"]}]
    body = send(http, "/v1/compare", adapters=requested).json()
    assert [each["adapters"][0]["digest"] for each in body["answers"]] == [
        old["digest"],
        now["digest"],
    ]
    assert [each["text"] for each in body["answers"]] == ["echo+mine: hi"] * 2
    for version, status in ("3", 404), ("0", 400), ("x", 400):
        wrong = http.get("/v1/adapters/mine", params={"version": version})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (status, "version")
    assert http.delete("/v1/adapters/mine").status_code == 200
