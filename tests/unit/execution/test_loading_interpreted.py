"""A start on the GPU's backend, interpreted: real trials and recorded steps of a tiny model."""

import os
from pathlib import Path

import msgspec
import pytest

from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.loading import load_parts, load_runner, start_runner
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.kernels.cuda.backend import CudaKernels
from support.encoder_decoders import CASES, save_case
from support.metered_accelerator import MeteredAccelerator
from support.step_driver import Prompt, StepDriver
from support.tiny_model import TinyCheckpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="the kernels are not interpreted"
    ),
]

TOTAL = 64 << 20
SETTINGS = RunnerSettings(
    dtype="float32",
    block_size=4,
    kv_cache_bytes=1 << 16,
    lora_device_bytes=1 << 16,
    max_model_len=16,
    max_num_seqs=3,
    max_num_batched_tokens=6,
    max_lora_rank=4,
    optimal_lora_rank=4,
    cuda_graph_batch_sizes=(1, 2),
)
PROMPTS = [Prompt((5, 6, 7)), Prompt((9,))]


def test_the_trials_run_and_the_runner_generates(tiny_checkpoint: TinyCheckpoint) -> None:
    folder = tiny_checkpoint.save()
    expected = StepDriver(load_runner(folder, SETTINGS, HostAdapters())).generate(PROMPTS, 3)
    accelerator = MeteredAccelerator(TOTAL)
    parts = load_parts(folder, SETTINGS, HostAdapters(), accelerator=accelerator)
    assert isinstance(parts.kernels, CudaKernels)
    graphs = parts.kernels.graphs
    assert len(graphs) == 0
    runner = start_runner(parts, SETTINGS)
    assert len(graphs) == 2 * len(parts.recorded_sizes) == 4
    assert runner.capacity().device_bytes == TOTAL
    assert StepDriver(runner).generate(PROMPTS, 3) == expected


@pytest.mark.parametrize("name", ["flan-t5", "bart"])
def test_trials_of_models_with_an_encoder(tmp_path: Path, name: str) -> None:
    """The largest step encodes the longest input; recorded steps read what rows have of theirs."""
    save_case(tmp_path, CASES[name])
    settings = msgspec.structs.replace(SETTINGS, kv_cache_bytes=1 << 20, lora_device_bytes=1 << 20)
    parts = load_parts(tmp_path, settings, HostAdapters(), accelerator=MeteredAccelerator(TOTAL))
    assert isinstance(parts.kernels, CudaKernels)
    capacity = start_runner(parts, settings).capacity()
    assert len(parts.kernels.graphs) == 2 * len(parts.recorded_sizes) == 4
    assert capacity.longest_encoder_input == settings.max_num_batched_tokens - 1
    assert capacity.device_bytes == TOTAL
