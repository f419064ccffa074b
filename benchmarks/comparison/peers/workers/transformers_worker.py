"""transformers + peft: a static batch with an adapter for each row (`adapter_names`)."""

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria

if TYPE_CHECKING:
    from comparison.peers.workers.serve import Job

_BASE = "__base__"
"""peft's name for a row without an adapter."""
_PAD = 0


def load(options: dict[str, Any]) -> "TransformersWorker":
    """options: model (a folder), dtype, threads, max_num_seqs, adapters ({name: folder})."""
    torch.set_num_threads(options["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=getattr(torch, options["dtype"])
    )
    # No end token: a request ends at its length.
    model.generation_config = GenerationConfig.from_dict({"do_sample": False, "pad_token_id": _PAD})
    worker = TransformersWorker(model, options["max_num_seqs"])
    for name, path in options["adapters"].items():
        worker.add_adapter(name, path)
    return worker


class TransformersWorker:
    gather_seconds = 0.002

    def __init__(self, model: Any, max_num_seqs: int) -> None:
        self._model = model
        self._max_num_seqs = max_num_seqs
        self._waiting: deque[Job] = deque()

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def submit(self, job: "Job") -> None:
        if len(job.prompt) < 1:
            raise ValueError("a prompt has at least one token")
        self._waiting.append(job)

    def add_adapter(self, name: str, path: str) -> None:
        if isinstance(self._model, PeftModel):
            self._model.load_adapter(path, adapter_name=name)
        else:
            self._model = PeftModel.from_pretrained(self._model, path, adapter_name=name)

    def remove_adapter(self, name: str) -> None:
        self._model.delete_adapter(name)

    def step(self) -> None:
        count = min(self._max_num_seqs, len(self._waiting))
        self._generate([self._waiting.popleft() for _ in range(count)])

    @torch.inference_mode()
    def _generate(self, jobs: "list[Job]") -> None:
        width = max(len(job.prompt) for job in jobs)
        # A decoder goes on at the right end of a row, so the padding is on its left.
        rows = [[_PAD] * (width - len(job.prompt)) + job.prompt for job in jobs]
        mask = [[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in jobs]
        adapted: dict[str, Any] = {}
        if isinstance(self._model, PeftModel):
            adapted["adapter_names"] = [job.adapter or _BASE for job in jobs]
        self._model.generate(
            input_ids=torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max(job.num_tokens for job in jobs),
            stopping_criteria=[_Collector(jobs)],
            **adapted,
        )


class _Collector(StoppingCriteria):
    """Called after each step with all ids so far: hands out the new, ends rows that are full."""

    def __init__(self, jobs: "list[Job]") -> None:
        self._jobs = jobs

    def __call__(
        self,
        input_ids: torch.Tensor,
        scores: torch.Tensor,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> torch.Tensor:
        for job, token in zip(self._jobs, input_ids[:, -1].tolist(), strict=True):
            job.add(token)
        return torch.tensor([job.is_done for job in self._jobs])
