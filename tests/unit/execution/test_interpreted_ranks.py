"""Whole models of several ranks on the GPU's backend, interpreted: the tokens of one rank."""

import os
from pathlib import Path

import pytest

from loraplex.execution.adapters.host_adapters import HostAdapter, HostAdapters
from loraplex.execution.adapters.layout import pieces_of
from loraplex.execution.loading import load_parts, load_runner, start_runner
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.model_runner import ModelRunner
from loraplex.kernels.accelerator import HostAccelerator
from loraplex.kernels.channel import RankChannels
from loraplex.kernels.cuda.backend import CudaKernels
from loraplex.memory.adapter_pages import most_pages
from loraplex.models.linear_group import TensorShard
from loraplex.models.registry import read_config
from support.expert_adapters import random_expert_adapter
from support.ranks_in_turns import UNINITIALISED, TurnsChannel, ranks_in_turns
from support.step_driver import Prompt, StepDriver
from support.tiny_model import TinyCheckpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="the kernels are not interpreted"
    ),
    *UNINITIALISED,
]

SETTINGS = RunnerSettings(
    dtype="float32",
    block_size=4,
    num_blocks=24,
    lora_device_bytes=1 << 16,
    max_model_len=16,
    max_num_seqs=3,
    max_num_batched_tokens=6,
    max_lora_rank=4,
    optimal_lora_rank=4,
    cuda_graph_batch_sizes=(1, 2),
)
HANDLES = (3, 4)
PROMPTS = [Prompt((5, 6, 7), ((3, 1.0),)), Prompt((9,)), Prompt((8, 2), ((4, 0.5),))]
NUM_TOKENS = 3


def adapters_of(folder: Path) -> list[HostAdapter]:
    """Adapters of mixed ranks on every module."""
    spec = read_config(folder)
    return [
        random_expert_adapter(spec, f"{seed}", lambda i, name, _: 1 + (i + len(name)) % 4, seed)
        for seed in HANDLES
    ]


def tokens(runner: ModelRunner, host: HostAdapters, adapters: list[HostAdapter]) -> list[list[int]]:
    driver, capacity = StepDriver(runner), runner.capacity()
    for handle, adapter in zip(HANDLES, adapters, strict=True):
        host[handle] = runner.prepare_adapter(adapter)
        num_pages = most_pages(capacity.held(pieces_of(adapter)), capacity.page_geometry)
        assert driver.load(handle, num_pages).copies_done == (handle,)
    return [list(map(int, generated)) for generated in driver.generate(PROMPTS, NUM_TOKENS)]


def test_two_ranks_generate_what_one_does(tiny_checkpoint: TinyCheckpoint) -> None:
    folder = tiny_checkpoint.save()
    adapters, host = adapters_of(folder), HostAdapters()
    expected = tokens(load_runner(folder, SETTINGS, host), host, adapters)

    def body(channel: TurnsChannel) -> tuple[list[list[int]], int]:
        host = HostAdapters()
        parts = load_parts(
            folder,
            SETTINGS,
            host,
            accelerator=HostAccelerator(),
            place=TensorShard(channel.rank, channel.size),
            channels=RankChannels(channel, channel),
        )
        assert isinstance(parts.kernels, CudaKernels)
        runner = start_runner(parts, SETTINGS)
        assert len(parts.kernels.graphs) == 4
        return tokens(runner, host, adapters), channel.num_exchanges

    (first, num_exchanges), (second, others_exchanges) = ranks_in_turns(2, body)
    assert first == second == expected
    assert num_exchanges == others_exchanges
