"""An encoder that only tests have, and a decoder whose layers read it by cross attention.

All of an input's tokens change all of the encoder's output, and a decoder's token attends to all of
it. So what a model writes depends on each token of its input, and on the places of these tokens.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final

import torch

from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.assembly import Assembly
from loraplex.execution.loading import assemble_parts
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.runner_parts import RunnerParts
from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.ops import Kernels
from loraplex.models.batch import ForwardBatch
from loraplex.models.linear_group import LinearGroup
from loraplex.models.mixers.mixer import Linear
from loraplex.models.parameters import DecoderParameters, build_parameters
from loraplex.models.spec import EncoderSpec, LayerSpec, ModelSpec, NormPlace
from loraplex.models.specs.cross import CROSS_KV, CROSS_OUTPUT, CROSS_QUERY, CrossSpec
from support.tiny_decoder import tiny_spec
from support.toy_mixer import RandomWeights

LONGEST_INPUT: Final = 11
ENCODER = "encoder"
"""Group of the encoder's linear layer, which is in the first layer of the decoder."""


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
        cross=CrossSpec(num_heads=num_heads, head_dim=head_dim, scale=head_dim**-0.5),
        norms={
            **layer.norms,
            NormPlace.BEFORE_CROSS: dataclasses.replace(norm, path=f"{prefix}cross_norm"),
        },
        linears={
            **layer.linears,
            CROSS_QUERY: _group(f"{prefix}{CROSS_QUERY}", hidden, {"cross_attn.q_proj": size}),
            CROSS_KV: _group(f"{prefix}{CROSS_KV}", hidden, keys_and_values),
            CROSS_OUTPUT: _group(f"{prefix}{CROSS_OUTPUT}", size, {"cross_attn.out_proj": hidden}),
        },
    )


def _group(path: str, in_features: int, outputs: Mapping[str, int]) -> LinearGroup:
    return LinearGroup(
        paths=tuple(f"{path}.{module}" for module in outputs),
        outputs=outputs,
        in_features=in_features,
        has_bias=False,
    )


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
    return assemble_parts(assembly, HostAdapters()), encoder
