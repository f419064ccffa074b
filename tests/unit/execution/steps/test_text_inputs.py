"""Inputs of an encoder in real steps: a failure costs its own row alone."""

import dataclasses
import re
from collections.abc import Iterator, Sequence

import pytest
import torch

from loraplex.core.adapter import AdapterHandle
from loraplex.core.errors import DeviceLost, StepFailedError
from loraplex.core.plan import AdapterCopy, EncodeText, RowAdded, RowStep, StepPlan, StepResult
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.model_runner import ModelRunner
from loraplex.execution.steps.runner_parts import RunnerParts
from loraplex.kernels.reference import ReferenceKernels
from support.naming import naming
from support.random_schedules import RandomAdapters, RecordingSampler
from support.toy_encoder import ToyEncoder, encoder_decoder_parts

VOCAB_SIZE = 99
SETTINGS = RunnerSettings(
    block_size=4, num_blocks=160, max_num_seqs=4, max_lora_rank=8, dtype="float32"
)
PROMPT = (5, 6, 7)
LONG, SHORT, OTHER = (8, 9, 10, 11, 12, 13), (8, 9, 10), (9, 8, 10)
ADAPTER: AdapterHandle = 3
MEMORY = torch.OutOfMemoryError("none left")

Given = tuple[tuple[int, ...], AdapterHandle | None]


@pytest.fixture(scope="module")
def model() -> tuple[RunnerParts, ToyEncoder]:
    parts, encoder = encoder_decoder_parts(
        VOCAB_SIZE, SETTINGS, ReferenceKernels(torch.device("cpu"))
    )
    adapters = RandomAdapters(parts.host_adapters, parts.decoder.spec, (4,))
    host = parts.adapter_bank.prepare(adapters.make(adapters.sources[0]))
    parts.host_adapters[ADAPTER] = host
    return parts, encoder


@pytest.fixture
def parts(model: tuple[RunnerParts, ToyEncoder]) -> RunnerParts:
    return model[0]


@pytest.fixture
def encoder(model: tuple[RunnerParts, ToyEncoder]) -> Iterator[ToyEncoder]:
    _, encoder = model
    encoder.encoded.clear()
    yield encoder
    encoder.errors = {}


class Rows:
    """Rows of one step of a new runner, one for each input; they share no block."""

    def __init__(self, parts: RunnerParts, *inputs: Given, copies: bool = True) -> None:
        self._sampler = RecordingSampler(VOCAB_SIZE)
        runner = ModelRunner(dataclasses.replace(parts, sampler=self._sampler))
        pages = tuple(range(parts.capacity.num_adapter_pages))
        copy = AdapterCopy(ADAPTER, pages)
        assert runner.launch(StepPlan(1, adapter_copies=(copy,) if copies else ())).wait()
        self.result: StepResult = runner.launch(plan_of(inputs)).wait()
        runner.close()

    @property
    def bits(self) -> list[object]:
        """What each row computed; None: its error."""
        return [
            None if row.error is not None else self._sampler.bits[row.slot]
            for row in self.result.rows
        ]

    @property
    def errors(self) -> list[str | None]:
        """Message of each row's error."""
        return [None if row.error is None else row.error.message for row in self.result.rows]


