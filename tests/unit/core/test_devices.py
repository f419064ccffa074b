"""The device for `auto`, and a device that the operator set, without importing torch."""

import ctypes
import re
import subprocess
import sys

import pytest

from loraplex.core.devices import CudaDriver, check_cuda, choose, cuda_driver
from loraplex.core.errors import ConfigError
from support.naming import naming, refused

CPU_BUILD = "from typing import Optional\n__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n"
CUDA_BUILD = "__version__ = '2.13.0'\ncuda: Optional[str] = '12.8'\n"
H100 = CudaDriver(12, ("NVIDIA H100 80GB HBM3", "NVIDIA L4"))


def no_driver() -> CudaDriver:
    raise AssertionError("the driver is not needed")


def test_the_first_gpu() -> None:
    assert choose(CUDA_BUILD, True, lambda: H100) == ("cuda", "NVIDIA H100 80GB HBM3")
    assert choose("", True, lambda: H100).name == "cuda"


def test_a_torch_for_cpus() -> None:
    assert choose(CPU_BUILD, True, no_driver) == ("cpu", "this torch is a CPU build")


def test_no_gpu() -> None:
    assert choose(CUDA_BUILD, False, no_driver) == (
        "cpu",
        "there is no NVIDIA GPU that this process may use",
    )


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (CudaDriver(12, ()), "NVIDIA's driver shows this process no GPU"),
        (CudaDriver(11, ("T4",)), "NVIDIA's driver supports CUDA 11, and torch needs 12"),
        (CudaDriver(problem="the driver cannot start"), "the driver cannot start"),
    ],
)
def test_a_gpu_that_torch_cannot_use(driver: CudaDriver, reason: str) -> None:
    assert choose(CUDA_BUILD, True, lambda: driver) == ("cpu", reason)


class Library:
    """Stands for libcuda with two GPUs."""

    def __init__(self, error: int = 0) -> None:
        self.error = error

    def cuInit(self, flags: int) -> int:
        return self.error

    def cuDriverGetVersion(self, version: object) -> int:
        version._obj.value = 12040
        return 0

    def cuDeviceGetCount(self, count: object) -> int:
        count._obj.value = 2
        return 0

    def cuDeviceGetName(self, name: ctypes.Array, size: int, index: int) -> int:
        assert len(name) == size
        name.value = b"GPU %d" % index
        return 0


def test_the_driver() -> None:
    assert cuda_driver(lambda _: Library()) == CudaDriver(12, ("GPU 0", "GPU 1"))
    assert cuda_driver(lambda _: Library(100)) == CudaDriver()
    assert re.search(naming("CUDA", 803), cuda_driver(lambda _: Library(803)).problem)


def test_no_driver() -> None:
    def load(name: str) -> None:
        raise OSError(name)

    assert re.search(naming("NVIDIA", "libcuda.so.1"), cuda_driver(load).problem)


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from loraplex.core.devices import find_device; "
        "assert find_device().name in ('cpu', 'cuda'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cuda_with_a_torch_for_cpus() -> None:
    with pytest.raises(ConfigError, match=naming("2.13.0+cpu", "CPUs")):
        check_cuda("cuda", CPU_BUILD, has_gpu=True)


def test_cuda_without_a_gpu() -> None:
    with refused(ConfigError, "cuda:1", "NVIDIA", "GPU", param="device"):
        check_cuda("cuda:1", CUDA_BUILD, has_gpu=False)


def test_cuda_that_may_work() -> None:
    check_cuda("cuda", CUDA_BUILD, has_gpu=True)
    check_cuda("cuda", "", has_gpu=True)
