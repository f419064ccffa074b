"""The backend of a GPU: Triton kernels, cuBLAS, and CUDA graphs of whole steps."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.channel import DeviceChannel
from loraplex.kernels.cuda import convolution, elementwise, experts, recurrence, sampling
from loraplex.kernels.cuda.attention import CudaAttention, CudaAttentionPlan
from loraplex.kernels.cuda.graphs import StepGraphs
from loraplex.kernels.cuda.grouped_linear import GroupedLinear
from loraplex.kernels.cuda.linear import PACKED_LAYOUT, CudaLinear
from loraplex.kernels.cuda.linear_packing import squared_row_norms
from loraplex.kernels.cuda.lora import CudaLora
from loraplex.kernels.cuda.ranks import RankSums
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import (
    AttentionPlan,
    AttentionRules,
    AttentionShape,
    Parameter,
    RowLayout,
)
from loraplex.kernels.reference import ReferenceKernels
from loraplex.kernels.reference_attention import TilePlan
from loraplex.kernels.sizes import DEFAULT_SIZES, ProgramSizes


class CudaKernels(ReferenceKernels):
    """Implements `Kernels` for tensors of one accelerator: binds each op to its launches."""

    packed_layout = PACKED_LAYOUT

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        batch_invariant: bool = False,
        attention_backend: str = "auto",
        channel: DeviceChannel | None = None,
        sizes: ProgramSizes = DEFAULT_SIZES,
    ) -> None:
        """batch_invariant: a row's result has the same bits alone and in company; slower.

        attention_backend: as in RunnerSettings. channel: to the other ranks; None: there are none.
        sizes: as a tuning on this card chose them.
        """
        device = accelerator.device
        super().__init__(device, channel)
        self.graphs = StepGraphs(accelerator)
        self.recording, self.forget_recorded = self.graphs.recording, self.graphs.clear
        sums = None if channel is None else RankSums(channel)
        self._bind_products(device, sums, sizes, batch_invariant=batch_invariant)
        attention = CudaAttention(
            device,
            batch_invariant=batch_invariant,
            backend=attention_backend,
            accelerator=accelerator,
            sizes=sizes,
        )
        self._deciding["paged_attention"] = attention.size_of
        self.allocate_kv, self.write_kv = attention.allocate, attention.write
        self.plan_attention, self.paged_attention = attention.plan, attention.attend
        self._bind_rows()

    def _bind_products(
        self,
        device: torch.device,
        sums: RankSums | None,
        sizes: ProgramSizes,
        *,
        batch_invariant: bool,
    ) -> None:
        linear = CudaLinear(device, batch_invariant=batch_invariant, sums=sums, sizes=sizes)
        self.pack_linear, self.takes_quantized = linear.pack, linear.takes
        self.linear_parts, self.join_linear = linear.parts, linear.join
        self.linear, self.linear_apart = linear.apply, linear.apply_apart
        self.squared_row_norms, self.weight_rows = squared_row_norms, linear.rows
        grouped = GroupedLinear(device, batch_invariant=batch_invariant, sums=sums, sizes=sizes)
        self.grouped_linear = grouped.apply
        lora = CudaLora(device, batch_invariant=batch_invariant, sums=sums, sizes=sizes)
        self.add_lora, self.add_expert_lora = lora.add, lora.add_experts
        self._deciding: dict[str, Callable[..., str | None]] = {
            "linear": linear.size_of,
            "grouped_linear": grouped.size_of,
            "add_lora": lora.size_of,
            "add_expert_lora": lora.size_of,
        }
        if sums is not None:
            self.gather_columns = sums.columns

    def _bind_rows(self) -> None:
        """Bind what looks at one row at a time, so that nothing is to be chosen."""
        self.take_rows = elementwise.take_rows
        self.rms_norm, self.add_rms_norm = elementwise.rms_norm, elementwise.add_rms_norm
        self.layer_norm, self.add_layer_norm = elementwise.layer_norm, elementwise.add_layer_norm
        self.add, self.scale = elementwise.add, elementwise.scale
        self.multiply, self.causal_conv = elementwise.multiply, convolution.causal_conv
        self.rotary = elementwise.rotary
        self.delta_rule, self.ssd = recurrence.delta_rule, recurrence.ssd
        self.gated_rms_norm, self.sigmoid_gate = (
            elementwise.gated_rms_norm,
            elementwise.sigmoid_gate,
        )
        self.gate, self.activate = elementwise.gate, elementwise.activate
        self.route, self.combine_experts = experts.route, experts.combine_experts
        self.argmax, self.apply_bitmask = sampling.argmax, sampling.apply_bitmask
        self.draw_tokens = sampling.draw_tokens
        self.top_logprobs = sampling.top_logprobs

    def size_of(self, op: str, arguments: Sequence[Any]) -> str | None:
        deciding = self._deciding.get(op)
        return None if deciding is None else deciding(*arguments)

    def plan_latent_attention(
        self, rows: RowLayout, shape: AttentionShape, rules: AttentionRules
    ) -> AttentionPlan:
        """Return the plan of the reference, which reads tables by row."""
        device = rows.on_device
        if device is not None:
            tables = device.block_tables[device.table_rows.long()].long()
            rows = dataclasses.replace(rows, block_tables=tables)
        return super().plan_latent_attention(rows, shape, rules)

    def repeat(
        self,
        key: Hashable,
        parameters: Sequence[Parameter],
        compute: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        if any(isinstance(parameter, TilePlan) for parameter in parameters):
            # Latent attention has no programs yet: the reference reads on the host which rows
            # there are, and a graph cannot.
            return compute()
        inputs = [tensor for parameter in parameters for tensor in _tensors(parameter)]
        return self.graphs.repeat(key, inputs, compute)


def _tensors(parameter: Parameter) -> tuple[torch.Tensor, ...]:
    """What a graph reads of it."""
    match parameter:
        case torch.Tensor():
            return (parameter,)
        case tuple():
            return parameter
        case CudaAttentionPlan():
            return parameter.tensors
        case LoraBatch():
            assert parameter.segments is not None, "the adapter bank of a GPU makes them"
            return parameter.segments.tensors
    assert parameter is None, f"no kernel reads a {type(parameter).__name__}"
    return ()
