r"""A server under faults: nothing lost, nothing wrong, memory flat, no process left over.

    PYTHONPATH=tests python benchmarks/soak.py [--minutes 30] [--streams 64] [--seed 0] \
        [--output benchmarks/results] [-- SERVE FLAGS]

Serves the shipped capitals model to two tenants. Streams, chats, tools and grammars run all the
time, and each must have the text of the same request alone. Each tenant loads, replaces and
deletes adapters; what was acknowledged must be there, with the right weights. Meanwhile the
engine, the workers and the server itself are killed and stopped, and the disk of the state
directory is filled and freed. The server is killed in the first half only. The second half measures
its memory, from when it remembers as many grammars as it ever does. Prints a report and writes it;
exit code 1 if anything was lost, wrong or left over.
"""

import argparse
import asyncio
import collections
import contextlib
import datetime
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
from comparison.faults import (
    KINDS_OF_PROCESS,
    adopt_orphans,
    children,
    full_disk,
    processes_of,
    reap_orphans,
    seconds_until_gone,
    send_signal,
    small_disk,
)
from comparison.stream_load import (
    MEBIBYTE,
    Held,
    LoadRequest,
    growth,
    held_by,
    new_client,
    send_one,
)
from streams import MOST_GROWTH, TOOL, chat, completion, mixed

from loraplex.bench.machine import Code, Machine, machine_lines, this_code, this_machine
from loraplex.bench.report import markdown_table, write_dated
from loraplex.core.environment import child_environment
from loraplex.core.stopped_process import state_of
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.serving.access.key_file_changes import create_key
from loraplex.testing.running_server import RunningServer, start

RESULTS: Final = Path(__file__).parent / "results"
TENANTS: Final = ("acme", "umbrella")
TABLES: Final = """
[tenants.{tenant}]
use = "all"
list = "all"
manage = ["{tenant}-*"]
"""
DISK_BYTES: Final = 256 * MEBIBYTE
NUM_REMEMBERED: Final = 16_384
"""Maximum of the grammars that a server remembers: each counts for 512 of 8 MiB at least."""
NUM_FILLERS: Final = 16
NUM_NAMES: Final = 6
NUM_SAMPLES: Final = 60
PAUSE_SECONDS: Final = (2.0, 10.0)
"""Pause between two faults."""
RECOVERY_SECONDS: Final = 180.0
ORPHAN_SECONDS: Final = 20.0
"""Limit for a process to end after its parent."""
RETRY_SECONDS: Final = 0.2
MAY_REFUSE: Final = ("refused: 404", "refused: 503")
"""Deletion of what is not there, and changes that needed a process that is gone."""
DISK_IS_FULL: Final = "refused: 507"


class Fault(msgspec.Struct, frozen=True):
    kind: str
    seconds: float
    """Time from the fault until the server was ready."""


class Tally(msgspec.Struct, kw_only=True):
    """What happened to requests and changes."""

    streams: collections.Counter[str]
    """Those with the right text, by label."""
    num_cut: int = 0
    """Streams that ended because the server itself was killed."""
    changes: collections.Counter[str]
    """Acknowledged, refused, or cut by a kill of the server."""
    wrong: list[str]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    created: str
    code: Code
    machine: Machine
    serve_flags: tuple[str, ...]
    seed: int
    minutes: float
    num_streams: int
    fills_disk: bool
    """False if the system does not let this program mount a small disk."""
    faults: list[Fault]
    tally: Tally
    held: list[Held]
    growth: float
    """Bytes of the serving process for each thousand requests, in the second half."""
    left_behind: list[str]
    """Processes and temporary files of a server that has ended."""

    @property
    def is_good(self) -> bool:
        return not self.tally.wrong and not self.left_behind and self.growth <= MOST_GROWTH


