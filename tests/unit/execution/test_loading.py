"""A start on a device with a memory of its own: memory is measured, divided, and reported if short.

Device and runner are doubles: the tests set what they take.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.errors import ConfigError, RowFailedError, StepFailedError
from loraplex.core.plan import Capacity, RowResult, StepPlan, StepResult
from loraplex.execution import assembly, loading
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.assembly import Assembly
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.model_runner import ModelRunner, RunnerParts
from loraplex.kernels.accelerator import Accelerator, HostAccelerator
from loraplex.kernels.cuda.backend import CudaKernels
from support.metered_accelerator import MeteredAccelerator
from support.naming import naming
from support.tiny_model import TinyCheckpoint

MIB = 1 << 20
TOTAL = 64 * MIB
STEP, GRAPH = 6 * MIB, 1 * MIB
SETTINGS = RunnerSettings(
    device="cuda",
    dtype="float32",
    block_size=4,
    max_num_seqs=4,
    max_lora_rank=4,
    optimal_lora_rank=4,
)
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
FULL_ROW = RowResult(0, error=RowFailedError("the device is out of memory for a step").to_info())


@dataclasses.dataclass
class Costs:
    """What steps of the fake runner take, and what goes wrong with them."""

    workspace: int = STEP
    per_graph: int = GRAPH
    step_error: Exception | None = None
    row: RowResult | None = None
    graph_error: Exception | None = None


class FakeRunner:
    def __init__(self, parts: RunnerParts, accelerator: MeteredAccelerator, costs: Costs) -> None:
        self.parts = parts
        self._capacity = parts.capacity
        self._accelerator = accelerator
        self._costs = costs
        self._taken = 0

    def capacity(self) -> Capacity:
        return self._capacity

    def set_capacity(self, capacity: Capacity) -> None:
        self._capacity = capacity

    def launch(self, plan: StepPlan) -> "FakeRunner":
        assert plan.num_tokens == SETTINGS.max_num_batched_tokens or plan.rows
        self._accelerator.use(self._costs.workspace)
        return self

    def wait(self) -> StepResult:
        if self._costs.step_error is not None:
            raise self._costs.step_error
        return StepResult(0, () if self._costs.row is None else (self._costs.row,))

    def record_steps(self) -> None:
        if self._costs.graph_error is not None:
            raise self._costs.graph_error
        self._taken = self._costs.per_graph * len(self.parts.recorded_sizes)
        self._accelerator.take(self._taken)

    def forget_steps(self) -> None:
        self._accelerator.take(-self._taken)
        self._taken = 0


class Start:
    """Start of a tiny model on the doubles."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, checkpoint: TinyCheckpoint) -> None:
        self.accelerator = MeteredAccelerator(TOTAL)
        self.costs = Costs()
        self._folder = checkpoint.save()
        make = functools.partial(FakeRunner, accelerator=self.accelerator, costs=self.costs)
        monkeypatch.setattr(assembly, "ModelRunner", make)
        monkeypatch.setattr(loading, "ModelRunner", make)

    def parts(self, **changes: Any) -> RunnerParts:
        return loading.load_parts(
            self._folder,
            msgspec.structs.replace(SETTINGS, **changes),
            HostAdapters(),
            accelerator=self.accelerator,
        )

    def capacity(self, **changes: Any) -> Capacity:
        settings = msgspec.structs.replace(SETTINGS, **changes)
        return loading.start_runner(self.parts(**changes), settings).capacity()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: TinyCheckpoint) -> Start:
    return Start(monkeypatch, tiny_checkpoint)


