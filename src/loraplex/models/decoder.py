"""The whole decoder: token ids in, logits out. All that a step needs is an argument."""

from collections.abc import Mapping, Sequence

import torch

from loraplex.core.adapter import LM_HEAD, OUTSIDE_LAYERS
from loraplex.kernels.adapter_parts import add_vectors, embed, replace_logits
from loraplex.kernels.lora import batch_of_rows, head_blocks
from loraplex.kernels.ops import AttentionPlan, Kernels, KVStorage
from loraplex.models.attention import Angles, Attention, attention_shape
from loraplex.models.base_linears import BaseLinears, base_linears
from loraplex.models.batch import ForwardBatch
from loraplex.models.config import DecoderConfig
from loraplex.models.mlp import make_mlp
from loraplex.models.norm import make_norm
from loraplex.models.parameters import DecoderParameters, LayerParameters
from loraplex.models.rope import RotaryTable

_MAX_REPEATED_TOKENS = 256
"""Beyond that, what it costs to call the ops is little beside what they compute."""


class DecoderLayer:
    def __init__(
        self, config: DecoderConfig, layer: int, parameters: LayerParameters, kernels: Kernels
    ) -> None:
        norm = parameters.post_attention_norm
        self._post_attention_norm = make_norm(norm, config.norm_eps, kernels)
        self._attention = Attention(config, layer, parameters, kernels)
        self._mlp = make_mlp(config, layer, parameters, kernels)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        batch: ForwardBatch,
        angles: Angles | None,
        storage: KVStorage,
        plan: AttentionPlan,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, residual), each [T, hidden]: their sum is what the next layer sees.

        x is the normed residual, the one that is given.
        """
        x = self._attention.forward(x, batch, angles, storage, plan)
        x, residual = self._post_attention_norm.add(x, residual)
        return self._mlp.forward(x, batch.lora), residual


class Decoder:
    """One base model on one device."""

    def __init__(
        self,
        config: DecoderConfig,
        parameters: DecoderParameters,
        rotary: RotaryTable | None,
        kernels: Kernels,
        *,
        block_size: int,
    ) -> None:
        """The parameters must be packed by these kernels. block_size: of the KV storage that
        `forward` will be given. rotary: None where positions are learned.
        """
        self.config = config
        self._kernels = kernels
        self._rotary = rotary
        self._attention_shape = attention_shape(config, block_size)
        self._embedding = parameters.embedding
        self._positions = parameters.positions
        self._layers = [
            DecoderLayer(config, index, layer, kernels)
            for index, layer in enumerate(parameters.layers)
        ]
        norms = [*(layer.input_norm for layer in parameters.layers), parameters.final_norm]
        self._first_norm, *self._next_norms = (
            make_norm(norm, config.norm_eps, kernels) for norm in norms
        )
        self._lm_head = parameters.lm_head
        self.base_linears: BaseLinears = base_linears(config, parameters, kernels)
        """The linear layers as adapters see them."""

    def forward(self, batch: ForwardBatch, kv: Sequence[KVStorage]) -> torch.Tensor:
        """Logits [S, vocab_size] of batch.logits_indices, in the model's dtype.

        They are valid until the next call. kv has one entry per layer.
        """
        plans = self._plan(batch)
        if not _is_repeatable(batch):
            return self._logits(self._hidden(batch, kv, plans), batch)
        return self._kernels.repeat(
            (
                *(id(self), id(kv), batch.token_ids.shape[0]),
                batch.lora and batch.lora.num_waves,
                batch.rows.num_device_rows,
            ),
            (batch.token_ids, batch.positions, batch.slot_mapping, batch.lora, *plans.values()),
            lambda: self._kernels.linear(self._hidden(batch, kv, plans), self._lm_head),
        )

    def _hidden(
        self,
        batch: ForwardBatch,
        kv: Sequence[KVStorage],
        plans: Mapping[int | None, AttentionPlan],
    ) -> torch.Tensor:
        """[T, hidden], after the final norm."""
        angles = self._angles(batch)
        x, residual = self._embed(batch)
        layers = zip(self._layers, kv, self.config.layer_windows, self._next_norms, strict=True)
        for index, (layer, storage, window, next_norm) in enumerate(layers):
            _wait_for(index, batch)
            x, residual = layer.forward(x, residual, batch, angles, storage, plans[window])
            x, residual = next_norm.add(x, residual)
        return x

    def _angles(self, batch: ForwardBatch) -> Angles | None:
        if self._rotary is None:
            return None
        take = self._kernels.take_rows
        return take(self._rotary.cos, batch.positions), take(self._rotary.sin, batch.positions)

    def _embed(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(input of the first layer, residual), each [T, hidden]."""
        embedded = self._kernels.take_rows(self._embedding, batch.token_ids)
        _wait_for(OUTSIDE_LAYERS, batch)
        if batch.lora is not None and batch.lora.parts:
            embed(embedded, batch.token_ids, batch.lora.parts)
        if self._positions is None:
            return self._first_norm.apply(embedded), embedded
        positions = self._kernels.take_rows(self._positions, batch.positions)
        return self._first_norm.add(positions, embedded)

    def _plan(self, batch: ForwardBatch) -> dict[int | None, AttentionPlan]:
        """One attention plan per kind of layer."""
        return {
            window: self._kernels.plan_attention(
                batch.rows, self._attention_shape, window, self.config.num_sink_tokens
            )
            for window in dict.fromkeys(self.config.layer_windows)
        }

    def _logits(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [T, hidden], normed -> [S, vocab_size]."""
        indices, lora = batch.logits_indices, batch.lora
        x = x[indices]
        logits = self._kernels.linear(x, self._lm_head)
        if lora is not None and not lora.is_plain:
            lora = batch_of_rows(lora, indices, batch.token_ids.shape[0])
            replace_logits(logits, x, lora.parts)
            add_vectors(logits, lora.parts, OUTSIDE_LAYERS, (LM_HEAD,), (0,))
            if lora.head_table is not None:
                blocks, firsts = head_blocks(lora.head_table)
                self._kernels.add_lora(logits, x, lora, 0, blocks, firsts)
        return logits


def _is_repeatable(batch: ForwardBatch) -> bool:
    """A small step that only decodes: one like it comes again, and it is nothing but kernels."""
    num_tokens = batch.token_ids.shape[0]
    if num_tokens > _MAX_REPEATED_TOKENS or batch.logits_indices.shape[0] < num_tokens:
        return False
    return batch.lora is None or (batch.lora.is_plain and batch.lora.arrivals is None)


def _wait_for(layer: int, batch: ForwardBatch) -> None:
    """Where adapters are still arriving, until what they have for this layer is there."""
    if batch.lora is not None and batch.lora.arrivals is not None:
        batch.lora.arrivals.wait_for(layer)
