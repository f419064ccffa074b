r"""Duration of small requests while hostile clients send theirs, with this code and older code.

    PYTHONPATH=tests python benchmarks/hostile_clients.py [--before CHECKOUT] [--seconds 10] \
        [--rounds 1] [--output benchmarks/results/hostile-clients]

For each kind of client a new server with the shipped capitals model serves two tenants. One
tenant sends a completion of one token every 50 ms; the other, or a client without a key, does its
worst from a process of its own. `--before` is a checkout of older code with its `.venv`, which is
served in turns with this one, in each round. The rows have the medians of the rounds, and the
ratios are medians of the rounds' ratios. Clients and server share the machine, which may be busy
with other programs: compare the rows of one kind, not the seconds.
The small request is a load against clients that delay loads of adapters; some kinds are measured
with small chats and with a new small grammar in each request, too. Against clients that keep the
base model busy it is two tokens of the base. `first loads, slow host` measures the first loads of a
tenant, so nothing is loaded before; `idle connections` are to a server with few descriptors.
"""

import argparse
import asyncio
import contextlib
import datetime
import itertools
import json
import multiprocessing
import os
import queue
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
from comparison.faults import children, send_signal
from comparison.stream_load import MEBIBYTE, held_by
from hostile_bodies import send

from loraplex.bench.machine import Code, Machine, machine_lines, this_code, this_machine
from loraplex.bench.report import markdown_table, write_pair
from loraplex.bench.statistics import percentile
from loraplex.core.environment import child_environment
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.serving.access.key_file_changes import create_key
from loraplex.testing.running_server import RunningServer

HERE: Final = Path(__file__).parent
TENANTS: Final = ("quiet", "hostile")
TABLE: Final = '[tenants.{tenant}]\nuse = "all"\nlist = "all"\nmanage = "all"\n'
PAUSE_SECONDS: Final = 0.05
LIMIT_SECONDS: Final = 60.0
"""Limit of one small request: a longer wait is reported as this."""
NUM_CALLERS: Final = 16
BYTECODE: Final = Path(tempfile.gettempdir()) / "hostile-clients-bytecode"
"""Folder of the bytecode of all checkouts, by their paths."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of the small requests during one kind of attack."""

    seconds: list[float]
    """Duration of each small request."""
    num_failed: int
    serving_bytes: int
    """Largest memory of the serving process that was seen."""
    load_average: float
    """Load average of the machine at the end, with other programs."""

    def milliseconds(self, percent: float) -> float:
        return 1000 * percentile(self.seconds, percent)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    created: str
    code: Code
    machine: Machine
    before: Code | None
    results: dict[str, dict[str, list[Result]]]
    """Results of the rounds for each kind of client, "before" and "now"."""


