"""Encoder of an encoder-decoder model: all positions of an input see one another.

It keeps nothing: keys and values of a layer lie in one storage that all layers overwrite.
"""

from collections.abc import Callable

import torch

from loraplex.core.plan import CacheGroupId
from loraplex.kernels.ops import AttentionShape, Kernels, RowLayout
from loraplex.models.batch import ForwardBatch
from loraplex.models.decoder import DecoderLayer, embedding_factor
from loraplex.models.embedding import Embedding
from loraplex.models.mixers.mixer import LayerPlace, MixerInputs, PlanKind, Storages
from loraplex.models.norm import make_norm
from loraplex.models.parameters import DecoderParameters
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import AttentionSpec
from loraplex.models.specs.part import LayerCache

_GROUP: CacheGroupId = 0


class Encoder:
    """Implements `TextEncoder` (execution.steps.text_inputs)."""

    def __init__(
        self,
        spec: ModelSpec,
        parameters: DecoderParameters,
        kernels: Kernels,
        *,
        block_size: int,
        longest_input: int,
        device: torch.device,
    ) -> None:
        """parameters: packed by these kernels. longest_input: number of tokens."""
        encoder, weights = spec.encoder, parameters.encoder
        assert encoder is not None
        assert weights is not None
        self._block_size = block_size
        self._embedding = Embedding(
            kernels,
            parameters.embedding,
            parameters.packed_embedding,
            factor=embedding_factor(spec, parameters.embedding.dtype),
            projection=None,
            norm=make_norm(encoder.embedding_norm, weights.embedding_norm, kernels),
            positions=weights.positions,
            is_norm_last=spec.is_embedding_norm_last,
        )
        self._final_norm = make_norm(encoder.final_norm, weights.final_norm, kernels)
        groups: dict[LayerCache, CacheGroupId] = {}
        self._layers = []
        planners: dict[PlanKind, Callable[[ForwardBatch], object]] = {}
        for index, (layer, packed) in enumerate(zip(encoder.layers, weights.layers, strict=True)):
            assert isinstance(layer.mixer, AttentionSpec)
            groups.update(dict.fromkeys(layer.mixer.caches(), _GROUP))
            place = LayerPlace(index, layer.linears, groups, block_size)
            made = DecoderLayer(layer, place, packed, kernels)
            self._layers.append(made)
            planners |= {kind: kind.planner(kernels, device) for kind in made.plan_kinds}
        assert len(groups) == 1, "the layers have keys and values of one form"
        self._planners = planners
        num_blocks = -(-longest_input // block_size)
        attention = encoder.layers[0].mixer
        assert isinstance(attention, AttentionSpec)
        heads = attention.num_kv_heads
        shape = AttentionShape(heads, heads, attention.head_dim, block_size)
        storage = kernels.allocate_kv(num_blocks, shape, parameters.embedding.dtype)
        self._storages: Storages = ((storage,) * len(self._layers),)
        self._table = torch.arange(num_blocks, device=device).unsqueeze(0)

    def encode(self, batch: ForwardBatch) -> torch.Tensor:
        """Compute the output [T, hidden] of the T tokens of one input."""
        num_tokens = len(batch.token_ids)
        num_blocks = -(-num_tokens // self._block_size)
        rows = RowLayout([0, num_tokens], [num_tokens], self._table[:, :num_blocks])
        own = ForwardBatch(
            batch.token_ids,
            batch.positions,
            slot_mappings=(batch.positions,),
            rows=(rows,),
            logits_indices=batch.logits_indices,
            lora=batch.lora,
        )
        plans = {kind: plan(own) for kind, plan in self._planners.items()}
        inputs = MixerInputs(own, self._storages, {}, plans)
        state = self._embedding.state(own)
        for layer in self._layers:
            state = layer.forward(state, inputs)
        output, _ = self._final_norm.read(state)
        return output
