"""The limits of this machine that the floors of kernels are computed from: compiled and measured.

python benchmarks/machine_limits.py
"""

import ctypes
import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_suffix(".cpp")
_READ_BYTES = 1 << 30
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclasses.dataclass(frozen=True, slots=True)
class MachineLimits:
    """Total of this number of threads."""

    num_threads: int
    vector_bytes: int
    flops: float
    """float32 multiply-adds, two operations each, a second."""
    read_bytes: float
    """Bytes read from memory per second, with 4 streams per thread: the best 4 MiB window."""
    median_read_bytes: float
    last_cache_bytes: int
    """Cache of the whole chip, which other machines on it may share. 0 if unknown."""

    def floor_seconds(self, num_bytes: float, num_flops: float) -> float:
        """No kernel can be faster that reads so much and computes in float32."""
        return max(num_bytes / self.read_bytes, num_flops / self.flops)


def measure_limits(num_threads: int) -> MachineLimits:
    """Takes a few seconds and 1 GiB. Raises SystemExit if there is no compiler."""
    compiler = shutil.which("c++")
    if compiler is None:
        raise SystemExit("the limits of the machine are measured in C++: no compiler named c++")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "machine_limits.so"
        command = [compiler, "-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-shared"]
        subprocess.run([*command, "-fPIC", "-pthread", _SOURCE, "-o", library], check=True)
        return _measure(ctypes.CDLL(str(library)), num_threads)


def _measure(library: ctypes.CDLL, num_threads: int) -> MachineLimits:
    library.multiply_add_rate.restype = ctypes.c_double
    library.read_rate.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, *_REFERENCES)
    memory = torch.ones(_READ_BYTES, dtype=torch.uint8)
    best, median = ctypes.c_double(), ctypes.c_double()
    library.read_rate(
        *(memory.data_ptr(), _READ_BYTES, num_threads), ctypes.byref(best), ctypes.byref(median)
    )
    return MachineLimits(
        num_threads=num_threads,
        vector_bytes=library.vector_bytes(),
        flops=library.multiply_add_rate(num_threads),
        read_bytes=best.value,
        median_read_bytes=median.value,
        last_cache_bytes=_last_cache_bytes(),
    )


_REFERENCES = (ctypes.POINTER(ctypes.c_double), ctypes.POINTER(ctypes.c_double))


def _last_cache_bytes() -> int:
    sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
    return max((int(size.removesuffix("K")) << 10 for size in sizes), default=0)


def main() -> None:
    json.dump([dataclasses.asdict(measure_limits(count)) for count in (1, 2)], sys.stdout, indent=2)


if __name__ == "__main__":
    main()
