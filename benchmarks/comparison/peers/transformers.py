"""transformers + peft: the reference that most people begin with.

A static batch by peft's `adapter_names`, which mixes any adapters with the base model and responds
right. Requests that come while one batch runs wait for its longest row.
"""

from pathlib import Path

from comparison.peers.in_process import RunningWorker
from comparison.peers.places import package_versions
from comparison.peers.worker_process import WorkerProcess
from comparison.systems import Setup

_START_SECONDS = 600.0


class TransformersPeft:
    """Implements `System`. Needs a virtual environment with torch, transformers and peft."""

    name = "transformers + peft f32"
    weight_bits = 32
    is_http = False
    mixes_adapters = True

    def __init__(self, python: Path) -> None:
        self._python = python

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
            variables={"OMP_NUM_THREADS": str(setup.num_threads), "HF_HUB_OFFLINE": "1"},
            seconds=_START_SECONDS,
        )
        return RunningWorker(worker, setup)

    def version(self) -> str:
        return package_versions(self._python, "transformers", "peft", "torch")
