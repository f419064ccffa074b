"""A decoder with cross attention under all conditions: completions equal those of lone requests.

The scheduler and the runner are real, the model is a toy whose texts depend on each token of the
encoder's input.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from loraplex.core.errors import ErrorInfo, RowFailedError
from loraplex.core.plan import EncodeText, RowStep
from loraplex.execution.steps import text_inputs
from loraplex.execution.steps.input_batch import (
    EncoderInput,
    EncoderLengths,
    InputBatch,
    StepInputs,
)
from loraplex.kernels.dispatch import select_kernels
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.ops import Kernels
from loraplex.kernels.reference import ReferenceKernels
from loraplex.scheduling import request as request_module
from loraplex.scheduling.state import SchedulerState
from support.accelerated_reference import AcceleratedReference
from support.delayed_accelerator import DelayedAccelerator
from support.examples import num_examples
from support.feature_schedules import FEATURE_SETTINGS, FeatureSchedules
from support.grammar_tokens import FIRST_BYTE, VOCAB_SIZE
from support.random_conditions import Conditions
from support.toy_encoder import LONGEST_INPUT, encoder_decoder_parts

SETTINGS = msgspec.structs.replace(
    FEATURE_SETTINGS, dtype="float32", cuda_graph_batch_sizes=(2, 4, 6)
)
NUM_SCHEDULES = num_examples(0.2)
ENOUGH = 100
"""Number of schedules in which everything in HAPPENINGS has happened."""
HAPPENINGS = (
    "accepted",
    "adapter_evictions",
    "cached_tokens",
    "copies",
    "crashes",
    "failed",
    "loads",
    "offloads",
    "preemptions",
)
FAILING_SHARE = 0.4
"""Share of the schedules in which one of the inputs cannot be encoded, or at first."""
ENCODE_ERROR = ValueError("it was to fail")
FULL_MEMORY = torch.OutOfMemoryError("none left, for once")
MAX_ERRORS = 2
"""Errors of an input in a schedule. Others with this input are encoded."""


def _inputs() -> list[tuple[int, ...]]:
    """Return inputs some of which differ in one token, or in its place."""
    draws = random.Random("encoder inputs")
    longest = tuple(draws.randrange(FIRST_BYTE, VOCAB_SIZE) for _ in range(LONGEST_INPUT))
    turned = (longest[1], longest[0], *longest[2:])
    return [longest, longest[:5], turned, longest[:1], (*longest[:-1], FIRST_BYTE), longest[2:6]]


INPUTS = _inputs()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Schedules:
    """Schedules of one model, in some of which an input cannot be encoded, or at first."""

    def __init__(
        self, folder: Path, kernels: Kernels, accelerator: DelayedAccelerator | None = None
    ) -> None:
        """accelerator: that of the kernels."""
        parts, self.encoder = encoder_decoder_parts(VOCAB_SIZE, SETTINGS, kernels, accelerator)
        self.features = FeatureSchedules(parts, folder, kernels, INPUTS)
        reason = f"the encoder's input could not be encoded: {ENCODE_ERROR}"
        self.features.planned_errors.append(RowFailedError(reason).to_info())

    def run(self, seed: object) -> list[str]:
        """Return the differences from lone requests."""
        draws = random.Random(f"encoder {seed}")
        fails = draws.random() < FAILING_SHARE
        errors = draws.choice([[ENCODE_ERROR] * MAX_ERRORS, [FULL_MEMORY]])
        self.encoder.errors = {draws.choice(INPUTS): errors} if fails else {}
        return self.features.run(seed)


@pytest.fixture(scope="module")
def schedules(tmp_path_factory: pytest.TempPathFactory) -> Schedules:
    return Schedules(tmp_path_factory.mktemp("host"), ReferenceKernels(torch.device("cpu")))


def check(schedules: Schedules, seeds: Sequence[object]) -> None:
    for seed in seeds:
        problems = schedules.run(seed)
        assert not problems, "\n".join(problems[:20])


@pytest.mark.timeout(1800)
def test_completions_are_those_of_lone_requests(schedules: Schedules) -> None:
    schedules.encoder.encoded.clear()
    check(schedules, range(NUM_SCHEDULES))
    tally = schedules.features.tally
    assert tally["preemptions"] > 0
    assert tally["cached_tokens"] > 0
    assert set(schedules.encoder.encoded) == set(INPUTS)
    if NUM_SCHEDULES >= ENOUGH:
        assert all(tally[name] > 0 for name in HAPPENINGS), tally


def test_each_token_of_the_input_changes_the_completions(schedules: Schedules) -> None:
    """Check that completions differ; otherwise equal ones would prove little."""
    schedules.encoder.errors = {}
    (request, *_) = (r for r in schedules.features.requests if r.sampling.logprobs == 1)
    requests = [msgspec.structs.replace(request, encoder_token_ids=given) for given in INPUTS]
    found = {repr(schedules.features._run_alone(each).sequences[0]) for each in requests}
    assert len(found) == len(INPUTS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_accelerator_has_the_bits_of_a_cpu(tmp_path: Path, schedules: Schedules) -> None:
    """Late copies, padding and recorded steps change nothing."""
    accelerator = DelayedAccelerator(seed=3)
    kernels = AcceleratedReference(accelerator)
    accelerated = Schedules(tmp_path, kernels, accelerator)
    assert kernels.num_repeated > 100
    assert accelerated.features.alone == schedules.features.alone
    check(accelerated, range(2))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_native_steps_are_recorded_with_their_inputs(tmp_path: Path) -> None:
    kernels = select_kernels(torch.device("cpu"))
    if not isinstance(kernels, NativeKernels):
        pytest.skip("the native kernels are not built")
    native = Schedules(tmp_path, kernels)
    check(native, range(20))
    assert kernels._programs.keys(), "decode steps are recorded"
    assert None not in kernels._programs.values()


def read_the_blocks_of_another_input(patch: pytest.MonkeyPatch) -> None:
    prepare = InputBatch.prepare

    def planted(batch: InputBatch, steps: Sequence[RowStep]) -> StepInputs:
        inputs = prepare(batch, steps)
        tables = tuple(
            table[::-1].copy() if group in batch._encoder_groups else table
            for group, table in enumerate(inputs.block_tables)
        )
        return dataclasses.replace(inputs, block_tables=tables)

    patch.setattr(InputBatch, "prepare", planted)


def read_as_much_as_another_input(patch: pytest.MonkeyPatch) -> None:
    lengths = InputBatch._encoder_lengths

    def planted(batch: InputBatch, steps: Sequence[RowStep]) -> EncoderLengths:
        found = lengths(batch, steps)
        return found._replace(of_rows=[max(found.of_rows)] * len(steps))

    patch.setattr(InputBatch, "_encoder_lengths", planted)


def encode_only_once(patch: pytest.MonkeyPatch) -> None:
    admit = SchedulerState.admit

    def planted(state, sequence, admission):
        admit(state, sequence, admission)
        if sequence.num_preemptions:
            sequence.input_to_encode = 0

    patch.setattr(SchedulerState, "admit", planted)
    draw = Conditions.draw
    patch.setattr(Conditions, "draw", lambda seed: draw(seed).short_of_memory())


def encode_with(patch: pytest.MonkeyPatch, adapters: Callable[[EncoderInput], object]) -> None:
    inputs = InputBatch.encoder_inputs

    def planted(batch: InputBatch, encodes: Sequence[EncodeText]) -> tuple[EncoderInput, ...]:
        found = inputs(batch, encodes)
        return tuple(given._replace(adapters=adapters(given)) for given in found)  # type: ignore[arg-type]

    patch.setattr(InputBatch, "encoder_inputs", planted)


def encode_without_adapters(patch: pytest.MonkeyPatch) -> None:
    encode_with(patch, lambda _given: ())


def encode_with_half_the_scale(patch: pytest.MonkeyPatch) -> None:
    encode_with(patch, lambda given: tuple((handle, s / 2) for handle, s in given.adapters))


def forget_the_input_in_the_salt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request_module, "salt_with_input", lambda salt, _token_ids: salt)


def compute_rows_whose_input_failed(patch: pytest.MonkeyPatch) -> None:
    encode = text_inputs.TextInputs.encode

    def planted(inputs: text_inputs.TextInputs, given: EncoderInput) -> ErrorInfo | None:
        encode(inputs, given)
        return None

    patch.setattr(text_inputs.TextInputs, "encode", planted)


@pytest.mark.parametrize(
    "plant",
    [
        read_the_blocks_of_another_input,
        read_as_much_as_another_input,
        encode_only_once,
        encode_without_adapters,
        encode_with_half_the_scale,
        forget_the_input_in_the_salt,
        compute_rows_whose_input_failed,
    ],
)
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    schedules: Schedules,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="schedule planted"):
        check(schedules, [f"planted {number}" for number in range(30)])
