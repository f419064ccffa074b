"""What an adapter takes in each tier, in bytes: as `loraplex plan` counts, and so a server."""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from comparison.processes import ServerProcess
from loraplex.core.errors import ConfigError


class AdapterBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes."""

    device_bytes: int
    """Whole pages, of one adapter."""
    host_bytes: int
    least_device_bytes: int
    """That a server takes for the device tier: one adapter of the largest rank."""

    def settings(self, num_adapters: int) -> dict[str, int]:
        """Return the settings of tiers that hold exactly this number of adapters."""
        return {
            "lora_device_bytes": max(num_adapters * self.device_bytes, self.least_device_bytes),
            "lora_host_bytes": num_adapters * self.host_bytes,
        }


async def adapter_bytes(
    model: Path, adapter: Path, flags: Sequence[str], log: Path
) -> AdapterBytes:
    """flags: those of the server that decide it. log: for its messages. Raises ConfigError."""
    command = [sys.executable, "-m", "loraplex", "plan", str(model), "--json"]
    process = await ServerProcess.start(
        [*command, "--adapters", str(adapter), *flags], log, pipes=True
    )
    try:
        output = await process.stdout.read()
    finally:
        await process.stop()
    try:
        plan = msgspec.json.decode(output, type=_Plan)
    except msgspec.DecodeError:
        raise ConfigError(f"loraplex plan failed for {model}: {process.log_tail()}") from None
    (planned,) = plan.adapters.adapters
    if planned.problem:
        raise ConfigError(f"{adapter} cannot be served: {planned.problem}")
    device = plan.memory.device
    return AdapterBytes(
        device_bytes=planned.device_bytes,
        host_bytes=planned.host_bytes,
        least_device_bytes=max(fit.pages for fit in device.fits) * device.page_bytes,
    )


class _Planned(msgspec.Struct):
    device_bytes: int
    host_bytes: int
    problem: str


class _Adapters(msgspec.Struct):
    adapters: tuple[_Planned, ...]


class _Fit(msgspec.Struct):
    pages: int


class _Device(msgspec.Struct):
    page_bytes: int
    fits: tuple[_Fit, ...]


class _Memory(msgspec.Struct):
    device: _Device


class _Plan(msgspec.Struct):
    """What matters of it."""

    memory: _Memory
    adapters: _Adapters
