"""The functions of loraplex that a request enters on its way to the scheduler's queue.

    PYTHONPATH=docs python -m tools.request_paths [--write]

prints today's numbers; with --write it writes benchmarks/results/request-paths.toml as well, and
the numbers of the paths in ARCHITECTURE.md.

A server with the shipped model runs under `path_tracer`. For each path (chat, infer, load of an
adapter) it gets equal requests on one connection: some warm it up, two are traced. What counts:

- the distinct functions of src/loraplex that are entered or resumed, in any process, from the first
  byte of the request to the function that ends the path (`RequestPath.end`), and inside of it.
  Lambdas, properties and nested functions count. Comprehensions, generator expressions and what
  dataclasses and msgspec generate are no functions of the source, and do not count;
- in other processes than the engine, only until the request is handed to the engine
  (`RequestPath.sent`): what they do afterwards prepares the response;
- only what both traced requests entered, and nothing that a background task did: an entry is left
  out if in the same process the same function was entered through the same callers while the server
  was idle. An idle window, longer than a request takes, precedes each traced request. So what runs
  all the time, such as the engine's wait for commands, is not on a path.

The HTTP guard parses request heads for its limits (ADR 21). It is counted apart.
"""

import argparse
import http.client
import itertools
import json
import re
import shutil
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from loraplex.demo import ADAPTER_PATHS
from loraplex.testing.running_server import serving
from tools.path_records import SOURCE, Entry, Function, PathTracer, functions_of, imported_packages

ROOT = Path(__file__).parents[2]
BASELINE = ROOT / "benchmarks" / "results" / "request-paths.toml"
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
MARGIN = 2
"""Functions, and files, that a path may have in addition to the baseline's."""
MAX_LINES = 60
"""Lines of a function on a path."""
GUARD = ("app/http_guard.py",)
"""Files of the HTTP guard."""
WARM_UPS = 4
"""Requests that are not traced: the processes of the sandbox take turns, and all must be warm."""
IDLE_SECONDS = 1.5
"""More than the second between two beats of an engine."""
SETTLE_SECONDS = 0.5
"""Time for what follows a request, such as a step that ends with it, before the server is idle."""

Send = Callable[[str, str, object], None]
"""Send a request (method, path, body) on the connection, and read its response."""


class RequestPath(NamedTuple):
    """One kind of request, and where its path ends."""

    send: Callable[[Send, Path], None]
    """Send the request. The folder holds an adapter to load."""
    end: str
    """Function of the engine process that ends the path."""
    sent: str = "serving/engines/link.py:ProcessLink.send"
    """Function of the serving process that hands over to the engine: its last call before `end`."""
    undo: Callable[[Send], None] = lambda _send: None
    """Prepare the server for the next equal request."""


def _chat(send: Send, _adapter: Path) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "chinese", "messages": messages, "max_tokens": 2, "temperature": 0}
    send("POST", "/v1/chat/completions", body)


def _infer(send: Send, _adapter: Path) -> None:
    tensors = (
        ("text_input", "BYTES", "The capital of France is"),
        ("max_tokens", "INT32", 2),
        ("lora_task_id", "UINT64", 1),
    )
    inputs = [
        {"name": name, "datatype": datatype, "shape": [1, 1], "data": [value]}
        for name, datatype, value in tensors
    ]
    send("POST", "/v2/models/ensemble/infer", {"inputs": inputs})


def _load(send: Send, adapter: Path) -> None:
    send("POST", "/v1/adapters", {"name": "loaded", "path": str(adapter)})


def _unload(send: Send) -> None:
    send("DELETE", "/v1/adapters/loaded", None)


_QUEUED = "scheduling/queues.py:WaitingQueue.add"
PATHS: Mapping[str, RequestPath] = {
    "chat": RequestPath(_chat, _QUEUED),
    "infer": RequestPath(_infer, _QUEUED),
    # The adapter is on the device: no request has to wait for it any more.
    "load": RequestPath(_load, "memory/adapter_cache.py:AdapterCache.copied", undo=_unload),
}


