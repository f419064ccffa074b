"""GPU metrics, from a management library that is not there, and from one that half tells."""

import pynvml
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from loraplex.frontends.exact_counters import with_counters
from loraplex.frontends.kserve.gpu_metrics import GpuCollector, GpuReading, gpu_collectors


def reading(uuid="GPU-1", **changed):
    values = {
        "power_watts": 90.5,
        "power_limit_watts": 700.0,
        "energy_joules": 1000.0,
        "utilization": 0.25,
        "memory_total_bytes": 80.0,
        "memory_used_bytes": 8.0,
    }
    return GpuReading(uuid=uuid, **values | changed)


def shown(collector):
    registry = CollectorRegistry()
    registry.register(collector)
    text = with_counters(generate_latest(registry)).decode()
    return [line for line in text.splitlines() if not line.startswith("# HELP")]


def test_the_families_of_a_gpu():
    readings = [reading()]
    collector = GpuCollector(lambda: readings)
    readings[0] = reading(energy_joules=1003.5)
    assert shown(collector) == [
        "# TYPE nv_gpu_utilization gauge",
        'nv_gpu_utilization{gpu_uuid="GPU-1"} 0.25',
        "# TYPE nv_gpu_memory_total_bytes gauge",
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"} 80.0',
        "# TYPE nv_gpu_memory_used_bytes gauge",
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 8.0',
        "# TYPE nv_gpu_power_usage gauge",
        'nv_gpu_power_usage{gpu_uuid="GPU-1"} 90.5',
        "# TYPE nv_gpu_power_limit gauge",
        'nv_gpu_power_limit{gpu_uuid="GPU-1"} 700.0',
        "# TYPE nv_energy_consumption counter",
        'nv_energy_consumption{gpu_uuid="GPU-1"} 3.5',
    ]


def test_what_a_gpu_does_not_tell_is_left_out():
    silent = reading(power_watts=None, energy_joules=None)
    lines = shown(GpuCollector(lambda: [silent]))
    assert not any(line.startswith(("nv_gpu_power_usage{", "nv_energy")) for line in lines)
    assert 'nv_gpu_utilization{gpu_uuid="GPU-1"} 0.25' in lines


def test_without_a_driver_there_is_nothing(monkeypatch):
    def absent():
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert gpu_collectors() == []


@pytest.fixture
def library(monkeypatch):
    """A library with one GPU that tells neither power nor energy."""

    def unknown(handle):
        raise pynvml.NVMLError_NotSupported

    class Pair:
        total, used, gpu = 64, 16, 50

    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: Pair,
        "nvmlDeviceGetUtilizationRates": lambda handle: Pair,
        "nvmlDeviceGetPowerUsage": unknown,
        "nvmlDeviceGetPowerManagementLimit": lambda handle: 350_000,
        "nvmlDeviceGetTotalEnergyConsumption": unknown,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    return answers


def test_the_library_is_asked(library):
    (collector,) = gpu_collectors()
    lines = [line for line in shown(collector) if not line.startswith("#")]
    assert lines == [
        'nv_gpu_utilization{gpu_uuid="GPU-0"} 0.5',
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-0"} 64.0',
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-0"} 16.0',
        'nv_gpu_power_limit{gpu_uuid="GPU-0"} 350.0',
    ]


def test_a_driver_that_goes_away_is_no_error(library, monkeypatch):
    (collector,) = gpu_collectors()

    def gone():
        raise pynvml.NVMLError_Uninitialized

    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", gone)
    assert not [line for line in shown(collector) if not line.startswith("#")]
