"""Self-attention of one decoder layer: fused projections, rotation, paged attention."""

import torch

from loraplex.kernels.ops import AttentionPlan, AttentionShape, Kernels, KVStorage
from loraplex.models.batch import ForwardBatch
from loraplex.models.config import DecoderConfig
from loraplex.models.parameters import LayerParameters

_QKV = ("q_proj", "k_proj", "v_proj")


def attention_shape(config: DecoderConfig, block_size: int) -> AttentionShape:
    return AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, block_size)


class Attention:
    def __init__(
        self, config: DecoderConfig, layer: int, parameters: LayerParameters, kernels: Kernels
    ) -> None:
        self._config = config
        self._layer = layer
        self._kernels = kernels
        self._qkv = parameters.qkv
        self._o = parameters.o
        self._q_norm = parameters.q_norm
        self._k_norm = parameters.k_norm
        self._qkv_offsets = (0, config.q_size, config.q_size + config.kv_size)

    def forward(
        self,
        x: torch.Tensor,
        batch: ForwardBatch,
        angles: tuple[torch.Tensor, torch.Tensor],
        storage: KVStorage,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]; writes the tokens' keys and values to the storage."""
        query, key, value = self._project(x, batch)
        self._kernels.rotary(query, key, *angles)
        self._kernels.write_kv(storage, key, value, batch.slot_mapping)
        attended = self._kernels.paged_attention(query, storage, plan).flatten(1)
        output = self._kernels.linear(attended, self._o)
        if batch.lora is not None:
            self._kernels.add_lora(output, attended, batch.lora, self._layer, ("o_proj",), (0,))
        return output

    def _project(
        self, x: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [T, H, D], key and value [T, K, D], before the rotation."""
        config = self._config
        qkv = self._kernels.linear(x, self._qkv)
        if batch.lora is not None:
            self._kernels.add_lora(qkv, x, batch.lora, self._layer, _QKV, self._qkv_offsets)
        sizes = [config.q_size, config.kv_size, config.kv_size]
        query, key, value = (
            part.view(len(x), -1, config.head_dim) for part in torch.split(qkv, sizes, dim=1)
        )
        if self._q_norm is not None and self._k_norm is not None:
            query = self._kernels.rms_norm(query, self._q_norm, config.rms_norm_eps)
            key = self._kernels.rms_norm(key, self._k_norm, config.rms_norm_eps)
        return query, key, value
