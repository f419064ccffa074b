r"""Hundreds of streams at once, and memory over thousands of requests.

    PYTHONPATH=tests python benchmarks/streams.py [--streams 256] [--requests 10000] \
        [-- SERVE FLAGS]

Serves the shipped capitals model with its two adapters, by default settings but for the size of the
KV cache. First so many streams at once, several rounds: each must have the text of the same request
alone. Then a closed loop of requests of all kinds (streams, clients that leave, tools, a new
grammar each, Triton's gRPC streams), while the memory and the open files of the server's processes
are sampled. Prints tables and writes them, with everything as JSON in a second file; exit code 1 if
a response is missing or wrong, or if a process grows.
"""

import argparse
import asyncio
import collections
import datetime
import itertools
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_aio
from comparison.stream_load import (
    MEBIBYTE,
    Held,
    LoadRequest,
    LoadResult,
    growth,
    held_by,
    new_client,
    send_at_once,
    send_one,
)

from loraplex.bench.machine import (
    Code,
    Machine,
    load_average,
    machine_lines,
    this_code,
    this_machine,
)
from loraplex.bench.report import markdown_table, write_dated
from loraplex.bench.statistics import percentile
from loraplex.testing.running_server import RunningServer, serving
from support.capitals.corpus import COUNTRIES, LANGUAGES, founding_prompts, phrased_queries

RESULTS = Path(__file__).parent / "results"
NUM_CLIENTS = 64
NUM_SAMPLES = 20
MOST_GROWTH = 2 * MEBIBYTE
"""Largest growth of a process per thousand requests."""
KV_CACHE_BYTES = 128 * MEBIBYTE
"""So that the prefix cache is full early: what it may hold is memory that a server takes once."""
MODELS = ("capitals", "chinese", "japanese")
TOOL = {
    "type": "function",
    "function": {
        "name": "set_light",
        "parameters": {
            "type": "object",
            "properties": {"room": {"enum": ["kitchen", "bath"]}, "is_on": {"type": "boolean"}},
            "required": ["room", "is_on"],
            "additionalProperties": False,
        },
    },
}


class Burst(msgspec.Struct, frozen=True):
    """All streams of a round, which began together."""

    results: list[LoadResult]
    wrong: list[str]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    created: str
    code: Code
    machine: Machine
    load: float | None
    serve_flags: tuple[str, ...]
    bursts: list[Burst]
    kinds: dict[str, int]
    """Requests of the closed loop."""
    failed: list[str]
    held: list[Held]
    growth: dict[str, float]
    """Bytes for each thousand requests, by process."""

    @property
    def is_good(self) -> bool:
        grows = any(slope > MOST_GROWTH for slope in self.growth.values())
        return not grows and not self.failed and not any(burst.wrong for burst in self.bursts)


def chat(model: str, number: int) -> LoadRequest:
    country = COUNTRIES[number % len(COUNTRIES)]
    language = LANGUAGES[number // len(COUNTRIES) % 3]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": phrased_queries(country, language)[0]}],
        "max_tokens": 24,
        "temperature": 0,
    }
    return LoadRequest(model, "/v1/chat/completions", body)


def completion(model: str, number: int) -> LoadRequest:
    prompt = founding_prompts(COUNTRIES[number % len(COUNTRIES)])["english"]
    body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0}
    return LoadRequest(model, "/v1/completions", body)


