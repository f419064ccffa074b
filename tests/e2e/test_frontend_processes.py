"""Several front-end processes behave as one server, also when one of them is killed."""

import asyncio
import contextlib
import datetime
import json
import os
import signal
import time
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from loraplex.demo import ADAPTER_PATHS
from loraplex.serving.access.key_file_changes import create_key
from loraplex.testing.running_server import MODEL, RunningServer, serving

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("frontend-processes")]

FLAGS = ("--frontend-processes", "2", "--metrics-cache-seconds", "0")
NUM_CONNECTIONS = 24
"""New connections go to either process by chance: all go to one of them once in 8 million times."""
TOKENS = 300
NOW = datetime.datetime(2026, 1, 31, tzinfo=datetime.UTC)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frontends")
    flags = [*FLAGS, "--access-log", str(folder / "access.log")]
    flags += ["--allowed-adapter-roots", str(ADAPTER_PATHS["chinese"].parent)]
    with serving(folder / "state", *flags) as running:
        yield running


def completion(**fields) -> bytes:
    fields = {"model": MODEL, "prompt": "x", "max_tokens": 4, "temperature": 0} | fields
    return json.dumps(fields).encode()


def stream_of(num_tokens: int) -> bytes:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return completion(max_tokens=num_tokens, ignore_eos=True, **options)


STREAM = stream_of(TOKENS)