class Numbers(NamedTuple):
    """Size of a path."""

    functions: int
    files: int
    median_statements: float
    longest_lines: int
    """Lines of the longest function."""


class Trace(NamedTuple):
    """The functions of a path in order of their first entry, each with its process."""

    functions: Mapping[Function, str]
    guard: Mapping[Function, str]
    """Functions of the HTTP guard."""

    @property
    def files(self) -> set[str]:
        return {function.file for function in self.functions}

    @property
    def packages(self) -> set[str]:
        """Packages of others that these files import."""
        return set().union(*(imported_packages(SOURCE, file) for file in self.files))

    @property
    def numbers(self) -> Numbers:
        return Numbers(
            len(self.functions),
            len(self.files),
            statistics.median(function.num_statements for function in self.functions),
            max(function.num_lines for function in self.functions),
        )


def measure() -> dict[str, Trace]:
    """Run a server, and trace all paths."""
    with tempfile.TemporaryDirectory(prefix="request-paths-") as name:
        folder = Path(name)
        adapter = new_adapter(folder / "adapter")
        tracer = PathTracer(folder / "records")
        flags = ("--allowed-adapter-roots", str(folder), "--log-level", "warning")
        with (
            serving(folder / "state", *flags, env=tracer.environment()) as server,
            connection(server.http_port) as send,
        ):
            return {kind: _trace(tracer, path, send, adapter) for kind, path in PATHS.items()}


def new_adapter(folder: Path) -> Path:
    """Copy an adapter with another scale, so that the server does not have it yet."""
    shutil.copytree(ADAPTER_PATHS["chinese"], folder)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 12}))
    return folder


@contextmanager
def connection(port: int) -> Iterator[Send]:
    """Connect to a server, and send requests on this connection."""
    kept = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def send(method: str, path: str, body: object) -> None:
        text = None if body is None else json.dumps(body)
        kept.request(method, path, text, {"Content-Type": "application/json"})
        with kept.getresponse() as response:
            content = response.read()
        if response.status >= 300:
            raise RuntimeError(f"{method} {path}: {response.status} {content!r}")

    with closing(kept):
        yield send


def _trace(tracer: PathTracer, path: RequestPath, send: Send, adapter: Path) -> Trace:
    for name in (path.end, path.sent):
        functions = functions_of(SOURCE, name.partition(":")[0]).values()
        if all(function.name != name for function in functions):
            raise RuntimeError(f"there is no {name}: name its successor in {__file__}")
    for _ in range(WARM_UPS):
        path.send(send, adapter)
        path.undo(send)
    idle: set[tuple[str, ...]] = set()
    requests = []
    for _ in range(2):
        time.sleep(SETTLE_SECONDS)
        with tracer.window():
            time.sleep(IDLE_SECONDS)
        idle.update(entry.stack for entry in tracer.entries())
        with tracer.window():
            path.send(send, adapter)
            tracer.wait_for(path.end)
        requests.append(tracer.entries())
        path.undo(send)
    first, second = (on_path(entries, path.end, path.sent, idle) for entries in requests)
    both = {function: process for function, process in second.items() if function in first}
    guard = {function: process for function, process in both.items() if function.file in GUARD}
    return Trace({f: process for f, process in both.items() if f not in guard}, guard)


def on_path(
    entries: Sequence[Entry], end: str, sent: str, idle: set[tuple[str, ...]]
) -> dict[Function, str]:
    """Return the functions on a path and their processes, in order of their first entry.

    entries: in order of their times. idle: stacks of an idle server.
    """
    ended = next(entry for entry in entries if entry.function.name == end)
    *_, handed = (e for e in entries if e.function.name == sent and e.time_ns <= ended.time_ns)
    found: dict[Function, str] = {}
    left: set[str] = set()
    """Processes that called their last function once more."""
    for entry in entries:
        last = ended if entry.process == ended.process else handed
        is_early = entry.time_ns <= last.time_ns
        if not is_early and (entry.process, entry.function) == (last.process, last.function):
            left.add(entry.process)
        is_inside = last.function in entry.callers and entry.process not in left
        if (is_early or is_inside) and entry.stack not in idle:
            found.setdefault(entry.function, entry.process)
    return found


