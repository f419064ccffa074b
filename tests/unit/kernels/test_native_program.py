"""Recorded steps: they give the bits of the calls that they repeat, for any parameters."""

import dataclasses

import numpy as np
import pytest
import torch

from loraplex.core.errors import InternalError
from loraplex.kernels.activations import Activation
from loraplex.kernels.adapter_parts import AdapterParts, OutputVector, PartsUse
from loraplex.kernels.lora import LoraCells, LoraPlace, LoraTable, LoraUse, lora_batch
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.library import (
    NativeLibrary,
    NativeLibraryError,
    Pointer,
    Size,
    available_instruction_sets,
    load_library,
)
from loraplex.kernels.native.program import Recorder
from loraplex.kernels.ops import AttentionRules, AttentionShape, RowLayout
from support.naming import naming

try:
    INSTRUCTION_SETS = available_instruction_sets()
except NativeLibraryError as error:
    pytest.skip(f"the native kernels are not built: {error}", allow_module_level=True)

HIDDEN = 40


@pytest.fixture(params=INSTRUCTION_SETS)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    torch.default_generator.manual_seed(0)
    return load_library([request.param])


class Model:
    """A few ops, with views between them and an op that writes in place."""

    def __init__(self, kernels: NativeKernels) -> None:
        self.num_computed = 0
        self._kernels = kernels
        self._table = torch.randn(30, HIDDEN)
        self._angles = torch.randn(30, 10)
        self._norm = torch.randn(HIDDEN)
        self._wide = kernels.pack_linear(torch.randn(4 * HIDDEN, HIDDEN), torch.randn(4 * HIDDEN))
        self._narrow = kernels.pack_linear(torch.randn(HIDDEN, 2 * HIDDEN), None)

    def compute(self, indices: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        self.num_computed += 1
        kernels = self._kernels
        residual = kernels.take_rows(self._table, indices)
        x = kernels.rms_norm(residual, self._norm, 1e-5)
        for _ in range(3):
            wide = kernels.linear(x, self._wide)
            query, key = wide[:, :HIDDEN].view(-1, 2, 20), wide[:, HIDDEN:].view(-1, 6, 20)
            cos, sin = (kernels.take_rows(self._angles, rows) for rows in (indices, other))
            kernels.rotary(query, key, cos, sin)
            x = kernels.linear(kernels.gate(wide, Activation.SILU), self._narrow)
            x, residual = kernels.add_rms_norm(x, residual, self._norm, 1e-5)
        return x

    def repeat(self, indices: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self._kernels.repeat(
            len(indices), (indices, other, None), lambda: self.compute(indices, other)
        ).clone()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_repeated_step_has_the_bits_of_its_ops(library: NativeLibrary, num_threads: int) -> None:
    model = Model(NativeKernels(library, num_threads))
    for num_tokens in (3, 1, 7, 3, 1, 40, 7, 3):
        indices, other = torch.randint(30, (2, num_tokens)).unbind()
        other = other.clone()
        assert torch.equal(model.repeat(indices, other), model.compute(indices, other))
    assert model.num_computed == 8 + 4


def test_the_memory_of_a_program_does_not_grow_with_its_length(library: NativeLibrary) -> None:
    kernels = NativeKernels(library, 1)
    linear = kernels.pack_linear(torch.randn(64, 64), None)

    def chain(x: torch.Tensor, length: int) -> torch.Tensor:
        for _ in range(length):
            x = kernels.linear(x, linear)
        return x

    recorder = kernels._recorder
    inputs = torch.randn(16, 64)
    kernels.repeat("short", (inputs,), lambda: chain(inputs, 3))
    size = recorder.num_bytes
    kernels.repeat("long", (inputs,), lambda: chain(inputs, 30))
    assert recorder.num_bytes == size > 0


def test_no_op_writes_over_what_it_reads(library: NativeLibrary) -> None:
    kernels = NativeKernels(library, 1)
    rows, reverse = torch.randn(24, 64), kernels.pack_linear(torch.eye(64).flip(0), None)

    def compute() -> torch.Tensor:
        x = rows
        for _ in range(6):
            x = kernels.linear(x, reverse)
        return x

    for _ in range(2):
        assert torch.equal(kernels.repeat("key", (rows,), compute), rows)
    assert kernels._programs["key"] is not None


def test_what_calls_an_op_that_no_program_holds_is_computed_each_time(
    library: NativeLibrary,
) -> None:
    kernels = NativeKernels(library, 1)
    weight = torch.randn(8, 8)
    calls = []

    def compute() -> torch.Tensor:
        calls.append(1)
        return kernels.linear(torch.ones(1, 8), kernels.pack_linear(weight, None))

    results = [kernels.repeat("key", (), compute) for _ in range(3)]
    assert len(calls) == 3
    assert torch.equal(results[0], results[2])


def test_what_torch_has_a_part_in_is_computed_each_time(library: NativeLibrary) -> None:
    """A copy of a turned view: no native call would make it again."""
    kernels = NativeKernels(library, 1)
    linear = kernels.pack_linear(torch.randn(8, 8), None)

    def turned() -> torch.Tensor:
        return kernels.linear(x.t().contiguous().t(), linear)

    for _ in range(3):
        x = torch.randn(3, 8)
        assert torch.equal(kernels.repeat("turned", (x,), turned), kernels.linear(x, linear))
    assert set(kernels._programs.values()) == {None}


def test_the_vectors_of_adapters_are_part_of_a_program(library: NativeLibrary) -> None:
    kernels = NativeKernels(library, 1)
    linear = kernels.pack_linear(torch.randn(8, 8), None)
    parts = AdapterParts(vectors={(0, "q_proj"): [OutputVector(0, None, torch.ones(8))]})
    ranks, scales = np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
    table = LoraTable(LoraCells([{"q_proj": (8, 8)}]), np.zeros((1, 1), np.int64), ranks, scales)
    plain = lora_batch(torch.zeros(1), table, [LoraUse(0, 0, 0, 3, 1.0)])

    def with_vectors() -> torch.Tensor:
        y = kernels.linear(x, linear)
        kernels.add_lora(y, x, batch, LoraPlace(0, ("q_proj",), (0,)))
        return y

    for scale in (1.0, 2.0, 3.0):
        x = torch.randn(3, 8)
        uses = (PartsUse(parts, torch.arange(1, 3), torch.full((2,), scale)),)
        batch = dataclasses.replace(plain, parts=uses)
        lora_ns = kernels.lora_ns
        expected = kernels.linear(x, linear)
        assert kernels.lora_ns == lora_ns, "only ops of LoRA count"
        expected[1:] += scale
        assert torch.equal(kernels.repeat("vectors", (x, batch), with_vectors), expected)
        assert kernels.lora_ns > lora_ns
    assert None not in kernels._programs.values()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_op_of_a_decoder_may_be_in_a_program(
    library: NativeLibrary, dtype: torch.dtype
) -> None:
    kernels = NativeKernels(library, 2)
    shape = AttentionShape(num_heads=3, num_kv_heads=1, head_dim=8, block_size=4)
    table, storage = torch.randn(30, 24).to(dtype), kernels.allocate_kv(3, shape, dtype)
    key, value = torch.randn(2, 12, 1, 8).to(dtype)
    kernels.write_kv(storage, key, value, torch.arange(12))
    weight, bias, of_heads = torch.randn(24), torch.randn(24), torch.randn(3, 8)
    sink_logits, no_keys = torch.randn(3), torch.empty(2, 0, 8, dtype=dtype)
    up = kernels.pack_linear(torch.randn(48, 24).to(dtype), None)
    angles = torch.randn(30, 2)
    embedding = kernels.pack_linear(table, None)

    def compute() -> torch.Tensor:
        residual = kernels.add(
            kernels.take_rows(table, indices), kernels.weight_rows(embedding, indices, dtype), 2.0
        )
        x = kernels.layer_norm(residual, weight, bias, 1e-5)
        query = kernels.layer_norm(x.view(-1, 3, 8), of_heads, of_heads, 1e-5)
        turns = kernels.take_rows(angles, indices)
        kernels.rotary(query, no_keys, turns, turns, is_interleaved=True)
        x = kernels.paged_attention(query, storage, plan, sink_logits).flatten(1)
        x, residual = kernels.add_rms_norm(x, residual, weight, 1e-5, 0.3)
        x = kernels.take_rows(x, swapped)
        gated = kernels.gate(kernels.linear(x, up), Activation.GELU_TANH)
        x, residual = kernels.add_layer_norm(gated, residual, weight, bias, 1e-5, 0.2)
        x = kernels.add(kernels.activate(x, Activation.SQUARED_RELU), residual, 0.5)
        kernels.scale(x, 1.5, 2.0)
        return x

    for first, slope in ((1, 0.5), (4, 0.25), (9, 0.0)):
        indices = torch.arange(first, first + 2)
        swapped = torch.tensor([first % 2, 0])
        layout = RowLayout([0, 2], [first + 2], torch.arange(3).unsqueeze(0))
        rules = AttentionRules(scale=0.4, soft_cap=3.0, alibi_slopes=(slope, 0.1, 1.0))
        plan = kernels.plan_attention(layout, shape, rules)
        repeated = kernels.repeat("step", (indices, swapped, plan), compute).clone()
        assert torch.equal(repeated, compute())
    assert kernels._programs["step"] is not None


@pytest.mark.parametrize(
    "kind", ["made by torch", "result of torch", "view of a parameter", "parameter as a table"]
)
def test_a_value_that_no_op_made_is_computed_each_time(library: NativeLibrary, kind: str) -> None:
    """A program would read the first step's tensor, or one that is gone, at every step."""
    kernels = NativeKernels(library, 1)
    norm, indices = torch.randn(8), torch.tensor([0, 1])

    def compute() -> torch.Tensor:
        match kind:
            case "made by torch":
                return kernels.rms_norm(x[:2] * 1.5, norm, 1e-5)
            case "result of torch":
                return kernels.rms_norm(x, norm, 1e-5) * 1.5
            case "view of a parameter":
                return kernels.rms_norm(x[1:], norm, 1e-5)
        return kernels.take_rows(x, indices)

    for _ in range(3):
        x = torch.randn(3, 8)
        assert torch.equal(kernels.repeat("key", (x, indices), compute), compute())
    assert kernels._programs["key"] is None


def test_memory_of_torch_that_a_later_op_gets_is_no_output_before(library: NativeLibrary) -> None:
    kernels = NativeKernels(library, 1)
    norm, indices = torch.randn(8), torch.tensor([0, 1])

    def compute() -> torch.Tensor:
        made = x * 1.5
        normed = kernels.rms_norm(made, norm, 1e-5)
        kernels._recorder.output(made)  # Freed, and allocated anew for an op's output.
        return kernels.take_rows(normed, indices)

    for _ in range(3):
        x = torch.randn(3, 8)
        assert torch.equal(kernels.repeat("key", (x, indices), compute), compute())
    assert kernels._programs["key"] is None


def test_a_failed_recording_leaves_nothing_behind(library: NativeLibrary) -> None:
    kernels = NativeKernels(library, 1)
    model = Model(kernels)

    def fail() -> torch.Tensor:
        model.compute(torch.tensor([1]), torch.tensor([2]))
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match=naming("middle")):
        kernels.repeat(2, (), fail)
    indices, other = torch.tensor([1, 2]), torch.tensor([3, 4])
    model.repeat(indices, other)
    assert torch.equal(model.repeat(other, indices), model.compute(other, indices))


def test_an_op_that_fails_ends_the_program(library: NativeLibrary) -> None:
    kernels = NativeKernels(library, 1)
    table = torch.randn(4, 8)
    indices = torch.tensor([0, 1])
    kernels.repeat("key", (indices,), lambda: kernels.take_rows(table, indices))
    program = kernels._programs["key"]
    assert program is not None
    with pytest.raises(InternalError, match=naming("loraplex_run_program")):
        program.run(())


def test_code_that_is_none_is_refused(library: NativeLibrary) -> None:
    run = library.function("loraplex_run_program", Pointer, Size, Pointer, Size)
    for words in ([0], [99, 0, 0], [0, 1, 0, 5], [0, 9, 0, 1]):
        code = torch.tensor(words)
        with pytest.raises(InternalError, match=naming("loraplex_run_program")):
            run(code.data_ptr(), len(words), None, 0)
    assert Recorder(library).num_bytes == 0