async def fetch(
    server: RunningServer,
    path: str = "/v1/completions",
    body: bytes | None = None,
    key: str = "",
    begun: asyncio.Event | None = None,
) -> bytes:
    """A whole response with its head, over a connection of its own; what came of a broken one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: localhost\r\n"
    head += "connection: close\r\ncontent-type: application/json\r\n"
    if key:
        head += f"authorization: Bearer {key}\r\n"
    data = b"" if body is None else body
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    received = bytearray()
    try:
        while chunk := await reader.read(65536):
            received += chunk
            if begun is not None and b"data: {" in received:
                begun.set()
    except ConnectionResetError:
        pass
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return bytes(received)


async def fetch_all(server: RunningServer, *args, number: int = NUM_CONNECTIONS) -> list[bytes]:
    return await asyncio.gather(*(fetch(server, *args) for _ in range(number)))


def status(response: bytes) -> int:
    return int(response.split(b" ", 2)[1]) if response else 0


def text_of(response: bytes) -> str:
    head, _, body = response.partition(b"\r\n\r\n")
    assert status(response) == 200, response
    assert b"content-length" in head.lower(), head
    return json.loads(body)["choices"][0]["text"]


def is_whole(response: bytes, num_tokens: int = TOKENS) -> bool:
    usage = f'"completion_tokens":{num_tokens}'.encode()
    return status(response) == 200 and usage in response and b"[DONE]" in response


def metric(server: RunningServer, name: str) -> float:
    lines = server.get("/metrics")[1].splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def processes(server: RunningServer) -> tuple[list[dict], int]:
    """Listed processes, and how many front-end processes SIGKILL has ended."""
    shown = json.loads(server.get("/v1/processes")[1])
    restarts = shown["frontend_restarts"].items()
    return shown["processes"], sum(number for how, number in restarts if "SIGKILL" in how)


def frontends(server: RunningServer) -> list[int]:
    """The front-end processes that the owner has started."""
    folder = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    pids = map(int, folder.read_text().split())
    return [pid for pid in pids if b"frontend_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def begun_streams(
    server: RunningServer, number: int, path: str = "/v1/completions", body: bytes = STREAM
) -> list["asyncio.Task[bytes]"]:
    events = [asyncio.Event() for _ in range(number)]
    streams = [asyncio.create_task(fetch(server, path, body, begun=event)) for event in events]
    async with asyncio.timeout(60):
        await asyncio.gather(*(event.wait() for event in events))
    return streams


async def until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, "not in time"
        await asyncio.sleep(0.05)


async def only_frontend(server) -> int:
    """Return its id, as soon as what an earlier test has killed or stopped is replaced."""
    await until(lambda: len(frontends(server)) == 1, 90)
    return frontends(server)[0]


async def test_vectors_of_all_processes_are_alike_and_count_as_one(server):
    name = "loraplex_pooled_requests_total"
    before = await asyncio.to_thread(metric, server, name)
    body = json.dumps({"model": f"{MODEL}:chinese", "input": ["x", "y"]}).encode()
    responses = await fetch_all(server, "/v1/embeddings", body)
    vectors = set()
    for response in responses:
        assert status(response) == 200, response
        shown = json.loads(response.partition(b"\r\n\r\n")[2])
        assert [entry["index"] for entry in shown["data"]] == [0, 1]
        vectors.add(json.dumps([entry["embedding"] for entry in shown["data"]]))
    assert len(vectors) == 1
    refused = await fetch_all(server, "/v1/embeddings", b'{"input": []}', number=4)
    assert {status(response) for response in refused} == {400}
    await until(lambda: metric(server, name) == before + 2 * NUM_CONNECTIONS)

    def tasks() -> list[list[str]]:
        listed = json.loads(server.get("/v1/requests?limit=1000&status=ok")[1])["requests"]
        of_route = [one for one in listed if one["route"] == "/v1/embeddings"]
        return [[each["task"] for each in one["generations"]] for one in of_route]

    await until(lambda: tasks() == [["embed", "embed"]] * NUM_CONNECTIONS)


async def test_scores_of_labels_are_alike_in_all_processes(server):
    labels = {"query": "x", "items": ["y", "z" * 3000], "label_token_ids": [5, 6]}
    cut = {"truncate_prompt_tokens": 8, "apply_softmax": True}
    body = json.dumps({"model": f"{MODEL}:chinese", **labels, **cut}).encode()
    responses = await fetch_all(server, "/v1/score", body)
    assert {status(response) for response in responses} == {200}
    shown = [json.loads(response.partition(b"\r\n\r\n")[2]) for response in responses]
    assert len({json.dumps(one["scores"]) for one in shown}) == 1
    assert [sum(scores) for scores in shown[0]["scores"]] == [pytest.approx(1)] * 2
    nothing = await fetch_all(server, "/v2/rerank", b'{"query": "a", "documents": ["b"]}', number=4)
    assert {status(response) for response in nothing} == {400}
    assert all(b"this model scores no pairs" in response for response in nothing)


async def test_all_processes_respond_alike_and_count_as_one(server):
    def counts() -> tuple[float, ...]:
        names = ("loraplex_requests_total", "loraplex_e2e_request_latency_seconds_count")
        return tuple(metric(server, name) for name in names)

    before = await asyncio.to_thread(counts)
    responses = await fetch_all(server, "/v1/completions", completion())
    assert len(set(map(text_of, responses))) == 1
    after = await asyncio.to_thread(counts)
    assert [now - then for now, then in zip(after, before, strict=True)] == [NUM_CONNECTIONS] * 2


async def test_requests_of_all_processes_are_listed(server):
    def listed(query="") -> dict:
        return json.loads(server.get(f"/v1/requests?limit=1000{query}")[1])

    await until(lambda: listed()["is_complete"], 90)  # an earlier test may have stopped a process
    earlier = (await asyncio.to_thread(listed))["next"]
    streams = await begun_streams(server, NUM_CONNECTIONS)
    seen = await asyncio.to_thread(listed, f"&after={earlier}")
    assert seen["is_complete"]
    assert 0 < seen["num_open"] == len(seen["open"]) <= NUM_CONNECTIONS
    assert all(map(is_whole, await asyncio.gather(*streams)))
    new: list[dict] = []

    def is_whole_list() -> bool:
        new[:] = listed(f"&after={seen['next']}&status=ok")["requests"]
        return len(new) == NUM_CONNECTIONS - num_ended

    num_ended = sum(one["completion_tokens"] == TOKENS for one in seen["requests"])
    await until(is_whole_list)
    assert [one["id"] for one in new] == sorted(one["id"] for one in new)
    assert all(one["generations"][0]["phases"]["decode_ms"] > 0 for one in new)


async def test_streams_are_whole(server):
    streams = await begun_streams(server, 8)
    assert all(map(is_whole, await asyncio.gather(*streams)))


async def test_chats_and_several_prompts(server):
    messages = [{"role": "user", "content": "Hello"}]
    chat = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0}
    chats = await fetch_all(server, "/v1/chat/completions", json.dumps(chat).encode())
    contents = {
        json.loads(response.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"]
        for response in chats
    }
    assert len(contents) == 1
    several = await fetch_all(server, "/v1/completions", completion(prompt=["a", "b", "c"], n=2))
    for response in several:
        assert len(json.loads(response.partition(b"\r\n\r\n")[2])["choices"]) == 6


async def test_refusals_are_the_same(server):
    bodies = [completion(model="none"), completion(prompt=""), completion(temperature=-1), b"{"]
    for body in bodies:
        responses = await fetch_all(server, "/v1/completions", body, number=12)
        assert len({response.partition(b"\r\n\r\n")[2] for response in responses}) == 1
        assert status(responses[0]) in (400, 404)


async def test_the_rest_is_forwarded(server):
    for path in ("/v1/models", "/health/ready", "/v2/health/ready", f"/v2/models/{MODEL}/config"):
        responses = await fetch_all(server, path, number=12)
        assert len({response.partition(b"\r\n\r\n")[2] for response in responses}) == 1, path
        assert len(set(map(status, responses))) == 1
    body = json.dumps({"text_input": "x", "max_tokens": 4}).encode()
    generated = await fetch_all(server, "/v2/models/ensemble/generate", body, number=12)
    assert set(map(status, generated)) == {200}
    created = await fetch(
        server, "/v1/responses", json.dumps({"model": MODEL, "input": "x"}).encode()
    )
    name = json.loads(created.partition(b"\r\n\r\n")[2])["id"]
    stored = await fetch_all(server, f"/v1/responses/{name}", number=12)
    assert set(map(status, stored)) == {200}


async def test_grpc_is_the_owners(server):
    def infer() -> pb.ServerMetadataResponse:
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            return stub.ServerMetadata(pb.ServerMetadataRequest(), timeout=60)

    assert (await asyncio.to_thread(infer)).name


async def test_an_adapter_is_everywhere_at_once(server):
    load = json.dumps({"name": "fresh", "path": str(ADAPTER_PATHS["chinese"])}).encode()
    expected = text_of(await fetch(server, "/v1/completions", completion(model="chinese")))
    for _ in range(3):
        assert status(await fetch(server, "/v1/adapters", load)) in (200, 201)
        responses = await fetch_all(server, "/v1/completions", completion(model="fresh"))
        assert {text_of(response) for response in responses} == {expected}
        await asyncio.to_thread(server.delete, "/v1/adapters/fresh")
        gone = await fetch_all(server, "/v1/completions", completion(model="fresh"))
        assert set(map(status, gone)) == {404}


async def test_a_client_that_leaves_aborts_its_request(server):
    for path, field in (("/v1/completions", "prompt"), ("/v1/responses", "input")):
        body = {"model": MODEL, field: "x", "stream": True, "ignore_eos": True}
        limit = "max_tokens" if field == "prompt" else "max_output_tokens"
        data = json.dumps(body | {limit: 2000}).encode()
        before = await asyncio.to_thread(metric, server, "loraplex_requests_total")
        streams = await begun_streams(server, 12, path, data)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        # All are counted: those that were not would be counted during the next test.
        await until(lambda: metric(server, "loraplex_requests_total") == before + 12)  # noqa: B023
        await until(lambda: metric(server, "loraplex_running_requests") == 0)


async def test_each_request_is_logged_once_with_its_client(server, tmp_path):
    async def request(number: int, path: str, body: bytes | None) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: localhost\r\n"
        head += f"connection: close\r\nx-request-id: once-{number}\r\n"
        head += "content-type: application/json\r\nx-forwarded-for: 6.6.6.6\r\n"
        data = body or b""
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        assert b"200 OK" in await reader.read()
        writer.close()

    await asyncio.gather(*(request(n, "/v1/completions", completion()) for n in range(12)))
    await asyncio.gather(*(request(n, "/v1/models", None) for n in range(12, 24)))
    log = Path(_flag(server, "--access-log"))

    def logged() -> list[dict]:
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        return [line for line in lines if str(line["request_id"]).startswith("once-")]

    await until(lambda: len(logged()) >= 24)
    assert len({line["request_id"] for line in logged()}) == len(logged()) == 24
    assert {line["client"] for line in logged()} == {"127.0.0.1"}


def _flag(server: RunningServer, name: str) -> str:
    arguments = server.process.args
    assert isinstance(arguments, list)
    return str(arguments[arguments.index(name) + 1])


async def test_a_killed_process_takes_its_own_clients_with_it(server):
    before = await asyncio.to_thread(metric, server, "loraplex_requests_total")
    killed_before = (await asyncio.to_thread(processes, server))[1]
    victim = await only_frontend(server)
    streams = await begun_streams(server, NUM_CONNECTIONS)
    os.kill(victim, signal.SIGKILL)
    responses = await asyncio.gather(*streams)
    num_whole = sum(map(is_whole, responses))
    assert 0 < num_whole < NUM_CONNECTIONS
    assert all(status(response) == 200 for response in responses)
    await until(lambda: metric(server, "loraplex_running_requests") == 0)
    await until(lambda: [pid for pid in frontends(server) if pid != victim])
    assert all(map(text_of, await fetch_all(server, "/v1/completions", completion())))
    after = await asyncio.to_thread(metric, server, "loraplex_requests_total")
    assert after >= before + num_whole, "counters never fall"
    listed, killed = await asyncio.to_thread(processes, server)
    kinds = [process["kind"] for process in listed]
    assert kinds[0] == "server"
    assert (kinds.count("front end"), kinds.count("engine")) == (1, 1)
    assert killed == killed_before + 1
    assert all(process["memory_bytes"] > 1 << 20 for process in listed)


async def test_a_stopped_process_is_replaced(server):
    victim = await only_frontend(server)
    os.kill(victim, signal.SIGSTOP)
    await until(lambda: [pid for pid in frontends(server) if pid != victim], 90)
    assert all(map(text_of, await fetch_all(server, "/v1/completions", completion())))


async def test_limits_hold_for_all_processes_together(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text("[tenants.few]\nmax_concurrent_requests = 3\nrequests_per_minute = 40\n")
    key = create_key(path, "few", NOW)[1]
    with serving(tmp_path / "state", *FLAGS, "--api-keys-file", str(path)) as server:
        bad = await fetch_all(server, "/v1/completions", completion())
        assert set(map(status, bad)) == {401}
        # Long ones: none ends before the last request has come.
        responses = await fetch_all(server, "/v1/completions", stream_of(4 * TOKENS), key)
        assert sorted(map(status, responses)) == [200] * 3 + [429] * (NUM_CONNECTIONS - 3)
        assert all(is_whole(r, 4 * TOKENS) for r in responses if status(r) == 200)
        for _ in range(37):
            assert status(await fetch(server, "/v1/completions", completion(), key)) == 200
        assert status(await fetch(server, "/v1/completions", completion(), key)) == 429


async def test_a_stop_loses_no_stream_and_no_process_stays(tmp_path):
    with serving(tmp_path / "state", *FLAGS, "--shutdown-seconds", "300") as server:
        pids = frontends(server)
        streams = await begun_streams(server, 8)
        status_now, report = await asyncio.to_thread(server.post, "/drain", {})
        assert (status_now, report["in_work"]) == (202, 8)
        refused = await fetch_all(server, "/v1/completions", completion())
        assert set(map(status, refused)) == {503}
        server.process.send_signal(signal.SIGTERM)
        assert all(map(is_whole, await asyncio.gather(*streams)))
        assert await asyncio.to_thread(server.process.wait, 300) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def test_the_owners_death_ends_all(tmp_path):
    with serving(tmp_path / "state", *FLAGS) as server:
        pids = frontends(server)
        server.process.kill()
        await asyncio.to_thread(server.process.wait)
        await until(lambda: not any(_runs(pid) for pid in pids), 20)


def _runs(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
