"""Self-attention of one decoder layer: fused projections, rotation if any, paged attention."""

import torch

from loraplex.kernels.ops import AttentionPlan, AttentionShape, Kernels, KVStorage
from loraplex.models.batch import ForwardBatch
from loraplex.models.config import DecoderConfig
from loraplex.models.layer_linears import layer_linears
from loraplex.models.linear import Linear
from loraplex.models.norm import RmsNorm
from loraplex.models.parameters import LayerParameters, NormParameters

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [T, head_dim / 2]."""


def attention_shape(config: DecoderConfig, block_size: int) -> AttentionShape:
    return AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, block_size)


class Attention:
    def __init__(
        self, config: DecoderConfig, layer: int, parameters: LayerParameters, kernels: Kernels
    ) -> None:
        self._config = config
        self._kernels = kernels
        linears = layer_linears(config)
        self._qkv = Linear(parameters.qkv, linears.qkv, layer, kernels)
        self._o = Linear(parameters.o, linears.o, layer, kernels)
        self._q_norm = self._head_norm(parameters.q_norm)
        self._k_norm = self._head_norm(parameters.k_norm)

    def forward(
        self,
        x: torch.Tensor,
        batch: ForwardBatch,
        angles: Angles | None,
        storage: KVStorage,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]; writes the tokens' keys and values to the storage."""
        query, key, value = self._project(x, batch)
        if angles is not None:
            self._kernels.rotary(query, key, *angles)
        self._kernels.write_kv(storage, key, value, batch.slot_mapping)
        attended = self._kernels.paged_attention(query, storage, plan).flatten(1)
        return self._o.forward(attended, batch.lora)

    def _project(
        self, x: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [T, H, D], key and value [T, K, D], before the rotation."""
        config = self._config
        qkv = self._qkv.forward(x, batch.lora)
        sizes = [config.q_size, config.kv_size, config.kv_size]
        query, key, value = (
            part.view(len(x), -1, config.head_dim) for part in torch.split(qkv, sizes, dim=1)
        )
        if self._q_norm is not None and self._k_norm is not None:
            query, key = self._q_norm.apply(query), self._k_norm.apply(key)
        return query, key, value

    def _head_norm(self, parameters: NormParameters | None) -> RmsNorm | None:
        if parameters is None:
            return None
        return RmsNorm(parameters.weight, self._config.norm_eps, self._kernels)