class Soak:
    """One server after the other on the same ports and the same state directory."""

    def __init__(self, folder: Path, options: argparse.Namespace, keys: dict[str, str]) -> None:
        self.folder = folder
        self.keys = keys
        self.chance = random.Random(options.seed)
        self.tally = Tally(streams=collections.Counter(), changes=collections.Counter(), wrong=[])
        self.faults: list[Fault] = []
        self.held: list[Held] = []
        self.left_behind: list[str] = []
        self.num_kills = 0
        """Kills of the server itself, counted before the signal is sent."""
        self.num_full = 0
        """How often the disk was filled, and how often freed: it is full while this is odd."""
        self.is_down = False
        """Whether the server was killed and the next one is not ready."""
        self.is_over = False
        self._ports = (0, 0, 0)
        self._flags = options.flags
        self.server = self._start()

    def _start(self) -> RunningServer:
        command = [sys.executable, "-m", "loraplex", "serve", str(BASE_PATH), "--name", "capitals"]
        for name, path in ADAPTER_PATHS.items():
            command += ["--adapter", f"{name}={path}"]
        for kind, port in zip(("http", "grpc", "metrics"), self._ports, strict=True):
            command += [f"--{kind}-port", str(port)]
        command += ["--state-dir", str(self.folder / "disk" / "state"), "--log-level", "error"]
        command += ["--api-keys-file", str(self.folder / "keys.toml")]
        command += ["--allowed-adapter-roots", str(BASE_PATH.parent), *self._flags]
        environment = {**child_environment(), "TMPDIR": str(self.folder / "tmp")}
        return start(command, env=environment)[0]

    @contextlib.asynccontextmanager
    async def client(self, tenant: str) -> AsyncIterator[httpx.AsyncClient]:
        async with new_client(self.server.url) as http:
            http.headers["authorization"] = f"Bearer {self.keys[tenant]}"
            yield http

    async def ready(self) -> None:
        await asyncio.to_thread(self.server.wait_until, ready=True, seconds=RECOVERY_SECONDS)

    async def restart(self) -> None:
        """Kill the server and start the next one; its processes must end by themselves."""
        server = self.server
        self._ports = (server.http_port, server.grpc_port, server.metrics_port)
        self.num_kills += 1
        self.is_down = True
        orphans = [pid for pid, _ in children(self.server.process.pid)]
        self.server.process.kill()
        self.server.process.wait()
        for pid in orphans:
            send_signal(pid, signal.SIGCONT)  # it may be stopped by a fault before
            if await seconds_until_gone(pid, ORPHAN_SECONDS) is None:
                self.left_behind.append(f"process {pid} after a kill of the server")
                send_signal(pid, signal.SIGKILL)
        self.server = self._start()
        await self.ready()
        self.is_down = False

    def stop(self) -> None:
        """Stop the last server; note what it leaves."""
        if (code := self.server.stop()) != 0:
            self.tally.wrong.append(f"the server ended with {code}")
        reap_orphans(self.server.process.pid)
        self.left_behind += [command for _, command in children(os.getpid())]
        self.left_behind += [f"temporary {path.name}" for path in (self.folder / "tmp").iterdir()]


# ---------------------------------------------------------------- streams


def load_requests(count: int) -> list[LoadRequest]:
    """Return completions and chats for base and adapters; some with tools."""
    requests = mixed(count)
    for number in range(6, count, 8):
        each = chat(requests[number].label, number)
        tools = {"tools": [TOOL], "tool_choice": "required"}
        requests[number] = LoadRequest(each.label, each.path, {**each.body, **tools})
    return requests


def with_new_grammar(model: str) -> tuple[LoadRequest, str]:
    """Return a request whose grammar no cache has, and the only text that it allows."""
    text = f"number {next(_serial)}"
    plain = completion(model, 0)
    body = {**plain.body, "structured_outputs": {"regex": text}}
    return LoadRequest("grammar", plain.path, body), text


_serial = itertools.count()


async def texts_alone(soak: Soak, requests: Sequence[LoadRequest]) -> list[str]:
    """Return what each request gives on an idle server."""
    texts = []
    async with soak.client(TENANTS[0]) as http:
        for each in requests:
            result = await send_one(http, each)
            assert result.is_whole, f"{each.label}: {result.error}"
            texts.append(result.text)
    return texts


async def stream_client(
    soak: Soak, number: int, requests: Sequence[LoadRequest], texts: Sequence[str]
) -> None:
    async with soak.client(TENANTS[number % 2]) as http:
        while not soak.is_over:
            number = (number + 1) % len(requests)
            kills, was_down = soak.num_kills, soak.is_down
            request, text = requests[number], texts[number]
            if number % 8 == 7:
                request, text = with_new_grammar(request.label)
            result = await send_one(http, request)
            if result.is_whole and not result.error and result.text == text:
                soak.tally.streams[result.label] += 1
                continue
            was_cut = was_down or soak.num_kills != kills
            if not was_cut or not text.startswith(result.text):
                reason = result.error or f"{result.text!r} instead of {text!r}"
                soak.tally.wrong.append(f"{result.label}: {reason}")
            is_refused = result.error.startswith("ConnectError")
            soak.tally.num_cut += was_cut and not is_refused
            await asyncio.sleep(RETRY_SECONDS)


