"""Every op of every family's steps is a native kernel: the decoder computes nothing with torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.loading import load_parts
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.library import NativeLibraryError, load_library
from loraplex.kernels.native.program import StepProgram
from loraplex.models.decoder import Decoder
from support.families import every
from support.random_schedules import Schedules

try:
    load_library()
except NativeLibraryError as error:
    pytest.skip(f"the native kernels are not built: {error}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = every.CASES
SETTINGS = RunnerSettings(block_size=4, num_blocks=60, max_num_seqs=6, max_lora_rank=8)
SPAN_COPIES = {"aten::copy_"}
"""What replaces the angles of prompts that are rotated by their length (ADR 32)."""


class TorchOps(TorchDispatchMode):
    """Counts the ops that compute something: no views, no allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.num_steps = 0
        self.num_program_runs = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.name().split(".")[0]
        if not func.is_view and name != "aten::empty":
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> TorchOps:
    """Return the ops of all decoder steps."""
    ops, forward, run = TorchOps(), Decoder.forward, StepProgram.run

    def counted_forward(*args: Any) -> torch.Tensor:
        ops.num_steps += 1
        with ops:
            return forward(*args)

    def counted_run(*args: Any) -> torch.Tensor:
        ops.num_program_runs += 1
        return run(*args)

    monkeypatch.setattr(Decoder, "forward", counted_forward)
    monkeypatch.setattr(StepProgram, "run", counted_run)
    return ops


@pytest.mark.some(12)
@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].is_quick])
def test_the_decoder_computes_nothing_with_torch(name: str, tmp_path: Path, ops: TorchOps) -> None:
    """Whole prompts, chunks and decode steps, with adapters; the latter are run as programs."""
    CASES[name].save(tmp_path)
    parts = load_parts(tmp_path, SETTINGS, HostAdapters())
    assert isinstance(parts.kernels, NativeKernels)
    schedules = Schedules(parts, num_requests=5, max_tokens=6, ranks=(1, 4))
    schedules.run(0)
    assert ops.num_program_runs > 0
    assert None not in parts.kernels._programs.values()
    # Tables of a size, and the angles of a length, are computed once.
    ops.counts.clear()
    num_steps = ops.num_steps
    schedules.run(0)
    assert ops.num_steps > num_steps
    has_spans = any(
        rope.rope_type in {"longrope", "dynamic"}
        for layer in parts.decoder.spec.layers
        for mixer in layer.mixers
        for rope in mixer.ropes()
    )
    assert set(ops.counts) <= (SPAN_COPIES if has_spans else set())
