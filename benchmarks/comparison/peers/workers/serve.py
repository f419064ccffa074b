"""The loop of a worker: another inference library in its own process, driven over pipes.

    python serve.py MODULE OPTIONS

Runs with the Python of the library's own virtual environment, so it imports nothing of loraplex
and of MODULE, a file in the same folder, only `load(options) -> Worker`. OPTIONS is JSON.

Messages are lines of JSON. Every message has an `id`, and its one reply has the same; the reply
with id 0 reports that the worker is loaded.

    {"id": 1, "op": "generate", "prompt": [5, 9], "num_tokens": 3, "adapter": null}
    {"id": 1, "tokens": [7, 7, 8], "token_ns": [..., ..., ...]}
    {"id": 2, "op": "add_adapter", "name": "a", "path": "/folder"}
    {"id": 2}
    {"id": 3, "op": "remove_adapter", "name": "a"}
    {"id": 3, "error": "KeyError: 'a'"}   or "unsupported": for what the library cannot do

Times are time.perf_counter_ns() here; on Linux that is one clock for all processes.
The worker ends when its input does.
"""

import dataclasses
import importlib
import json
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol

Send = Callable[[dict[str, Any]], None]


@dataclasses.dataclass
class Job:
    """One request. The worker calls `add` for each token, as soon as it knows it."""

    id: int
    prompt: list[int]
    num_tokens: int
    adapter: str | None
    send: Send
    tokens: list[int] = dataclasses.field(default_factory=list)
    token_ns: list[int] = dataclasses.field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.tokens) == self.num_tokens

    def add(self, token: int) -> None:
        """Send the reply with the last token; ignore more: a static batch runs to its longest."""
        if len(self.tokens) == self.num_tokens:
            return
        self.tokens.append(token)
        self.token_ns.append(time.perf_counter_ns())
        if self.is_done:
            self.send({"id": self.id, "tokens": self.tokens, "token_ns": self.token_ns})


class Worker(Protocol):
    """What MODULE.load gives."""

    gather_seconds: float
    """How long an idle worker waits for one more request before it begins."""

    @property
    def is_idle(self) -> bool: ...

    def submit(self, job: Job) -> None: ...

    def step(self) -> None:
        """Make progress with what was submitted. What it raises ends the worker."""
        ...

    def add_adapter(self, name: str, path: str) -> None: ...

    def remove_adapter(self, name: str) -> None: ...


class Lines:
    """The lines of a file descriptor, without waiting longer than one wants to."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self.is_open = True

    def read(self, seconds: float | None) -> list[bytes]:
        """Those that are there, or the first that arrive in that time (None: however long)."""
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return []
        data = os.read(self._descriptor, 1 << 20)
        self.is_open = bool(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines

    def gather(self, seconds: float) -> Iterator[bytes]:
        """Wait for some, then take what follows until nothing came for so long."""
        yield from self.read(None)
        while self.is_open and (lines := self.read(seconds)):
            yield from lines


def main(module: str, options: dict[str, Any]) -> None:
    send = _sender()
    worker: Worker = importlib.import_module(module).load(options)
    send({"id": 0})
    lines = Lines(sys.stdin.fileno())
    while lines.is_open:
        arrived = lines.gather(worker.gather_seconds) if worker.is_idle else lines.read(0)
        for line in arrived:
            _handle(worker, json.loads(line), send)
        if not worker.is_idle:
            worker.step()


def _sender() -> Send:
    """Replies go where standard output went; what a library prints goes to standard error."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    lock = threading.Lock()  # a worker may have threads of its own

    def send(reply: dict[str, Any]) -> None:
        line = json.dumps(reply) + "\n"
        with lock:
            replies.write(line)
            replies.flush()

    return send


def _handle(worker: Worker, message: dict[str, Any], send: Send) -> None:
    message_id = message["id"]
    try:
        match message["op"]:
            case "generate":
                worker.submit(
                    Job(
                        message_id,
                        message["prompt"],
                        message["num_tokens"],
                        message["adapter"],
                        send,
                    )
                )
                return
            case "add_adapter":
                worker.add_adapter(message["name"], message["path"])
            case "remove_adapter":
                worker.remove_adapter(message["name"])
            case unknown:
                raise ValueError(f"no op is named {unknown}")
        send({"id": message_id})
    except Exception as error:
        traceback.print_exc()
        kind = "unsupported" if isinstance(error, NotImplementedError) else "error"
        send({"id": message_id, kind: f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
