"""Encoder and cross mixer that only tests have, and a decoder whose layers read the encoder.

All of an input's tokens change all of the encoder's output, and a decoder's token attends to all of
it. So what a model writes depends on each token of its input, and on the places of these tokens.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np
import pytest
import torch

from loraplex.core.cache import CachedVectors, Cross
from loraplex.core.plan import CacheGroupId
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.assembly import Assembly
from loraplex.execution.loading import assemble_parts
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.runner_parts import RunnerParts
from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import (
    AttentionPlan,
    AttentionRules,
    AttentionShape,
    DeviceRows,
    Kernels,
    RowLayout,
    Storage,
)
from loraplex.models.batch import ForwardBatch
from loraplex.models.linear_group import LinearGroup
from loraplex.models.mixers import kinds
from loraplex.models.mixers.mixer import LayerPlace, Linear, MixerInputs
from loraplex.models.parameters import DecoderParameters, LayerParameters, build_parameters
from loraplex.models.spec import EncoderSpec, LayerSpec, ModelSpec, NormPlace
from loraplex.models.specs.part import (
    LayerCache,
    MixerSpec,
)
from support.tiny_decoder import tiny_spec
from support.toy_mixer import RandomWeights, WholeSpec

LONGEST_INPUT: Final = 11
ENCODER, QUERY, KEYS_AND_VALUES, OUT = "encoder", "cross_q", "cross_kv", "cross_o"
"""Groups of linear layers. That of the encoder is in the first layer of the decoder."""


@dataclasses.dataclass(frozen=True, slots=True)
class ToyCrossSpec(WholeSpec):
    """Attention to all positions of an encoder's output, of the decoder's size."""

    num_heads: int
    head_dim: int

    def caches(self) -> tuple[LayerCache]:
        vectors = CachedVectors(self.num_heads, self.head_dim)
        return (LayerCache(Cross(), (vectors, vectors)),)

    def step_bytes(self, itemsize: int) -> int:
        return 3 * self.num_heads * self.head_dim * itemsize


class CrossKind(NamedTuple):
    """Kind of plan: causal attention in which each token is the last one of a row of its own."""

    cache_group: CacheGroupId
    shape: AttentionShape

    def planner(
        self, kernels: Kernels, _device: torch.device
    ) -> Callable[[ForwardBatch], AttentionPlan]:
        rules = AttentionRules(scale=self.shape.head_dim**-0.5)

        def plan(batch: ForwardBatch) -> AttentionPlan:
            rows = _row_per_token(batch.rows[self.cache_group], len(batch.token_ids))
            return kernels.plan_attention(rows, self.shape, rules)

        return plan


def _row_per_token(rows: RowLayout, num_tokens: int) -> RowLayout:
    """num_tokens: with padding."""
    counts = np.diff(rows.query_start_loc)
    row_of_token = np.repeat(np.arange(len(counts)), counts)
    indices, tables, on_device = torch.from_numpy(row_of_token), rows.block_tables, rows.on_device
    if on_device is None:
        tables = tables[indices]
    elif len(on_device.seq_lens) != num_tokens:
        on_device = DeviceRows(
            torch.arange(num_tokens + 1, dtype=torch.int32),
            on_device.seq_lens[indices],
            on_device.table_rows[indices],
            on_device.block_tables,
        )
    seq_lens = [rows.seq_lens[row] for row in row_of_token.tolist()]
    return RowLayout(list(range(len(seq_lens) + 1)), seq_lens, tables, on_device)


class ToyCross:
    """Implements `Mixer` and `EncoderReader`."""

    def __init__(
        self, spec: ToyCrossSpec, place: LayerPlace, parameters: LayerParameters, kernels: Kernels
    ) -> None:
        (cache,) = spec.caches()
        heads, head_dim = spec.num_heads, spec.head_dim
        self._heads = (heads, head_dim)
        self._kernels = kernels
        self._layer = place.layer
        self._query = place.linear(QUERY, parameters, kernels)
        self._keys_and_values = place.linear(KEYS_AND_VALUES, parameters, kernels)
        self._out = place.linear(OUT, parameters, kernels)
        shape = AttentionShape(heads, heads, head_dim, place.block_size)
        self._kind = CrossKind(place.cache_groups[cache], shape)
        self.plan_kinds = (self._kind,)

    def forward(self, x: torch.Tensor, lora: LoraBatch | None, inputs: MixerInputs) -> torch.Tensor:
        query = self._query.forward(x, lora).view(len(x), *self._heads)
        plan = inputs.plans[self._kind]
        attended = self._kernels.paged_attention(query, self._storage(inputs), plan)
        return self._out.forward(attended.flatten(1), lora)

    def encode(self, x: torch.Tensor, lora: LoraBatch | None, inputs: MixerInputs) -> None:
        both = self._keys_and_values.forward(x, lora).view(len(x), 2, *self._heads)
        places = inputs.batch.slot_mappings[self._kind.cache_group]
        self._kernels.write_kv(self._storage(inputs), both[:, 0], both[:, 1], places)

    def _storage(self, inputs: MixerInputs) -> Storage:
        storage = inputs.storages[self._kind.cache_group][self._layer]
        assert storage is not None
        return storage


class ToyEncoder:
    """Implements `TextEncoder`."""

    def __init__(
        self,
        spec: ModelSpec,
        parameters: DecoderParameters,
        weights: RandomWeights,
        kernels: Kernels,
    ) -> None:
        packed, group = parameters.layers[0].linears[ENCODER], spec.layers[0].linears[ENCODER]
        self._linear = Linear(packed, group, 0, kernels)
        self._tokens = weights.tensor("encoder.tokens", (spec.vocab_size, spec.hidden_size))
        self._places = weights.tensor("encoder.places", (LONGEST_INPUT, spec.hidden_size))
        self.encoded: list[tuple[int, ...]] = []
        """Inputs that were encoded."""
        self.errors: dict[tuple[int, ...], list[Exception]] = {}
        """What is raised for inputs, in turn."""

    def encode(self, batch: ForwardBatch) -> torch.Tensor:
        given = tuple(batch.token_ids.tolist())
        if self.errors.get(given):
            raise self.errors[given].pop(0)
        self.encoded.append(given)
        x = self._tokens[batch.token_ids] + self._places[batch.positions]
        x = x + self._linear.forward(x, batch.lora)
        return x + x.double().sum(0).float()


def encoder_decoder_spec(vocab_size: int) -> ModelSpec:
    """Return a model of two layers; both have cross attention."""
    spec = tiny_spec(
        hidden_size=64,
        intermediate_size=80,
        head_dim=16,
        vocab_size=vocab_size,
        max_position_embeddings=160,
        dtype="float32",
    )
    first, *others = (
        _with_cross(layer, f"model.layers.{index}.", 4, 16)
        for index, layer in enumerate(spec.layers)
    )
    encoder = _group("encoder.linear", 64, {"encoder.embed": 64})
    first = dataclasses.replace(first, linears={**first.linears, ENCODER: encoder})
    return dataclasses.replace(
        spec, layers=(first, *others), encoder=EncoderSpec(longest_input=LONGEST_INPUT)
    )


def _with_cross(layer: LayerSpec, prefix: str, num_heads: int, head_dim: int) -> LayerSpec:
    norm = layer.norms[NormPlace.BEFORE_MIXER]
    hidden, size = norm.size, num_heads * head_dim
    keys_and_values = {f"cross_attn.{name}_proj": size for name in "kv"}
    return dataclasses.replace(
        layer,
        cross=ToyCrossSpec(num_heads, head_dim),
        norms={
            **layer.norms,
            NormPlace.BEFORE_CROSS: dataclasses.replace(norm, path=f"{prefix}cross_norm"),
        },
        linears={
            **layer.linears,
            QUERY: _group(f"{prefix}{QUERY}", hidden, {"cross_attn.q_proj": size}),
            KEYS_AND_VALUES: _group(f"{prefix}{KEYS_AND_VALUES}", hidden, keys_and_values),
            OUT: _group(f"{prefix}{OUT}", size, {"cross_attn.out_proj": hidden}),
        },
    )


def _group(path: str, in_features: int, outputs: Mapping[str, int]) -> LinearGroup:
    return LinearGroup(
        paths=tuple(f"{path}.{module}" for module in outputs),
        outputs=outputs,
        in_features=in_features,
        has_bias=False,
    )


@contextlib.contextmanager
def known_cross() -> Iterator[None]:
    """Return the block in which decoders with such layers are made."""
    with pytest.MonkeyPatch.context() as patch:
        mixers: dict[type[MixerSpec], kinds.MixerClass] = {ToyCrossSpec: ToyCross}
        patch.setattr(kinds, "MIXERS", {**kinds.MIXERS, **mixers})
        yield


def encoder_decoder_parts(
    vocab_size: int,
    settings: RunnerSettings,
    kernels: Kernels,
    accelerator: Accelerator | None = None,
) -> tuple[RunnerParts, ToyEncoder]:
    """Return the parts of a runner, with random weights. accelerator: that of the kernels."""
    spec, weights = encoder_decoder_spec(vocab_size), RandomWeights(kernels)
    parameters = build_parameters(spec, weights)
    encoder = ToyEncoder(spec, parameters, weights, kernels)
    assembly = Assembly(
        spec=spec,
        parameters=parameters,
        weights_bytes=1 << 20,
        settings=settings,
        kernels=kernels,
        accelerator=accelerator,
        text_encoder=encoder,
    )
    with known_cross():
        return assemble_parts(assembly, HostAdapters()), encoder