async def fill_memory(soak: Soak, seconds: float) -> None:
    """After half of the time, let the server remember all that it may; measure from then on."""
    await asyncio.sleep(seconds / 2 + max(PAUSE_SECONDS))
    while soak.is_down:
        await asyncio.sleep(RETRY_SECONDS)
    numbers = iter(range(NUM_REMEMBERED))

    async def fill() -> None:
        async with soak.client(TENANTS[0]) as http:
            for _ in itertools.takewhile(lambda _: not soak.is_over, numbers):
                request, text = with_new_grammar("capitals")
                result = await send_one(http, request)
                if result.error or not text.startswith(result.text):
                    reason = result.error or f"{result.text!r} instead of {text!r}"
                    soak.tally.wrong.append(f"filling grammar: {reason}")

    await asyncio.gather(*(fill() for _ in range(NUM_FILLERS)))
    if not soak.is_over:
        soak.held.clear()


# ---------------------------------------------------------------- adapters


async def changer(soak: Soak, tenant: str, texts: dict[str | None, str]) -> None:
    """Change the adapters of a tenant; check each of them after every change.

    texts: of the probe, by adapter; None: that of a name that is not there.
    """
    chance = random.Random(f"{soak.chance.random()} {tenant}")
    known: dict[str, set[str | None]] = {}
    async with soak.client(tenant) as http:
        while not soak.is_over:
            name = f"{tenant}-{chance.randrange(NUM_NAMES)}"
            wanted = chance.choice([*ADAPTER_PATHS, None])
            before = known.get(name, {None})
            num_full = soak.num_full
            outcome = await change(http, name, wanted)
            soak.tally.changes[outcome] += 1
            known[name] = {wanted} if outcome == "acknowledged" else {*before, wanted}
            is_full = soak.num_full % 2 or soak.num_full != num_full
            may_refuse = (*MAY_REFUSE, DISK_IS_FULL) if is_full else MAY_REFUSE
            if outcome.startswith("refused") and outcome not in may_refuse:
                soak.tally.wrong.append(f"adapter {name}: {outcome}")
            for each, adapters in known.items():
                found = await probe(http, each)
                if found not in {texts[adapter] for adapter in adapters}:
                    shown = sorted(map(str, adapters))
                    soak.tally.wrong.append(f"adapter {each}: {found!r}, expected {shown}")
                known[each] = {a for a in adapters if texts[a] == found} or {None}


async def change(http: httpx.AsyncClient, name: str, adapter: str | None) -> str:
    """Load an adapter under a name, or delete the name; return the outcome."""
    try:
        if adapter is None:
            response = await http.delete(f"/v1/adapters/{name}")
        else:
            body = {"name": name, "path": str(ADAPTER_PATHS[adapter]), "replace": True}
            response = await http.post("/v1/adapters", json=body)
    except httpx.HTTPError:
        return "cut"
    if response.is_success:
        return "acknowledged"
    print(f"{name}: {response.text[:300]}", file=sys.stderr)
    return f"refused: {response.status_code}"


async def probe(http: httpx.AsyncClient, name: str) -> str | None:
    """Return the output of an adapter for a fixed prompt; None if there is no such adapter."""
    while True:
        body = {
            "model": name,
            "prompt": "The capital of France",
            "max_tokens": 16,
            "temperature": 0,
        }
        with contextlib.suppress(httpx.HTTPError):
            response = await http.post("/v1/completions", json=body)
            if response.is_success:
                return str(response.json()["choices"][0]["text"])
            if response.status_code == httpx.codes.NOT_FOUND:
                return None
            if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                return f"{response.status_code}: {response.text[:200]}"
        await asyncio.sleep(RETRY_SECONDS)


# ---------------------------------------------------------------- faults


async def faults(soak: Soak, seconds: float, disk: Path | None) -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    while (passed := loop.time() - start) < seconds:
        await asyncio.sleep(soak.chance.uniform(*PAUSE_SECONDS))
        kinds = [f"{verb} {kind}" for verb in ("kill", "stop") for kind in KINDS_OF_PROCESS]
        kinds += ["pause server", *(["kill server"] if passed < seconds / 2 else [])]
        kinds += ["fill disk"] if disk else []
        kind = soak.chance.choice(kinds)
        before = loop.time()
        if not await inflict(soak, kind, disk):
            continue
        await soak.ready()
        soak.faults.append(Fault(kind, loop.time() - before))
        reap_orphans(soak.server.process.pid)
        print(f"{passed:6.0f} s {kind}: {soak.faults[-1].seconds:.1f} s", file=sys.stderr)


