"""Many streams at once against a running server, each of which must be as it is alone; and
what the server's processes hold meanwhile. Speaks OpenAI's streams over HTTP.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

MEBIBYTE: Final = 1 << 20
_DATA: Final = "data: "
_READ_SECONDS: Final = 300.0


@dataclasses.dataclass(frozen=True, slots=True)
class LoadRequest:
    """A streamed request. `leaves_after`: the client goes after so many events; None: it stays."""

    label: str
    path: str
    body: Mapping[str, Any]
    leaves_after: int | None = None


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came back for one."""

    label: str
    text: str = ""
    first_seconds: float = 0.0
    """Seconds from the call to the first event with text."""
    longest_gap: float = 0.0
    """Seconds between two events."""
    error: str = ""
    is_whole: bool = False
    """It ended with [DONE]."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What processes hold after so many requests."""

    num_requests: int
    resident_bytes: dict[str, int]
    """Bytes by process: serving, engine, and the other processes of serving."""
    num_files: dict[str, int]


def new_client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url,
        timeout=httpx.Timeout(_READ_SECONDS),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    )


async def send_at_once(
    http: httpx.AsyncClient, load_requests: Sequence[LoadRequest]
) -> list[LoadResult]:
    return await asyncio.gather(*(send_one(http, load_request) for load_request in load_requests))


async def send_one(http: httpx.AsyncClient, load_request: LoadRequest) -> LoadResult:
    """Run one request; the result has its error."""
    stream = _Stream()
    try:
        async with http.stream(
            "POST", load_request.path, json={**load_request.body, "stream": True}
        ) as response:
            if response.is_success:
                async for line in response.aiter_lines():
                    if stream.take(line) and stream.num_events == load_request.leaves_after:
                        break
            else:
                stream.error = f"{response.status_code}: {(await response.aread()).decode()[:300]}"
    except httpx.HTTPError as error:
        stream.error = f"{type(error).__name__}: {error}"
    return stream.result_of(load_request)


class _Stream:
    def __init__(self) -> None:
        self.num_events = 0
        self.error = ""
        self._start = self._last = time.perf_counter()
        self._first = 0.0
        self._longest = 0.0
        self._texts: list[str] = []
        self._is_whole = False

    def take(self, line: str) -> bool:
        """Whether it was an event with text."""
        if not line.startswith(_DATA):
            return False
        if line == "data: [DONE]":
            self._is_whole = True
            return False
        event = json.loads(line.removeprefix(_DATA))
        if "error" in event:
            self.error = str(event["error"])
            return False
        text = "".join(map(_text_of, event["choices"]))
        if not text:
            return False
        now = time.perf_counter()
        if self._texts:
            self._longest = max(self._longest, now - self._last)
        else:
            self._first = now - self._start
        self._last = now
        self._texts.append(text)
        self.num_events += 1
        return True

    def result_of(self, load_request: LoadRequest) -> LoadResult:
        return LoadResult(
            label=load_request.label,
            text="".join(self._texts),
            first_seconds=self._first,
            longest_gap=self._longest,
            error=self.error,
            is_whole=self._is_whole,
        )


def _text_of(choice: Mapping[str, Any]) -> str:
    """Return the text of a completion or a chat, or the arguments of tool calls."""
    if "text" in choice:
        return str(choice["text"])
    delta = choice["delta"]
    calls = delta.get("tool_calls") or ()
    return (delta.get("content") or "") + "".join(
        call["function"].get("arguments") or "" for call in calls
    )


def held_by(pid: int, num_requests: int) -> Held:
    """Return the memory of a server's process and its children."""
    resident_bytes, num_files = {}, {}
    for name, process in _names(pid):
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            resident_bytes[name] = _resident_bytes(process)
            num_files[name] = len(os.listdir(f"/proc/{process}/fd"))
    return Held(num_requests=num_requests, resident_bytes=resident_bytes, num_files=num_files)


def _names(pid: int) -> Iterator[tuple[str, int]]:
    yield "serving", pid
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):
            for number in map(int, child.read_text().split()):
                command = Path(f"/proc/{number}/cmdline").read_bytes().decode().replace("\0", " ")
                known = ("engine", "staging_worker", "grammar_worker", "chat_worker")
                yield next((name for name in known if name in command), "other"), number


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def growth(samples: Sequence[Held], process: str) -> float:
    """Bytes for each thousand requests: the slope of the line through the second half."""
    half = [each for each in samples[len(samples) // 2 :] if process in each.resident_bytes]
    line = statistics.linear_regression(
        [each.num_requests / 1000 for each in half],
        [each.resident_bytes[process] for each in half],
    )
    return line.slope
