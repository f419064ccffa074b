"""The operations that a decoder is made of, with their shapes. Backends implement `Kernels`.

T tokens of a step lie row after row; R is the number of rows (sequences).
H query heads share K key and value heads; D is the head size."""

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.activations import Activation
from loraplex.kernels.block_rows import BlockRows
from loraplex.kernels.delta import DeltaGates, DeltaShape
from loraplex.kernels.latent import HeadsPlace
from loraplex.kernels.lora import LoraBatch, LoraPlace
from loraplex.kernels.quantization import StoredNumbers
from loraplex.kernels.routing import Routes
from loraplex.kernels.routing_rules import RoutingRules
from loraplex.kernels.sampling import DrawOptions, IntArray, TopLogprobs
from loraplex.kernels.ssm import SsmGates, SsmShape
from loraplex.kernels.states import StatePlan, StoredRows

SCALE_BYTES = 4
_LARGEST_NUMBER = 127.0


def stored_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a stored vector."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def to_stored(vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., D] -> [..., stored_size] of the dtype."""
    if dtype != torch.int8:
        return vectors.to(dtype)
    wide = vectors.float()
    scales = wide.abs().amax(-1, keepdim=True) / _LARGEST_NUMBER
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)
    scales = torch.where(torch.isfinite(scales), scales, torch.nan)
    numbers = torch.where(scales > 0, torch.round(wide / scales), 0.0).to(torch.int8)
    return torch.cat((numbers, scales.view(torch.int8)), dim=-1)


def from_stored(stored: torch.Tensor) -> torch.Tensor:
    """[..., stored_size] -> [..., D] float32."""
    if stored.dtype != torch.int8:
        return stored.float()
    scales = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return stored[..., :-SCALE_BYTES].float() * scales


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceRows:
    """A RowLayout as an accelerator reads it, at addresses that stay.

    There may be more rows than those of the layout, up to the number of a recorded step: they have
    no tokens, and seq_lens 0.
    """

    query_start_loc: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32
    table_rows: torch.Tensor  # [R] int32: the row's table is block_tables[table_rows[r]]
    block_tables: torch.Tensor  # [any, max blocks] int32


@dataclasses.dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the rows' queries and keys are.

    Row r computes the tokens query_start_loc[r] .. query_start_loc[r + 1] - 1, which are the last
    of its seq_lens[r] positions. Position p lies in block block_tables[r, p // block_size].
    """

    query_start_loc: Sequence[int]  # R + 1, on the host
    seq_lens: Sequence[int]  # R, on the host
    block_tables: torch.Tensor  # [R, max blocks] int64, on the device; unseen entries are any block
    on_device: DeviceRows | None = None
    """The rows for a backend that reads them there; then `block_tables` may be empty."""

    @property
    def num_device_rows(self) -> int | None:
        """Number of rows, with those that have no tokens; None if they are not on the device."""
        return None if self.on_device is None else self.on_device.seq_lens.shape[0]


PackedLinear = object
"""Linear layer in the form of one backend. Opaque: only that backend can use it."""

AttentionPlan = object
"""Backend's preparation of a step's attention before its layers run. Opaque, like PackedLinear."""


@dataclasses.dataclass(frozen=True, slots=True)
class LinearParts:
    """A PackedLinear taken apart, so that it can be kept in a file."""

    numbers: tuple[int, ...]
    tensors: tuple[torch.Tensor | None, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)


Parameter = torch.Tensor | tuple[torch.Tensor, ...] | LoraBatch | AttentionPlan | None
"""Input that differs between two computations of one shape. A tuple is as its tensors are."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """Tensors of what one layer keeps, such as keys and values. The first axis is the block.

    It is equal to itself only, so a record's key may contain it.
    """

    tensors: tuple[torch.Tensor, ...]  # [num_blocks, ...] each

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shape of one attention layer and its KV storage."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one block of keys and values of this dtype; for int8 with scales."""
        vectors = 2 * self.block_size * self.num_kv_heads
        return vectors * stored_size(self.head_dim, dtype) * dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRules:
    """Which keys a query sees, and how a score is computed from their product q.k.

    score = scale * q.k, then soft_cap * tanh(score / soft_cap), then + slope * (key position -
    query position), then + position_bias of paged_attention.
    """

    scale: float
    window: int | None = None
    """Number of positions, its own included, that a token sees; None: all before it.

    It sees as many after its own, too, if attention is not causal.
    """
    num_sink_tokens: int = 0
    """First positions that stay visible in addition to a window."""
    soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] = ()
    """One for each query head (arXiv:2108.12409); empty: none."""
    is_causal: bool = True
    """Whether a token sees no later position. Else it sees all of its row, which may have fewer
    keys than queries: then queries have no positions, and there is neither window nor slope."""


