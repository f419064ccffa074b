"""test_every_feature on an accelerator: late, padded or recorded work changes no result."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.kernels.accelerator import Accelerator, HostAccelerator
from loraplex.kernels.reference import ReferenceKernels
from support.accelerated_reference import AcceleratedReference, load_parts_with
from support.delayed_accelerator import DelayedAccelerator
from support.feature_schedules import (
    DYNAMIC,
    FEATURE_SETTINGS,
    LONGROPE,
    FeatureSchedules,
    feature_checkpoint,
)

SETTINGS = msgspec.structs.replace(
    FEATURE_SETTINGS, dtype="float32", cuda_graph_batch_sizes=(2, 4, 6)
)
TWO_KV_GROUPS = msgspec.structs.replace(SETTINGS, max_attention_window_size=(9, 160))
NUM_SLOW = 40


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def accelerated(
    folder: Path,
    accelerator: Accelerator,
    settings: RunnerSettings = SETTINGS,
    **fields: Any,
) -> tuple[FeatureSchedules, int]:
    """And how many steps were repeated so far. fields: of config.json."""
    kernels = AcceleratedReference(accelerator)
    model = feature_checkpoint(folder, **fields)
    parts = load_parts_with(kernels, accelerator, model, settings, HostAdapters())
    schedules = FeatureSchedules(parts, folder, kernels)
    return schedules, kernels.num_repeated


def check(schedules: FeatureSchedules, seeds: range, name: str) -> None:
    problems = [problem for seed in seeds for problem in schedules.run(f"{name} {seed}")]
    assert not problems, "\n".join(problems[:20])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        pytest.param(TWO_KV_GROUPS, {}, id="two cache groups"),
        pytest.param(SETTINGS, DYNAMIC, id="dynamic"),
        pytest.param(SETTINGS, {}, id="", marks=pytest.mark.soak),
        pytest.param(SETTINGS, LONGROPE, id="longrope", marks=pytest.mark.soak),
    ],
)
def test_late_copies_change_no_output(
    tmp_path: Path, settings: RunnerSettings, fields: dict[str, Any]
) -> None:
    """Every completion is that of a CPU in every bit, for requests that run alone, too."""
    schedules, num_repeated = accelerated(tmp_path, DelayedAccelerator(seed=3), settings, **fields)
    assert num_repeated > 100
    folder = tmp_path / "host"
    folder.mkdir()
    kernels = ReferenceKernels(torch.device("cpu"))
    model = feature_checkpoint(folder, **fields)
    parts = load_parts_with(kernels, None, model, settings, HostAdapters())
    assert schedules.alone == FeatureSchedules(parts, folder, kernels).alone
    check(schedules, range(1), "delayed")


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["host", "delayed"])
def test_many_schedules(tmp_path: Path, name: str) -> None:
    accelerator = HostAccelerator() if name == "host" else DelayedAccelerator(seed=5)
    schedules, _ = accelerated(tmp_path, accelerator)
    check(schedules, range(100, 100 + NUM_SLOW // (1 if name == "host" else 4)), name)
    happened = ("accepted", "copies", "failed_steps", "loads", "offloads", "preemptions")
    assert name == "delayed" or all(schedules.tally[what] > 0 for what in happened)
