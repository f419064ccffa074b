"""Part of a model that one stage of a pipeline computes: a range of layers. Free of torch.

Like a rank's part (`models.sharding`) it is a `ModelSpec` of its own, of fewer layers. A stage is
taken of a rank's part, so that both kinds of parallelism go together (ADR 36).
"""

import dataclasses
import itertools

from loraplex.core.errors import ConfigError
from loraplex.models.spec import LayerSpec, ModelSpec


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineStage:
    """Place of a stage in its pipeline."""

    index: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1


ONLY_STAGE = PipelineStage()


def stage(spec: ModelSpec, place: PipelineStage) -> ModelSpec:
    """Return what this stage computes.

    Raises ConfigError if there are too few layers that may begin a stage, or if the model has an
    encoder or own inputs of layers, which only a whole model can have.
    """
    if place.size == 1:
        return spec
    if spec.encoder is not None:
        raise ConfigError(
            f"{spec.architecture} has an encoder, whose output all layers read: "
            f"pipeline_parallel_size must be 1, got {place.size}",
            param="pipeline_parallel_size",
        )
    if spec.layer_input_size:
        raise ConfigError(
            f"layers of {spec.architecture} read vectors that are made of the token embedding: "
            f"pipeline_parallel_size must be 1, got {place.size}",
            param="pipeline_parallel_size",
        )
    if place.size > spec.num_layers:
        raise ConfigError(
            f"{spec.architecture} has {spec.num_layers} layers, and each stage needs one: "
            f"pipeline_parallel_size must be at most {spec.num_layers}, got {place.size}",
            param="pipeline_parallel_size",
        )
    borders = _borders(spec.whole, place.size)
    first, end = borders[place.index : place.index + 2]
    return dataclasses.replace(
        spec,
        layers=spec.layers[first:end],
        first_layer=first,
        first_layers=tuple(borders[:-1]),
        stage_of=spec,
    )


def layer_alone(spec: ModelSpec, layer: int) -> ModelSpec:
    """Return the stage that computes one layer of a whole model, in a pipeline of such stages."""
    return dataclasses.replace(
        spec,
        layers=spec.layers[layer : layer + 1],
        first_layer=layer,
        first_layers=tuple(range(spec.num_layers)),
        stage_of=spec,
    )


def _borders(spec: ModelSpec, num_stages: int) -> list[int]:
    """Return the first layer of each stage and the end: stages read about equally many weights.

    The output layer counts to the last one. The embedding is only looked up. Raises ConfigError if
    too few layers can be the first of a stage.
    """
    whole = [layer for layer in range(1, spec.num_layers) if not _is_cut(spec, layer)]
    if len(whole) < num_stages - 1:
        raise ConfigError(
            f"layers of {spec.architecture} read keys and values of earlier ones, and both must be "
            f"in one stage: pipeline_parallel_size must be at most {len(whole) + 1}, got "
            f"{num_stages}",
            param="pipeline_parallel_size",
        )
    read = list(itertools.accumulate(map(_num_weights, spec.layers), initial=0))
    total = read[-1] + spec.vocab_size * (spec.embedding_size or spec.hidden_size)
    borders = [0]
    for index in range(1, num_stages):
        possible = [layer for layer in whole if layer > borders[-1]]
        possible = possible[: len(possible) - (num_stages - 1 - index)]
        wanted = total * index // num_stages
        borders.append(min(possible, key=lambda layer: abs(read[layer] - wanted)))
    return [*borders, spec.num_layers]


def _is_cut(spec: ModelSpec, border: int) -> bool:
    """Whether a layer from this one on reads keys and values of a layer before it."""
    return any(
        index - mixer.kv_distance < border
        for index, layer in enumerate(spec.layers[border:], border)
        for mixer in layer.mixers
    )


def _num_weights(layer: LayerSpec) -> int:
    return sum(
        group.in_features * sum(group.outputs.values()) * (group.num_experts or 1)
        for group in layer.linears.values()
    )
