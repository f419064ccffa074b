"""Cross attention of one decoder layer: the encoder's keys and values are projected once."""

import torch

from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import AttentionRules, AttentionShape, Kernels, Storage
from loraplex.models.mixers.attention import AttentionKind
from loraplex.models.mixers.mixer import LayerPlace, MixerInputs
from loraplex.models.parameters import LayerParameters
from loraplex.models.specs.cross import CROSS_KV, CROSS_OUTPUT, CROSS_QUERY, CrossSpec


class CrossAttention:
    """Implements `Mixer` and `EncoderReader`."""

    def __init__(
        self, spec: CrossSpec, place: LayerPlace, parameters: LayerParameters, kernels: Kernels
    ) -> None:
        (cache,) = spec.caches()
        self._heads = (spec.num_heads, spec.head_dim)
        self._kernels = kernels
        self._layer = place.layer
        self._query = place.linear(CROSS_QUERY, parameters, kernels)
        self._keys_and_values = place.linear(CROSS_KV, parameters, kernels)
        self._output = place.linear(CROSS_OUTPUT, parameters, kernels)
        shape = AttentionShape(spec.num_heads, spec.num_heads, spec.head_dim, place.block_size)
        rules = AttentionRules(scale=spec.scale, is_causal=False)
        self._kind = AttentionKind(place.cache_groups[cache], shape, rules)
        self.plan_kinds = (self._kind,)

    def forward(self, x: torch.Tensor, lora: LoraBatch | None, inputs: MixerInputs) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]; reads the storage of the encoder's positions."""
        query = self._query.forward(x, lora).view(len(x), *self._heads)
        plan = inputs.plans[self._kind]
        attended = self._kernels.paged_attention(query, self._storage(inputs), plan)
        return self._output.forward(attended.flatten(1), lora)

    def encode(self, x: torch.Tensor, lora: LoraBatch | None, inputs: MixerInputs) -> None:
        """Write keys and values of an encoder's output x [T, size]."""
        both = self._keys_and_values.forward(x, lora).view(len(x), 2, *self._heads)
        places = inputs.batch.slot_mappings[self._kind.cache_group]
        self._kernels.write_kv(self._storage(inputs), both[:, 0], both[:, 1], places)

    def _storage(self, inputs: MixerInputs) -> Storage:
        storage = inputs.storages[self._kind.cache_group][self._layer]
        assert storage is not None
        return storage
