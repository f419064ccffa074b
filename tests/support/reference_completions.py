"""Completions of transformers and PEFT, and a runner of the same checkpoint.

Needs the `dev` extra: nothing that serves imports this file.
"""

import dataclasses
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from loraplex.core.plan import RowResult
from loraplex.execution.adapters.host_adapters import HostAdapter, HostAdapters
from loraplex.execution.adapters.layout import pieces_of
from loraplex.execution.loading import load_parts
from loraplex.execution.sampling.sampler import Sampler
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.model_runner import ModelRunner
from loraplex.memory.adapter_pages import place
from support.step_driver import Prompt, StepDriver


class RecordingSampler(Sampler):
    """Keeps the logits of the last steps."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size, device=torch.device("cpu"))
        self.logits: list[torch.Tensor] = []

    def sample(self, logits: torch.Tensor, steps: Any) -> list[RowResult]:
        self.logits.append(logits.clone())
        return super().sample(logits, steps)


def recorded_driver(
    folder: Path, adapters: Mapping[int, HostAdapter], *, is_scrambled: bool, **settings: Any
) -> tuple[StepDriver, RecordingSampler]:
    """Return a driver of the checkpoint with all adapters, by handle, on the device.

    is_scrambled: it takes the KV blocks in another order.
    """
    host = HostAdapters()
    fixed = {"num_blocks": 80, "block_size": 8, "max_num_seqs": 8}
    parts = load_parts(folder, RunnerSettings(**(fixed | settings)), host)
    for handle, adapter in adapters.items():
        host[handle] = parts.adapter_bank.prepare(adapter)
    sampler = RecordingSampler(parts.capacity.vocab_size)
    runner = ModelRunner(dataclasses.replace(parts, sampler=sampler))
    order = list(range(parts.capacity.cache_groups[0].num_blocks))
    if is_scrambled:
        random.Random(3).shuffle(order)
    driver = StepDriver(runner, order)
    for handle, adapter in adapters.items():
        pages = place(pieces_of(adapter), parts.capacity.page_geometry).num_pages
        assert driver.load(handle, pages).copies_done == (handle,)
    return driver, sampler


def reference_completion(
    model: PeftModel, adapter: str | None, prompt: Prompt, num_tokens: int
) -> tuple[torch.Tensor, list[int]]:
    """(logits of the prompt, greedy tokens)"""
    if adapter is None:
        with model.disable_adapter():
            return completion(model, prompt, num_tokens)
    model.set_adapter(adapter)
    return completion(model, prompt, num_tokens)


@torch.no_grad()
def completion(model: Any, prompt: Prompt, num_tokens: int) -> tuple[torch.Tensor, list[int]]:
    """Return (logits of the prompt, greedy tokens) of a model of transformers."""
    inputs = torch.tensor([prompt.token_ids])
    logits = model(input_ids=inputs).logits[0].float()
    output = model.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return logits, output[0, inputs.shape[1] :].tolist()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max())
