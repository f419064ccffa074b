"""All features of an engine whose layers keep states, and bugs of runners that this finds.

The states are exact hashes of all tokens before them (toy_recurrence), or those of the mixers that
are served. Each request writes what it writes alone in a plain engine.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from loraplex.core.adapter import AdapterSource
from loraplex.core.plan import NO_BLOCK, CacheGroupCapacity, RowStep
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.engine.engine import Engine, build_engine
from loraplex.execution.adapters.host_adapters import HostAdapter, HostAdapters
from loraplex.execution.loading import start_runner
from loraplex.execution.mirror import Array
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.input_batch import InputBatch, NewBlocks, StepInputs
from loraplex.execution.steps.model_runner import ModelRunner
from loraplex.execution.steps.runner_parts import RunnerParts
from loraplex.execution.steps.stages import StageLinks
from loraplex.execution.steps.tensors import DeviceTensors
from loraplex.kernels.accelerator import Accelerator, Graph, HostAccelerator
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.library import NativeLibraryError, load_library
from loraplex.kernels.ops import Kernels
from loraplex.kernels.reference import ReferenceKernels
from loraplex.kernels.states import StatePlan
from loraplex.memory.cache_group import CacheGroup
from loraplex.memory.cache_policy import _StatesPolicy
from loraplex.memory.kv_blocks import KVBlocks
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.delta import DeltaSpec
from loraplex.models.specs.ssm import SsmSpec
from loraplex.scheduling import beam_scheduling
from loraplex.testing.fake_clock import FakeClock
from support.accelerated_reference import AcceleratedReference, load_parts_with
from support.delayed_accelerator import DelayedAccelerator
from support.engine_requests import engine_request
from support.examples import num_examples
from support.feature_schedules import FEATURE_SETTINGS, FeatureSchedules, feature_checkpoint
from support.metered_accelerator import MeteredAccelerator
from support.random_conditions import Conditions
from support.stage_threads import queue_links, staged
from support.step_driver import Prompt, StepDriver
from support.toy_recurrence import Recurrence, known_recurrence, with_recurrence

EVERY = 8
SETTINGS = msgspec.structs.replace(
    FEATURE_SETTINGS, dtype="float32", cuda_graph_batch_sizes=(2, 4, 6)
)
MIXED, ALONE = (0, 2), (0, 1, 2)
"""Layers with a recurrence, of three; the others attend."""


class RealMixer(NamedTuple):
    """A model whose layers but the second have such a mixer."""

    fields: Mapping[str, Any]
    """Fields of config.json."""
    kind: type[Any]
    op: str
    """The op that computes its recurrence."""


REAL = {
    "state-space": RealMixer(
        {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "shared_intermediate_size": 80,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
            "mamba_d_head": 6,
        },
        SsmSpec,
        "ssd",
    ),
    "delta-rule": RealMixer(
        {
            "architectures": ["Qwen3_5ForCausalLM"],
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "head_dim": 16,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 10,
        },
        DeltaSpec,
        "delta_rule",
    ),
}
QUICK = range(5, 5 + num_examples(0.2))
"""Seeds, of which the first ones have what the tests look for."""
MAX_SCHEDULES = 60
"""Number of schedules in which a planted bug must show."""
HAPPENINGS = (
    "accepted",
    "aborts",
    "copies",
    "crashes",
    "failed_steps",
    "offloads",
    "preemptions",
    "replayed",
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(
    folder: Path,
    layers: Sequence[int],
    kernels: Kernels,
    settings: RunnerSettings = SETTINGS,
    accelerator: Accelerator | None = None,
    links: StageLinks | None = None,
) -> RunnerParts:
    """Write a model with a recurrence in these layers to the folder, and load it."""

    def changed(spec: ModelSpec) -> ModelSpec:
        return with_recurrence(spec, layers, EVERY)

    model = feature_checkpoint(folder, changed, num_hidden_layers=3)
    with known_recurrence():
        return load_parts_with(
            kernels, accelerator, model, settings, HostAdapters(), links, changed
        )


def load_real(
    folder: Path,
    name: str,
    kernels: Kernels,
    settings: RunnerSettings = SETTINGS,
    accelerator: Accelerator | None = None,
    links: StageLinks | None = None,
) -> RunnerParts:
    """Write a model with a mixer that is served, and load it with shorter chunks."""
    real = REAL[name]

    def changed(spec: ModelSpec) -> ModelSpec:
        return spec.map_mixers(real.kind, lambda mixer, _: dataclasses.replace(mixer, every=EVERY))

    model = feature_checkpoint(folder, changed, num_hidden_layers=3, **real.fields)
    return load_parts_with(kernels, accelerator, model, settings, HostAdapters(), links, changed)


def make_schedules(
    folder: Path, model: Sequence[int] | str, accelerator: Accelerator | None = None
) -> FeatureSchedules:
    """model: the layers with a toy, or one of REAL."""
    kernels = ReferenceKernels(torch.device("cpu"))
    if accelerator is not None:
        kernels = AcceleratedReference(accelerator)
    if isinstance(model, str):
        parts = load_real(folder, model, kernels, accelerator=accelerator)
    else:
        parts = load(folder, model, kernels, accelerator=accelerator)
    return FeatureSchedules(parts, folder, kernels)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> FeatureSchedules:
    return make_schedules(tmp_path_factory.mktemp("mixed"), MIXED)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> FeatureSchedules:
    return make_schedules(tmp_path_factory.mktemp("alone"), ALONE)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> FeatureSchedules:
    return make_schedules(tmp_path_factory.mktemp("recorded"), MIXED, HostAccelerator())


@pytest.fixture(scope="module", params=REAL)
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> FeatureSchedules:
    return make_schedules(tmp_path_factory.mktemp("real"), request.param)


@pytest.fixture(scope="module", params=REAL)
def real_native(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> FeatureSchedules:
    try:
        kernels = NativeKernels(load_library(), 2)
    except NativeLibraryError as error:
        pytest.skip(f"the native kernels are not built: {error}")
    folder = tmp_path_factory.mktemp("native")
    return FeatureSchedules(load_real(folder, request.param, kernels), folder, kernels)


@pytest.fixture(scope="module", params=REAL)
def real_recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> FeatureSchedules:
    return make_schedules(tmp_path_factory.mktemp("real"), request.param, HostAccelerator())


def check(schedules: FeatureSchedules, seeds: range) -> Counter[str]:
    problems = [problem for seed in seeds for problem in schedules.run(f"states {seed}")]
    assert not problems, "\n".join(problems[:20])
    return schedules.tally


def spoil_new_states(schedules: FeatureSchedules, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks of states hold no number when a sequence takes them: reading it is an error."""
    take, storages = CacheGroup.take, schedules.storages

    def spoilt(self: CacheGroup, num_blocks: int) -> list[int]:
        taken = take(self, num_blocks)
        for storage in storages[self.group_id] if self.is_sparse else ():
            if storage is not None:
                for tensor in storage.tensors:
                    tensor[taken] = torch.nan
        return taken

    monkeypatch.setattr(CacheGroup, "take", spoilt)


