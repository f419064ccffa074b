"""loraplex's own library: a thread for each request, which reads its stream.

The library puts the streams into one batch, whenever they arrive.
"""

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from loraplex import LLM
from loraplex.core.errors import LoraplexError
from loraplex.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from comparison.peers.workers.serve import Job


def load(options: dict[str, Any]) -> "LoraplexWorker":
    """options: arguments of LLM."""
    # The handlers of a normal exit stop the engine and remove its files.
    signal.signal(signal.SIGTERM, _end_input)
    return LoraplexWorker(LLM(**options))


def _end_input(*_: object) -> None:
    """End the worker as the end of its input does; harmless while it ends already."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())


class LoraplexWorker:
    gather_seconds = 0.0
    is_idle = True
    """Its threads compute, so the loop has nothing to do but to wait for messages."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def submit(self, job: "Job") -> None:
        threading.Thread(target=self._generate, args=(job,), daemon=True).start()

    def step(self) -> None:
        """Never called, because it is always idle."""

    def add_adapter(self, name: str, path: str) -> None:
        self._llm.add_adapter(name, path)

    def remove_adapter(self, name: str) -> None:
        self._llm.remove_adapter(name)

    def _generate(self, job: "Job") -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=job.num_tokens, ignore_eos=True)
        try:
            for output in self._llm.stream(job.prompt, sampling, adapter=job.adapter):
                for sequence in output.sequences:
                    for token in sequence.token_ids:
                        job.add(token)
        except LoraplexError as error:
            job.send({"id": job.id, "error": f"{type(error).__name__}: {error}"})
