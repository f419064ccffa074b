"""Latency of health checks, and the server's memory, while one client sends a hostile body.

    python benchmarks/hostile_bodies.py [CASE ...]

Serves the shipped model, with 40,960 positions and an API key. A process sends the body of a case;
this one checks the health 500 times a second meanwhile. `quiet` is the server without hostile
clients: what the machine adds. Prints a table.
"""

import argparse
import dataclasses
import datetime
import json
import multiprocessing
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final

import grpc
import psutil

from loraplex.demo import BASE_PATH
from loraplex.serving.access.key_file_changes import create_key
from loraplex.testing.running_server import serving

INTERVAL_SECONDS: Final = 0.002
MAX_POSITIONS: Final = 40_960
MEBIBYTE: Final = 1 << 20
INFER: Final = "/inference.GRPCInferenceService/ModelInfer"


@dataclasses.dataclass(frozen=True)
class Case:
    body: Callable[[], bytes]
    path: str = "/v1/completions"
    """Path, or the name of an RPC."""
    has_key: bool = True
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


def completion(**fields: Any) -> bytes:
    fields = {"model": "capitals", "max_tokens": 1, **fields}
    return json.dumps(fields, ensure_ascii=False).encode()


def weights(num_bytes: int) -> tuple[bytes, str]:
    """Return a request with a binary tensor, and the length of its JSON."""
    tensor = {
        "name": "lora_weights",
        "datatype": "FP16",
        "shape": [1, num_bytes // 2],
        "parameters": {"binary_data_size": num_bytes},
    }
    head = json.dumps({"inputs": [tensor]}).encode()
    return head + bytes(num_bytes), str(len(head))


def varint(number: int) -> bytes:
    encoded = b""
    while number > 0x7F:
        encoded += bytes([number & 0x7F | 0x80])
        number >>= 7
    return encoded + bytes([number])


def raw_tensor(num_bytes: int) -> bytes:
    return b"\x0a\x01m\x3a" + varint(num_bytes) + bytes(num_bytes)


CASES: Final[dict[str, Case]] = {
    "quiet": Case(lambda: b"", "/health/live"),
    "gRPC, 16 MB of inputs, no key": Case(lambda: b"\x2a\x00" * (8 * MEBIBYTE), INFER, False),
    "gRPC, 16 MB of inputs": Case(lambda: b"\x2a\x00" * (8 * MEBIBYTE), INFER),
    "gRPC, 60 MB raw": Case(lambda: raw_tensor(60 * MEBIBYTE), INFER),
    "60 MB of token ids": Case(lambda: completion(prompt=[100] * (12 * MEBIBYTE))),
    "131,000 token ids": Case(lambda: completion(prompt=[100] * 131_000)),
    "logit_bias of 1e6": Case(
        lambda: completion(prompt="a", logit_bias={str(n): 1 for n in range(10**6)})
    ),
    "logit_bias of 65,000": Case(
        lambda: completion(prompt="a", logit_bias={str(n): 1 for n in range(65_000)})
    ),
    "30,000 lists": Case(lambda: completion(prompt=[[1]] * 30_000)),
    "8,192 messages": Case(
        lambda: completion(messages=[{"role": "user", "content": "x"}] * 8192),
        "/v1/chat/completions",
    ),
    "8 MB of escapes": Case(
        lambda: b'{"model":"capitals","prompt":"' + b"\\u00e9" * (8_300_000 // 6) + b'"}'
    ),
    "5 MB of combining characters": Case(lambda: completion(prompt="\u0301" * 2_500_000)),
    "5 MB of text": Case(lambda: completion(prompt="capital of " * 500_000)),
    "192 MB of weights": Case(
        lambda: weights(192 * MEBIBYTE)[0],
        "/v2/models/capitals/infer",
        headers={"inference-header-content-length": weights(192 * MEBIBYTE)[1]},
    ),
    "openapi.json": Case(lambda: b"", "/openapi.json"),
}


def send(name: str, key: str, ports: tuple[int, int], results: Any) -> None:
    """Put a marker before the request, and its status after it."""
    case, (http_port, grpc_port) = CASES[name], ports
    body = case.body()
    token = {"authorization": f"Bearer {key}"} if case.has_key else {}
    results.put("sending")
    started = time.perf_counter()
    if case.path == INFER:
        status = _rpc(grpc_port, case.path, body, token)
    else:
        status = _http(f"http://127.0.0.1:{http_port}{case.path}", body, {**token, **case.headers})
    results.put(f"{status} after {time.perf_counter() - started:.2f} s")


def _rpc(port: int, name: str, body: bytes, token: Mapping[str, str]) -> str:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        try:
            channel.unary_unary(name)(body, metadata=tuple(token.items()))
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def _http(url: str, body: bytes, headers: Mapping[str, str]) -> str:
    sent = {"content-type": "application/json", **headers}
    request = urllib.request.Request(url, body or None, sent)
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return str(response.status)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except OSError as error:
        return str(error)


def measure(name: str, key: str, ports: tuple[int, int], pid: int) -> tuple[float, float, str]:
    """Return the slowest health check in ms, the growth of memory in MiB, and the response."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    client = context.Process(target=send, args=(name, key, ports, results))
    client.start()
    results.get()
    memory, connection = psutil.Process(pid), HTTPConnection("127.0.0.1", ports[0])
    before = most = memory.memory_info().rss
    slowest, end = 0.0, time.perf_counter() + 0.5
    while client.is_alive() or time.perf_counter() < end:
        started = time.perf_counter()
        connection.request("GET", "/health/live")
        connection.getresponse().read()
        slowest = max(slowest, time.perf_counter() - started)
        most = max(most, memory.memory_info().rss)
        time.sleep(INTERVAL_SECONDS)
    client.join()
    return 1e3 * slowest, (most - before) / MEBIBYTE, results.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        shutil.copytree(BASE_PATH, base)
        config = json.loads((base / "config.json").read_text())
        config["max_position_embeddings"] = MAX_POSITIONS
        (base / "config.json").write_text(json.dumps(config))
        print("| case | slowest health check, ms | memory, MiB | response |\n|---|---|---|---|")
        keys = Path(folder, "keys.toml")
        _, key, _ = create_key(keys, "acme", datetime.datetime.now(datetime.UTC))
        flags = ("--api-keys-file", str(keys), "--max-body-bytes", str(256 * MEBIBYTE))
        with serving(Path(folder, "state"), *flags, model=base) as server:
            ports = (server.http_port, server.grpc_port)
            for name in arguments.cases or CASES:
                slowest, memory, status = measure(name, key, ports, server.process.pid)
                print(f"| {name} | {slowest:.0f} | {memory:.0f} | {status} |", flush=True)


if __name__ == "__main__":
    main()
