"""transformers + peft: the reference that most people begin with.

A static batch by peft's `adapter_names`, which mixes any adapters with the base model and responds
right. Requests that come while one batch runs wait for its longest row.
"""

from collections.abc import Mapping
from pathlib import Path

from comparison.peers.in_process import RunningWorker
from comparison.peers.places import package_versions
from comparison.peers.worker_process import WorkerProcess
from comparison.systems import Setup, System

_START_SECONDS = 600.0
# "Performance Tuning Guide" of docs.pytorch.org, section "Utilize OpenMP": OMP_NUM_THREADS in any
# case, and GNU OpenMP's binding and schedule where they help.
_VARIANTS: tuple[dict[str, str], ...] = ({}, {"OMP_SCHEDULE": "STATIC", "OMP_PROC_BIND": "CLOSE"})


class TransformersPeft:
    """Implements `System`. Needs a virtual environment with torch, transformers and peft."""

    name = "transformers + peft f32"
    weights = "32-bit"
    weight_bits = 32
    is_http = False
    mixes_adapters = True

    def __init__(self, python: Path, variables: Mapping[str, str] | None = None) -> None:
        """variables: settings of OpenMP that are added to its environment."""
        self._python = python
        self._variables = dict(variables or {})

    @property
    def variants(self) -> dict[str, System]:
        return {
            " ".join(f"{name}={value}" for name, value in variables.items()) or "default": (
                TransformersPeft(self._python, variables)
            )
            for variables in _VARIANTS
        }

    async def prepare(self, setup: Setup) -> None:
        """It takes the files as they are."""

    async def start(self, setup: Setup) -> RunningWorker:
        worker = await WorkerProcess.start(
            self._python,
            "transformers_worker",
            {
                "model": str(setup.model),
                "dtype": "float32",
                "threads": setup.num_threads,
                "max_num_seqs": setup.max_num_seqs,
                "adapters": {adapter.name: str(adapter.path) for adapter in setup.adapters},
            },
            log=setup.log,
            variables={
                "OMP_NUM_THREADS": str(setup.num_threads),
                "HF_HUB_OFFLINE": "1",
                **self._variables,
            },
            seconds=_START_SECONDS,
        )
        return RunningWorker(worker, setup)

    def version(self) -> str:
        return package_versions(self._python, "transformers", "peft", "torch")
