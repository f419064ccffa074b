"""The backend of a GPU: Triton kernels, cuBLAS, and CUDA graphs of whole steps."""

import contextlib
from collections.abc import Callable, Hashable, Sequence

import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.activations import Activation
from loraplex.kernels.channel import DeviceChannel
from loraplex.kernels.cuda import elementwise, experts, sampling
from loraplex.kernels.cuda.attention import AttentionKernel, CudaAttentionPlan
from loraplex.kernels.cuda.expert_lora import add_expert_lora
from loraplex.kernels.cuda.graphs import StepGraphs
from loraplex.kernels.cuda.grouped_linear import GroupedLinear
from loraplex.kernels.cuda.linear import PACKED_LAYOUT, LinearKernel
from loraplex.kernels.cuda.linear_packing import PackedWeight
from loraplex.kernels.cuda.lora import LoraKernel
from loraplex.kernels.cuda.ranks import RankSums
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import (
    AttentionPlan,
    AttentionRules,
    AttentionShape,
    LinearParts,
    PackedLinear,
    Parameter,
    Storage,
)
from loraplex.kernels.quantization import GROUP_SIZES, QuantizedWeight
from loraplex.kernels.routing import Routes
from loraplex.kernels.routing_rules import RoutingRules
from loraplex.kernels.row_layout import RowLayout
from loraplex.kernels.sampling import DrawOptions, IntArray, TopLogprobs


