"""Promises of the runner in addition to right tokens: a row's errors stay its own."""

import dataclasses
from typing import Any

import pytest
import torch

from loraplex.core.adapter import LoraTarget
from loraplex.core.errors import StepFailedError
from loraplex.core.output import TokenLogprob
from loraplex.core.plan import (
    AdapterCopy,
    BlockCopy,
    RowAdded,
    RowStep,
    StepPlan,
    StepResult,
    Wanted,
)
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.engine.runner import Runner
from loraplex.execution.adapters.host_adapters import HostAdapter, HostAdapters, HostWeight
from loraplex.execution.loading import load_parts, load_runner
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.model_runner import ModelRunner
from loraplex.kernels.native.backend import NativeKernels
from support.step_driver import Prompt, StepDriver
from support.tiny_model import TinyCheckpoint

BLOCK_SIZE = 4
SETTINGS = RunnerSettings(block_size=BLOCK_SIZE, num_blocks=40, max_num_seqs=8, max_lora_rank=4)
HANDLE, BROKEN_HANDLE = 3, 4
Adapters = tuple[tuple[int, float], ...]


def adapter(value: float, in_features: int = 16) -> HostAdapter:
    target = LoraTarget(1, "o_proj", 2, in_features, 16)
    generator = torch.Generator().manual_seed(0)
    a = value * torch.randn(2, in_features, generator=generator)
    b = value * torch.randn(16, 2, generator=generator)
    return HostAdapter("digest", (HostWeight(target, a, b, 1.0),))


@pytest.fixture
def host_adapters() -> HostAdapters:
    adapters = HostAdapters()
    adapters[HANDLE] = adapter(1.0)
    adapters[BROKEN_HANDLE] = adapter(float("nan"))
    return adapters


@pytest.fixture
def runner(tiny_checkpoint: TinyCheckpoint, host_adapters: HostAdapters) -> Runner:
    return load_runner(tiny_checkpoint.save(), SETTINGS, host_adapters)


def added(slot: int, token_ids: tuple[int, ...], adapters: Adapters = ()) -> RowAdded:
    return RowAdded(
        slot=slot,
        sequence_id=slot,
        task=Generate(SamplingParams(temperature=0.0, repetition_penalty=1.1)),
        sequence_index=0,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        adapters=adapters,
    )


def prompt_step(slot: int, token_ids: tuple[int, ...], first_block: int) -> RowStep:
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    blocks = tuple(range(first_block, first_block + num_blocks))
    return RowStep(
        slot, 0, len(token_ids), token_ids=token_ids, new_block_ids=(blocks,), num_logprobs=0
    )


def run(runner: Runner, step_id: int = 1, **plan: Any) -> StepResult:
    return runner.launch(StepPlan(step_id, **plan)).wait()


def token_alone(
    runner: Runner, token_ids: tuple[int, ...], adapters: Adapters = ()
) -> TokenLogprob:
    """The token after a prompt, and its log probability; the runner is as before."""
    step = prompt_step(7, token_ids, 30)
    result = run(runner, added=(added(7, token_ids, adapters),), rows=(step,))
    run(runner, removed=(7,))
    (logprob,) = result.rows[0].logprobs
    return logprob


def test_capacity(runner: Runner) -> None:
    capacity = runner.capacity()
    assert (capacity.block_size, capacity.cache_groups[0].num_blocks) == (BLOCK_SIZE, 40)
    assert (capacity.max_num_seqs, capacity.max_model_len, capacity.vocab_size) == (8, 64, 50)
    assert not capacity.keeps_host_copy
    assert capacity.kv_cache_bytes == 40 * 2 * 2 * BLOCK_SIZE * 2 * 4 * 4
    assert capacity.weights_bytes > 0
    assert capacity.adapter_page_bytes == 4 * capacity.page_geometry.page_elements


def test_a_prompt_then_its_own_tokens(runner: Runner) -> None:
    """LAST_SAMPLED gives what the same tokens give as a prompt."""
    prompt = (5, 6, 7)
    first = run(runner, added=(added(0, prompt),), rows=(prompt_step(0, prompt, 0),))
    (token,) = first.rows[0].token_ids
    second = run(runner, 2, rows=(RowStep(0, 3, 1, num_logprobs=0),))
    assert (first.step_id, second.step_id) == (1, 2)
    third = run(runner, 3, rows=(RowStep(0, 4, 1, new_block_ids=((9,),), num_logprobs=0),))
    tokens = (token, *second.rows[0].token_ids, *third.rows[0].token_ids)
    for i, expected in enumerate((first, second, third)):
        assert (token_alone(runner, (*prompt, *tokens[:i])),) == expected.rows[0].logprobs


def test_timing_is_reported(runner: Runner) -> None:
    timing = run(runner, added=(added(0, (1,)),), rows=(prompt_step(0, (1,), 0),)).timing
    assert min(timing.prepare_ns, timing.forward_ns, timing.sample_ns) > 0


