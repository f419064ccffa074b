"""Latent attention of one decoder layer, absorbed: one key head whose values are its first part."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from loraplex.core.plan import CacheGroupId
from loraplex.kernels.latent import HeadsPlace
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import AttentionPlan, AttentionRules, AttentionShape, Kernels
from loraplex.kernels.routing import Routes
from loraplex.models.batch import ForwardBatch
from loraplex.models.mixers.mixer import LayerPlace, MixerInputs
from loraplex.models.norm import make_norm
from loraplex.models.parameters import LayerParameters
from loraplex.models.specs.latent import (
    LATENT_DOWN,
    LATENT_HEADS,
    LATENT_NORM,
    LATENT_OUT,
    LATENT_QUERY,
    QUERY_NORM,
    LatentSpec,
)

_MAX_KEPT_TOKENS = 256
"""Routes of larger steps, which are never recorded, are made anew."""


class LatentKind(NamedTuple):
    """All that the plan of a step's latent attention depends on."""

    cache_group: CacheGroupId
    shape: AttentionShape
    rules: AttentionRules

    def planner(
        self, kernels: Kernels, _device: torch.device
    ) -> Callable[[ForwardBatch], AttentionPlan]:
        return lambda batch: kernels.plan_latent_attention(
            batch.rows[self.cache_group], self.shape, self.rules
        )


class HeadRoutes(NamedTuple):
    """Kind of plan: routes of tokens that each choose all of so many experts, which are heads."""

    num_heads: int

    def planner(
        self, _kernels: Kernels, device: torch.device
    ) -> Callable[[ForwardBatch], tuple[torch.Tensor, ...]]:
        return _MadeRoutes(self.num_heads, device).plan