class CudaKernels:
    """Implements `Kernels` for tensors of one accelerator."""

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        batch_invariant: bool = False,
        attention_backend: str = "auto",
        channel: DeviceChannel | None = None,
    ) -> None:
        """batch_invariant: a row's result has the same bits alone and in company; slower.

        attention_backend: as in RunnerSettings. channel: to the other ranks; None: there are none.
        """
        device = accelerator.device
        self._sums = None if channel is None else RankSums(channel)
        self.graphs = StepGraphs(accelerator)
        self._linear = LinearKernel(device, batch_invariant=batch_invariant, sums=self._sums)
        self._grouped = GroupedLinear(device, batch_invariant=batch_invariant, sums=self._sums)
        self._attention = AttentionKernel(
            device,
            batch_invariant=batch_invariant,
            backend=attention_backend,
            accelerator=accelerator,
        )
        self._lora = LoraKernel(device, batch_invariant=batch_invariant, sums=self._sums)

    def repeat(
        self,
        key: Hashable,
        parameters: Sequence[Parameter],
        compute: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        inputs = [tensor for parameter in parameters for tensor in self._tensors(parameter)]
        return self.graphs.repeat(key, inputs, compute)

    @property
    def lora_ns(self) -> None:
        return None

    def recording(self) -> contextlib.AbstractContextManager[None]:
        return self.graphs.recording()

    def forget_recorded(self) -> None:
        self.graphs.clear()

    def take_rows(self, table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return elementwise.take_rows(table, indices)

    def pack_linear(
        self,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None,
        precision: WeightPrecision = WeightPrecision.NATIVE,
        num_blocks: int = 0,
    ) -> PackedLinear:
        return self._linear.pack(weight, bias, precision, is_row=num_blocks > 0)

    def takes_quantized(self, weight: QuantizedWeight, num_blocks: int) -> bool:
        """All but fp8: a rank packs its own inputs, so the blocks of ranks do not matter."""
        del num_blocks
        is_narrow = weight.precision in (WeightPrecision.INT8, WeightPrecision.INT4)
        return is_narrow and weight.group_size in GROUP_SIZES

    @property
    def packed_layout(self) -> str:
        return PACKED_LAYOUT

    def linear_parts(self, packed: PackedLinear) -> LinearParts:
        return self._linear.parts(packed)

    def join_linear(self, parts: LinearParts) -> PackedLinear:
        return self._linear.join(parts)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        return self._linear.apply(x, packed)

    def linear_apart(
        self, x: torch.Tensor, packed: PackedLinear, dtype: torch.dtype
    ) -> torch.Tensor:
        # Triton starts kernels on the device of the thread, which compute() chose for the first.
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            return self._linear.apply_apart(x.to(dtype), packed)

    def gather_columns(self, x: torch.Tensor, total: int) -> torch.Tensor:
        return x if self._sums is None else self._sums.columns(x, total)

    def squared_row_norms(self, packed: PackedLinear) -> torch.Tensor:
        return self._linear.squared_row_norms(packed)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return elementwise.rms_norm(x, weight, eps)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        factor: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return elementwise.add_rms_norm(x, residual, weight, eps, factor)

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return elementwise.layer_norm(x, weight, bias, eps)

    def add_layer_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        factor: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return elementwise.add_layer_norm(x, residual, weight, bias, eps, factor)

    def add(self, x: torch.Tensor, residual: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return elementwise.add(x, residual, factor)

    def scale(self, x: torch.Tensor, factor: float, soft_cap: float | None = None) -> None:
        elementwise.scale(x, factor, soft_cap)

    def rotary(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        is_interleaved: bool = False,
    ) -> None:
        elementwise.rotary(query, key, cos, sin, is_interleaved=is_interleaved)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        return elementwise.gate(gate_up, activation)

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return elementwise.activate(x, activation)

    def add_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        batch: LoraBatch,
        layer: int,
        modules: Sequence[str],
        out_offsets: Sequence[int],
        num_blocks: int = 0,
    ) -> None:
        self._lora.add(y, x, batch, layer, modules, out_offsets, is_row=num_blocks > 0)

    def route(
        self,
        logits: torch.Tensor,
        rules: RoutingRules,
        selection_bias: torch.Tensor | None = None,
    ) -> Routes:
        return experts.route(logits, rules, selection_bias)

    def grouped_linear(self, x: torch.Tensor, packed: PackedLinear, routes: Routes) -> torch.Tensor:
        assert isinstance(packed, PackedWeight)
        return self._grouped.apply(x, packed, routes)

    def add_expert_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        batch: LoraBatch,
        routes: Routes,
        layer: int,
        modules: Sequence[str],
        out_offsets: Sequence[int],
        num_blocks: int = 0,
    ) -> None:
        places = (layer, modules, out_offsets)
        add_expert_lora(self._lora, y, x, batch, routes, *places, is_row=num_blocks > 0)

    def combine_experts(
        self,
        y: torch.Tensor,
        routes: Routes,
        shared: torch.Tensor | None = None,
        shared_gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return experts.combine_experts(y, routes, shared, shared_gate)

    def allocate_kv(self, num_blocks: int, shape: AttentionShape, dtype: torch.dtype) -> Storage:
        return self._attention.allocate(num_blocks, shape, dtype)

    def write_kv(
        self, storage: Storage, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        self._attention.write(storage, key, value, slot_mapping)

    def plan_attention(
        self, rows: RowLayout, shape: AttentionShape, rules: AttentionRules
    ) -> AttentionPlan:
        return self._attention.plan(rows, shape, rules)

    def paged_attention(
        self,
        query: torch.Tensor,
        storage: Storage,
        plan: AttentionPlan,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(plan, CudaAttentionPlan)
        return self._attention.attend(query, storage, plan, sink_logits)

    def argmax(self, logits: torch.Tensor, rows: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        return sampling.argmax(logits, rows)

    def draw_tokens(
        self, logits: torch.Tensor, rows: IntArray, options: DrawOptions
    ) -> torch.Tensor:
        return sampling.draw_tokens(logits, rows, options)

    def top_logprobs(
        self, logits: torch.Tensor, rows: IntArray, token_ids: IntArray, num_top: int
    ) -> TopLogprobs:
        return sampling.top_logprobs(logits, rows, token_ids, num_top)

    def apply_bitmask(self, logits: torch.Tensor, rows: IntArray, bitmask: torch.Tensor) -> None:
        sampling.apply_bitmask(logits, rows, bitmask)

    @staticmethod
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
