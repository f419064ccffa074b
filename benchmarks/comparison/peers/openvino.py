"""OpenVINO GenAI, exported from the fixture by optimum-intel.

Fast on one model, but one adapter serves its whole batch: the worker groups requests by adapter.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comparison.peers.conversion import made_once
from comparison.peers.in_process import RunningWorker
from comparison.peers.places import package_versions
from comparison.peers.worker_process import WorkerProcess
from comparison.systems import Setup, System
from loraplex.core.errors import ConfigError

_START_SECONDS = 600.0
_WIDTHS = {32: "fp32", 16: "fp16", 8: "int8"}
# docs.openvino.ai, "Performance Hints" and "CPU Device: Optimization": INFERENCE_NUM_THREADS in any
# case (the worker sets it), and these.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"PERFORMANCE_HINT": "LATENCY"},
    {"PERFORMANCE_HINT": "THROUGHPUT"},
    {"ENABLE_CPU_PINNING": False},
)
# A processor that knows bfloat16 computes in it by default, and the KV cache is of 8 bits. With
# 32-bit weights that would compare another arithmetic; with narrower ones it is what the library's
# users get, and without it a processor with AMX would multiply without it.
_FULL_PRECISION = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


class OpenVinoGenAI:
    """Implements `System`. Needs a virtual environment with openvino-genai, and with optimum-intel
    (torchvision, which it requires, is not used) for models not yet exported.
    """

    is_http = False
    mixes_adapters = False

    def __init__(
        self, python: Path, weight_bits: int, properties: Mapping[str, Any] | None = None
    ) -> None:
        """properties: settings of threads that are added to the device's properties."""
        if weight_bits not in _WIDTHS:
            raise ConfigError(f"the widths are {sorted(_WIDTHS)} bits; {weight_bits} is none")
        self.weight_bits = weight_bits
        self.weights = f"{weight_bits}-bit"
        self.name = f"OpenVINO {_WIDTHS[weight_bits]}"
        self._python = python
        self._properties = dict(properties or {})

    @property
    def variants(self) -> dict[str, System]:
        return {
            " ".join(f"{name}={value}" for name, value in properties.items()) or "default": (
                OpenVinoGenAI(self._python, self.weight_bits, properties)
            )
            for properties in _VARIANTS
        }

    async def prepare(self, setup: Setup) -> None:
        await self._exported(setup)

    async def start(self, setup: Setup) -> RunningWorker:
        options: dict[str, Any] = {
            "model": str(await self._exported(setup)),
            "threads": setup.num_threads,
            "max_num_seqs": setup.max_num_seqs,
            "max_model_len": setup.max_model_len,
            "properties": (_FULL_PRECISION if self.weight_bits == 32 else {}) | self._properties,
            "adapters": {adapter.name: str(adapter.path) for adapter in setup.adapters},
        }
        worker = await WorkerProcess.start(
            self._python,
            "openvino_worker",
            options,
            log=setup.log,
            variables={},
            seconds=_START_SECONDS,
        )
        return RunningWorker(worker, setup)

    def version(self) -> str:
        return package_versions(self._python, "openvino-genai")

    async def _exported(self, setup: Setup) -> Path:
        width = _WIDTHS[self.weight_bits]

        def export(folder: Path) -> list[str]:
            return [
                str(self._python.parent / "optimum-cli"),
                *("export", "openvino", "--task", "text-generation-with-past"),
                *("--model", str(setup.model), "--weight-format", width),
                str(folder),
            ]

        return await made_once(setup.cache / "openvino" / width, export, setup.log)