def too_long(kind: str, trace: Trace, baseline: Mapping[str, Any]) -> list[str]:
    """Return a line for each limit that a path exceeds. baseline: content of its file."""
    known, before = baseline[kind], Numbers(**baseline["before"][kind])
    listed = {line.split()[1] for line in known["entered"]}
    files = {name.partition(":")[0] for name in listed}
    new = {f.name: f"{f.name} ({process})" for f, process in trace.functions.items()}
    median = trace.numbers.median_statements
    sizes = (
        ("functions", new.keys(), listed, [new[name] for name in new if name not in listed]),
        ("files", trace.files, files, sorted(trace.files - files)),
    )
    found = [
        f"{len(now)} {what}, the baseline has {len(then)}; new: {', '.join(names)}"
        for what, now, then, names in sizes
        if len(now) > len(then) + MARGIN
    ]
    if packages := trace.packages.difference(known["packages"]):
        found.append(f"imports of other packages: {', '.join(sorted(packages))}")
    if median > 2 * before.median_statements:
        found.append(f"{median:g} statements a function, {before.median_statements:g} at first")
    found += [
        f"{function.name} has {function.num_lines} lines, at most {MAX_LINES} are allowed"
        for function in trace.functions
        if function.num_lines > MAX_LINES
    ]
    return [f"{kind}: {line}" for line in found]


def read_baseline() -> dict[str, Any]:
    return tomllib.loads(BASELINE.read_text(encoding="utf-8"))


def write_baseline(traces: Mapping[str, Trace]) -> None:
    """Write the lists. The numbers of the first measurement stay."""
    tables: dict[str, dict[str, Any]] = {
        kind: trace.numbers._asdict()
        | {
            "packages": sorted(trace.packages),
            "guard": _listed(trace.guard),
            "entered": _listed(trace.functions),
        }
        for kind, trace in traces.items()
    }
    tables |= {f"before.{kind}": first for kind, first in read_baseline()["before"].items()}
    lines = ["# Written by `python -m tools.request_paths --write` (docs/tools/request_paths.py)."]
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += (f"{key} = {json.dumps(value, indent=4)}" for key, value in table.items())
    BASELINE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _listed(functions: Mapping[Function, str]) -> list[str]:
    return [f"{process} {function.name}" for function, process in functions.items()]


def with_numbers(text: str, baseline: Mapping[str, Any]) -> str:
    """Return ARCHITECTURE.md with the sizes of the paths.

    Each path is an item that names functions on it; the number after a function is how many are
    entered until the next one. Raises ValueError for a function that is not on the path, or not
    after the ones before it.
    """
    for kind in PATHS:
        entered = [line.split()[1] for line in baseline[kind]["entered"]]
        files = {name.partition(":")[0] for name in entered}
        names = [name.rpartition("/")[2] for name in entered]
        [old] = re.findall(rf"(?ms)^- \*\*{kind}\*\*.*?(?=^- |^$)", text)
        starts = [0]
        for name in re.findall(r"`(\S+:\S+)`", old)[1:]:
            starts.append(names.index(name, starts[-1]))
        sizes = (end - start for start, end in itertools.pairwise((*starts, len(names))))
        texts = re.split(r"\d+(?= functions| files|,|$)", old, flags=re.M)
        pairs = itertools.zip_longest(texts, (len(names), len(files), *sizes), fillvalue="")
        text = text.replace(old, "".join(f"{before}{number}" for before, number in pairs))
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {BASELINE.name}")
    arguments = parser.parse_args()
    traces = measure()
    for kind, trace in traces.items():
        numbers = ", ".join(f"{value:g} {name}" for name, value in trace.numbers._asdict().items())
        sys.stdout.write(f"{kind}: {numbers}; guard: {len(trace.guard)} functions\n")
    if arguments.write:
        write_baseline(traces)
        ARCHITECTURE.write_text(
            with_numbers(ARCHITECTURE.read_text("utf-8"), read_baseline()), "utf-8"
        )


if __name__ == "__main__":
    main()