async def inflict(soak: Soak, kind: str, disk: Path | None) -> bool:
    """Do one fault and wait until it has passed; False if there is no such process now."""
    verb, _, target = kind.partition(" ")
    server = soak.server.process.pid
    if kind == "kill server":
        await soak.restart()
    elif kind == "pause server":
        send_signal(server, signal.SIGSTOP)
        await asyncio.sleep(soak.chance.uniform(1, 4))
        send_signal(server, signal.SIGCONT)
    elif disk is not None and kind == "fill disk":
        soak.num_full += 1
        with full_disk(disk):
            await asyncio.sleep(soak.chance.uniform(1, 5))
        soak.num_full += 1
    else:
        pids = processes_of(server, target)
        if not pids:
            return False
        pid = soak.chance.choice(pids)
        send_signal(pid, signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
        if await seconds_until_gone(pid, RECOVERY_SECONDS) is None:
            soak.tally.wrong.append(f"{kind}: still there after {RECOVERY_SECONDS:.0f} s")
            send_signal(pid, signal.SIGKILL)
    return True


async def samples(soak: Soak, seconds: float) -> None:
    while not soak.is_over:
        await asyncio.sleep(seconds / NUM_SAMPLES)
        process = soak.server.process
        if process.poll() is None and state_of(process.pid) not in (None, "T"):
            with contextlib.suppress(OSError):  # one of its processes has just ended
                soak.held.append(held_by(process.pid, soak.tally.streams.total()))


async def run(soak: Soak, options: argparse.Namespace, disk: Path | None) -> None:
    await soak.ready()
    requests = load_requests(options.streams)
    texts = await texts_alone(soak, requests)
    async with soak.client(TENANTS[0]) as http:
        spoken = {name: await probe(http, name) for name in ADAPTER_PATHS}
    by_adapter: dict[str | None, Any] = {**spoken, None: None}
    seconds = options.minutes * 60
    tasks = [stream_client(soak, number, requests, texts) for number in range(options.streams)]
    tasks += [changer(soak, tenant, by_adapter) for tenant in TENANTS]
    tasks += [fill_memory(soak, seconds)]
    async with asyncio.TaskGroup() as group:
        for task in [*tasks, samples(soak, seconds)]:
            group.create_task(task)
        await faults(soak, seconds, disk)
        soak.is_over = True


# ---------------------------------------------------------------- the report


def tables(report: Report) -> str:
    tally = report.tally
    seconds = collections.defaultdict(list)
    for fault in report.faults:
        seconds[fault.kind].append(fault.seconds)
    rows = [
        [kind, str(len(each)), f"{statistics.median(each):.1f}", f"{max(each):.1f}"]
        for kind, each in sorted(seconds.items())
    ]
    changes = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.changes.items()))
    lines = [
        "# Soak",
        "",
        *machine_lines(report.created, report.code, report.machine),
        f"{report.minutes:g} minutes, {report.num_streams} streams at a time, seed {report.seed}; "
        f"`loraplex serve` {' '.join(report.serve_flags)}"
        + ("" if report.fills_disk else "; the disk was not filled: nothing could be mounted"),
        "",
        markdown_table(["fault", "times", "median s until ready", "max"], rows),
        "",
        f"{tally.streams.total()} streams had the right text, {tally.num_cut} were cut by a kill "
        f"of the server itself, {len(tally.wrong)} responses or adapters were wrong.",
        f"Adapter changes: {changes}.",
        f"Serving grew by {report.growth / 1024:+.0f} KiB per thousand requests.",
        f"Left behind: {', '.join(report.left_behind) or 'nothing'}.",
        *_first(tally.wrong),
    ]
    return "\n".join(lines)


def _first(wrong: Sequence[str]) -> Iterator[str]:
    yield from (f"- {each}" for each in wrong[:10])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--streams", type=int, default=64, help="at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the report")
    parser.add_argument("flags", nargs="*", help="flags for `loraplex serve`, after --")
    options = parser.parse_args()
    created = datetime.datetime.now(datetime.UTC)
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        (folder / "keys.toml").write_text("".join(TABLES.format(tenant=t) for t in TENANTS))
        keys = {t: create_key(folder / "keys.toml", t, created)[1] for t in TENANTS}
        with small_disk(folder / "disk", DISK_BYTES) as fills_disk:
            soak = Soak(folder, options, keys)
            try:
                asyncio.run(run(soak, options, folder / "disk" if fills_disk else None))
                soak.stop()
            finally:
                soak.server.process.kill()
                soak.server.process.wait()
    report = Report(
        created=created.isoformat(timespec="seconds"),
        code=this_code(),
        machine=this_machine(),
        serve_flags=tuple(options.flags),
        seed=options.seed,
        minutes=options.minutes,
        num_streams=options.streams,
        fills_disk=fills_disk,
        faults=soak.faults,
        tally=soak.tally,
        held=soak.held,
        growth=growth(soak.held, "serving"),
        left_behind=soak.left_behind,
    )
    paths = write_dated(report, tables(report), options.output, kind="soak")
    print(tables(report))
    print(*paths, sep="\n", file=sys.stderr)
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