def plan_of(inputs: Sequence[Given]) -> StepPlan:
    added, rows, next_block = [], [], 11
    for slot, (given, handle) in enumerate(inputs):
        adapters = () if handle is None else ((handle, 1.0),)
        added.append(
            RowAdded(
                slot,
                slot,
                Generate(SamplingParams(temperature=0.0), seed=slot),
                0,
                PROMPT,
                len(PROMPT),
                adapters=adapters,
                encoder_token_ids=given,
            )
        )
        num_blocks = -(-len(given) // SETTINGS.block_size)
        # In no order that rows could have by chance.
        blocks = tuple(range(next_block, next_block - num_blocks, -1))
        next_block -= num_blocks
        rows.append(RowStep(slot, 0, len(PROMPT), PROMPT, new_block_ids=((slot,), blocks)))
    return StepPlan(
        2,
        added=tuple(added),
        rows=tuple(rows),
        encodes=tuple(EncodeText(slot) for slot in range(len(inputs))),
    )


def test_rows_have_the_bits_of_steps_alone(parts: RunnerParts, encoder: ToyEncoder) -> None:
    inputs: list[Given] = [(LONG, None), (LONG, ADAPTER), (SHORT, ADAPTER), (OTHER, None)]
    together = Rows(parts, *inputs).bits
    alone = [bits for given in inputs for bits in Rows(parts, given).bits]
    assert together == alone
    assert len({repr(bits) for bits in alone}) == len(inputs)
    assert encoder.encoded == 2 * [given for given, _ in inputs]


def test_an_input_that_cannot_be_encoded_fails_its_row_alone(
    parts: RunnerParts, encoder: ToyEncoder
) -> None:
    expected = Rows(parts, (SHORT, None)).bits
    encoder.errors[LONG] = [ValueError("such a text")]
    rows = Rows(parts, (LONG, ADAPTER), (SHORT, None))
    assert rows.bits[1:] == expected
    assert rows.errors == ["the encoder's input could not be encoded: such a text", None]


def test_a_full_memory_is_tried_again_once(parts: RunnerParts, encoder: ToyEncoder) -> None:
    inputs: list[Given] = [(LONG, None), (SHORT, None)]
    expected = Rows(parts, *inputs).bits
    encoder.errors[LONG] = [MEMORY]
    assert Rows(parts, *inputs).bits == expected
    encoder.errors[LONG] = [MEMORY, MEMORY]
    rows = Rows(parts, *inputs)
    assert rows.bits[1:] == expected[1:]
    (error, _) = rows.errors
    assert error is not None
    assert re.search(
        naming("max_num_batched_tokens", "max_prefill_chunk", "kv_cache_fraction"), error
    )


def test_a_row_whose_adapter_is_missing_encodes_nothing(
    parts: RunnerParts, encoder: ToyEncoder
) -> None:
    host = parts.host_adapters.get(ADAPTER)
    assert host is not None
    parts.adapter_bank.copy(ADAPTER + 1, host, range(parts.capacity.num_adapter_pages))
    rows = Rows(parts, (LONG, ADAPTER), (SHORT, None), copies=False)
    assert encoder.encoded == [SHORT]
    assert rows.errors == [f"adapter {ADAPTER} is not on the device", None]


def test_a_token_outside_of_the_vocabulary_fails_its_row(
    parts: RunnerParts, encoder: ToyEncoder
) -> None:
    rows = Rows(parts, ((8, VOCAB_SIZE), None), (SHORT, None))
    assert rows.errors == [f"token {VOCAB_SIZE} is not in the vocabulary", None]
    assert encoder.encoded == [SHORT]


def test_a_lost_device_is_no_error_of_a_row(parts: RunnerParts, encoder: ToyEncoder) -> None:
    encoder.errors[LONG] = [DeviceLost("gone")]
    with pytest.raises(StepFailedError, match="gone"):
        Rows(parts, (LONG, None), (SHORT, None))


def test_on_one_rank_of_several_an_error_fails_the_step(
    parts: RunnerParts, encoder: ToyEncoder
) -> None:
    runner = ModelRunner(parts)
    inputs = runner._computer.text_inputs
    assert inputs is not None
    inputs._is_alone = False
    encoder.errors[LONG] = [ValueError("such a text")]
    with pytest.raises(StepFailedError, match="such a text"):
        runner.launch(plan_of([(LONG, None)])).wait()


def test_a_runner_needs_the_encoder_of_its_model(parts: RunnerParts) -> None:
    with pytest.raises(AssertionError):
        ModelRunner(dataclasses.replace(parts, text_encoder=None))
