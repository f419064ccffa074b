"""The whole decoder: token ids in, logits out. All that a step needs is an argument."""

from collections.abc import Mapping, Sequence

import torch

from loraplex.core.adapter import LM_HEAD, OUTSIDE_LAYERS
from loraplex.kernels.adapter_parts import add_vectors, embed, replace_logits
from loraplex.kernels.channel import Channel
from loraplex.kernels.lora import LoraBatch, batch_of_rows, head_blocks
from loraplex.kernels.ops import AttentionPlan, Kernels, KVStorage
from loraplex.models.attention import (
    Angles,
    Attention,
    AttentionInputs,
    AttentionKind,
    HeadOrder,
    attention_kind,
)
from loraplex.models.base_linears import BaseLinears, base_linears
from loraplex.models.batch import ForwardBatch
from loraplex.models.feed_forward import feed_forward
from loraplex.models.kv_groups import KVGroup
from loraplex.models.norm import HiddenState, NoNorm, make_norm
from loraplex.models.parameters import DecoderParameters, LayerParameters
from loraplex.models.rope import RotaryTable
from loraplex.models.spec import LayerSpec, ModelSpec, NormPlace, RopeConfig

_MAX_REPEATED_TOKENS = 256
"""Maximum of a repeated step: in larger ones the calls of the ops cost little compared with what
they compute."""


class DecoderLayer:
    """One layer of a decoder: how its parts and norms follow one another."""

    def __init__(
        self,
        spec: LayerSpec,
        layer: int,
        parameters: LayerParameters,
        kernels: Kernels,
    ) -> None:
        self._factor = spec.residual_factor
        self._norms = {
            place: make_norm(spec.norms.get(place), parameters.norms.get(place), kernels)
            for place in NormPlace
        }
        self._attention = Attention(spec, layer, parameters, kernels)
        self._feed_forward = feed_forward(spec, layer, parameters, kernels)
        self._kernels = kernels
        self._has_second_norm = NormPlace.BEFORE_FEED_FORWARD in spec.norms
        self.forward = self._both_at_once if spec.is_parallel else self._one_by_one
        """(state, inputs, storage, lora) -> the state that the next layer reads."""

    def _one_by_one(
        self,
        state: HiddenState,
        inputs: AttentionInputs,
        storage: KVStorage,
        lora: LoraBatch | None,
    ) -> HiddenState:
        norms = self._norms
        x, residual = norms[NormPlace.BEFORE_ATTENTION].read(state)
        attended = self._attention.forward(x, lora, inputs, storage)
        attended = norms[NormPlace.AFTER_ATTENTION].apply(attended)
        state = HiddenState(residual, attended, self._factor)
        x, residual = norms[NormPlace.BEFORE_FEED_FORWARD].read(state)
        x = self._feed_forward.forward(x, lora)
        x = norms[NormPlace.AFTER_FEED_FORWARD].apply(x)
        return HiddenState(residual, x, self._factor)

    def _both_at_once(
        self,
        state: HiddenState,
        inputs: AttentionInputs,
        storage: KVStorage,
        lora: LoraBatch | None,
    ) -> HiddenState:
        x, residual = self._norms[NormPlace.BEFORE_ATTENTION].read(state)
        attended = self._attention.forward(x, lora, inputs, storage)
        if self._has_second_norm:
            x = self._norms[NormPlace.BEFORE_FEED_FORWARD].apply(residual)
        x = self._feed_forward.forward(x, lora)
        return HiddenState(residual, self._kernels.add(x, attended), self._factor)


