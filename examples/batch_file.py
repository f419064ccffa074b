"""Batch files: requests in OpenAI's format from a JSONL file, a few at a time, with a resume.

    pip install httpx
    python examples/batch_file.py requests.jsonl results.jsonl --url http://localhost:8000

A line of the input is {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body":
{"model": "chinese", "messages": [...]}}. A line of the output has the same `custom_id`; its place
is that of the completion. After an interruption the same command goes on: requests that have a
result, also an error, are not sent again. `--api-key-file` names the file of a key.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import httpx

MAX_TRIES = 5
MAX_WAIT_SECONDS = 60.0
BUSY = (429, 503)
"""Statuses of a server that wants to be tried again later."""


def finished_ids(output: Path) -> set[str]:
    """Return the ids of an output so far. A last line that was cut off is removed from it."""
    if not output.exists():
        return set()
    finished, num_bytes = set(), 0
    with output.open("rb+") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            finished.add(json.loads(line)["custom_id"])
            num_bytes += len(line)
        lines.truncate(num_bytes)
    return finished


class InputError(Exception):
    """A line of the input is no request, or repeats an id."""


class UnavailableError(Exception):
    """The server did not take a request, however often it was sent."""


def open_requests(source: Path, finished: set[str]) -> Iterator[dict[str, Any]]:
    """Read the requests that have no result; one line is in memory at a time.

    Raises InputError. Tasks read it, and a SystemExit there would stop the event loop in the middle
    of the other tasks.
    """
    seen = set()
    with source.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                request = json.loads(line)
                custom_id, _ = request["custom_id"], (request["url"], request["body"])
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(f"{source}, line {number}: {error!r}") from error
            if custom_id in seen:
                raise InputError(f"{source}, line {number}: the id {custom_id!r} occurs twice")
            seen.add(custom_id)
            if custom_id not in finished:
                yield request


async def send(client: httpx.AsyncClient, request: dict[str, Any]) -> dict[str, Any]:
    """Return the line of a request's result, after the waits that a busy server wants."""
    problem, seconds = "", 0.0
    for attempt in range(MAX_TRIES):
        await asyncio.sleep(seconds)
        seconds = 2.0**attempt
        try:
            response = await client.post(request["url"], json=request["body"])
        except httpx.TransportError as error:
            problem = repr(error)
            continue
        if response.status_code not in BUSY:
            return {
                "custom_id": request["custom_id"],
                "response": {
                    "status_code": response.status_code,
                    "request_id": response.headers.get("x-request-id", ""),
                    "body": response.json(),
                },
                "error": None,
            }
        problem = f"{response.status_code} {response.text}"
        wanted = response.headers.get("retry-after", "")
        seconds = min(float(wanted) if wanted.isdigit() else seconds, MAX_WAIT_SECONDS)
    raise UnavailableError(f"request {request['custom_id']!r}: {problem}")


async def run(
    client: httpx.AsyncClient, requests: Iterator[dict[str, Any]], output: IO[str], concurrency: int
) -> tuple[int, int]:
    """Send the requests, `concurrency` at a time; return the numbers of results and of errors."""
    num_results, num_errors = 0, 0

    async def work() -> None:
        nonlocal num_results, num_errors
        for request in requests:  # all workers take from the same iterator
            result = await send(client, request)
            output.write(json.dumps(result, ensure_ascii=False) + "\n")
            output.flush()
            num_results += 1
            num_errors += result["response"]["status_code"] != 200

    async with asyncio.TaskGroup() as workers:
        for _ in range(concurrency):
            workers.create_task(work())
    return num_results, num_errors


async def process(args: argparse.Namespace) -> int:
    finished = finished_ids(args.output)
    if finished:
        print(f"{len(finished)} requests have their results already")
    headers = {}
    if args.api_key_file is not None:
        headers["authorization"] = f"Bearer {args.api_key_file.read_text().strip()}"
    limits = httpx.Limits(max_connections=args.concurrency)
    client = httpx.AsyncClient(base_url=args.url, headers=headers, timeout=600, limits=limits)
    num_results = num_errors = 0
    problem = ""
    with args.output.open("a", encoding="utf-8") as output:
        async with client:
            requests = open_requests(args.input, finished)
            try:
                num_results, num_errors = await run(client, requests, output, args.concurrency)
            except* UnavailableError as group:
                problem = f"{group.exceptions[0]}. The same command goes on later."
            except* InputError as group:
                problem = f"{group.exceptions[0]}. The same command goes on with a correct line."
    if problem:
        print(problem, file=sys.stderr)
        return 2
    print(f"{num_results} requests were sent, {num_errors} of them failed")
    return 1 if num_errors else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--api-key-file", type=Path)
    return asyncio.run(process(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
