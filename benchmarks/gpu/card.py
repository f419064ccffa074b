"""The device that figures are of: its name, clocks and driver, and how fast it copies."""

import statistics
import subprocess
import time
from collections.abc import Callable

import msgspec
import torch
import triton

from loraplex.bench.machine import Code, Machine, this_code, this_machine

_QUERIES = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.limit",
    "ecc.mode.current",
)
_COPY_BYTES = 2 << 30


class Card(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    memory_bytes: int
    num_multiprocessors: int
    compute_capability: str
    told: dict[str, str]  # language: quoted (a field of the results)
    """Output of nvidia-smi at the start; empty if there is none."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Code and card that made the figures of a file."""

    created: str
    code: Code
    machine: Machine
    card: Card
    versions: dict[str, str]


def this_place(device: torch.device) -> Place:
    versions = {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
    }
    return Place(
        created=time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        code=this_code(),
        machine=this_machine(),
        card=_card(device),
        versions=versions,
    )


def _card(device: torch.device) -> Card:
    if device.type == "cpu":
        return Card(
            name="none: kernels on the processor",
            memory_bytes=0,
            num_multiprocessors=0,
            compute_capability="",
            told={},
        )
    found = torch.cuda.get_device_properties(device)
    return Card(
        name=found.name,
        memory_bytes=found.total_memory,
        num_multiprocessors=found.multi_processor_count,
        compute_capability=f"{found.major}.{found.minor}",
        told=_reported(),
    )


def _reported() -> dict[str, str]:
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(_QUERIES)}",
        "--format=csv,noheader",
        "-i",
        "0",
    ]
    try:
        line = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    return dict(zip(_QUERIES, (field.strip() for field in line.split(",")), strict=False))


def finish(device: torch.device) -> None:
    """Wait for all work that was sent to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 10) -> list[float]:
    """Measure each repeat by the host's clock, after a warm-up that does not count."""
    times = []
    for _ in range(1 + repeats):
        finish(device)
        start = time.perf_counter()
        work()
        finish(device)
        times.append(time.perf_counter() - start)
    return times[1:]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second by a copy within the device: the median of ten."""
    size = _COPY_BYTES if device.type == "cuda" else 1 << 22
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / statistics.median(seconds_of(lambda: target.copy_(source), device))


def arrival_bandwidth(device: torch.device) -> float:
    """Bytes a second from pinned host memory to the device."""
    size = 1 << 30 if device.type == "cuda" else 1 << 22
    source = torch.ones(size // 4, pin_memory=device.type == "cuda")
    target = torch.empty(size // 4, device=device)
    work = lambda: target.copy_(source, non_blocking=True)  # noqa: E731
    return size / statistics.median(seconds_of(work, device))