class Decoder:
    """One base model on one device."""

    def __init__(
        self,
        spec: ModelSpec,
        parameters: DecoderParameters,
        rotary: Mapping[RopeConfig, RotaryTable],
        kernels: Kernels,
        *,
        kv_groups: Sequence[KVGroup],
        block_size: int,
        loads: Channel | None = None,
    ) -> None:
        """parameters: packed by these kernels. rotary: a table for each RopeConfig of the layers.

        kv_groups: in the order of what `forward` will get; block_size: of its KV storage. loads:
        channel of the thread that loads adapters; None: this is the only rank.
        """
        self.spec = spec
        self._kernels = kernels
        self._rotary = rotary
        self._embedding = parameters.embedding
        self._projections = parameters.projections
        self._positions = parameters.positions
        group_of = {layer: n for n, group in enumerate(kv_groups) for layer in group.layers}
        kinds = [
            attention_kind(layer.attention, group_of[index], block_size)
            for index, layer in enumerate(spec.layers)
        ]
        self._layers = [
            DecoderLayer(layer, index, packed, kernels)
            for index, (layer, packed) in enumerate(
                zip(spec.layers, parameters.layers, strict=True)
            )
        ]
        self._kinds = kinds
        self._orders = {
            order: HeadOrder(order, parameters.embedding.device)
            for order in {layer.attention.head_order for layer in spec.layers}
            if order
        }
        factor = torch.tensor(spec.embedding_factor, dtype=torch.float64)
        if spec.rounds_embedding_factor:
            factor = factor.to(parameters.embedding.dtype)
        self._embedding_factor: float = factor.item()
        norm, weights = spec.embedding_norm, parameters.embedding_norm
        self._embedding_norm = make_norm(norm, weights, kernels)
        self._final_norm = make_norm(spec.final_norm, parameters.final_norm, kernels)
        if not spec.is_last_stage:
            self._final_norm = NoNorm(kernels)
        self._lm_head = parameters.lm_head
        self.base_linears: BaseLinears = base_linears(spec, parameters, kernels, loads)
        """The linear layers as adapters see them."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of its activations."""
        return self._embedding.dtype

    def forward(
        self,
        batch: ForwardBatch,
        kv: Sequence[KVStorage],
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the logits [S, vocab_size] of batch.logits_indices, in the model's dtype.

        They are valid until the next call. kv has one entry per layer. In a stage that is not the
        last, the result is the hidden state [T, hidden] instead. hidden: that of the stage before,
        which may be overwritten; None: this is the first stage.
        """
        plans = self._plan(batch)
        num_tokens = batch.token_ids.shape[0]
        head_rows = {order: heads.rows(num_tokens) for order, heads in self._orders.items()}
        if not _is_repeatable(batch):
            state = self._hidden(batch, kv, plans, head_rows, hidden)
            return self._logits(state, batch) if self.spec.is_last_stage else state
        # A record holds addresses of these weights and this KV storage, and the number of launches
        # that follows from the numbers of tokens, LoRA waves and device rows, and from whether
        # adapters change outputs in addition to LoRA: all are in the key.
        return self._kernels.repeat(
            (
                *(id(self), id(kv), num_tokens),
                batch.lora and (batch.lora.num_waves, bool(batch.lora.parts)),
                batch.rows[0].num_device_rows,
            ),
            (
                *(batch.token_ids, batch.positions, *batch.slot_mappings),
                *(batch.lora, *plans.values(), *head_rows.values()),
                *(() if hidden is None else (hidden,)),
            ),
            lambda: self._decoded(self._hidden(batch, kv, plans, head_rows, hidden)),
        )

    def _hidden(
        self,
        batch: ForwardBatch,
        kv: Sequence[KVStorage],
        plans: Mapping[AttentionKind, AttentionPlan],
        head_rows: Mapping[tuple[int, ...], torch.Tensor],
        hidden: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the output of the final norm [T, hidden]; before the last stage, what it gets."""
        angles = self._angles(batch)
        state = self._embed(batch) if hidden is None else HiddenState(hidden, None)
        for index, (layer, storage) in enumerate(zip(self._layers, kv, strict=True)):
            _wait_for(index, batch)
            kind, attention = self._kinds[index], self.spec.layers[index].attention
            inputs = AttentionInputs(
                angles=angles.get(attention.rope),
                query_angles=angles.get(attention.query_rope),
                slot_mapping=batch.slot_mappings[kind.kv_group],
                plan=plans[kind],
                head_rows=head_rows.get(attention.head_order),
            )
            state = layer.forward(state, inputs, storage, batch.lora)
        normed, _ = self._final_norm.read(state)
        return normed

    def _decoded(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden]: result of `_hidden` of a step that wants the logits of every token."""
        if not self.spec.is_last_stage:
            return x
        return self._scaled(self._base_logits(self._projected_back(x)))

    def _angles(self, batch: ForwardBatch) -> dict[RopeConfig | None, Angles]:
        take = self._kernels.take_rows
        angles: dict[RopeConfig | None, Angles] = {}
        for rope, table in self._rotary.items():
            cos, sin = take(table.cos, batch.positions), take(table.sin, batch.positions)
            for span in batch.rotated_spans:
                table.rotate_span(cos, sin, span)
            angles[rope] = cos, sin
        return angles

    def _embed(self, batch: ForwardBatch) -> HiddenState:
        """Return the state that the first layer reads."""
        embedded = self._kernels.take_rows(self._embedding, batch.token_ids)
        _wait_for(OUTSIDE_LAYERS, batch)
        if batch.lora is not None and batch.lora.parts:
            embed(embedded, batch.token_ids, batch.lora.parts)
        if self._embedding_factor != 1.0:
            self._kernels.scale(embedded, self._embedding_factor)
        if self._projections:
            embedded = self._kernels.linear(embedded, self._projections[0])
        embedded = self._embedding_norm.apply(embedded)
        if self._positions is None:
            return HiddenState(embedded, None)
        return HiddenState(embedded, self._kernels.take_rows(self._positions, batch.positions))

    def _plan(self, batch: ForwardBatch) -> dict[AttentionKind, AttentionPlan]:
        return {
            kind: self._kernels.plan_attention(batch.rows[kind.kv_group], kind.shape, kind.rules)
            for kind in dict.fromkeys(self._kinds)
        }

    def _logits(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Compute the logits [S, vocab_size] of normed x [T, hidden]."""
        indices, lora = batch.logits_indices, batch.lora
        # The lm_head is the largest product: only tokens that are sampled need it.
        x = self._projected_back(self._kernels.take_rows(x, indices))
        logits = self._base_logits(x)
        if lora is not None and lora.changes_ends:
            lora = batch_of_rows(lora, indices, batch.token_ids.shape[0])
            replace_logits(logits, x, lora.parts)
            add_vectors(logits, lora.parts, OUTSIDE_LAYERS, (LM_HEAD,), (0,))
            if lora.head_table is not None:
                blocks, firsts = head_blocks(lora.head_table)
                self._kernels.add_lora(logits, x, lora, 0, blocks, firsts)
        return self._scaled(logits)

    def _base_logits(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x [S, size] -> [S, vocab_size]; ranks compute a share each and give it to all."""
        logits = self._kernels.linear(x, self._lm_head)
        if self.spec.own_logits is None:
            return logits
        return self._kernels.gather_columns(logits, self.spec.vocab_size)

    def _projected_back(self, x: torch.Tensor) -> torch.Tensor:
        """x [S, hidden] -> what the output layer reads."""
        return self._kernels.linear(x, self._projections[1]) if self._projections else x

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply, in place, what the model does to its logits [S, vocab_size]."""
        factor, soft_cap = self.spec.logits_factor, self.spec.logits_soft_cap
        if factor != 1.0 or soft_cap is not None:
            self._kernels.scale(logits, factor, soft_cap)
        return logits


def _is_repeatable(batch: ForwardBatch) -> bool:
    """Whether the step is a small one that only decodes: the next one of its size is like it."""
    num_tokens = batch.token_ids.shape[0]
    if (
        batch.rotated_spans
        or num_tokens > _MAX_REPEATED_TOKENS
        or batch.logits_indices.shape[0] < num_tokens
    ):
        return False
    return batch.lora is None or not (batch.lora.changes_ends or batch.lora.arrivals)


def _wait_for(layer: int, batch: ForwardBatch) -> None:
    """Let the device wait for the layer's matrices of adapters that are still being copied."""
    if batch.lora is not None and batch.lora.arrivals is not None:
        batch.lora.arrivals.wait_for(layer)
