"""OpenVINO GenAI: its continuous batching, with one adapter for the whole batch at a time.

`ContinuousBatchingPipeline.add_request` ignores the adapter of a request, and `generate` applies
that of its first request to all (seen in 2026.4). So requests run in groups of one adapter, and a
`generate` of one token sets the adapter of the group that follows.
"""

import json
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from comparison.peers.workers.serve import Job

_BLOCK_TOKENS = 32
"""Tokens of a KV block on a CPU."""
_MAX_BATCHED_TOKENS = 2048
_ANY_TOKEN = 1


def load(options: dict[str, Any]) -> "OpenVinoWorker":
    """options: model (an exported folder), threads, max_num_seqs, max_model_len, properties (of
    the device), adapters ({name: folder}).
    """
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = options["max_num_seqs"]
    scheduler.max_num_batched_tokens = _MAX_BATCHED_TOKENS
    scheduler.num_kv_blocks = options["max_num_seqs"] * (
        -(-options["max_model_len"] // _BLOCK_TOKENS) + 1
    )
    scheduler.enable_prefix_caching = False
    adapters = {name: KnownAdapter(path) for name, path in options["adapters"].items()}
    properties = {"INFERENCE_NUM_THREADS": options["threads"], **options["properties"]}
    if adapters:
        properties["adapters"] = openvino_genai.AdapterConfig(
            [(adapter.weights, adapter.scale) for adapter in adapters.values()]
        )
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        options["model"],
        openvino_genai.Tokenizer(options["model"]),
        scheduler,
        "CPU",
        **properties,
    )
    return OpenVinoWorker(pipeline, adapters, options["max_num_seqs"])


class KnownAdapter:
    def __init__(self, folder: str) -> None:
        config = json.loads(Path(folder, "adapter_config.json").read_text())
        self.weights = openvino_genai.Adapter(str(Path(folder, "adapter_model.safetensors")))
        # The library reads no adapter_config.json: what it calls alpha is the whole factor.
        self.scale = config["lora_alpha"] / config["r"]
        self.modules = frozenset(config["target_modules"])


class OpenVinoWorker:
    gather_seconds = 0.002

    def __init__(self, pipeline: Any, adapters: dict[str, KnownAdapter], max_num_seqs: int) -> None:
        self._pipeline = pipeline
        self._adapters = adapters
        self._modules = frozenset[str]().union(*(known.modules for known in adapters.values()))
        self._max_num_seqs = max_num_seqs
        self._waiting: deque[Job] = deque()
        self._running: list[tuple[Job, Any]] = []
        self._adapter: str | None = None
        self._num_requests = 0

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running

    def submit(self, job: "Job") -> None:
        if job.adapter is not None and job.adapter not in self._adapters:
            raise ValueError(f"no adapter is named {job.adapter}")
        self._waiting.append(job)

    def add_adapter(self, name: str, path: str) -> None:
        """Works for modules that an adapter had when the pipeline was made; of others, the library
        drops the tensors with a warning.
        """
        adapter = KnownAdapter(path)
        if unknown := adapter.modules - self._modules:
            raise NotImplementedError(
                f"the pipeline was made without adapters of {sorted(unknown)}"
            )
        self._adapters[name] = adapter

    def remove_adapter(self, name: str) -> None:
        del self._adapters[name]

    def step(self) -> None:
        if not self._running:
            self._begin_group()
        self._admit()
        self._pipeline.step()
        for job, handle in self._running:
            while handle.can_read():
                for output in handle.read().values():
                    for token in output.generated_ids:
                        job.add(token)
        self._running = [(job, handle) for job, handle in self._running if not job.is_done]

    def _begin_group(self) -> None:
        """Those that want what the first wants come before the others."""
        wanted = self._waiting[0].adapter
        self._waiting = deque(
            [job for job in self._waiting if job.adapter == wanted]
            + [job for job in self._waiting if job.adapter != wanted]
        )
        if wanted != self._adapter or self._num_requests == 0:
            prompt = openvino.Tensor(np.array([[_ANY_TOKEN]], dtype=np.int64))
            self._pipeline.generate([prompt], [self._config(1, wanted)])
            self._adapter = wanted

    def _admit(self) -> None:
        while (
            self._waiting
            and self._waiting[0].adapter == self._adapter
            and len(self._running) < self._max_num_seqs
        ):
            job = self._waiting.popleft()
            prompt = openvino.Tensor(np.array([job.prompt], dtype=np.int64))
            config = self._config(job.num_tokens, job.adapter)
            handle = self._pipeline.add_request(self._num_requests, prompt, config)
            self._num_requests += 1
            self._running.append((job, handle))

    def _config(self, num_tokens: int, adapter: str | None) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.do_sample = False
        config.ignore_eos = True
        if self._adapters:
            chosen = [] if adapter is None else [self._adapters[adapter]]
            config.adapters = openvino_genai.AdapterConfig(
                [(known.weights, known.scale) for known in chosen]
            )
        return config
