"""The torch version of every op: correct first, on any device that torch has.

On a CPU it is also batch-invariant: a row's result has the same bits alone and in company. BLAS
picks its way of summing by the number of rows, so rows are padded to a multiple at which all ways
agree (float32), or go in tiles of one number (oneDNN's narrow types). And torch computes the ends
of a chunk of a tensor with other code than its middle, so activations are rounded from float64.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels import routing, sampling
from loraplex.kernels.activations import Activation
from loraplex.kernels.block_rows import BlockRows
from loraplex.kernels.channel import Channel, joined_shares, tree_sum
from loraplex.kernels.delta import DeltaGates, DeltaShape, delta_rule
from loraplex.kernels.host_tensors import fixed_tiles
from loraplex.kernels.latent import add_heads_lora, scale_heads
from loraplex.kernels.lora import LoraBatch, LoraPlace, add_lora
from loraplex.kernels.ops import (
    AttentionPlan,
    AttentionRules,
    AttentionShape,
    LinearParts,
    PackedLinear,
    Parameter,
    RowLayout,
    Storage,
    stored_size,
    to_stored,
)
from loraplex.kernels.quantization import StoredNumbers, quantize
from loraplex.kernels.reference_attention import TilePlan, attend, plan_tiles
from loraplex.kernels.routing import Routes
from loraplex.kernels.ssm import SsmGates, SsmShape, ssd
from loraplex.kernels.states import StatePlan, StoredRows

_HOST_ROWS = 8
"""Row multiple of a float32 product: all multiples are summed alike (measured for MKL)."""


_ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: functools.partial(functional.gelu, approximate="tanh"),
    Activation.RELU: functional.relu,
    Activation.SQUARED_RELU: lambda x: functional.relu(x).square(),
    Activation.SILU: functional.silu,
}


_SWIGLU_LIMIT = 7.0
_SWIGLU_ALPHA = 1.702


class _TorchLinear(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None
    is_row: bool = False
    """Whether ranks have a part of the inputs each."""


class ReferenceKernels:
    """Implements `Kernels`. A row layer's inputs are one block for each rank.

    Other backends bind the ops that they compute by other functions, and list nothing else.
    """

    packed_layout = "torch"
    add_heads_lora = staticmethod(add_heads_lora)
    scale_heads = staticmethod(scale_heads)
    route = staticmethod(routing.route)
    combine_experts = staticmethod(routing.combine_experts)
    argmax = staticmethod(sampling.argmax)
    draw_tokens = staticmethod(sampling.draw_tokens)
    top_logprobs = staticmethod(sampling.top_logprobs)
    apply_bitmask = staticmethod(sampling.apply_bitmask)

    def __init__(self, device: torch.device, channel: Channel | None = None) -> None:
        """channel: to the other ranks; None: there are none."""
        self._device = device
        self._channel = channel
        self._is_host = device.type == "cpu"

    def repeat(
        self,
        key: Hashable,  # noqa: ARG002
        parameters: Sequence[Parameter],  # noqa: ARG002
        compute: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        return compute()

    def size_of(self, op: str, arguments: Sequence[Any]) -> str | None:  # noqa: ARG002
        return None

    @property
    def lora_ns(self) -> int | None:
        return None

    def recording(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def forget_recorded(self) -> None:
        pass

    def take_rows(self, table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return table[indices]

    def pack_linear(
        self,
        weight: torch.Tensor | StoredNumbers,
        bias: torch.Tensor | None,
        precision: WeightPrecision = WeightPrecision.NATIVE,
        num_blocks: int = 0,
    ) -> PackedLinear:
        """Quantised weights are multiplied in their own type again: rounded, but no smaller."""
        assert isinstance(weight, torch.Tensor)
        if precision is not WeightPrecision.NATIVE:
            rows = quantize(weight.flatten(0, -2), precision).dequantized()
            weight = rows.to(weight.dtype).view(weight.shape)
        return _TorchLinear(weight, bias, num_blocks > 0)

    def takes_quantized(self, weight: StoredNumbers, num_blocks: int) -> bool:
        del weight, num_blocks
        return False

    def pack_blocks(
        self, weight: BlockRows, bias: torch.Tensor | None, num_blocks: int
    ) -> PackedLinear | None:
        del weight, bias, num_blocks
        return None

    def weight_rows(
        self, packed: PackedLinear, indices: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        assert isinstance(packed, _TorchLinear)
        return packed.weight[indices].to(dtype)

    def linear_parts(self, packed: PackedLinear) -> LinearParts:
        assert isinstance(packed, _TorchLinear)
        return LinearParts((int(packed.is_row),), (packed.weight, packed.bias))

    def join_linear(self, parts: LinearParts) -> PackedLinear:
        weight, bias = parts.tensors
        assert weight is not None
        return _TorchLinear(weight, bias, bool(parts.numbers[0]))

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        assert isinstance(packed, _TorchLinear)
        if packed.is_row and self._channel is not None:
            total = self._over_ranks(
                self._product(x.float(), _TorchLinear(packed.weight.float(), None))
            )
            return (total if packed.bias is None else total + packed.bias.float()).to(x.dtype)
        return self._product(x, packed)

    def _product(self, x: torch.Tensor, packed: _TorchLinear) -> torch.Tensor:
        if self._is_host and x.dtype == torch.float32:
            padded = functional.pad(x, (0, 0, 0, -len(x) % _HOST_ROWS))
            return functional.linear(padded, packed.weight, packed.bias)[: len(x)]
        tiles = [functional.linear(tile, packed.weight, packed.bias) for tile in fixed_tiles(x)]
        return torch.cat(tiles)[: len(x)]

    def linear_apart(
        self, x: torch.Tensor, packed: PackedLinear, dtype: torch.dtype
    ) -> torch.Tensor:
        assert isinstance(packed, _TorchLinear)
        return self._product(x.to(dtype), packed._replace(bias=None))

    def _over_ranks(self, share: torch.Tensor) -> torch.Tensor:
        """Add what the ranks computed of their inputs."""
        return (
            share if self._channel is None else tree_sum(self._channel.gather(share.contiguous()))
        )

    def gather_columns(self, x: torch.Tensor, total: int) -> torch.Tensor:
        if self._channel is None:
            return x
        return joined_shares(self._channel, x.t(), total).t().contiguous()

    def squared_row_norms(self, packed: PackedLinear) -> torch.Tensor:
        assert isinstance(packed, _TorchLinear)
        wide = packed.weight.double()
        return (wide * wide).sum(1)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight * wide.to(weight.dtype)).to(x.dtype)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        factor: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.add(x, residual, factor)
        return self.rms_norm(total, weight, eps), total

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> torch.Tensor:
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * weight.float() + bias.float()).to(x.dtype)

    def add_layer_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        factor: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.add(x, residual, factor)
        return self.layer_norm(total, weight, bias, eps), total

    def add(self, x: torch.Tensor, residual: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return (residual.float() + x.float() * factor).to(x.dtype)

    def multiply(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return x * factor

    def scale(self, x: torch.Tensor, factor: float, soft_cap: float | None = None) -> None:
        # float64 on a host, as for activations: a tanh's bits differ with its place in a chunk.
        wide = (x.double() if self._is_host else x.float()) * factor
        if soft_cap is not None:
            wide = soft_cap * torch.tanh(wide / soft_cap)
        x.copy_(wide)

    def rotary(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        is_interleaved: bool = False,
    ) -> None:
        for heads in (query, key):
            _rotate(heads, cos.unsqueeze(1), sin.unsqueeze(1), is_interleaved=is_interleaved)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        wide = gate.double() if self._is_host else gate
        if activation is Activation.CLAMPED_SWIGLU:
            wide = wide.double().clamp(max=_SWIGLU_LIMIT)
            factor = up.double().clamp(-_SWIGLU_LIMIT, _SWIGLU_LIMIT) + 1
            return (wide * torch.sigmoid(_SWIGLU_ALPHA * wide) * factor).to(gate.dtype)
        return _ACTIVATIONS[activation](wide).to(gate.dtype) * up

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return self._activated(x, activation, x.dtype)

    def xielu(self, x: torch.Tensor, positive: float, negative: float) -> torch.Tensor:
        wide = x.double() if self._is_host else x.float()
        above, below = wide.clamp(min=0), wide.clamp(max=0)
        curves = positive * above.square() + negative * (torch.expm1(below) - below)
        return (curves + wide / 2).to(x.dtype)

    def _activated(
        self, x: torch.Tensor, activation: Activation, dtype: torch.dtype
    ) -> torch.Tensor:
        wide = x.double() if self._is_host else x.float()
        return _ACTIVATIONS[activation](wide).to(dtype)

    def add_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        batch: LoraBatch,
        place: LoraPlace,
    ) -> None:
        reduce = self._over_ranks if place.num_blocks else None
        add_lora(y, x, batch, place, reduce)

    def grouped_linear(self, x: torch.Tensor, packed: PackedLinear, routes: Routes) -> torch.Tensor:
        assert isinstance(packed, _TorchLinear)
        num_pairs, num_outputs = len(routes.pairs), packed.weight.shape[1]
        y = torch.empty(num_pairs, num_outputs, dtype=x.dtype, device=x.device)
        starts = routes.starts.tolist()
        for expert, (first, end) in enumerate(itertools.pairwise(starts)):
            if first < end:
                pairs = routes.pairs[first:end].long()
                bias = None if packed.bias is None else packed.bias[expert]
                inputs = x[pairs * len(x) // num_pairs]
                y[pairs] = self.linear(
                    inputs, packed._replace(weight=packed.weight[expert], bias=bias)
                )
        return y

    def add_expert_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        batch: LoraBatch,
        routes: Routes,
        place: LoraPlace,
    ) -> None:
        reduce = self._over_ranks if place.num_blocks else None
        routing.add_expert_lora(y, x, batch, routes, place, reduce)

    def allocate_kv(self, num_blocks: int, shape: AttentionShape, dtype: torch.dtype) -> Storage:
        """Layout [num_blocks, K, block_size, stored_size] (kernels.ops)."""
        vector_size = stored_size(shape.head_dim, dtype)
        sizes = (num_blocks, shape.num_kv_heads, shape.block_size, vector_size)
        key, value = (torch.zeros(sizes, dtype=dtype, device=self._device) for _ in range(2))
        return Storage((key, value))

    def write_kv(
        self, storage: Storage, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        keys, values = storage.tensors
        block_size = keys.shape[2]
        blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
        offsets = slot_mapping % block_size
        keys[blocks, :, offsets] = to_stored(key, keys.dtype)
        values[blocks, :, offsets] = to_stored(value, values.dtype)

    def plan_attention(
        self, rows: RowLayout, shape: AttentionShape, rules: AttentionRules
    ) -> AttentionPlan:
        heads_per_kv = shape.num_heads // shape.num_kv_heads
        multiple = _HOST_ROWS if self._is_host else 1
        query_multiple = multiple // math.gcd(multiple, heads_per_kv)
        return plan_tiles(rows, shape.block_size, rules, query_multiple)

    def paged_attention(
        self,
        query: torch.Tensor,
        storage: Storage,
        plan: AttentionPlan,
        sink_logits: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(plan, TilePlan)
        return attend(query, storage, plan, sink_logits, position_bias)

    def write_latent(
        self,
        storage: Storage,
        latent: torch.Tensor,
        key: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        (stored,) = storage.tensors
        vectors = torch.cat((latent, key), dim=1)
        stored.view(-1, vectors.shape[1])[slot_mapping] = vectors.to(stored.dtype)

    def plan_latent_attention(
        self, rows: RowLayout, shape: AttentionShape, rules: AttentionRules
    ) -> AttentionPlan:
        return ReferenceKernels.plan_attention(self, rows, shape, rules)

    def latent_attention(
        self,
        query: torch.Tensor,
        query_key: torch.Tensor,
        storage: Storage,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        assert isinstance(plan, TilePlan)
        (stored,) = storage.tensors
        size = query.shape[2]
        # A view: the values are the first part of the keys.
        shared = Storage((stored, stored[..., :size]))
        return attend(torch.cat((query, query_key), dim=2), shared, plan, None)

    def causal_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation | None,
        rows: StoredRows,
        storage: Storage,
        tensor: int = 0,
    ) -> torch.Tensor:
        inputs, stored = x.float(), storage.tensors[tensor]
        is_stored = rows.places >= 0
        stored.view(-1, x.shape[1])[rows.places[is_stored]] = inputs[is_stored]
        num_taps = weight.shape[1]
        total = torch.zeros_like(inputs)
        for tap in range(num_taps):
            total = total + weight[:, tap] * _inputs_before(
                inputs, rows, stored, num_taps - 1 - tap
            )
        if bias is not None:
            total = total + bias
        return (
            total.to(x.dtype) if activation is None else self._activated(total, activation, x.dtype)
        )

    def delta_rule(
        self,
        qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        gates: DeltaGates,
        shape: DeltaShape,
        plan: StatePlan,
        chunk: Storage,
        states: Storage,
    ) -> torch.Tensor:
        return delta_rule(qkv, b, a, gates, shape, plan, chunk.tensors, states.tensors[0])

    def ssd(
        self,
        xbc: torch.Tensor,
        dt: torch.Tensor,
        gates: SsmGates,
        shape: SsmShape,
        plan: StatePlan,
        chunk: Storage,
        states: Storage,
    ) -> torch.Tensor:
        return ssd(xbc, dt, gates, shape, plan, chunk.tensors, states.tensors[0])

    def gated_rms_norm(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        is_gated_first: bool,
    ) -> torch.Tensor:
        factor = functional.silu(gate.double())
        if is_gated_first:
            return (weight * _unit_rms(x.double() * factor, eps).to(x.dtype)).to(x.dtype)
        normed = weight * _unit_rms(x.double(), eps).to(x.dtype)
        return (normed.double() * factor).to(x.dtype)

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(gate.double()).to(x.dtype)


def _unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _rotate(
    heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_interleaved: bool
) -> None:
    half = cos.shape[-1]
    if is_interleaved:
        first, second = heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
    else:
        first, second = heads[..., :half], heads[..., half : 2 * half]
    x, y = first.float(), second.float()
    rotated = x * cos - y * sin, y * cos + x * sin
    first.copy_(rotated[0])
    second.copy_(rotated[1])


def _inputs_before(
    inputs: torch.Tensor, rows: StoredRows, stored: torch.Tensor, distance: int
) -> torch.Tensor:
    """Return the inputs [T, C] so many positions before each token; zero before position 0.

    inputs [T, C]: of the step. stored [blocks, block_size, C]: of all positions.
    """
    if not len(inputs):
        return inputs
    tokens = torch.arange(len(inputs), device=inputs.device)
    row = torch.searchsorted(rows.query_start_loc, tokens, right=True) - 1
    row = row.clamp(max=len(rows.table_starts) - 1)
    first_token = rows.query_start_loc[row]
    position = rows.positions - distance
    is_of_step = tokens - distance >= first_token
    block_size = stored.shape[1]
    known = position.clamp(min=0)
    entry = rows.table_starts[row] + known // block_size
    is_before = ~is_of_step & (position >= 0)
    # Entries that are not read may be outside of the tables, and name any block.
    block = rows.tables[torch.where(is_before, entry, 0)]
    earlier = stored[torch.where(is_before, block, 0), known % block_size]
    here = inputs[(tokens - distance).clamp(min=0)]
    found = torch.where(is_of_step.unsqueeze(1), here, earlier)
    return torch.where((position < 0).unsqueeze(1), 0.0, found)
