"""Triton's families nv_gpu_* and nv_energy_consumption, one series for each GPU of the machine.

Source of the numbers: NVIDIA's management library, which comes with the driver. Without a driver
the families are not there, as in Triton.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pynvml
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loraplex.frontends.exact_counters import ExactCounter

_LABEL = "gpu_uuid"


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """Of one GPU, now; None: it does not tell."""

    uuid: str
    power_watts: float | None
    power_limit_watts: float | None
    energy_joules: float | None
    """Since the driver was loaded."""
    utilization: float | None
    """0 to 1."""
    memory_total_bytes: float | None
    memory_used_bytes: float | None


ReadGpus = Callable[[], Sequence[GpuReading]]
_GAUGES: tuple[tuple[str, str, Callable[[GpuReading], float | None]], ...] = (
    ("nv_gpu_utilization", "GPU utilization rate [0.0 - 1.0)", lambda gpu: gpu.utilization),
    ("nv_gpu_memory_total_bytes", "GPU total memory, in bytes", lambda gpu: gpu.memory_total_bytes),
    ("nv_gpu_memory_used_bytes", "GPU used memory, in bytes", lambda gpu: gpu.memory_used_bytes),
    ("nv_gpu_power_usage", "GPU power usage in watts", lambda gpu: gpu.power_watts),
    (
        "nv_gpu_power_limit",
        "GPU power management limit in watts",
        lambda gpu: gpu.power_limit_watts,
    ),
)


class GpuCollector(Collector):
    def __init__(self, read: ReadGpus) -> None:
        self._read = read
        self._first_joules = {gpu.uuid: gpu.energy_joules for gpu in read()}

    def collect(self) -> Iterator[Metric]:
        gpus = self._read()
        for name, text, value_of in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=[_LABEL])
            for gpu in gpus:
                if (value := value_of(gpu)) is not None:
                    gauge.add_metric([gpu.uuid], value)
            yield gauge
        yield self._energy(gpus)

    def _energy(self, gpus: Sequence[GpuReading]) -> Metric:
        counter = ExactCounter(
            "nv_energy_consumption", "GPU energy consumption in joules since the server started"
        )
        for gpu in gpus:
            first = self._first_joules.setdefault(gpu.uuid, gpu.energy_joules)
            if gpu.energy_joules is not None and first is not None:
                counter.add({_LABEL: gpu.uuid}, gpu.energy_joules - first)
        return counter


def gpu_collectors() -> list[Collector]:
    """None where the machine has no GPU that tells."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    return [GpuCollector(_read_all)]


def _read_all() -> list[GpuReading]:
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [_reading(handle) for handle in handles]
    except pynvml.NVMLError:  # the driver has gone
        return []


def _reading(handle: Any) -> GpuReading:
    memory = _asked(pynvml.nvmlDeviceGetMemoryInfo, handle)
    rates = _asked(pynvml.nvmlDeviceGetUtilizationRates, handle)
    return GpuReading(
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        power_watts=_thousandths(_asked(pynvml.nvmlDeviceGetPowerUsage, handle)),
        power_limit_watts=_thousandths(_asked(pynvml.nvmlDeviceGetPowerManagementLimit, handle)),
        energy_joules=_thousandths(_asked(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)),
        utilization=None if rates is None else rates.gpu / 100,
        memory_total_bytes=None if memory is None else memory.total,
        memory_used_bytes=None if memory is None else memory.used,
    )


def _asked(question: Callable[[Any], Any], handle: Any) -> Any:
    """None: this GPU does not tell."""
    try:
        return question(handle)
    except pynvml.NVMLError:
        return None


def _thousandths(value: float | None) -> float | None:
    return None if value is None else value / 1000
