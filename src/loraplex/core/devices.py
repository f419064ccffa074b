"""The device of a model: the choice for `auto`, the check of a device that the operator set, and
the name of the processor.

Nothing here imports torch, which takes seconds: a build of torch is known by its version file, and
the GPUs by NVIDIA's driver.
"""

import ctypes
import importlib.util
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from loraplex.core.errors import ConfigError
from loraplex.core.gpus import num_gpus

_CPU: Final = "cpu"
_CUDA: Final = "cuda"
_CPU_INFO: Final = Path("/proc/cpuinfo")
_WSL_GPU: Final = Path("/dev/dxg")
"""Device of a GPU under Windows, which has no device of NVIDIA's driver."""
_CUDA_OF_TORCH: Final = re.compile(r"^cuda\b[^=]*= *(?:None|'([0-9]+)[^']*')", re.MULTILINE)
_TORCH_VERSION: Final = re.compile(r"^__version__ *= *'([^']*)'", re.MULTILINE)
_DRIVER: Final = "libcuda.so.1"
_NO_GPU: Final = 100
"""CUDA_ERROR_NO_DEVICE."""
_MAX_NAME_BYTES: Final = 256
_CUDA_VERSION: Final = 1000
"""Factor of the major version in a version number of CUDA: 12040 is 12.4."""


class Device(NamedTuple):
    """A device, and the reason for it."""

    name: str
    reason: str


class CudaDriver(NamedTuple):
    """What NVIDIA's driver reports."""

    version: int = 0
    """Major version of CUDA that it supports."""
    gpus: tuple[str, ...] = ()
    """Names of the GPUs that this process may use."""
    problem: str = ""
    """Reason why it can serve none; else empty."""


def find_device() -> Device:
    """Return the device for `auto`: the first GPU if torch can use it, else the CPU."""
    return choose(torch_version_file(), has_gpu(), cuda_driver)


def choose(version_file: str, is_gpu_here: bool, driver: Callable[[], CudaDriver]) -> Device:
    """Return the device for `auto`. version_file: text of torch's version.py.

    driver: called only where torch has CUDA and the machine a GPU.
    """
    built = _CUDA_OF_TORCH.search(version_file)
    if built is not None and built[1] is None:
        return Device(_CPU, "this torch is a CPU build")
    if not is_gpu_here:
        return Device(_CPU, "there is no NVIDIA GPU that this process may use")
    found = driver()
    if found.problem:
        return Device(_CPU, found.problem)
    if not found.gpus:
        return Device(_CPU, "NVIDIA's driver shows this process no GPU")
    if built is not None and found.version < int(built[1]):
        return Device(
            _CPU, f"NVIDIA's driver supports CUDA {found.version}, and torch needs {built[1]}"
        )
    return Device(_CUDA, found.gpus[0])


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU that this process may use."""
    return num_gpus() > 0 or _WSL_GPU.exists()


def check_cuda(device: str, version_file: str, *, has_gpu: bool) -> None:
    """Raise ConfigError if torch or the machine has no CUDA. version_file: text of torch's."""
    built = _CUDA_OF_TORCH.search(version_file)
    if built is not None and built[1] is None:
        version = _TORCH_VERSION.search(version_file)
        named = f"torch {version[1]}" if version else "the installed torch"
        raise ConfigError(
            f"device is {device}, but {named} is a build for CPUs: install a build with CUDA (see "
            "https://pytorch.org/get-started/locally), or set --device cpu",
            param="device",
        )
    if not has_gpu:
        raise ConfigError(
            f"device is {device}, but this machine has no NVIDIA GPU that this process may use: "
            "set --device cpu, or check nvidia-smi, CUDA_VISIBLE_DEVICES and, in a container, the "
            "runtime's GPU option",
            param="device",
        )


def processor_name() -> str:
    """Return the name of this machine's processor."""
    return processor_field("model name") or platform.processor() or platform.machine()


def processor_field(name: str) -> str | None:
    """Return a field of the first processor in /proc/cpuinfo; None if there is none."""
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return None


def torch_version_file() -> str:
    """Return the text of torch's version.py; empty: it is not found."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        return Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return ""


def cuda_driver(load: Callable[[str], Any] = ctypes.CDLL) -> CudaDriver:
    """Return what NVIDIA's driver reports."""
    try:
        library = load(_DRIVER)
    except OSError:
        return CudaDriver(problem=f"NVIDIA's driver ({_DRIVER}) is not installed")
    if error := library.cuInit(0):
        if error == _NO_GPU:
            return CudaDriver()
        return CudaDriver(problem=f"NVIDIA's driver cannot start (CUDA error {error})")
    version, count = ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    library.cuDeviceGetCount(ctypes.byref(count))
    names = []
    for index in range(count.value):
        name = ctypes.create_string_buffer(_MAX_NAME_BYTES)
        library.cuDeviceGetName(name, _MAX_NAME_BYTES, index)
        names.append(name.value.decode(errors="replace"))
    return CudaDriver(version.value // _CUDA_VERSION, tuple(names))
