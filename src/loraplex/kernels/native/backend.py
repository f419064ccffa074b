"""The backend of a CPU: every op natively."""

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Sequence

import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.activations import Activation
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.native.attention import AttentionKernel, NativeAttentionPlan
from loraplex.kernels.native.channel import SharedMemoryChannel
from loraplex.kernels.native.elementwise import ElementwiseKernel
from loraplex.kernels.native.experts import ExpertKernel
from loraplex.kernels.native.library import NativeLibrary, ThreadPool
from loraplex.kernels.native.linear import PACKED_LAYOUT, LinearKernel, PackedWeight, WeightKind
from loraplex.kernels.native.lora import LoraKernel
from loraplex.kernels.native.program import Program, Recorder
from loraplex.kernels.native.row_norms import squared_row_norms
from loraplex.kernels.native.sampling import SamplingKernel
from loraplex.kernels.ops import (
    AttentionPlan,
    AttentionRules,
    AttentionShape,
    LinearParts,
    PackedLinear,
    Parameter,
    Storage,
)
from loraplex.kernels.quantization import QuantizedWeight
from loraplex.kernels.routing import Routes
from loraplex.kernels.routing_rules import RoutingRules
from loraplex.kernels.row_layout import RowLayout
from loraplex.kernels.sampling import DrawOptions, IntArray, TopLogprobs