class Target(msgspec.Struct, frozen=True):
    """A server as a hostile client sees it."""

    http_port: int
    grpc_port: int
    key: str
    folder: str
    """Folder from which adapters may be loaded."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    async def post(self, http: httpx.AsyncClient, path: str, body: bytes) -> None:
        """Send a body, and ignore the response."""
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        with contextlib.suppress(httpx.HTTPError):
            await http.post(self.url + path, content=body, headers=headers)


# ---------------------------------------------------------------- hostile clients

Attack = Callable[[Target, httpx.AsyncClient, int], Awaitable[None]]
"""Sends one request; the number differs between requests."""


def sending(case: str) -> Attack:
    """Return the attack that sends the body of a case of hostile_bodies, two at a time."""
    turns = asyncio.Semaphore(2)

    async def send_case(target: Target, _: httpx.AsyncClient, number: int) -> None:
        del number
        results: queue.Queue[str] = queue.Queue()
        ports = (target.http_port, target.grpc_port)
        async with turns:
            await asyncio.to_thread(send, case, target.key, ports, results)

    return send_case


async def many_sequences(target: Target, http: httpx.AsyncClient, number: int) -> None:
    """64 long outputs for one prompt."""
    body = {"model": "capitals", "prompt": f"{number}", "n": 64, "max_tokens": 1500}
    body |= {"ignore_eos": True}
    await target.post(http, "/v1/completions", json.dumps(body).encode())


async def grammars(target: Target, http: httpx.AsyncClient, number: int) -> None:
    """Grammars that take long to compile, each a new one."""
    regex = "(a|b|c|d){1,400}" * 3 + str(number)
    body = {"model": "capitals", "prompt": "x", "max_tokens": 1}
    body |= {"structured_outputs": {"regex": regex}}
    await target.post(http, "/v1/completions", json.dumps(body).encode())


async def long_chats(target: Target, http: httpx.AsyncClient, number: int) -> None:
    """Chats of 2,000 messages."""
    messages = [{"role": "user", "content": f"word {number} {i}"} for i in range(2000)]
    body = {"model": "capitals", "messages": messages, "max_tokens": 1}
    await target.post(http, "/v1/chat/completions", json.dumps(body).encode())


async def slow_grammars(target: Target, http: httpx.AsyncClient, number: int) -> None:
    """Grammars that take a quarter of a second to compile, and as long for a mask, each new."""
    names = [f"part-{number}-{index}" for index in range(700)]
    parts: dict[str, Any] = {names[-1]: {"type": "string"}}
    for name, following in itertools.pairwise(names):
        reference = {"$ref": f"#/$defs/{following}"}
        parts[name] = {"anyOf": [reference, {"items": reference}]}
    schema = {"$defs": parts, "$ref": f"#/$defs/{names[0]}"}
    body = {"model": "capitals", "prompt": "x", "max_tokens": 4}
    body |= {"structured_outputs": {"json": schema}}
    await target.post(http, "/v1/completions", json.dumps(body).encode())


async def long_texts(target: Target, http: httpx.AsyncClient, number: int) -> None:
    """Texts of 1 MB to tokenize, each a new one."""
    body = {"model": "capitals", "prompt": f"capital {number} of " * 60_000, "max_tokens": 1}
    await target.post(http, "/v1/completions", json.dumps(body).encode())


async def new_adapters(target: Target, http: httpx.AsyncClient, number: int) -> None:
    """An adapter under a new name with each request."""
    body = {"name": f"new-{number}", "path": str(ADAPTER_PATHS["japanese"])}
    await target.post(http, "/v1/adapters", json.dumps(body).encode())


async def slow_host(target: Target, http: httpx.AsyncClient, number: int) -> None:
    """An adapter of a host that sends a byte a second."""

    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n"
        with contextlib.suppress(ConnectionError):
            for size in itertools.chain([len(head)], itertools.repeat(1)):
                writer.write(head[:size])
                await writer.drain()
                await asyncio.sleep(1.0)

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as host:
        port = host.sockets[0].getsockname()[1]
        body = {"name": f"slow-{number}", "path": f"http://127.0.0.1:{port}/adapter/"}
        await target.post(http, "/v1/adapters", json.dumps(body).encode())


async def regular_expression(target: Target, http: httpx.AsyncClient, number: int) -> None:
    """An adapter whose target_modules match catastrophically."""
    folder = Path(target.folder) / f"adapter-{number % NUM_CALLERS}"
    if not folder.exists():
        folder.mkdir()
        source = ADAPTER_PATHS["chinese"]
        for path in source.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        config = json.loads((source / "adapter_config.json").read_text())
        config["target_modules"] = r"((\w+\.?)+)+!"
        (folder / "adapter_config.json").write_text(json.dumps(config))
    body = {"name": f"hostile-{number}", "path": str(folder)}
    await target.post(http, "/v1/adapters", json.dumps(body).encode())


async def prompt_logprobs(target: Target, http: httpx.AsyncClient, number: int) -> None:
    """The 20 likeliest tokens at each position of 16 long prompts."""
    await target.post(http, "/v1/completions", long_prompts(number, prompt_logprobs=20))


async def echoed_logprobs(target: Target, http: httpx.AsyncClient, number: int) -> None:
    """The same in the form of the echo."""
    await target.post(http, "/v1/completions", long_prompts(number, echo=True, logprobs=20))


def long_prompts(number: int, **fields: Any) -> bytes:
    """Return a request for one token each after 16 prompts of 1,650 tokens."""
    prompts = [[10 + (number + i + at) % 90 for at in range(1650)] for i in range(16)]
    return json.dumps({"model": "capitals", "prompt": prompts, "max_tokens": 1, **fields}).encode()


async def many_logprobs(target: Target, http: httpx.AsyncClient, number: int) -> None:
    """64 outputs of 400 tokens, with the 20 likeliest ones at each position."""
    body = {"model": "capitals", "prompt": f"{number}", "n": 64, "max_tokens": 400}
    body |= {"ignore_eos": True, "logprobs": 20}
    await target.post(http, "/v1/completions", json.dumps(body).encode())


async def context_logits(target: Target, http: httpx.AsyncClient, number: int) -> None:
    """All logits of a long prompt, as JSON."""
    prompt = f"{number} " + "the capital of France is Paris. " * 120
    body = {"text_input": prompt, "max_tokens": 1, "return_context_logits": True}
    await target.post(http, "/v2/models/ensemble/generate", json.dumps(body).encode())


async def unread_responses(target: Target, http: httpx.AsyncClient, number: int) -> None:
    """A connection whose responses, of tens of megabytes, are never read."""
    del http
    body = long_prompts(number, prompt_logprobs=20)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {target.key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", target.http_port, limit=1)
    try:
        writer.write(head.encode() + body)
        await asyncio.sleep(2 * LIMIT_SECONDS)
    finally:
        writer.close()


_THREE: Final = asyncio.Semaphore(3)


async def sequences_on_the_base(target: Target, http: httpx.AsyncClient, number: int) -> None:
    """Three requests at a time of 64 outputs of 800 tokens."""
    body = {"model": "capitals", "prompt": f"{number}", "n": 64, "max_tokens": 800}
    async with _THREE:
        await target.post(http, "/v1/completions", json.dumps(body | {"ignore_eos": True}).encode())


async def beams(target: Target, http: httpx.AsyncClient, number: int) -> None:
    """Beam searches of 64 beams."""
    body = {"model": "capitals", "prompt": f"{number}", "n": 64, "max_tokens": 800}
    body |= {"use_beam_search": True, "temperature": 0, "ignore_eos": True}
    async with _THREE:
        await target.post(http, "/v1/completions", json.dumps(body).encode())


async def idle_connections(target: Target, http: httpx.AsyncClient, number: int) -> None:
    """Connections that send nothing, and are opened again when the server closes them."""
    del http, number
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", target.http_port)
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_IDLE // NUM_CALLERS):
                group.create_task(_idle_connection(target.http_port))
        writer.close()


async def _idle_connection(port: int) -> None:
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await reader.read()
        writer.close()


BODIES: Final = (
    *("gRPC, 16 MB of inputs, no key", "gRPC, 16 MB of inputs"),
    *("60 MB of token ids", "logit_bias of 1e6"),
    *("5 MB of combining characters", "8 MB of escapes", "192 MB of weights"),
)
ATTACKS: Final[dict[str, Attack]] = {
    **{case: sending(case) for case in BODIES},
    "n = 64": many_sequences,
    "prompt_logprobs": prompt_logprobs,
    "echo with logprobs": echoed_logprobs,
    "n = 64 with logprobs": many_logprobs,
    "context logits": context_logits,
    "unread responses": unread_responses,
    "n = 64 on the base": sequences_on_the_base,
    "64 beams": beams,
    "idle connections": idle_connections,
    "first loads, slow host": slow_host,
    "grammars": grammars,
    "grammars that compile for long": slow_grammars,
    "texts of 1 MB": long_texts,
    "chats of 2,000 messages": long_chats,
    "new adapters": new_adapters,
    "small grammars, slow grammars": slow_grammars,
    "small chats, long chats": long_chats,
    "small loads, new adapters": new_adapters,
    "slow host of adapters": slow_host,
    "regular expression": regular_expression,
}
ON_THE_BASE: Final = ("n = 64 on the base", "64 beams")
OF_LOADS: Final = (
    *("small loads, new adapters", "slow host of adapters", "regular expression"),
    "idle connections",
)
FIRST_LOADS: Final = "first loads, slow host"
MAX_FILES: Final = {"idle connections": 300}
"""Descriptors of the server under an attack; others have those of the machine."""
NUM_IDLE: Final = 320
COMPLETION: Final = {"model": "chinese", "prompt": "x", "max_tokens": 1, "temperature": 0}


def small_request(attack: str | None, number: int) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a small request that is measured during an attack."""
    if attack in OF_LOADS or attack == FIRST_LOADS:
        path = str(ADAPTER_PATHS["chinese"])
        name = f"small-{number}" if attack == FIRST_LOADS else "small"
        return "/v1/adapters", {"name": name, "path": path, "replace": True}
    if attack in ON_THE_BASE:
        return "/v1/completions", COMPLETION | {"model": "capitals", "max_tokens": 2}
    if attack == "small grammars, slow grammars":
        return "/v1/completions", COMPLETION | {"structured_outputs": {"regex": f"[a-z]{number}?"}}
    if attack == "small chats, long chats":
        messages = [{"role": "user", "content": f"{number}"}]
        body = {key: value for key, value in COMPLETION.items() if key != "prompt"}
        return "/v1/chat/completions", body | {"messages": messages}
    return "/v1/completions", COMPLETION


