"""Kills and holds engines of servers, and compares what every client got."""

import collections
import contextlib
import dataclasses
import http.client
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from loraplex.testing.running_server import MODEL, RunningServer

LONG, SHORT = 300, 20
NUM_CLIENTS = 8
REQUEST_SECONDS = 240
START_KILLS = 0.15
"""So often the engine is killed while it starts; else at a random moment of its work."""
LONGEST_LIFE_SECONDS = 1.5

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"model": "capitals", "prompt": "The capital of France", "max_tokens": LONG},
    "adapter": {"model": "chinese", "prompt": "What is it?", "max_tokens": LONG},
    "other adapter": {"model": "japanese", "prompt": "x" * 200, "max_tokens": LONG},
    "sampled": {
        "model": "capitals",
        "prompt": "Q",
        "temperature": 1,
        "seed": 7,
        "max_tokens": LONG,
    },
    "sampled adapter": {
        "model": "japanese",
        "prompt": "Q",
        "temperature": 0.8,
        "top_p": 0.9,
        "frequency_penalty": 0.2,
        "seed": 8,
        "max_tokens": LONG,
    },
    "two": {"model": "chinese", "prompt": "Q: ", "temperature": 1, "seed": 9, "n": 2},
    "stop": {
        "model": "capitals",
        "prompt": "The capital of",
        "temperature": 1,
        "seed": 3,
        "n": 2,
        "max_tokens": LONG,
    },
    "short": {"model": "capitals", "prompt": "The capital of Japan", "max_tokens": 5},
    "long prompt": {"model": "chinese", "prompt": "city " * 100, "max_tokens": SHORT},
}
"""Requests that produce the same tokens every time."""


def body_of(request: dict[str, Any]) -> dict[str, Any]:
    fixed = {"temperature": 0, "max_tokens": 200, "logprobs": 2, "stream": True, "ignore_eos": True}
    return {**fixed, **request, "stream_options": {"include_usage": True}}


def send(port: int, request: dict[str, Any]) -> dict[str, Any]:
    """What a client gets over SSE, put together: text, tokens, scores and ends of each choice."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_SECONDS)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body_of(request)), headers)
        response = connection.getresponse()
        if response.status != 200:
            return {"status": response.status, "body": response.read().decode()}
        return gather(line.decode() for line in response)
    finally:
        connection.close()


def gather(lines: Iterable[str]) -> dict[str, Any]:
    choices: dict[str, Any] = collections.defaultdict(
        lambda: {"text": "", "tokens": [], "scores": []}
    )
    response: dict[str, Any] = {"choices": choices, "is_done": False}
    for line in lines:
        if not line.startswith("data: "):
            continue
        if line.strip() == "data: [DONE]":
            response["is_done"] = True
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            response["error"] = chunk["error"]
            continue
        for piece in chunk["choices"]:
            choice = choices[piece["index"]]
            choice["text"] += piece["text"]
            if piece.get("logprobs"):
                choice["tokens"] += piece["logprobs"]["tokens"]
                choice["scores"] += piece["logprobs"]["token_logprobs"]
            if piece["finish_reason"]:
                choice["end"] = piece["finish_reason"]
        if chunk.get("usage"):
            response["num_tokens"] = chunk["usage"]["completion_tokens"]
    response["choices"] = dict(choices)
    return response


def engine_pid(server: RunningServer) -> int | None:
    """None while there is no engine."""
    return next(iter(_children(server.process.pid, "loraplex.app.engine_process")), None)


def rank_pids(server: RunningServer) -> list[int]:
    """Return the processes of the engine's ranks but rank 0; empty while there is no engine."""
    pid = engine_pid(server)
    return [] if pid is None else _children(pid, "loraplex.app.rank")


HELD_ENGINE_FLAGS = ("--step-timeout-seconds", "600")
"""Flags of a server whose engine is held: else it is taken for one that hangs."""


@contextlib.contextmanager
def held_engine(server: RunningServer) -> Iterator[None]:
    """Stop the engine until the context ends: no output ends meanwhile, however slow the client."""
    pid = engine_pid(server)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def generated_tokens(server: RunningServer) -> int:
    """Return how many tokens the engine has generated since it started."""
    stats = json.loads(server.get("/v1/internal/stats")[1])
    return int(stats["models"][MODEL]["engine"]["generation_tokens"])


def wait_until_generated(server: RunningServer, num_tokens: int) -> None:
    """Wait until `generated_tokens` are at least so many."""
    while generated_tokens(server) < num_tokens:
        time.sleep(0.01)


def _children(pid: int, program: str) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if program in Path(f"/proc/{child}/cmdline").read_text():
                found.append(int(child))
    return found


@dataclasses.dataclass
class Outcome:
    num_kills: int = 0
    num_kills_at_start: int = 0
    num_responses: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    wrong: list[Any] = dataclasses.field(default_factory=list)
    """(name of a request, what it got, what it should have got)."""


class Load:
    """Clients that send one request after the other until they are stopped."""

    def __init__(
        self,
        server: RunningServer,
        requests: dict[str, Any],
        expected: dict[str, Any],
        outcome: Outcome,
    ) -> None:
        self._server = server
        self._requests = requests
        self._expected = expected
        self._outcome = outcome
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._client, args=(number,)) for number in range(NUM_CLIENTS)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Let every in-flight request end by itself."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _client(self, number: int) -> None:
        names = list(self._requests)
        while not self._is_over.is_set():
            name = names[number % len(names)]
            number += 1
            try:
                response = send(self._server.http_port, self._requests[name])
            except Exception as error:  # a broken stream is what this test is for
                response = {"exception": repr(error)}
            with self._lock:
                self._outcome.num_responses[name] += 1
                if response != self._expected[name]:
                    self._outcome.wrong.append((name, response, self._expected[name]))


def with_stop(server: RunningServer, request: dict[str, Any]) -> dict[str, Any]:
    """Return the request with a stop string that comes late in one of its outputs."""
    text = send(server.http_port, request)["choices"][0]["text"]
    middle = len(text) // 2
    late = (text[at : at + 4] for at in range(middle, len(text) - 4))
    fits = (piece for piece in late if "\ufffd" not in piece and text.index(piece) >= middle)
    stop = next(fits)
    return {**request, "stop": [stop]}


def kill_engines(
    server: RunningServer,
    num_kills: int,
    seed: int,
    find: Callable[[RunningServer], int | None] = engine_pid,
) -> Outcome:
    """Kill under load; the load ends by itself after the last kill.

    find: returns the process to kill, if it is there.
    """
    chance, outcome = random.Random(seed), Outcome()
    requests = {**REQUESTS, "stop": with_stop(server, REQUESTS["stop"])}
    expected = {name: send(server.http_port, request) for name, request in requests.items()}
    for response in expected.values():
        assert response.get("is_done"), response
        assert "error" not in response, response
    ends = {choice["end"] for choice in expected["stop"]["choices"].values()}
    assert "stop" in ends, "no stop string came"
    killed = None
    with Load(server, requests, expected, outcome):
        while outcome.num_kills < num_kills:
            while (pid := find(server)) in (None, killed):
                time.sleep(0.005)
            assert pid is not None
            if chance.random() < START_KILLS:
                outcome.num_kills_at_start += 1
            else:
                server.wait_until(ready=True)
            time.sleep(chance.random() * LONGEST_LIFE_SECONDS)
            killed = pid
            with contextlib.suppress(ProcessLookupError):  # it could not start
                os.kill(pid, signal.SIGKILL)
                outcome.num_kills += 1
    return outcome
