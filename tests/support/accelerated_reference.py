"""The torch reference under the rules of a GPU's backend, with the bits of the plain reference.

Rows, padding and adapters are read where an accelerator has them, at the addresses that a recorded
step was recorded with. Memory that must not be read contains NaN.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import numpy as np
import torch

from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.assembly import Assembly
from loraplex.execution.loading import assemble_parts
from loraplex.execution.sizing.capacity import choose_dtype
from loraplex.execution.sizing.kv import windowed
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.runner_parts import RunnerParts
from loraplex.execution.steps.stages import StageLinks
from loraplex.execution.weights.loading import load_weights
from loraplex.execution.weights.packing import WeightFormat
from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.cuda.graphs import StepGraphs
from loraplex.kernels.lora import LoraBatch, LoraPlace, LoraSegments, add_lora
from loraplex.kernels.ops import (
    AttentionPlan,
    AttentionRules,
    AttentionShape,
    DeviceRows,
    Kernels,
    Parameter,
    RowLayout,
    Storage,
)
from loraplex.kernels.reference import ReferenceKernels
from loraplex.models.registry import read_config
from loraplex.models.spec import ModelSpec
from loraplex.models.stages import ONLY_STAGE, stage


@dataclasses.dataclass(frozen=True, slots=True)
class _RowsOnDevice:
    """An attention plan that is worked out when the layer runs."""

    rows: DeviceRows
    shape: AttentionShape
    rules: AttentionRules

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        rows = self.rows
        return (rows.query_start_loc, rows.seq_lens, rows.table_rows, rows.block_tables)


class AcceleratedReference(ReferenceKernels):
    """Implements `Kernels` for an accelerator whose device is the CPU."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator.device)
        self.graphs = StepGraphs(accelerator)
        self.num_repeated = 0
        """Steps that were not computed anew."""

    def repeat(
        self,
        key: Hashable,
        parameters: Sequence[Parameter],
        compute: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        inputs = [tensor for parameter in parameters for tensor in _tensors(parameter)]
        self.num_repeated += key in self.graphs and not self.graphs.is_recording
        return self.graphs.repeat(key, inputs, compute)

    @property
    def lora_ns(self) -> None:
        return None

    def recording(self) -> contextlib.AbstractContextManager[None]:
        return self.graphs.recording()

    def forget_recorded(self) -> None:
        self.graphs.clear()

    def add_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        batch: LoraBatch,
        place: LoraPlace,
    ) -> None:
        if batch.segments is not None:
            batch = _of_segments(batch, batch.segments)
        add_lora(y, x, batch, place)

    def write_kv(
        self, storage: Storage, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        is_kept = slot_mapping >= 0
        super().write_kv(storage, key[is_kept], value[is_kept], slot_mapping[is_kept])

    def plan_attention(
        self, rows: RowLayout, shape: AttentionShape, rules: AttentionRules
    ) -> AttentionPlan:
        assert rows.on_device is not None, "the runner of an accelerator brings them there"
        return _RowsOnDevice(rows.on_device, shape, rules)

    def paged_attention(
        self,
        query: torch.Tensor,
        storage: Storage,
        plan: AttentionPlan,
        sink_logits: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(plan, _RowsOnDevice)
        rows = plan.rows
        num_rows = int((rows.seq_lens > 0).sum())
        starts = rows.query_start_loc[: num_rows + 1].tolist()
        output = torch.full_like(query, torch.nan)
        if not num_rows:
            return output
        tables = rows.block_tables[rows.table_rows[:num_rows].long()].long()
        layout = RowLayout(starts, rows.seq_lens[:num_rows].tolist(), tables)
        tiles = super().plan_attention(layout, plan.shape, plan.rules)
        attended = super().paged_attention(
            query[: starts[-1]], storage, tiles, sink_logits, position_bias
        )
        output[: starts[-1]] = attended
        return output


def _of_segments(batch: LoraBatch, segments: LoraSegments) -> LoraBatch:
    """Return the batch with the groups of the segments instead of its own."""
    entries = segments.entries.numpy()
    is_piece = entries >= 0
    counts = segments.counts.numpy()[is_piece].astype(np.int64)
    starts = segments.starts.numpy()[is_piece].astype(np.int64)
    ends = counts.cumsum()
    order = np.repeat(starts - (ends - counts), counts) + np.arange(counts.sum())
    chosen = torch.from_numpy(order)
    return dataclasses.replace(
        batch,
        entries=entries[is_piece].astype(np.int64),
        group_starts=np.append(0, ends),
        wave_starts=np.append(0, is_piece.sum(1).cumsum()),
        token_indices=segments.token_indices[chosen].long(),
        token_scales=segments.token_scales[chosen],
    )


def _tensors(parameter: Parameter) -> tuple[torch.Tensor, ...]:
    match parameter:
        case torch.Tensor():
            return (parameter,)
        case tuple():
            return parameter
        case _RowsOnDevice():
            return parameter.tensors
        case LoraBatch(segments=LoraSegments()):
            assert parameter.segments is not None
            return parameter.segments.tensors
    assert parameter is None, f"no op reads a {type(parameter).__name__}"
    return ()


def load_parts_with(
    kernels: Kernels,
    accelerator: Accelerator | None,
    folder: Path,
    settings: RunnerSettings,
    host_adapters: HostAdapters,
    links: StageLinks | None = None,
    changed: Callable[[ModelSpec], ModelSpec] = lambda spec: spec,
) -> RunnerParts:
    """Load the parts like execution.loading.load_parts, on a CPU with an optional accelerator.

    changed: the model that is made of the one of config.json, with some of its weights.
    """
    pipeline = ONLY_STAGE if links is None else links.stage
    spec = stage(windowed(settings, changed(read_config(folder))), pipeline)
    dtype = choose_dtype(settings, spec)
    form = WeightFormat(dtype=dtype, precision=settings.precision, device=torch.device("cpu"))
    weights = load_weights(folder, spec, kernels, form, None)
    assembly = Assembly(
        spec=spec,
        parameters=weights.parameters,
        weights_bytes=weights.num_bytes,
        settings=settings,
        kernels=kernels,
        accelerator=accelerator,
        links=links,
    )
    return assemble_parts(assembly, host_adapters)