def mixed(count: int) -> list[LoadRequest]:
    """Base and adapters in turn, chats and completions."""
    makers = (chat, completion)
    return [makers[n // 3 % 2](MODELS[n % 3], n // 6) for n in range(count)]


async def burst(
    http: httpx.AsyncClient, load_requests: Sequence[LoadRequest], alone: Sequence[str]
) -> Burst:
    results = await send_at_once(http, load_requests)
    return Burst(
        results,
        [
            each.error or f"{each.label}: {each.text!r} instead of {wanted!r}"
            for each, wanted in zip(results, alone, strict=True)
            if each.error or not each.is_whole or each.text != wanted
        ],
    )


# ---------------------------------------------------------------- the closed loop


def of_all_kinds(number: int) -> tuple[str, LoadRequest]:
    """One in eight leaves, one in eight has tools, one in eight a grammar of its own."""
    model = MODELS[number % 3]
    plain = chat(model, number // 8)
    body = dict(plain.body)
    match number % 8:
        case 0:
            endless = {**body, "max_tokens": 500, "ignore_eos": True}
            return "leaves", LoadRequest(model, plain.path, endless, leaves_after=1 + number % 5)
        case 1:
            return "tools", LoadRequest(
                model, plain.path, {**body, "tools": [TOOL], "tool_choice": "required"}
            )
        case 2:
            regex = {"structured_outputs": {"regex": f"[a-z]{{3}} {number}"}}
            return "grammar", LoadRequest(model, plain.path, {**body, **regex})
        case 3:
            return "completion", completion(model, number)
    return "chat", plain


async def loop(
    server: RunningServer, num_requests: int
) -> tuple[dict[str, int], list[str], list[Held]]:
    """(how many of each kind, what failed, samples of memory)."""
    numbers = itertools.count()
    kinds: collections.Counter[str] = collections.Counter()
    failed: list[str] = []
    held = [held_by(server.process.pid, 0)]
    every = max(num_requests // NUM_SAMPLES, 1)

    async def client() -> None:
        async with new_client(server.url) as http:
            while (number := next(numbers)) < num_requests:
                kind, error = await one(http, number)
                kinds[kind] += 1
                if error:
                    failed.append(f"{kind}: {error}")
                if (number + 1) % every == 0:
                    held.append(held_by(server.process.pid, number + 1))
                    show(held[-1])

    async with triton_aio.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as grpc:

        async def one(http: httpx.AsyncClient, number: int) -> tuple[str, str]:
            if number % 8 == 4:
                return "gRPC", await by_grpc(grpc, number)
            kind, load_request = of_all_kinds(number)
            results = await send_one(http, load_request)
            is_short = load_request.leaves_after is None and not results.is_whole
            return kind, results.error or ("cut off" if is_short else "")

        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
    return dict(kinds), failed, held


async def by_grpc(client: Any, number: int) -> str:
    """Triton's stream; gives the error, or nothing."""
    country = COUNTRIES[number % len(COUNTRIES)]
    arrays = {
        "text_input": np.array([[founding_prompts(country)["english"].encode()]], dtype=object),
        "max_tokens": np.array([[24]], dtype=np.int32),
        "stream": np.array([[True]]),
    }
    types = {"O": "BYTES", "i": "INT32", "b": "BOOL"}
    inputs = []
    for name, array in arrays.items():
        inputs.append(triton_grpc.InferInput(name, array.shape, types[array.dtype.kind]))
        inputs[-1].set_data_from_numpy(array)

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": "ensemble",
            "inputs": inputs,
            "enable_empty_final_response": True,
        }

    num_responses = 0
    async for result, error in client.stream_infer(requests()):
        if error is not None:
            return str(error)
        num_responses += 1
        final = result.get_response().parameters.get("triton_final_response")
        if final is not None and final.bool_param:
            break
    return "" if num_responses else "no answer"


# ---------------------------------------------------------------- the report


def tables(report: Report) -> str:
    return "\n\n".join(
        [
            "\n".join(
                ["# Streams", "", *machine_lines(report.created, report.code, report.machine)]
            ),
            f"`loraplex serve` {' '.join(report.serve_flags)}; "
            f"load average {report.load} at the start.",
            *_bursts(report.bursts),
            f"## {sum(report.kinds.values())} requests, {NUM_CLIENTS} at a time",
            ", ".join(f"{count} {kind}" for kind, count in sorted(report.kinds.items()))
            + f"; {len(report.failed)} failed",
            markdown_table(*_memory(report)),
        ]
    )


def _bursts(bursts: Sequence[Burst]) -> Iterator[str]:
    yield f"## {len(bursts[0].results)} streams at once"
    yield "Seconds to the first text, over the streams of a round."
    columns = ["round", "streams of", "p50", "p90", "max", "max / p50", "longest gap", "wrong"]
    rows = []
    for number, each in enumerate(bursts, start=1):
        for label in ("all", *MODELS):
            results = [one for one in each.results if label in ("all", one.label)]
            first = [one.first_seconds for one in results]
            middle = statistics.median(first)
            seconds = (middle, percentile(first, 90), max(first), max(first) / max(middle, 1e-9))
            gap = max(one.longest_gap for one in results)
            wrong = str(len(each.wrong)) if label == "all" else ""
            rows.append([str(number), label, *(f"{s:.2f}" for s in seconds), f"{gap:.2f}", wrong])
    yield markdown_table(columns, rows)


def _memory(report: Report) -> tuple[list[str], list[list[str]]]:
    names = list(report.growth)
    rows = [
        [str(sample.num_requests), *(_shown(sample, name) for name in names)]
        for sample in report.held
    ]
    slopes = (f"{report.growth[name] / 1024:+.0f} KiB" for name in names)
    return ["requests", *names], [*rows, ["per 1000, second half", *slopes]]


def _shown(sample: Held, name: str) -> str:
    if name not in sample.resident_bytes:
        return "-"
    return f"{sample.resident_bytes[name] / MEBIBYTE:.1f} MiB, {sample.num_files[name]} files"


def show(sample: Held) -> None:
    names = sample.resident_bytes
    shown = ", ".join(f"{name} {_shown(sample, name)}" for name in names)
    print(f"{sample.num_requests}: {shown}", file=sys.stderr)


async def measure(server: RunningServer, options: argparse.Namespace) -> Report:
    code, machine, load = this_code(), this_machine(), load_average()
    load_requests = mixed(options.streams)
    async with new_client(server.url) as http:
        alone = [(await send_one(http, load_request)).text for load_request in load_requests]
        bursts = [await burst(http, load_requests, alone) for _ in range(options.rounds)]
    kinds, failed, held = await loop(server, options.requests)
    return Report(
        created=options.created,
        code=code,
        machine=machine,
        load=load,
        serve_flags=tuple(options.flags),
        bursts=bursts,
        kinds=kinds,
        failed=failed,
        held=held,
        growth={name: growth(held, name) for name in held[-1].resident_bytes},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256, help="at once")
    parser.add_argument("--rounds", type=int, default=3, help="of them")
    parser.add_argument("--requests", type=int, default=10_000, help="of the closed loop")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the report")
    parser.add_argument("flags", nargs="*", help="flags for `loraplex serve`, after --")
    options = parser.parse_args()
    if min(options.streams, options.rounds) < 1 or options.requests < 2 * NUM_SAMPLES:
        parser.error(f"--streams and --rounds must be at least 1, --requests {2 * NUM_SAMPLES}")
    options.flags = ["--kv-cache-bytes", str(KV_CACHE_BYTES), *options.flags]
    options.created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with (
        tempfile.TemporaryDirectory(prefix="streams-") as state,
        serving(Path(state), "--log-level", "error", *options.flags) as server,
    ):
        report = asyncio.run(measure(server, options))
    paths = write_dated(report, tables(report), options.output, kind="streams")
    print(tables(report))
    print(
        *[*report.failed[:5], *(w for b in report.bursts for w in b.wrong[:5])],
        sep="\n",
        file=sys.stderr,
    )
    print(*paths, sep="\n", file=sys.stderr)
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
