"""An accelerator's runner computes what a CPU's computes, whatever rows are in the steps."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from loraplex.core.adapter import LoraTarget, TargetPart
from loraplex.core.plan import AdapterCopy, RowAdded, RowStep, StepPlan, Wanted
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.execution.adapters.host_adapters import (
    HostAdapter,
    HostAdapters,
    HostPart,
    HostWeight,
)
from loraplex.execution.loading import load_parts
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.model_runner import ModelRunner
from loraplex.execution.steps.runner_parts import RunnerParts
from loraplex.kernels.accelerator import HostAccelerator
from loraplex.kernels.reference import ReferenceKernels
from loraplex.memory.adapter_pages import place
from support.accelerated_reference import AcceleratedReference, load_parts_with
from support.delayed_accelerator import DelayedAccelerator
from support.step_driver import (
    Prompt,
    StepDriver,
    decoding_plans,
    run_ahead,
    run_in_turn,
)
from support.tiny_model import TinyCheckpoint

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
BLOCK_SIZE = 16
WINDOWS = (2, 1000)
HANDLE = 3
DORA = 4
WIDE = 5
RANDOM = SamplingParams(temperature=1.0, top_k=30, top_p=0.9, seed=3)
PROMPTS = [
    Prompt((3, 4, 5, 6, 7)),
    Prompt((9, 8), ((HANDLE, 1.0),), RANDOM),
    Prompt((1,), ((HANDLE, 0.5),), SamplingParams(temperature=0.0, repetition_penalty=1.3)),
]


def settings(*recorded_sizes: int, windows: tuple[int, ...] = ()) -> RunnerSettings:
    """windows: of the two layers; different ones make two cache groups."""
    return RunnerSettings(
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_attention_window_size=windows,
        num_blocks=20,
        max_num_seqs=5,
        max_lora_rank=8,
        max_num_batched_tokens=64,
        cuda_graphs=bool(recorded_sizes),
        cuda_graph_batch_sizes=recorded_sizes,
    )


def adapter() -> HostAdapter:
    generator = torch.Generator().manual_seed(1)
    target = LoraTarget(1, "q_proj", 2, 64, 64)
    a, b = torch.randn(2, 64, generator=generator), torch.randn(64, 2, generator=generator)
    return HostAdapter("digest", (HostWeight(target, a, b, 1.0),))


def wide_adapter() -> HostAdapter:
    """Adapter of the largest rank that the settings allow, in both layers."""
    generator = torch.Generator().manual_seed(3)
    weights = []
    for layer in (0, 1):
        a, b = torch.randn(8, 64, generator=generator), torch.randn(64, 8, generator=generator)
        target = LoraTarget(layer, "q_proj", 8, 64, 64)
        weights.append(HostWeight(target, a, b, 1.0))
    return HostAdapter("wide", tuple(weights))


def dora_adapter() -> HostAdapter:
    """DoRA of q_proj, and a bias of lora_B."""
    (weight,) = adapter().weights
    generator = torch.Generator().manual_seed(2)
    factor = LoraTarget(1, "q_proj", 1, 0, 64, TargetPart.FACTOR)
    shift = LoraTarget(1, "q_proj", 1, 0, 64, TargetPart.SHIFT)
    parts = (
        HostPart(factor, 1 + torch.rand(64, generator=generator), is_quotient=True),
        HostPart(shift, torch.randn(64, generator=generator), 0.5),
    )
    return HostAdapter("dora", (weight,), parts)


def runner_of(parts: RunnerParts) -> ModelRunner:
    parts.host_adapters[HANDLE] = parts.adapter_bank.prepare(adapter())
    parts.host_adapters[DORA] = parts.adapter_bank.prepare(dora_adapter())
    parts.host_adapters[WIDE] = parts.adapter_bank.prepare(wide_adapter())
    runner = ModelRunner(parts)
    runner.record_steps()
    return runner


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint = TinyCheckpoint(tmp_path, **SHAPE)
    checkpoint.tensors["lm_head.weight"] /= 4
    return checkpoint.save()


@pytest.fixture
def host(folder: Path) -> ModelRunner:
    return host_runner(folder)


def host_runner(folder: Path, windows: tuple[int, ...] = ()) -> ModelRunner:
    kernels = ReferenceKernels(torch.device("cpu"))
    chosen = settings(windows=windows)
    return runner_of(load_parts_with(kernels, None, folder, chosen, HostAdapters()))


@pytest.fixture
def accelerated(folder: Path) -> Callable[..., tuple[ModelRunner, AcceleratedReference]]:
    def make(
        *recorded_sizes: int, windows: tuple[int, ...] = ()
    ) -> tuple[ModelRunner, AcceleratedReference]:
        accelerator = DelayedAccelerator(seed=4)
        kernels = AcceleratedReference(accelerator)
        chosen = settings(*recorded_sizes, windows=windows)
        parts = load_parts_with(kernels, accelerator, folder, chosen, HostAdapters())
        return runner_of(parts), kernels

    return make


def generate(
    runner: ModelRunner, prompts: Sequence[Prompt], num_tokens: int, chunk_size: int | None
) -> list[list[int]]:
    driver = StepDriver(runner)
    assert driver.load(HANDLE, 1).copies_done == (HANDLE,)
    return driver.generate(prompts, num_tokens, chunk_size=chunk_size)


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("recorded_sizes", [(), (2, 4), (1, 2, 3)])
def test_tokens_are_those_of_a_cpu(
    host: ModelRunner,
    accelerated: Callable[..., tuple[ModelRunner, AcceleratedReference]],
    recorded_sizes: tuple[int, ...],
    chunk_size: int | None,
) -> None:
    runner, kernels = accelerated(*recorded_sizes)
    expected = generate(host, PROMPTS, 20, chunk_size)
    assert generate(runner, PROMPTS, 20, chunk_size) == expected
    assert (kernels.num_repeated > 0) == bool(recorded_sizes)


@pytest.mark.parametrize("handle", [DORA, WIDE], ids=["DoRA", "the largest rank"])
def test_such_a_row_leaves_its_neighbours_on_the_recorded_steps(
    host: ModelRunner,
    accelerated: Callable[..., tuple[ModelRunner, AcceleratedReference]],
    handle: int,
) -> None:
    """Every step that decodes is a recorded one, with the tokens of a CPU."""
    prompts = [
        *PROMPTS[:2],
        Prompt((7, 7, 2), ((handle, 1.0),)),
        Prompt((5,), ((handle, 0.5),), RANDOM),
    ]
    runner, kernels = accelerated(4)
    geometry = runner.capacity().page_geometry
    wide_pages = place([w.target for w in wide_adapter().weights], geometry).num_pages
    outputs = []
    for each in (host, runner):
        driver = StepDriver(each)
        for loaded, num_pages in ((HANDLE, 1), (handle, 1 if handle == DORA else wide_pages)):
            assert driver.load(loaded, num_pages).copies_done == (loaded,)
        outputs.append(driver.generate(prompts, 20))
    assert outputs[0] == outputs[1]
    plain = [dataclasses.replace(p, adapters=p.adapters and ((HANDLE, 1.0),)) for p in prompts]
    assert StepDriver(host).generate(plain, 20)[2:] != outputs[0][2:], "the adapter matters"
    assert kernels.num_repeated == 19


def test_a_row_with_draft_tokens_leaves_its_neighbours_on_the_recorded_steps(
    host: ModelRunner, accelerated: Callable[..., tuple[ModelRunner, AcceleratedReference]]
) -> None:
    """The drafts are right, or wrong from the third on; the tokens are those of a CPU."""
    plans = decoding_plans(12, [SamplingParams(temperature=0.0), RANDOM])
    results = [result.rows for result in run_in_turn(host, plans)]
    expected = [[row.token_ids[0] for row in rows] for rows in zip(*results, strict=True)]
    runner, kernels = accelerated(5)
    found = [list(row.token_ids) for row in run_in_turn(runner, plans[:1])[0].rows]
    for number in range(3):
        first, second = (len(tokens) for tokens in found)
        drafts = (*expected[0][first : first + 2], (99, expected[0][first + 2])[number % 2])
        rows = (
            RowStep(0, 2 + first, 4, draft_token_ids=drafts),
            RowStep(1, 2 + second, 1),
        )
        (result,) = run_in_turn(runner, [StepPlan(2 + number, rows=rows)])
        for tokens, row in zip(found, result.rows, strict=True):
            tokens.extend(row.token_ids)
    assert found == [expected[0][:11], expected[1][:4]]
    assert kernels.num_repeated == 3


@pytest.mark.parametrize("recorded_sizes", [(), (2, 4)])
def test_layers_with_different_windows_have_tables_of_their_own(
    folder: Path,
    accelerated: Callable[..., tuple[ModelRunner, AcceleratedReference]],
    recorded_sizes: tuple[int, ...],
) -> None:
    runner, kernels = accelerated(*recorded_sizes, windows=WINDOWS)
    assert len(runner.capacity().cache_groups) == 2
    # Long enough that blocks of the small window go to other rows.
    expected = generate(host_runner(folder, WINDOWS), PROMPTS, 60, 2)
    assert generate(runner, PROMPTS, 60, 2) == expected
    assert (kernels.num_repeated > 0) == bool(recorded_sizes)


@pytest.mark.slow
@pytest.mark.parametrize("windows", [(), WINDOWS], ids=["", "two cache groups"])
def test_interpreted_kernels_give_the_tokens_of_a_cpu(
    folder: Path, windows: tuple[int, ...]
) -> None:
    """Those of a GPU, with recorded steps and padding."""
    chosen = settings(2, 4, windows=windows)
    parts = load_parts(folder, chosen, HostAdapters(), accelerator=HostAccelerator())
    expected = generate(host_runner(folder, windows), PROMPTS, 4, 3)
    assert generate(runner_of(parts), PROMPTS, 4, 3) == expected


def added(slot: int, sampling: SamplingParams) -> RowAdded:
    return RowAdded(
        slot,
        slot,
        Generate(sampling, seed=5 + slot),
        0,
        (7, 8, slot),
        3,
    )


SAMPLINGS = {
    "blind": (SamplingParams(temperature=0.0), RANDOM, RANDOM),
    "needs the host": (
        SamplingParams(temperature=0.0, repetition_penalty=1.3),
        SamplingParams(temperature=1.0, top_p_decay=0.9),
    ),
    "mixed": (RANDOM, SamplingParams(temperature=1.0, frequency_penalty=0.5)),
}


@pytest.mark.parametrize("samplings", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("recorded_sizes", [(), (4,)])
def test_steps_launched_ahead_give_the_same(
    host: ModelRunner,
    accelerated: Callable[..., tuple[ModelRunner, AcceleratedReference]],
    samplings: tuple[SamplingParams, ...],
    recorded_sizes: tuple[int, ...],
) -> None:
    plans = decoding_plans(8, samplings)
    expected = [result.rows for result in run_in_turn(host, plans)]
    runner, _ = accelerated(*recorded_sizes)
    assert [result.rows for result in run_ahead(runner, plans)] == expected


def test_a_slot_that_changes_hands_before_its_step_has_ended(
    host: ModelRunner, accelerated: Callable[..., tuple[ModelRunner, AcceleratedReference]]
) -> None:
    """The row of an ended request is computed in vain, and leaves nothing to the next."""
    first, second, third = decoding_plans(2, (RANDOM, RANDOM))
    new = RowStep(0, 0, 3, token_ids=(7, 8, 0), new_block_ids=((0,),))
    change = StepPlan(
        4,
        removed=(0,),
        added=(added(0, SamplingParams(temperature=0.0)),),
        rows=(new, RowStep(1, 5, 1)),
    )
    after = StepPlan(5, rows=(RowStep(0, 3, 1), RowStep(1, 6, 1)))
    plans = [first, second, third, change, after]
    runner, _ = accelerated(2)
    expected = [result.rows for result in run_in_turn(host, plans)]
    assert [result.rows for result in run_ahead(runner, plans)] == expected


def test_one_row_with_as_many_logits_as_a_recorded_step_has_tokens(
    host: ModelRunner, accelerated: Callable[..., tuple[ModelRunner, AcceleratedReference]]
) -> None:
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=1)
    row = RowAdded(
        0,
        0,
        Generate(sampling),
        0,
        (5, 6, 7, 8),
        4,
    )
    step = RowStep(0, 0, 4, token_ids=(5, 6, 7, 8), new_block_ids=((0,),), wanted=Wanted.ALL)
    plan = StepPlan(1, added=(row,), rows=(step,))
    runner, _ = accelerated(4)
    assert run_in_turn(runner, [plan])[0].rows == run_in_turn(host, [plan])[0].rows


def test_a_step_without_rows_waits_for_its_copy(
    accelerated: Callable[..., tuple[ModelRunner, AcceleratedReference]],
) -> None:
    runner, _ = accelerated()
    copies = (AdapterCopy(HANDLE, (0,)), AdapterCopy(99, (1,)))
    failed = runner.launch(StepPlan(1, adapter_copies=copies)).wait()
    assert [handle for handle, _ in failed.copies_failed] == [99]
    reported = list(failed.copies_done)
    if not reported:
        reported += runner.launch(StepPlan(2)).wait().copies_done
    assert reported == [HANDLE]
    assert runner.launch(StepPlan(3)).wait().copies_done == ()


def test_times_are_those_of_the_step(
    accelerated: Callable[..., tuple[ModelRunner, AcceleratedReference]],
) -> None:
    runner, _ = accelerated(4)
    for result in run_ahead(runner, decoding_plans(3, SAMPLINGS["blind"])):
        timing = result.timing
        assert min(timing.prepare_ns, timing.forward_ns, timing.sample_ns) > 0
