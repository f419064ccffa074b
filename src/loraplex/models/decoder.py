"""The whole decoder: token ids in, logits out. All that a step needs is an argument."""

from collections.abc import Sequence

import torch

from loraplex.kernels.ops import AttentionPlan, Kernels, KVStorage
from loraplex.models.attention import Attention, attention_shape
from loraplex.models.batch import ForwardBatch
from loraplex.models.config import DecoderConfig
from loraplex.models.mlp import Mlp
from loraplex.models.parameters import DecoderParameters, LayerParameters
from loraplex.models.rope import RotaryTable


class DecoderLayer:
    def __init__(
        self, config: DecoderConfig, layer: int, parameters: LayerParameters, kernels: Kernels
    ) -> None:
        self._kernels = kernels
        self._eps = config.rms_norm_eps
        self._input_norm = parameters.input_norm
        self._post_attention_norm = parameters.post_attention_norm
        self._attention = Attention(config, layer, parameters, kernels)
        self._mlp = Mlp(config, layer, parameters, kernels)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        batch: ForwardBatch,
        angles: tuple[torch.Tensor, torch.Tensor],
        storage: KVStorage,
        plan: AttentionPlan,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, residual), each [T, hidden]: their sum is what the next layer sees."""
        norm = self._kernels.add_rms_norm
        x, residual = norm(x, residual, self._input_norm, self._eps)
        x = self._attention.forward(x, batch, angles, storage, plan)
        x, residual = norm(x, residual, self._post_attention_norm, self._eps)
        return self._mlp.forward(x, batch.lora), residual


class Decoder:
    """One base model on one device."""

    def __init__(
        self,
        config: DecoderConfig,
        parameters: DecoderParameters,
        rotary: RotaryTable,
        kernels: Kernels,
        *,
        block_size: int,
    ) -> None:
        """block_size: of the KV storage that `forward` will be given."""
        self.config = config
        self._kernels = kernels
        self._rotary = rotary
        self._attention_shape = attention_shape(config, block_size)
        self._embedding = parameters.embedding
        self._layers = [
            DecoderLayer(config, index, layer, kernels)
            for index, layer in enumerate(parameters.layers)
        ]
        self._final_norm = parameters.final_norm
        self._lm_head = kernels.pack_linear(parameters.lm_head, None)

    def forward(self, batch: ForwardBatch, kv: Sequence[KVStorage]) -> torch.Tensor:
        """Logits [S, vocab_size] float32 of batch.logits_indices; kv has one entry per layer."""
        angles = self._rotary.at(batch.positions)
        plans = self._plan(batch)
        x = self._embedding[batch.token_ids]
        residual = torch.zeros_like(x)
        windows = self.config.layer_windows
        for layer, storage, window in zip(self._layers, kv, windows, strict=True):
            x, residual = layer.forward(x, residual, batch, angles, storage, plans[window])
        return self._logits(x[batch.logits_indices], residual[batch.logits_indices])

    def _plan(self, batch: ForwardBatch) -> dict[int | None, AttentionPlan]:
        """One attention plan per kind of layer."""
        return {
            window: self._kernels.plan_attention(batch.rows, self._attention_shape, window)
            for window in set(self.config.layer_windows)
        }

    def _logits(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        norm, eps = self._final_norm, self.config.rms_norm_eps
        x, _ = self._kernels.add_rms_norm(x, residual, norm, eps)
        return self._kernels.linear(x, self._lm_head).float()