def test_layers_of_both_sorts(mixed: FeatureSchedules, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_new_states(mixed, monkeypatch)
    tally = check(mixed, QUICK)
    assert tally["preemptions"] > 0
    assert tally["cached_tokens"] > 0
    assert tally["accepted"] > 0


def test_recurrent_layers_alone(alone: FeatureSchedules, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_new_states(alone, monkeypatch)
    tally = check(alone, QUICK)
    assert tally["preemptions"] > 0
    assert tally["accepted"] > 0
    assert tally["cached_tokens"] == 0, "no group has a block of all positions"


def test_recorded_steps(recorded: FeatureSchedules, mixed: FeatureSchedules) -> None:
    assert recorded.alone == mixed.alone
    check(recorded, QUICK)


def test_mixers_that_are_served(real: FeatureSchedules, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_new_states(real, monkeypatch)
    tally = check(real, QUICK)
    assert tally["preemptions"] > 0
    assert tally["cached_tokens"] > 0
    assert tally["accepted"] > 0


def test_native_mixers_that_are_served(
    real_native: FeatureSchedules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write the same bits after crashes, whose journals other engines replay."""
    spoil_new_states(real_native, monkeypatch)
    tally = check(real_native, QUICK)
    assert tally["crashes"] > 0
    assert tally["replayed"] > 0
    assert tally["preemptions"] > 0


@pytest.mark.slow
def test_recorded_steps_of_mixers_that_are_served(real_recorded: FeatureSchedules) -> None:
    check(real_recorded, QUICK)


def of_stages(folder: Path, model: Sequence[int] | str, num_stages: int) -> list[list[int]]:
    """Return what a pipeline with little memory writes for some requests at once."""
    links = queue_links(num_stages) if num_stages > 1 else [None]
    kernels = ReferenceKernels(torch.device("cpu"))
    settings = msgspec.structs.replace(SETTINGS, num_blocks=40, max_model_len=64, max_num_seqs=6)
    if isinstance(model, str):
        parts = [load_real(folder, model, kernels, settings, links=link) for link in links]
    else:
        parts = [load(folder, model, kernels, settings, links=link) for link in links]
    runner, loader = staged(parts, _no_adapter)
    scheduling = SchedulerSettings(
        max_num_batched_tokens=12, num_draft_tokens=2, state_checkpoint_tokens=EVERY
    )
    clock = FakeClock(1)
    engine = build_engine(runner, loader, clock, scheduling, adapter_host_bytes=1)
    written: dict[int, list[int]] = {}
    for index in range(8):
        prompt = tuple((index // 2 + 3 * place) % 7 for place in range(5 + 4 * index))
        sampling = SamplingParams(
            max_tokens=20, temperature=float(index % 2), seed=index, ignore_eos=True
        )
        engine.add(engine_request(prompt, sampling, request_id=index))
        _step(engine, clock, written)
    while not engine.is_idle:
        _step(engine, clock, written)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    engine.close()
    return list(written.values())


def _no_adapter(source: AdapterSource) -> HostAdapter:
    raise AssertionError(source)


def _step(engine: Engine, clock: FakeClock, written: dict[int, list[int]]) -> None:
    for output in engine.step().outputs:
        assert output.error is None, output.error
        for delta in output.deltas:
            written.setdefault(output.request_id, []).extend(delta.token_ids)
    engine.check()
    clock.advance(1_000_000)


@pytest.mark.parametrize("model", [MIXED, *REAL], ids=str)
def test_two_stages_write_the_same_as_one(tmp_path: Path, model: Sequence[int] | str) -> None:
    expected = of_stages(tmp_path, model, 1)
    assert len(expected) == 8
    assert of_stages(tmp_path, model, 2) == expected


class CountedGraphs(HostAccelerator):
    """Counts how often recorded steps are repeated."""

    num_replays = 0

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Graph]:
        result, graph = super().record(compute)
        replay = graph.replay

        def counted() -> None:
            self.num_replays += 1
            replay()

        return result, SimpleNamespace(replay=counted)


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the programs are not interpreted"
)
@pytest.mark.parametrize("name", REAL)
def test_recorded_steps_of_the_programs_of_a_gpu(tmp_path: Path, name: str) -> None:
    """Repeat decoding steps with padding, over borders; write what a CPU writes."""
    backend = pytest.importorskip("loraplex.kernels.cuda.backend", reason="no Triton")
    settings = msgspec.structs.replace(
        SETTINGS, num_blocks=40, max_model_len=32, max_num_seqs=3, cuda_graph_batch_sizes=(2, 3)
    )
    prompts = [Prompt(tuple(range(1, count))) for count in (3, 7, 8)]
    written, accelerator, num_recorded = [], CountedGraphs(), 0
    cases = [(ReferenceKernels(torch.device("cpu")), None)]
    cases.append((backend.CudaKernels(accelerator), accelerator))
    for kernels, on_device in cases:
        runner = ModelRunner(load_real(tmp_path, name, kernels, settings, on_device))
        with np.errstate(all="ignore"):
            runner.record_steps()
        num_recorded = accelerator.num_replays
        # Rows start to decode, and end, one after another, so that steps have padding.
        with np.errstate(all="ignore"):  # padding holds any numbers
            written.append(StepDriver(runner).generate(prompts, 6, chunk_size=3))
    assert written[0] == written[1]
    assert accelerator.num_replays > num_recorded


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_late_copies(tmp_path: Path, mixed: FeatureSchedules) -> None:
    schedules = make_schedules(tmp_path, MIXED, DelayedAccelerator(seed=3))
    assert schedules.alone == mixed.alone
    check(schedules, range(1))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("layers", [MIXED, ALONE])
def test_many_schedules(tmp_path: Path, layers: Sequence[int]) -> None:
    tally = check(make_schedules(tmp_path, layers), range(1_000, 1_200))
    assert all(tally[name] > 0 for name in HAPPENINGS), tally


def test_completions_depend_on_each_token(mixed: FeatureSchedules) -> None:
    """Check that the hash decides what is written; otherwise equal completions prove little."""
    texts = {
        tuple(sequence.token_ids)
        for completion in mixed.alone
        for sequence in completion.sequences.values()
    }
    num_sequences = sum(len(completion.sequences) for completion in mixed.alone)
    assert len(texts) > 0.9 * num_sequences


def write_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the state that a row begins with, at the end of each row."""
    write = Recurrence.write

    def in_place(
        self: Recurrence, states: torch.Tensor, plan: StatePlan, hashes: torch.Tensor
    ) -> None:
        write(self, states, plan, hashes)
        last = plan.query_start_loc[1:] - 1
        is_read = (plan.reads >= 0) & (plan.query_start_loc.diff() > 0)
        states[plan.reads[is_read]] = hashes[last[is_read]].float()

    monkeypatch.setattr(Recurrence, "write", in_place)


def in_place_of_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the states that rows begin with, in the ops of mixers that are served."""

    def planted(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def in_place(*arguments: Any) -> torch.Tensor:
            output = op(*arguments)
            plan, states = _plan_of(arguments), arguments[-1].tensors[0]
            is_read = (plan.reads >= 0) & (plan.query_start_loc.diff() > 0)
            states[plan.reads[is_read]] *= 0.5
            return output

        return in_place

    _change_ops(monkeypatch, planted)


def draft_state_of_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a state of a row once, though draft tokens before it were rejected."""
    written: dict[tuple[int, int], list[int]] = {}

    def planted(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def write_once(*arguments: Any) -> torch.Tensor:
            plan, states = _plan_of(arguments), arguments[-1].tensors[0]
            writes = plan.writes.clone()
            for token in torch.nonzero(writes >= 0).flatten().tolist():
                place = id(states), int(writes[token])
                if written.get(place) == [int(plan.places[token])]:
                    writes[token] = NO_BLOCK
                written[place] = [int(plan.places[token])]
            changed = plan._replace(writes=writes)
            return op(*(changed if each is plan else each for each in arguments))

        return write_once

    _change_ops(monkeypatch, planted)


def _plan_of(arguments: Sequence[Any]) -> StatePlan:
    return next(each for each in arguments if isinstance(each, StatePlan))


def _change_ops(
    monkeypatch: pytest.MonkeyPatch,
    planted: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]],
) -> None:
    for real in REAL.values():
        monkeypatch.setattr(ReferenceKernels, real.op, planted(getattr(ReferenceKernels, real.op)))


def write_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take any block for a gap, as groups of positions do, which write to none of them."""
    extend = InputBatch._extend_block_tables

    def without_gaps(self: InputBatch, steps: Sequence[RowStep]) -> list[NewBlocks]:
        extended = extend(self, steps)
        for group in self._states:
            tables = self._block_tables[group]
            tables[tables == NO_BLOCK] = 0
        return extended

    monkeypatch.setattr(InputBatch, "_extend_block_tables", without_gaps)


def hit_without_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin where the prefix cache has blocks of positions, whether it has a state or not."""
    monkeypatch.setattr(_StatesPolicy, "serves", lambda _self, _table, num_blocks: num_blocks)


def keep_a_draft_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a state of a row once, though draft tokens before it were rejected."""
    write = Recurrence.write
    written: dict[tuple[int, int], list[int]] = {}

    def write_once(
        self: Recurrence, states: torch.Tensor, plan: StatePlan, hashes: torch.Tensor
    ) -> None:
        writes = plan.writes.clone()
        for token in torch.nonzero(writes >= 0).flatten().tolist():
            place = self._layer, int(writes[token])
            # The places of a chunk name the sequence, as long as it has them.
            if written.get(place) == [int(plan.places[token])]:
                writes[token] = NO_BLOCK
            written[place] = [int(plan.places[token])]
        write(self, states, plan._replace(writes=writes), hashes)

    monkeypatch.setattr(Recurrence, "write", write_once)


def share_between_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let preempted beams read states that others of them still compute."""
    longest_shared, one_group = beam_scheduling._longest_shared, CacheGroupCapacity(num_blocks=1)

    def shared(texts: list[list[int]], kv: KVBlocks) -> list[tuple[int, int]]:
        return longest_shared(texts, KVBlocks(kv.block_size, (one_group,)))

    monkeypatch.setattr(beam_scheduling, "_longest_shared", shared)


def write_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pad the places of states with the one that would be a block."""
    arrays = DeviceTensors._arrays

    def padded(
        self: DeviceTensors, inputs: StepInputs, token_ids: Sequence[Sequence[int]]
    ) -> list[Array]:
        made = arrays(self, inputs, token_ids)
        for group in self._states:
            mapping = made[len(self._states) + 3 + group]
            assert isinstance(mapping, np.ndarray)
            mapping[inputs.num_tokens :] = 0
        return made

    monkeypatch.setattr(DeviceTensors, "_arrays", padded)


def rows_of_draft_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each draft token be a row for states, too: it reads what its step writes."""
    with_row_per_token = StepInputs.with_row_per_token

    def all_apart(self: StepInputs) -> StepInputs:
        made, rows = with_row_per_token(self), self.state_rows
        assert rows is not None
        reads = {group: states[self.row_of_token] for group, states in rows.reads.items()}
        apart = rows._replace(
            query_start_loc=np.arange(self.num_tokens + 1),
            slots=rows.slots[self.row_of_token],
            reads=reads,
        )
        return dataclasses.replace(made, state_rows=apart)

    monkeypatch.setattr(StepInputs, "with_row_per_token", all_apart)


@pytest.mark.parametrize(
    ("plant", "name", "first_seed"),
    [
        (write_in_place, "mixed", 0),
        (write_a_gap, "mixed", 6),
        (hit_without_a_state, "mixed", 3),
        (keep_a_draft_state, "mixed", 0),
        (share_between_beams, "mixed", 1),
        (write_padding, "recorded", 0),
        (rows_of_draft_tokens, "recorded", 4),
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    name: str,
    first_seed: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expect_it_found(plant, request.getfixturevalue(name), first_seed, monkeypatch)


@pytest.mark.parametrize(
    ("plant", "first_seed"),
    [
        (in_place_of_ops, 0),
        (write_a_gap, 0),
        (hit_without_a_state, 0),
        (draft_state_of_ops, 0),
        (share_between_beams, 0),
    ],
)
def test_a_bug_is_found_with_mixers_that_are_served(
    plant: Callable[[pytest.MonkeyPatch], None],
    first_seed: int,
    real: FeatureSchedules,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expect_it_found(plant, real, first_seed, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "first_seed"), [(write_padding, 0), (rows_of_draft_tokens, 0)])
def test_a_bug_is_found_in_recorded_steps_of_mixers_that_are_served(
    plant: Callable[[pytest.MonkeyPatch], None],
    first_seed: int,
    real_recorded: FeatureSchedules,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expect_it_found(plant, real_recorded, first_seed, monkeypatch)


def expect_it_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    schedules: FeatureSchedules,
    first_seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil_new_states(schedules, monkeypatch)
    if plant is share_between_beams:
        only_preempted_beams(schedules, monkeypatch)
    plant(monkeypatch)
    seeds = range(first_seed, first_seed + MAX_SCHEDULES)
    assert any(is_wrong(schedules, f"planted {seed}") for seed in seeds)


def only_preempted_beams(schedules: FeatureSchedules, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let beam searches compete for memory, and be computed again as a whole."""
    draw = Conditions.draw

    def tight(seed: object) -> Conditions:
        return draw(seed).short_of_memory(
            max_num_batched_tokens=512, max_prefill_chunk=None, max_seqs_per_adapter=0
        )

    monkeypatch.setattr(Conditions, "draw", tight)
    beams = [each for each in schedules.requests if each.sampling.beam is not None]
    monkeypatch.setattr(schedules, "requests", beams)


def is_wrong(schedules: FeatureSchedules, seed: str) -> bool:
    """Return whether a schedule shows a bug."""
    try:
        return bool(schedules.run(seed))
    except AssertionError:
        return True


@pytest.mark.parametrize("layers", [MIXED, ALONE])
def test_an_accelerator_measures_its_largest_step(tmp_path: Path, layers: Sequence[int]) -> None:
    """Trials have few blocks of each group, which all rows share."""
    accelerator = MeteredAccelerator(64 << 20)
    kernels = AcceleratedReference(accelerator)
    parts = load(tmp_path, layers, kernels, accelerator=accelerator)
    start_runner(parts, SETTINGS).close()
    assert len(kernels.graphs) == 2 * 3, "each size with and without LoRA"