def refusal(run: Callable[[], object]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        run()
    return caught.value


def test_memory_is_divided_in_order(start: Start) -> None:
    start.accelerator.take(10 * MIB)  # other processes
    capacity = start.capacity(kv_cache_fraction=0.5, lora_device_fraction=0.5)
    sizes = (1, 2, 4)
    left = TOTAL - 10 * MIB - TOTAL // 128 - STEP - len(sizes) * GRAPH
    pool = capacity.num_adapter_pages * capacity.adapter_page_bytes
    assert capacity.kv_cache_bytes == pytest.approx(0.5 * left, rel=0.01)
    pool += capacity.adapter_table_bytes
    assert pool == pytest.approx(0.5 * (left - capacity.kv_cache_bytes), rel=0.01)
    assert (capacity.workspace_bytes, capacity.graph_bytes) == (STEP, 3 * GRAPH)
    assert capacity.device_bytes == TOTAL
    assert capacity.device_free_bytes == TOTAL - 10 * MIB - STEP - 3 * GRAPH
    assert capacity.keeps_host_copy
    assert capacity.host_page_bytes == capacity.adapter_page_bytes


def test_bytes_that_were_said_win(start: Start) -> None:
    capacity = start.capacity(kv_cache_bytes=8 * MIB, lora_device_bytes=2 * MIB)
    assert 7 * MIB < capacity.kv_cache_bytes <= 8 * MIB
    pool = capacity.num_adapter_pages * capacity.adapter_page_bytes
    assert MIB < pool <= 2 * MIB


def test_the_parts_have_the_recorded_sizes(start: Start) -> None:
    parts = start.parts()
    assert parts.accelerator is start.accelerator
    assert parts.recorded_sizes == (1, 2, 4)
    assert isinstance(parts.kernels, CudaKernels)
    assert start.parts(cuda_graphs=False).recorded_sizes == ()
    assert start.capacity(cuda_graphs=False).graph_bytes == 0


def test_nothing_of_the_trials_is_left(start: Start) -> None:
    start.parts()
    memory = start.accelerator.memory()
    assert memory is not None
    assert memory.free == TOTAL


def test_weights_that_do_not_fit(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OUT_OF_MEMORY

    monkeypatch.setattr(loading, "load_weights", full)
    error = refusal(start.parts)
    assert error.param == "quantization"
    assert re.search(naming("64 MiB", "quantization", "int8"), error.message)
    assert error.__cause__ is OUT_OF_MEMORY


def test_weights_that_cannot_fit_are_not_loaded(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_weights", None)
    start.accelerator.take(TOTAL - 1000)
    error = refusal(start.parts)
    assert error.param == "quantization"
    assert re.search(naming(1000), error.message)


@pytest.mark.parametrize(
    "costs",
    [
        {"step_error": StepFailedError(f"step 0 failed: {OUT_OF_MEMORY}")},
        {"step_error": OUT_OF_MEMORY},
        {"row": FULL_ROW},
    ],
)
def test_a_largest_step_that_does_not_fit(start: Start, costs: dict[str, Any]) -> None:
    vars(start.costs).update(costs)
    error = refusal(start.parts)
    assert error.param == "max_num_batched_tokens"
    assert re.search(naming(512, 4, "max_num_batched_tokens"), error.message)
    assert f"has {readable_bytes(TOTAL)} free" in error.message


def test_a_largest_step_that_fails_otherwise_is_not_hidden(start: Start) -> None:
    start.costs.step_error = StepFailedError("an illegal memory access")
    with pytest.raises(StepFailedError, match="illegal memory access"):
        start.parts()


def test_a_row_that_fails_otherwise_is_no_failure(start: Start) -> None:
    start.costs.row = RowResult(0, error=RowFailedError("logits that are NaN").to_info())
    assert start.capacity().workspace_bytes == STEP


def test_graphs_that_do_not_fit_at_the_trial(start: Start) -> None:
    start.costs.graph_error = OUT_OF_MEMORY
    error = refusal(start.parts)
    assert error.param == "cuda_graph_batch_sizes"
    assert f"has {readable_bytes(TOTAL - STEP)} free" in error.message


def test_graphs_that_do_not_fit_at_last(start: Start) -> None:
    parts = start.parts()
    start.costs.graph_error = RuntimeError("CUDA error: out of memory")
    error = refusal(lambda: loading.start_runner(parts, SETTINGS))
    assert error.param == "cuda_graph_batch_sizes"


def test_graphs_are_reported_as_measured_last(start: Start) -> None:
    parts = start.parts()
    start.costs.per_graph = GRAPH // 2
    assert loading.start_runner(parts, SETTINGS).capacity().graph_bytes == 3 * GRAPH // 2


@pytest.mark.parametrize("missing", [0, 1])
def test_graphs_must_leave_memory_for_a_step(start: Start, missing: int) -> None:
    parts = start.parts()
    start.accelerator.take(TOTAL - 3 * GRAPH - STEP + missing)
    if not missing:
        capacity = loading.start_runner(parts, SETTINGS).capacity()
        assert capacity.device_free_bytes == 0
        return
    error = refusal(lambda: loading.start_runner(parts, SETTINGS))
    assert error.param == "cuda_graph_batch_sizes"


def test_steps_that_leave_too_little(start: Start) -> None:
    start.costs.workspace = TOTAL - 3 * MIB
    error = refusal(start.parts)
    assert error.param == "max_num_batched_tokens"
    assert re.search(naming("cuda_graphs", "max_num_batched_tokens", 3), error.message)
    assert re.search(
        naming("cuda_graphs", readable_bytes(3 * GRAPH), 3, "max_num_batched_tokens"), error.message
    )


def test_pools_that_cannot_be_allocated(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = Assembly.parts, []

    def parts(self: Assembly, *arguments: Any) -> RunnerParts:
        calls.append(arguments)
        if len(calls) == 2:
            raise OUT_OF_MEMORY
        return original(self, *arguments)

    monkeypatch.setattr(Assembly, "parts", parts)
    error = refusal(start.parts)
    assert error.param == "kv_cache_fraction"
    assert re.search(naming("kv_cache_fraction", 0.9, "lora_device_fraction", 0.05), error.message)


def test_on_a_host_nothing_is_measured(tiny_checkpoint: TinyCheckpoint) -> None:
    parts = load_on(HostAccelerator(), tiny_checkpoint)
    capacity = parts.capacity
    assert (capacity.workspace_bytes, capacity.graph_bytes, capacity.device_bytes) == (0, 0, 0)
    assert parts.recorded_sizes == (1, 2, 4)
    without = load_on(None, tiny_checkpoint)
    assert (without.accelerator, without.recorded_sizes) == (None, ())
    assert not without.capacity.keeps_host_copy
    assert without.capacity.host_page_bytes == 0
    assert type(loading.start_runner(without, SETTINGS)) is ModelRunner


def load_on(accelerator: Accelerator | None, checkpoint: TinyCheckpoint) -> RunnerParts:
    settings = msgspec.structs.replace(SETTINGS, device="cpu")
    return loading.load_parts(checkpoint.save(), settings, HostAdapters(), accelerator=accelerator)