class NativeKernels:
    """Implements `Kernels` for tensors on the host.

    A row's result has the same bits alone and in company, on any number of threads.
    """

    def __init__(
        self, library: NativeLibrary, num_threads: int, channel: SharedMemoryChannel | None = None
    ) -> None:
        """num_threads: counting the one that calls. channel: to other ranks; None: none."""
        address = None if channel is None else channel.address
        self._channel = channel  # kept open
        self._pool = ThreadPool(library, num_threads)
        self._sampling = SamplingKernel(library, self._pool)
        # A thread and a pool of its own, out of the recorder's sight.
        self._linear_apart = LinearKernel(library, ThreadPool(library, 1))
        self._recorder = Recorder(library)
        self._programs: dict[Hashable, Program | None] = {}
        library = library.watched(self._recorder.watch)
        self._linear = LinearKernel(library, self._pool, address)
        self._attention = AttentionKernel(library, self._pool)
        self._lora = LoraKernel(library, self._pool, address)
        self._elementwise = ElementwiseKernel(library, self._pool)
        self._experts = ExpertKernel(library, self._pool)

    def repeat(
        self,
        key: Hashable,
        parameters: Sequence[Parameter],
        compute: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        addresses = [address for parameter in parameters for address in self._addresses(parameter)]
        if key not in self._programs:
            result, self._programs[key] = self._recorder.record(addresses, compute)
            return result
        program = self._programs[key]
        return compute() if program is None else program.run(addresses)

    @property
    def lora_ns(self) -> int:
        return self._pool.lora_ns

    def recording(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def forget_recorded(self) -> None:
        self._programs.clear()

    def take_rows(self, table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return self._output(self._elementwise.take_rows(table, indices))

    def pack_linear(
        self,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None,
        precision: WeightPrecision = WeightPrecision.NATIVE,
        num_blocks: int = 0,
    ) -> PackedLinear:
        return self._linear.pack(weight, bias, precision, num_blocks)

    def takes_quantized(self, weight: QuantizedWeight, num_blocks: int) -> bool:
        return self._linear.takes(weight, num_blocks)

    @property
    def packed_layout(self) -> str:
        return PACKED_LAYOUT

    def linear_parts(self, packed: PackedLinear) -> LinearParts:
        assert isinstance(packed, PackedWeight)
        sizes = (packed.group_size, packed.num_blocks, packed.out_features, packed.in_features)
        return LinearParts((int(packed.kind), *sizes), (packed.panels, packed.bias))

    def join_linear(self, parts: LinearParts) -> PackedLinear:
        kind, group_size, num_blocks, out_features, in_features = parts.numbers
        panels, bias = parts.tensors
        assert panels is not None
        sizes = (group_size, num_blocks, out_features, in_features)
        return PackedWeight(WeightKind(kind), *sizes, panels, bias)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        assert isinstance(packed, PackedWeight)
        return self._output(self._linear.apply(x, packed))

    def linear_apart(
        self,
        x: torch.Tensor,
        packed: PackedLinear,
        dtype: torch.dtype,  # noqa: ARG002 - panels take float32 whatever they hold
    ) -> torch.Tensor:
        assert isinstance(packed, PackedWeight)
        return self._linear_apart.apply(x, dataclasses.replace(packed, bias=None))

    def gather_columns(self, x: torch.Tensor, total: int) -> torch.Tensor:
        if self._channel is None:
            return x
        return self._output(self._linear.gather_columns(x, total))

    def squared_row_norms(self, packed: PackedLinear) -> torch.Tensor:
        assert isinstance(packed, PackedWeight)
        return squared_row_norms(packed)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._output(self._elementwise.rms_norm(x, weight, eps))

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        factor: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = self._elementwise.add_rms_norm(x, residual, weight, eps, factor)
        return self._output(normed), self._output(total)

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return self._output(self._elementwise.layer_norm(x, weight, bias, eps))

    def add_layer_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        factor: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = self._elementwise.add_layer_norm(x, residual, weight, bias, eps, factor)
        return self._output(normed), self._output(total)

    def add(self, x: torch.Tensor, residual: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return self._output(self._elementwise.add(x, residual, factor))

    def scale(self, x: torch.Tensor, factor: float, soft_cap: float | None = None) -> None:
        self._elementwise.scale(x, factor, soft_cap)

    def rotary(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        is_interleaved: bool = False,
    ) -> None:
        self._elementwise.rotary(query, key, cos, sin, is_interleaved=is_interleaved)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        return self._output(self._elementwise.gate(gate_up, activation))

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return self._output(self._elementwise.activate(x, activation))

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
        self._lora.add(y, x, batch, layer, modules, out_offsets, num_blocks)

    def route(
        self,
        logits: torch.Tensor,
        rules: RoutingRules,
        selection_bias: torch.Tensor | None = None,
    ) -> Routes:
        routes = self._experts.route(logits, rules, selection_bias)
        for tensor in (routes.experts, routes.weights, routes.pairs, routes.starts):
            self._output(tensor)
        return routes

    def grouped_linear(self, x: torch.Tensor, packed: PackedLinear, routes: Routes) -> torch.Tensor:
        assert isinstance(packed, PackedWeight)
        return self._output(self._linear.apply_grouped(x, packed, routes))

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
        self._lora.add_experts(y, x, batch, routes, layer, modules, out_offsets, num_blocks)

    def combine_experts(
        self,
        y: torch.Tensor,
        routes: Routes,
        shared: torch.Tensor | None = None,
        shared_gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._output(self._experts.combine(y, routes, shared, shared_gate))

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
        assert isinstance(plan, NativeAttentionPlan)
        return self._output(self._attention.attend(query, storage, plan, sink_logits))

    def argmax(self, logits: torch.Tensor, rows: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        return self._sampling.argmax(logits, rows)

    def draw_tokens(
        self, logits: torch.Tensor, rows: IntArray, options: DrawOptions
    ) -> torch.Tensor:
        return self._sampling.draw_tokens(logits, rows, options)

    def top_logprobs(
        self, logits: torch.Tensor, rows: IntArray, token_ids: IntArray, num_top: int
    ) -> TopLogprobs:
        return self._sampling.top_logprobs(logits, rows, token_ids, num_top)

    def apply_bitmask(self, logits: torch.Tensor, rows: IntArray, bitmask: torch.Tensor) -> None:
        self._sampling.apply_bitmask(logits, rows, bitmask)

    def _output(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._recorder.output(tensor)

    def _addresses(self, parameter: Parameter) -> tuple[int, ...]:
        match parameter:
            case torch.Tensor():
                return (parameter.data_ptr(),)
            case NativeAttentionPlan():
                return (parameter.address,)
            case LoraBatch():
                return (self._lora.step_address(parameter),)
            case tuple():
                return tuple(tensor.data_ptr() for tensor in parameter)
        assert parameter is None, f"no kernel reads a {type(parameter).__name__}"
        return (0,)