def test_the_time_of_lora_is_reported(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    run(runner, adapter_copies=(AdapterCopy(HANDLE, (2,)),))
    base = run(runner, added=(added(0, (1,)),), rows=(prompt_step(0, (1,), 0),))
    row = added(1, (1,), ((HANDLE, 1.0),))
    with_lora = run(runner, 2, added=(row,), rows=(prompt_step(1, (1,), 1),)).timing
    assert base.timing.lora_ns == 0
    assert with_lora.lora_ns is not None
    assert 0 < with_lora.lora_ns < with_lora.forward_ns
    monkeypatch.setattr(NativeKernels, "lora_ns", None)
    unmeasured = run(runner, 3, rows=(RowStep(0, 1, 1),)).timing
    assert unmeasured.lora_ns is None


def test_an_adapter_is_used_once_it_is_copied(runner: Runner) -> None:
    uses = ((HANDLE, 1.0),)
    early = run(runner, added=(added(0, (5, 6), uses),), rows=(prompt_step(0, (5, 6), 0),))
    error = early.rows[0].error
    assert error is not None
    assert (error.code, error.message) == ("row_failed", "adapter 3 is not on the device")
    copied = run(runner, adapter_copies=(AdapterCopy(HANDLE, (2,)),))
    assert (copied.rows, copied.copies_done, copied.copies_failed) == ((), (HANDLE,), ())
    base = token_alone(runner, (5, 6))
    assert token_alone(runner, (5, 6), uses) != base
    assert token_alone(runner, (5, 6), ((HANDLE, 0.0),)) == base


def test_failed_copies_are_reported_one_by_one(runner: Runner, host_adapters: HostAdapters) -> None:
    host_adapters[8] = adapter(0.1, in_features=99)
    (weight,) = adapter(0.1).weights
    cut = dataclasses.replace(weight, b=weight.b[:5])
    host_adapters[9] = HostAdapter("cut", (cut,))
    copies = (
        *(AdapterCopy(7, (0,)), AdapterCopy(HANDLE, (1,))),
        *(AdapterCopy(8, (2,)), AdapterCopy(9, (3,))),
    )
    result = run(runner, adapter_copies=copies)
    assert result.copies_done == (HANDLE,)
    codes = {handle: error.code for handle, error in result.copies_failed}
    assert codes == {7: "adapter_load_failed", 8: "adapter_mismatch", 9: "adapter_load_failed"}


@pytest.mark.parametrize("bad_token", [50, -1, 2**40])
def test_a_token_outside_the_vocabulary_fails_its_row_only(runner: Runner, bad_token: int) -> None:
    good, bad = (3, 4, 5), (3, bad_token)
    expected = token_alone(runner, good)
    result = run(
        runner,
        added=(added(0, bad), added(1, good)),
        rows=(prompt_step(0, bad, 0), prompt_step(1, good, 5)),
    )
    error = result.rows[0].error
    assert error is not None
    assert str(bad_token) in error.message
    assert (result.rows[0].slot, result.rows[0].token_ids) == (0, ())
    assert (result.rows[1].slot, result.rows[1].logprobs) == (1, (expected,))


def test_not_a_number_fails_its_row_only_and_leaves_nothing_behind(runner: Runner) -> None:
    run(runner, adapter_copies=(AdapterCopy(BROKEN_HANDLE, (0,)),))
    good = (3, 4, 5)
    expected = token_alone(runner, good)
    result = run(
        runner,
        added=(added(0, good, ((BROKEN_HANDLE, 1.0),)), added(1, good)),
        rows=(prompt_step(0, good, 0), prompt_step(1, good, 5)),
    )
    assert result.rows[0].error is not None
    assert result.rows[1].logprobs == (expected,)
    run(runner, removed=(0, 1))
    again = run(runner, added=(added(0, good),), rows=(prompt_step(0, good, 0),))
    assert again.rows[0].logprobs == (expected,)


def test_a_forked_row_reads_the_copied_block(runner: Runner) -> None:
    prompt = (9, 8, 7, 6, 5)
    run(runner, added=(added(0, prompt),), rows=(prompt_step(0, prompt, 0),))
    fork = RowStep(1, 5, 1, token_ids=(4,), new_block_ids=((0, 20),), num_logprobs=0)
    result = run(
        runner,
        added=(added(1, (*prompt, 4)),),
        block_copies=(BlockCopy(0, 1, 20),),
        rows=(fork,),
    )
    assert result.rows[0].logprobs == (token_alone(runner, (*prompt, 4)),)


def test_a_chunk_that_does_not_end_the_prompt_gives_no_token(runner: Runner) -> None:
    step = RowStep(0, 0, 2, token_ids=(1, 2), new_block_ids=((0,),), wanted=Wanted.NONE)
    result = run(runner, added=(added(0, (1, 2, 3)),), rows=(step,))
    assert (result.rows[0].token_ids, result.rows[0].error) == ((), None)


def test_a_step_that_fails_is_raised_by_wait_and_the_next_one_runs(runner: Runner) -> None:
    handle = runner.launch(StepPlan(5, rows=(RowStep(0, 0, 1, token_ids=(1,)),)))
    with pytest.raises(StepFailedError, match="step 5 failed"):
        handle.wait()
    assert token_alone(runner, (1, 2)).logprob <= 0
    runner.close()


def test_steps_are_repeated_as_programs(
    tiny_checkpoint: TinyCheckpoint, host_adapters: HostAdapters
) -> None:
    """Every op of such a step can be in a program, or Python would call them one by one again."""
    parts = load_parts(tiny_checkpoint.save(), SETTINGS, host_adapters)
    kernels = parts.decoder._kernels
    if not isinstance(kernels, NativeKernels):
        pytest.skip("the native kernels are not built")
    driver = StepDriver(ModelRunner(parts))
    driver.load(HANDLE, 1)
    driver.generate([Prompt((5, 6), ((HANDLE, 1.0),)), Prompt((7,))], 4)
    driver.generate([Prompt((5, 6))], 4)
    programs = kernels._programs
    assert len(programs) == 4, "of 3 and 2 tokens of prompts, of 2 and 1 that decode"
    assert all(program is not None for program in programs.values())
