"""A runner on a GPU, with a small random model: against transformers, and against itself."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.core.plan import RowResult, StepPlan
from loraplex.core.sampling_params import SamplingParams
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.loading import load_parts, start_runner
from loraplex.execution.sampling.sampler import Sampler
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.model_runner import ModelRunner
from support.step_driver import (
    Prompt,
    StepDriver,
    decoding_plans,
    run_ahead,
    run_in_turn,
)

pytestmark = pytest.mark.gpu

NUM_NEW_TOKENS = 16
VOCAB_SIZE = 1000
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Relative to the largest logit, over four layers."""
PROMPTS = [
    Prompt(tuple((7 * place + 13 * index) % VOCAB_SIZE for place in range(length)))
    for index, length in enumerate((1, 5, 16, 33, 100))
]
SAMPLINGS = {
    "greedy": [SamplingParams(temperature=0.0)] * 5,
    "random": [SamplingParams(temperature=1.0, top_k=50, top_p=0.9)] * 3
    + [SamplingParams(temperature=0.0)] * 2,
    "with the host": [
        SamplingParams(temperature=1.0, repetition_penalty=1.2),
        SamplingParams(temperature=0.0),
    ],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from support.checkpoints import save_random_model

    folder = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    return folder, save_random_model(folder, config)


def settings(dtype: str, **changes: Any) -> RunnerSettings:
    fixed: dict[str, Any] = {
        "device": "cuda",
        "dtype": dtype,
        "num_blocks": 200,
        "max_num_seqs": 8,
        "max_lora_rank": 16,
        "lora_device_bytes": 64 << 20,  # other tests may run at the same time
        "max_num_batched_tokens": 256,
        "cuda_graph_batch_sizes": (1, 4, 8),
        "kernel_check": "off",  # test_check.py does it once
    }
    return RunnerSettings(**(fixed | changes))


def runner_of(folder: Path, dtype: str, **changes: Any) -> ModelRunner:
    chosen = settings(dtype, **changes)
    return start_runner(load_parts(folder, chosen, HostAdapters()), chosen)


@torch.no_grad()
def expected_tokens(model: Any, prompt: Prompt) -> list[int]:
    inputs = torch.tensor([prompt.token_ids])
    output = model.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, inputs.shape[1] :].tolist()
    return tokens


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("chunk_size", [None, 7])
def test_tokens_are_those_of_transformers(
    model: tuple[Path, Any], graphs: bool, chunk_size: int | None
) -> None:
    folder, reference = model
    runner = runner_of(folder, "float32", cuda_graphs=graphs)
    tokens = StepDriver(runner).generate(PROMPTS, NUM_NEW_TOKENS, chunk_size=chunk_size)
    assert tokens == [expected_tokens(reference, prompt) for prompt in PROMPTS]


class RecordingSampler(Sampler):
    """Keeps the logits of steps that need those of all positions."""

    logits: torch.Tensor

    def sample(self, logits: torch.Tensor, steps: Any) -> list[RowResult]:
        self.logits = logits.float().cpu()
        return super().sample(logits, steps)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_logits_are_about_those_of_transformers(model: tuple[Path, Any], dtype: str) -> None:
    folder, reference = model
    parts = load_parts(folder, settings(dtype), HostAdapters())
    kernels = parts.sampler._kernels
    sampler = RecordingSampler(VOCAB_SIZE, device=parts.device, kernels=kernels)
    driver = StepDriver(ModelRunner(dataclasses.replace(parts, sampler=sampler)))
    for prompt in PROMPTS:
        driver.generate([prompt], 1, prompt_logits=True)
        with torch.no_grad():
            expected = reference(torch.tensor([prompt.token_ids])).logits[0].float()
        error = (sampler.logits - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCES[dtype]


@pytest.mark.parametrize("samplings", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("graphs", [True, False])
def test_steps_launched_ahead_give_the_same(
    model: tuple[Path, Any], dtype: str, samplings: Sequence[SamplingParams], graphs: bool
) -> None:
    plans = decoding_plans(12, samplings)
    in_turn = run_in_turn(runner_of(model[0], dtype, cuda_graphs=graphs), plans)
    ahead = run_ahead(runner_of(model[0], dtype, cuda_graphs=graphs), plans)
    assert [result.rows for result in ahead] == [result.rows for result in in_turn]


def test_no_step_in_flight_waits_for_the_device(model: tuple[Path, Any]) -> None:
    """Torch reports it where something does."""
    runner = runner_of(model[0], "bfloat16")
    plans = decoding_plans(6, SAMPLINGS["random"])
    run_ahead(runner, plans)
    removed = tuple(range(len(SAMPLINGS["random"])))
    runner.launch(StepPlan(9, removed=removed)).wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_ahead(runner, plans)
    finally:
        torch.cuda.set_sync_debug_mode("default")