class _MadeRoutes:
    """Routes by the number of tokens, always at the same addresses where steps are recorded."""

    def __init__(self, num_heads: int, device: torch.device) -> None:
        self._num_heads = num_heads
        self._device = device
        self._kept: dict[int, tuple[torch.Tensor, ...]] = {}

    def plan(self, batch: ForwardBatch) -> tuple[torch.Tensor, ...]:
        num_tokens = len(batch.token_ids)
        if num_tokens > _MAX_KEPT_TOKENS:
            return self._make(num_tokens)
        if num_tokens not in self._kept:
            self._kept[num_tokens] = self._make(num_tokens)
        return self._kept[num_tokens]

    def _make(self, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """Return the fields of `Routes`."""
        num_heads, device = self._num_heads, self._device
        pairs = torch.arange(num_tokens * num_heads, dtype=torch.int32, device=device)
        heads = torch.arange(num_heads + 1, dtype=torch.int32, device=device)
        return (
            heads[:-1].repeat(num_tokens, 1),
            torch.ones((num_tokens, num_heads), device=device),
            pairs.view(num_tokens, num_heads).t().flatten(),
            heads * num_tokens,
        )


class Latent:
    """Implements `Mixer`."""

    def __init__(
        self,
        spec: LatentSpec,
        place: LayerPlace,
        parameters: LayerParameters,
        kernels: Kernels,
    ) -> None:
        (cache,) = spec.caches()
        self._spec = spec
        self._kernels = kernels
        self._layer = place.layer
        self._down = place.linear(LATENT_DOWN, parameters, kernels)
        self._query = place.linear(LATENT_QUERY, parameters, kernels)
        self._output = place.linear(LATENT_OUT, parameters, kernels)
        latent_norm = parameters.norms[LATENT_NORM]
        self._latent_norm = make_norm(spec.latent_norm, latent_norm, kernels)
        self._query_norm = make_norm(spec.query_norm, parameters.norms.get(QUERY_NORM), kernels)
        # [heads, keys and values of a head, latent], decoded if it is quantised.
        num_outputs = spec.num_heads * spec.head_outputs
        rows = torch.arange(num_outputs, device=latent_norm.weight.device)
        packed, dtype = parameters.linears[LATENT_HEADS], latent_norm.weight.dtype
        weight = kernels.weight_rows(packed, rows, dtype).view(spec.num_heads, -1, spec.latent_size)
        keys, values = weight[:, : spec.key_size], weight[:, spec.key_size :]
        self._keys = kernels.pack_linear(keys.transpose(1, 2).contiguous(), None)
        self._values = kernels.pack_linear(values.contiguous(), None)
        (module,) = place.linears[LATENT_HEADS].modules
        sizes = (spec.num_heads, spec.key_size, spec.value_size)
        self._of_keys = HeadsPlace(place.layer, module, *sizes, is_of_keys=True)
        self._of_values = HeadsPlace(place.layer, module, *sizes, is_of_keys=False)
        shape = AttentionShape(spec.num_heads, 1, spec.cached_size, place.block_size)
        rules = AttentionRules(scale=spec.scale)
        self._kind = LatentKind(place.cache_groups[cache], shape, rules)
        self._routes = HeadRoutes(spec.num_heads)
        self.plan_kinds = (self._kind, self._routes)

    def forward(self, x: torch.Tensor, lora: LoraBatch | None, inputs: MixerInputs) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]; writes the tokens' latent vectors to the storage."""
        spec, kernels = self._spec, self._kernels
        storage = inputs.storages[self._kind.cache_group][self._layer]
        made = inputs.plans[self._routes]
        assert storage is not None
        assert isinstance(made, tuple)
        routes = Routes(*made)
        sizes = [spec.query_size or 0, spec.latent_size, spec.rope_size]
        # Views, not copies: every op takes rows and heads with longer strides.
        down, latent, key = torch.split(self._down.forward(x, lora), sizes, dim=1)
        if spec.query_size is not None:
            x = self._query_norm.apply(down)
        query = self._query.forward(x, lora).view(len(x), spec.num_heads, -1)
        turned = query[..., spec.key_size :]
        is_interleaved = spec.rope.is_interleaved
        angles = inputs.angles[spec.rope]
        kernels.rotary(turned, key.unsqueeze(1), *angles, is_interleaved=is_interleaved)
        if spec.query_growth is not None:
            kernels.rotary(query, query[:, :0], *inputs.angles[spec.query_growth])
        slots = inputs.batch.slot_mappings[self._kind.cache_group]
        kernels.write_latent(storage, self._latent_norm.apply(latent), key, slots)
        absorbed = self._absorbed(query[..., : spec.key_size], lora, routes)
        attended = kernels.latent_attention(absorbed, turned, storage, inputs.plans[self._kind])
        rows = attended.view(-1, spec.latent_size)
        values = kernels.grouped_linear(rows, self._values, routes)
        values = values.view(len(x), spec.num_heads, -1)
        if lora is not None:
            values = self._scaled(values, lora, self._of_values)
            kernels.add_heads_lora(values, attended, lora, self._of_values)
        return self._output.forward(values.flatten(1), lora)

    def _absorbed(
        self, query: torch.Tensor, lora: LoraBatch | None, routes: Routes
    ) -> torch.Tensor:
        """query [T, H, key size], heads with a longer stride -> [T, H, latent size]."""
        kernels, num_heads = self._kernels, self._spec.num_heads
        scaled = query if lora is None else self._scaled(query, lora, self._of_keys)
        rows = scaled.as_strided((len(query) * num_heads, query.shape[2]), (scaled.stride(1), 1))
        absorbed = kernels.grouped_linear(rows, self._keys, routes).view(len(query), num_heads, -1)
        if lora is not None:
            kernels.add_heads_lora(absorbed, query, lora, self._of_keys)
        return absorbed

    def _scaled(self, x: torch.Tensor, lora: LoraBatch, place: HeadsPlace) -> torch.Tensor:
        """x [T, H, size] -> the same shape; where no adapter has output vectors, x itself."""
        if not (lora.parts or lora.has_vectors):
            return x
        return self._kernels.scale_heads(x, lora, place)
