"""Diagnosis of a machine: what it has, what it allows, and whether kernels are right on it."""

import contextlib
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec
import torch

from loraplex.app.model_settings import with_device, within_build
from loraplex.app.open_step_sizes import largest_rank, runner_settings, with_step_sizes
from loraplex.core.config import ModelConfig
from loraplex.core.devices import processor_field, processor_name
from loraplex.core.environment import kernel_check_directory
from loraplex.core.host_memory import host_memory
from loraplex.core.version import __version__
from loraplex.execution.checking.checker import CheckFailed
from loraplex.execution.checking.start import find_verdict, verdict_folder
from loraplex.execution.checking.verdict import Verdict
from loraplex.execution.sizing.kv import windowed
from loraplex.execution.weights.hub import resolve_model
from loraplex.execution.weights.stored_head import read_model
from loraplex.kernels.native.library import (
    NativeLibraryError,
    available_instruction_sets,
    load_library,
)
from loraplex.models.linear_group import TensorShard

_CONFIG: Final = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
    }
)
"""The model that is checked if none is named."""
_FLAGS: Final = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx_vnni"),
    *("amx_bf16", "amx_int8", "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve"),
)
"""Instruction sets that matter, as Linux names them."""
_SHARED_MEMORY: Final = Path("/dev/shm")
_COPY_BYTES: Final = 256 << 20
_NUM_COPIES: Final = 5


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """The processor and its memory."""

    processor: str
    num_cores: int
    """Cores that this process may use."""
    num_threads: int
    """Threads of a CPU's kernels."""
    instruction_sets: tuple[str, ...]
    kernels: str
    """Instructions of the native kernels, or the reason why there are none."""
    memory_bytes: int | None
    copied_bytes_per_second: float
    """Bytes read and written by a copy within the memory."""
    limits: dict[str, str]


class GpuReport(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    capability: str
    memory_bytes: int
    free_bytes: int
    copied_bytes_per_second: float


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    versions: dict[str, str]
    host: HostReport
    gpu: GpuReport | None
    """None: the model is not on one."""
    model: str
    """Folder of the checked model; empty: a small one."""
    verdict: Verdict | None
    not_checked: str = ""
    """Reason why there is no verdict."""


def diagnose(model: ModelConfig, state_dir: str) -> Diagnosis:
    """Look at the machine, and check the kernels anew. Raises ConfigError.

    model.path: empty checks a small model. A server with these settings, and this state_dir (as
    configured), takes the verdict.
    """
    with _model_folder(model) as folder:
        found = within_build(str(folder), with_device(str(folder), model), folder)
        found = with_step_sizes(
            msgspec.structs.replace(
                found,
                path=str(folder),
                kernel_check_dir=str(kernel_check_directory(found.kernel_check_dir, state_dir)),
            )
        )
        settings = runner_settings(found)
        spec = largest_rank(settings, windowed(settings, read_model(folder)))
        device = torch.device(settings.device)
        host, gpu = _host(), _gpu(device)
        verdict, reason = None, ""
        try:
            verdict = find_verdict(
                folder,
                settings,
                spec,
                TensorShard(0, settings.tensor_parallel_size),
                verdict_folder(settings),
                is_fresh=True,
            )
        except CheckFailed as error:
            reason = str(error)
    return Diagnosis(
        versions={"loraplex": __version__, "torch": str(torch.__version__)},
        host=host,
        gpu=gpu,
        model=model.path,
        verdict=verdict,
        not_checked=reason,
    )


@contextlib.contextmanager
def _model_folder(model: ModelConfig) -> Iterator[Path]:
    if model.path:
        yield resolve_model(model.path, model.revision)
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(_CONFIG)))
        yield Path(folder)


def _host() -> HostReport:
    flags = (processor_field("flags") or processor_field("Features") or "").split()
    return HostReport(
        processor=processor_name(),
        num_cores=len(os.sched_getaffinity(0)),
        num_threads=torch.get_num_threads(),
        instruction_sets=tuple(flag for flag in _FLAGS if flag in flags),
        kernels=_native_kernels(),
        memory_bytes=host_memory(),
        copied_bytes_per_second=_copied(torch.device("cpu"), lambda: None),
        limits=_limits(),
    )


def _native_kernels() -> str:
    try:
        others = ", ".join(available_instruction_sets()[1:])
        return f"{load_library().arithmetic}{f' (also built: {others})' if others else ''}"
    except NativeLibraryError as error:
        return f"none, torch computes: {error}"


def _gpu(device: torch.device) -> GpuReport | None:
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return GpuReport(
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        memory_bytes=total,
        free_bytes=free,
        copied_bytes_per_second=_copied(device, lambda: torch.cuda.synchronize(device)),
    )


def _copied(device: torch.device, finish: Callable[[], None]) -> float:
    """Measure the bytes that a copy reads and writes in a second: the median of some copies."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(1 + _NUM_COPIES):
        finish()
        start = time.perf_counter()
        target.copy_(source)
        finish()
        seconds.append(time.perf_counter() - start)
    return 2 * _COPY_BYTES / statistics.median(seconds[1:])


def _limits() -> dict[str, str]:
    """Return limits of the system that servers meet."""
    found = {}
    for name, limit in (("open files", "NOFILE"), ("locked memory", "MEMLOCK")):
        number, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{limit}"))
        found[name] = "none" if number == resource.RLIM_INFINITY else str(number)
    with contextlib.suppress(OSError):
        found["shared memory"] = f"{shutil.disk_usage(_SHARED_MEMORY).free} bytes free"
    return found
