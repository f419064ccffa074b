"""All features of an engine whose layers convolve, and bugs of runners that this finds.

Each request writes what it writes alone in a plain engine: in chunks, with draft tokens, preempted,
forked, as beams, after hits in the prefix cache, and after crashes.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.mirror import Array
from loraplex.execution.steps.input_batch import StepInputs
from loraplex.execution.steps.tensors import DeviceTensors
from loraplex.kernels.accelerator import Accelerator, HostAccelerator
from loraplex.kernels.ops import Kernels
from loraplex.kernels.reference import ReferenceKernels
from support.accelerated_reference import AcceleratedReference, load_parts_with
from support.examples import num_examples
from support.feature_schedules import FEATURE_SETTINGS, FeatureSchedules, feature_checkpoint

SETTINGS = msgspec.structs.replace(
    FEATURE_SETTINGS, dtype="float32", cuda_graph_batch_sizes=(2, 4, 6)
)
FIELDS: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "layer_types": ["conv", "full_attention", "conv"],
    "num_hidden_layers": 3,
    "conv_L_cache": 4,
    "block_auto_adjust_ff_dim": False,
    "tie_word_embeddings": False,
}
QUICK = range(5, 5 + num_examples(0.2))
"""Seeds, of which the first ones have what the tests look for."""
MAX_SCHEDULES = 60
"""Number of schedules in which a planted bug must show."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_schedules(folder: Path, accelerator: Accelerator | None = None) -> FeatureSchedules:
    kernels: Kernels = ReferenceKernels(torch.device("cpu"))
    if accelerator is not None:
        kernels = AcceleratedReference(accelerator)
    model = feature_checkpoint(folder, **FIELDS)
    parts = load_parts_with(kernels, accelerator, model, SETTINGS, HostAdapters())
    return FeatureSchedules(parts, folder, kernels)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> FeatureSchedules:
    return make_schedules(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> FeatureSchedules:
    return make_schedules(tmp_path_factory.mktemp("recorded"), HostAccelerator())


def check(schedules: FeatureSchedules, seeds: range) -> Counter[str]:
    problems = [problem for seed in seeds for problem in schedules.run(f"convolutions {seed}")]
    assert not problems, "\n".join(problems[:20])
    return schedules.tally


def test_layers_of_both_sorts(plain: FeatureSchedules) -> None:
    tally = check(plain, QUICK)
    assert tally["preemptions"] > 0
    assert tally["cached_tokens"] > 0
    assert tally["accepted"] > 0


def test_recorded_steps(recorded: FeatureSchedules, plain: FeatureSchedules) -> None:
    assert recorded.alone == plain.alone
    check(recorded, QUICK)


def a_row_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolve the inputs of a step alone, as if nothing was before them."""
    causal_conv = ReferenceKernels.causal_conv

    def forgetful(self: ReferenceKernels, *arguments: Any) -> torch.Tensor:
        x, weight, bias, activation, rows, storage = arguments
        counts = rows.query_start_loc.diff()
        tokens = torch.arange(len(x)) - rows.query_start_loc[:-1].repeat_interleave(counts)
        return causal_conv(
            self, x, weight, bias, activation, rows._replace(positions=tokens), storage
        )

    monkeypatch.setattr(ReferenceKernels, "causal_conv", forgetful)


def padding_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pad the places of inputs with the one that would be a block."""
    arrays = DeviceTensors._arrays

    def padded(
        self: DeviceTensors, inputs: StepInputs, token_ids: Sequence[Sequence[int]]
    ) -> list[Array]:
        made = arrays(self, inputs, token_ids)
        # Two numbers of whole rows, the positions, and the places of two groups.
        mapping = made[4]
        assert isinstance(mapping, np.ndarray)
        mapping[inputs.num_tokens :] = 0
        return made

    monkeypatch.setattr(DeviceTensors, "_arrays", padded)


@pytest.mark.parametrize(
    ("plant", "name"),
    [(a_row_forgets, "plain"), (padding_is_stored, "recorded")],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    name: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedules: FeatureSchedules = request.getfixturevalue(name)
    plant(monkeypatch)
    assert any(is_wrong(schedules, f"planted {seed}") for seed in range(MAX_SCHEDULES))


def is_wrong(schedules: FeatureSchedules, seed: str) -> bool:
    """Return whether a schedule shows a bug."""
    try:
        return bool(schedules.run(seed))
    except AssertionError:
        return True