class Kernels(Protocol):
    """One backend. Its methods are pure but for the arguments that they are said to change."""

    def repeat(
        self,
        key: Hashable,
        parameters: Sequence[Parameter],
        compute: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """compute(); or the same ops with these parameters, without calling it.

        compute may call ops of this backend and take views of their results, nothing else. Under
        one key its calls differ in the parameters alone: in contiguous tensors of one shape and
        dtype, and in plans and batches of one size. The result, new from an op, lasts to the next.
        A record holds addresses of all that the calls read besides the parameters: the key must
        contain what owns it, such as a decoder and its KV storages.
        """
        ...

    @property
    def lora_ns(self) -> int | None:
        """Return the time that ops of LoRA have taken so far; None: it is not measured."""
        ...

    def size_of(self, op: str, arguments: Sequence[Any]) -> str | None:
        """Return which of kernels.sizes decides a call of an op; None: none does."""
        ...

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which `repeat` records each new key; a quick backend does anywhere."""
        ...

    def forget_recorded(self) -> None:
        """Free the records of `repeat`."""
        ...

    def take_rows(self, table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """table [..., N], indices [T] int64 -> [T, N]."""
        ...

    def pack_linear(
        self,
        weight: torch.Tensor | StoredNumbers,
        bias: torch.Tensor | None,
        precision: WeightPrecision = WeightPrecision.NATIVE,
        num_blocks: int = 0,
    ) -> PackedLinear:
        """weight [out, in], bias [out] or None; of experts: [E, out, in], [E, out]. Done at load.

        A weight that is quantised already must be one that `takes_quantized`, and stays as it is;
        precision: NATIVE.

        num_blocks of 1 or more: a row layer, whose inputs are cut into so many equal blocks, which
        must divide in. Each block is quantised by itself, and has a sum of its own; neighbouring
        sums are added until one is left: (b0 + b1) + (b2 + b3). With a channel this rank has some
        of the inputs, and the ranks' sums are added alike. Then the bias is added, once.

        Raises ConfigError if the weight cannot be quantised to the precision (quantization.py).
        """
        ...

    def takes_quantized(self, weight: StoredNumbers, num_blocks: int) -> bool:
        """Whether `linear` multiplies a weight of this form without decoding it before."""
        ...

    def pack_blocks(
        self, weight: BlockRows, bias: torch.Tensor | None, num_blocks: int
    ) -> PackedLinear | None:
        """Do the same as pack_linear with blocks of a file that `linear` multiplies as they are.

        None: they have to be decoded before. Raises ConfigError if a scale is not finite.
        """
        ...

    def weight_rows(
        self, packed: PackedLinear, indices: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return rows of a layer without experts: indices [T] int64 -> [T, in]."""
        ...

    @property
    def packed_layout(self) -> str:
        """Names the form of packed layers: parts may be joined where it is the same."""
        ...

    def linear_parts(self, packed: PackedLinear) -> LinearParts:
        """The very tensors of a packed layer, no copies."""
        ...

    def join_linear(self, parts: LinearParts) -> PackedLinear:
        """The layer that `linear_parts` took apart. It keeps the tensors, and only reads them."""
        ...

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """x [T, in] -> [T, out], x weight^T + bias."""
        ...

    def gather_columns(self, x: torch.Tensor, total: int) -> torch.Tensor:
        """x [T, n] of each rank -> [T, total], on all of them.

        Rank r of n ranks has the columns total * r // n .. total * (r + 1) // n - 1.
        """
        ...

    def linear_apart(
        self, x: torch.Tensor, packed: PackedLinear, dtype: torch.dtype
    ) -> torch.Tensor:
        """Compute `linear` without its bias, in another thread than the other ops; slower.

        Of a row layer only what this rank's inputs give. x [T, in] float32 is rounded to dtype, the
        model's, if the backend needs it; the result has the type that was computed in.
        """
        ...

    def squared_row_norms(self, packed: PackedLinear) -> torch.Tensor:
        """[out] float64: of each row of what the weight stands for; from any thread."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., N], weight [N]: x / sqrt(mean(x^2) + eps) in float32, then times the weight.

        A weight of x's dtype multiplies what was rounded to it, as in Llama; a float32 weight
        multiplies before the one rounding, as in Gemma.
        """
        ...

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        factor: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(sum), sum), each [T, N], where sum is factor * x + residual."""
        ...

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """x [T, N] or [T, H, N]: (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias.

        weight, bias [N], or [H, N] for heads, of x's dtype or float32. In float32, rounded once.
        """
        ...

    def add_layer_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        factor: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(layer_norm(sum), sum), each [T, N], where sum is factor * x + residual."""
        ...

    def add(self, x: torch.Tensor, residual: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """factor * x + residual [T, N], in float32, rounded once."""
        ...

    def multiply(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """x * factor [T, N], element by element, in float32, rounded once.

        Both may be views with a longer row stride.
        """
        ...

    def scale(self, x: torch.Tensor, factor: float, soft_cap: float | None = None) -> None:
        """Multiply x [T, N] by the factor, then replace it by soft_cap * tanh(x / soft_cap).

        In place; in float32, rounded once.
        """
        ...

    def rotary(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        is_interleaved: bool = False,
    ) -> None:
        """Rotate, in place, the first R elements of each head of query [T, H, D], key [T, K, D].

        cos, sin [T, R / 2] float32. The pairs are (i, i + R / 2), or (2 i, 2 i + 1) if they are
        interleaved. Query and key may be views with a longer row stride, and have no heads. Heads
        of the query may have a longer stride where there is one key head.
        """
        ...

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """[T, 2 N] -> [T, N]: activation(first half) * second half; or CLAMPED_SWIGLU."""
        ...

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """[T, N] -> [T, N]: the activation of each element."""
        ...

    def xielu(self, x: torch.Tensor, positive: float, negative: float) -> torch.Tensor:
        """[T, N] -> [T, N]: the activation xIELU (arXiv:2411.13010) of each element.

        positive * x^2 + x / 2 above zero, and negative * (e^x - 1 - x) + x / 2 below.
        """
        ...

    def add_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        batch: LoraBatch,
        place: LoraPlace,
    ) -> None:
        """y [T, out] += the adapters' share for x [T, in], in place; see kernels.lora.add_lora."""
        ...

    def route(
        self,
        logits: torch.Tensor,
        rules: RoutingRules,
        selection_bias: torch.Tensor | None = None,
        expert_factors: torch.Tensor | None = None,
    ) -> Routes:
        """Choose experts by logits [T, E], in float32; see kernels.routing.

        selection_bias, expert_factors [E] float32. A token with a NaN has any experts, and weights
        that are NaN.
        """
        ...

    def grouped_linear(self, x: torch.Tensor, packed: PackedLinear, routes: Routes) -> torch.Tensor:
        """[T * k, out]: row p is x weight[e]^T + bias[e] of the expert e of pair p.

        x is [T, in], then pair p reads the row of its token, or [T * k, in].
        """
        ...

    def add_expert_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        batch: LoraBatch,
        routes: Routes,
        place: LoraPlace,
    ) -> None:
        """y [T * k, out] += the adapters' share, of each pair's expert, in place.

        x as in `grouped_linear`. A pair has the adapters of its token.
        """
        ...

    def combine_experts(
        self,
        y: torch.Tensor,
        routes: Routes,
        shared: torch.Tensor | None = None,
        shared_gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [T, N]: the sum over j of weights[t, j] * y[t * k + j], for y [T * k, N].

        Then + shared [T, N], times sigmoid(shared_gate [T, 1]) if there is one. In float32, in
        this order, rounded once.
        """
        ...

    def allocate_kv(self, num_blocks: int, shape: AttentionShape, dtype: torch.dtype) -> Storage:
        """Keys and values of one layer, zero: num_blocks * shape.block_bytes(dtype) bytes.

        The axes after the first are the backend's.

        dtype: any of a model's, or int8, with a float32 scale per token, head, and key or value.
        """
        ...

    def write_kv(
        self, storage: Storage, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store key, value [T, K, D]; slot_mapping [T] int64: block * block_size + offset.

        They are rounded to the storage's dtype. As int8: scale = largest magnitude / 127, number =
        element / scale to the nearest, ties to even; a vector that is not finite has scale NaN.
        """
        ...

    def plan_attention(
        self, rows: RowLayout, shape: AttentionShape, rules: AttentionRules
    ) -> AttentionPlan:
        """Once per step and kind of layer."""
        ...

    def paged_attention(
        self,
        query: torch.Tensor,
        storage: Storage,
        plan: AttentionPlan,
        sink_logits: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention [T, H, D] of query [T, H, D] over each row's own stored keys.

        With a window of W and S sink tokens, a token at position p sees p - W + 1 .. p and, of
        what is before it, 0 .. S - 1. sink_logits [H] float32: one more score for each head's
        softmax, of a key without a value. position_bias [H, 2 C + 1] float32, contiguous: entry
        C + min(max(key position - query position, -C), C) is added to a score. The step's own keys
        must have been written before.
        """
        ...

    def write_latent(
        self,
        storage: Storage,
        latent: torch.Tensor,
        key: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store latent [T, L] and key [T, R] side by side, rounded to the storage's dtype.

        storage.tensors[0] [num_blocks, 1, block_size, L + R]; slot_mapping as in `write_kv`. Rows
        may be apart.
        """
        ...

    def plan_latent_attention(
        self, rows: RowLayout, shape: AttentionShape, rules: AttentionRules
    ) -> AttentionPlan:
        """Once per step; shape: one KV head of size L + R. rules: a scale alone."""
        ...

    def latent_attention(
        self,
        query: torch.Tensor,
        query_key: torch.Tensor,
        storage: Storage,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """Causal attention [T, H, L] over each row's own stored vectors, which all heads share.

        A score is scale * (query . latent + query_key . key), for query [T, H, L], contiguous, and
        query_key [T, H, R], of any strides; the values are the latent vectors. The step's own must
        have been written before.
        """
        ...

    def add_heads_lora(
        self, y: torch.Tensor, x: torch.Tensor, batch: LoraBatch, place: HeadsPlace
    ) -> None:
        """y [T, H, out] += the adapters' share for x [T, H, in], in place; see kernels.latent.

        Of keys: in is their size in a head, out that of the latent vector; of values they are
        reversed. Heads of x may have a longer stride; y is contiguous.
        """
        ...

    def scale_heads(self, x: torch.Tensor, batch: LoraBatch, place: HeadsPlace) -> torch.Tensor:
        """Return x [T, H, size], contiguous, with what output vectors (DoRA, biases) give for it.

        Of keys x is the queries, which the factors of the keys multiply as well; of values it is
        what the base's values gave, and the share of each adapter is of that.
        """
        ...

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
        """[T, C]: each channel of x [T, C] convolved with its own weights, over a row's positions.

        weight [C, K], bias [C], both float32. The result at position p is activation(bias + the sum
        over j of weight[:, j] * the input at p - (K - 1 - j)), where inputs before position 0 are
        zero: in float32, j in its order and the bias last, rounded once to x's dtype.

        The inputs are stored in storage.tensors[tensor] [blocks, block_size, C] float32, those of
        all rows before any is read; earlier positions of a row are read there. x may be a view with
        a longer row stride. Padding gives any finite numbers.
        """
        ...

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
        """Gated delta rule [T, Hv * dv] of qkv [T, Hk * dk + Hk * dk + Hv * dv]; a, b [T, Hv].

        q and k of each head are divided by their lengths, and q by the root of dk. The recurrence
        (kernels.recurrence) has strength sigmoid(b), rounded to the dtype of qkv, and decay
        -exp(a_log) * softplus(a + dt_bias). All else is float32, and rounded once.

        chunk.tensors[1:] store keys, written values and sums of decays of the positions since the
        last border; states.tensors[0] [blocks, Hv, dk, dv] the states. qkv, a and b may be views
        with a longer row stride. Padding gives any finite numbers.
        """
        ...

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
        """State space of Mamba2 [T, H * P] of xbc [T, H * P + G * S + G * S] and dt [T, H].

        With step = softplus(dt + dt_bias) within its limits, the recurrence (kernels.recurrence)
        has the queries C, the keys B, the values step * x, and the decay rate * step. skip * x is
        added to what it gives. All is float32, and rounded once.

        chunk.tensors[1:] store keys, values and sums of decays of the positions since the last
        border; states.tensors[0] [blocks, H, S, P] the states. xbc and dt may be views with a
        longer row stride. Padding gives any finite numbers.
        """
        ...

    def gated_rms_norm(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        is_gated_first: bool,
    ) -> torch.Tensor:
        """RMS norm, rounded, times the weight, of each group of x [T, groups, N]; the same shape.

        weight [N], or [groups, N], of x's dtype. The gate [T, groups, N], as silu(gate) in float32,
        multiplies x before the norm, or what the weight gave, and that is rounded. x and gate may
        be views with longer strides.
        """
        ...

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x [T, H, D] times sigmoid(gate), each rounded, for a gate [T, H, D] of any strides."""
        ...

    def argmax(self, logits: torch.Tensor, rows: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids [n] int64, maxima [n] float32) of the rows [n] of logits [any, vocab].

        Of any dtype. Of equal logits the lowest id. Where a row has a NaN, its maximum is NaN.
        """
        ...

    def draw_tokens(
        self, logits: torch.Tensor, rows: IntArray, options: DrawOptions
    ) -> torch.Tensor:
        """Token ids [n] int64 of the rows [n] of logits [any, vocab] float32.

        Top-k (ties with the kth stay), temperature, top-p (of equals the lower ids stay), min-p,
        then the inverse of the cumulative distribution in id order; see kernels.sampling. The
        tokens are those of its functions exactly. No row has a NaN; each has a finite maximum.
        """
        ...

    def top_logprobs(
        self, logits: torch.Tensor, rows: IntArray, token_ids: IntArray, num_top: int
    ) -> TopLogprobs:
        """Compute those of token_ids [n] and of the num_top likeliest, for rows [n] of logits."""
        ...

    def apply_bitmask(self, logits: torch.Tensor, rows: IntArray, bitmask: torch.Tensor) -> None:
        """The rows [n], all different, of logits [any, vocab] float32: -inf where a bit is 0.

        In place. bitmask [n, ceil(vocab / 32)] int32, as llguidance and XGrammar have it: token i
        is bit i % 32, from the least significant, of word i / 32.
        """
        ...