def attack_until_killed(name: str, target: Target) -> None:
    """Send the requests of one kind of client, 16 at a time, for ever."""

    async def caller(first: int) -> None:
        async with httpx.AsyncClient(timeout=LIMIT_SECONDS, trust_env=False) as http:
            number = first
            while True:
                await ATTACKS[name](target, http, number)
                number += NUM_CALLERS
                await asyncio.sleep(0.001)

    async def callers() -> None:
        await asyncio.gather(*map(caller, range(NUM_CALLERS)))

    asyncio.run(callers())


# ---------------------------------------------------------------- measuring


@contextlib.contextmanager
def running_server(
    checkout: Path, folder: Path, max_files: int | None = None
) -> Iterator[tuple[RunningServer, dict[str, str]]]:
    """Yield a server of the code in `checkout`, and the tenants' keys.

    max_files: limit of its open files.
    """
    keys_file = folder / "keys.toml"
    keys_file.write_text("".join(TABLE.format(tenant=tenant) for tenant in TENANTS))
    now = datetime.datetime.now(datetime.UTC)
    keys = {tenant: create_key(keys_file, tenant, now)[1] for tenant in TENANTS}
    ports = [_free_port() for _ in range(3)]
    python = checkout / ".venv" / "bin" / "python"
    command = [
        str(python if python.exists() else sys.executable),
        "-m",
        "loraplex",
        "serve",
        str(BASE_PATH),
        "--name",
        "capitals",
    ]
    for name, path in ADAPTER_PATHS.items():
        command += ["--adapter", f"{name}={path}"]
    for kind, port in zip(("http", "grpc", "metrics"), ports, strict=True):
        command += [f"--{kind}-port", str(port)]
    command += ["--state-dir", str(folder / "state"), "--log-level", "error"]
    command += ["--api-keys-file", str(keys_file), "--max-body-bytes", str(256 * MEBIBYTE)]
    for root in (folder, BASE_PATH.parent):
        command += ["--allowed-adapter-roots", str(root)]
    command += ["--allowed-adapter-hosts", "127.0.0.1", "--allow-private-addresses"]
    environment = {**child_environment(), "PYTHONPATH": str(checkout / "src")}
    # Without bytecode each process would compile the code, which takes longer than its start.
    environment |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(BYTECODE)}
    process = subprocess.Popen(command, text=True, env=environment)
    if max_files is not None:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (max_files, max_files))
    server = RunningServer(process, *ports)
    try:
        server.wait_until(ready=True)
        yield server, keys
    finally:
        workers = [pid for pid, _ in children(process.pid)]
        process.kill()
        process.wait()
        for pid in workers:  # older code's staging workers would spin without their server
            send_signal(pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def small_requests(
    server: RunningServer, key: str, seconds: float, attack: str | None = None
) -> Result:
    """Send small requests one after another for so many seconds."""
    durations: list[float] = []
    num_failed = most = 0
    start = time.monotonic()
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(timeout=LIMIT_SECONDS, headers=headers, trust_env=False) as http:
        while time.monotonic() - start < seconds:
            path, body = small_request(attack, len(durations))
            before = time.monotonic()
            try:
                response = await http.post(server.url + path, json=body)
                num_failed += not response.is_success
            except httpx.HTTPError:
                num_failed += 1
            durations.append(time.monotonic() - before)
            most = max(most, held_by(server.process.pid, 0).resident_bytes["serving"])
            await asyncio.sleep(PAUSE_SECONDS)
    return Result(
        seconds=durations,
        num_failed=num_failed,
        serving_bytes=most,
        load_average=os.getloadavg()[0],
    )


def measure(name: str | None, checkout: Path, seconds: float) -> Result:
    """Measure during one kind of attack; None: without an attack."""
    with (
        tempfile.TemporaryDirectory(prefix="hostile-") as folder,
        running_server(checkout, Path(folder), MAX_FILES.get(name or "")) as (server, keys),
    ):
        if name != FIRST_LOADS:
            # The first ones load the adapter, and start the processes that they need.
            asyncio.run(small_requests(server, keys["quiet"], 1.0, name))
        if name is None:
            return asyncio.run(small_requests(server, keys["quiet"], seconds))
        target = Target(server.http_port, server.grpc_port, keys["hostile"], folder)
        spawn = multiprocessing.get_context("spawn")
        client = spawn.Process(target=attack_until_killed, args=(name, target), daemon=True)
        client.start()
        time.sleep(2.0)  # until it has imported what it needs
        try:
            return asyncio.run(small_requests(server, keys["quiet"], seconds, name))
        finally:
            client.kill()
            client.join()


def tables(report: Report) -> str:
    columns = ["client", "code", "p50 ms", "p99 ms", "max ms", "p99 before / now"]
    columns += ["requests", "failed", "serving MiB", "load average"]
    rows = []
    for name, by_code in report.results.items():
        for code, rounds in by_code.items():
            times = [
                statistics.median(result.milliseconds(percent) for result in rounds)
                for percent in (50, 99, 100)
            ]
            rows.append(
                [
                    *(name, code),
                    *(f"{each:.0f}" for each in times),
                    _ratio(by_code) if code == "now" else "",
                    str(sum(len(result.seconds) for result in rounds)),
                    str(sum(result.num_failed for result in rounds)),
                    f"{max(result.serving_bytes for result in rounds) / MEBIBYTE:.0f}",
                    f"{statistics.median(result.load_average for result in rounds):.1f}",
                ]
            )
    head = ["# Hostile clients", "", *machine_lines(report.created, report.code, report.machine)]
    if report.before is not None:
        head.append(f'"before" is {report.before.commit}.')
    return "\n".join([*head, "", markdown_table(columns, rows), ""])


def _ratio(by_code: dict[str, list[Result]]) -> str:
    """Return the median of the rounds' ratios of p99, before to now."""
    if "before" not in by_code:
        return ""
    pairs = zip(by_code["before"], by_code["now"], strict=True)
    ratios = [before.milliseconds(99) / now.milliseconds(99) for before, now in pairs]
    return f"{statistics.median(ratios):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="checkout of older code to compare with")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--clients", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--output", type=Path, default=HERE / "results" / "hostile-clients")
    options = parser.parse_args()
    now = HERE.parent
    checkouts = {"now": now} if options.before is None else {"before": options.before, "now": now}
    names = {"none": None, **{name: name for name in options.clients}}
    results: dict[str, dict[str, list[Result]]] = {
        label: {code: [] for code in checkouts} for label in names
    }
    report = Report(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        code=this_code(),
        machine=this_machine(),
        before=None if options.before is None else this_code(options.before / "src" / "loraplex"),
        results=results,
    )
    for number in range(options.rounds):
        for label, name in names.items():
            for code, checkout in checkouts.items():
                results[label][code].append(measure(name, checkout, options.seconds))
            print(f"round {number}: {label}", file=sys.stderr)
        # Each whole round is a report: a run of many rounds may be ended early.
        write_pair(report, tables(report), options.output.with_suffix(".json"))
    print(tables(report))


if __name__ == "__main__":
    main()
