"""Part of a model that one rank of several computes: heads, inner units and logits. Free of torch.

A part is a `ModelSpec` of its own, of a smaller model, whose linear layers remember which slices of
the checkpoint they are. So KV cache, adapter pool, sizes and packing follow from it (ADR 34).
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Final

from loraplex.core.errors import ConfigError
from loraplex.core.plan import AdapterShare
from loraplex.models.linear_group import OutputSpan, TensorShard, share_of
from loraplex.models.spec import DOWN, SHARED_DOWN, SHARED_UP, UP, LayerSpec, ModelSpec
from loraplex.models.specs.part import Divided, MixerSpec

WHOLE: Final = TensorShard()


def shard(spec: ModelSpec, place: TensorShard) -> ModelSpec:
    """Return what this rank computes. Raises ConfigError if the model cannot be divided so."""
    if place.size == 1:
        return spec
    return dataclasses.replace(
        spec,
        layers=tuple(_layer(layer, place, spec) for layer in spec.layers),
        encoder=None
        if spec.encoder is None
        else dataclasses.replace(
            spec.encoder, layers=tuple(_layer(layer, place, spec) for layer in spec.encoder.layers)
        ),
        own_logits=share_of(spec.vocab_size, *place),
        shard_of=spec,
    )


def adapter_share(spec: ModelSpec, largest_piece: int) -> AdapterShare | None:
    """Return what of an adapter a rank with this spec holds; None: all.

    largest_piece: elements of the largest piece that staging makes of a vector.
    """
    if spec.shard_of is None:
        return None
    return AdapterShare(tuple(dict(shapes) for shapes in spec.module_shapes), largest_piece)


def _layer(layer: LayerSpec, place: TensorShard, spec: ModelSpec) -> LayerSpec:
    for divided in _divided(layer):
        if not divided.allows(place.size):
            raise _indivisible(spec, place, divided.what)
    linears = dict(layer.linears)

    def own(mixer: MixerSpec | None) -> MixerSpec | None:
        if mixer is None:
            return None
        part, splits = mixer.shard(place)
        for name, split in splits.items():
            linears[name] = linears[name].split(outputs=split.outputs, inputs=split.inputs)
        return part

    feed_forward = layer.feed_forward
    for up, down in ((UP, DOWN), (SHARED_UP, SHARED_DOWN)):
        if up in linears:
            inner = share_of(linears[down].in_features, *place)
            linears[up] = linears[up].split(
                outputs=[_within(part, inner) for part in linears[up].part_spans]
            )
            linears[down] = linears[down].split(inputs=inner)
            if up == UP and feed_forward is not None:
                feed_forward = dataclasses.replace(feed_forward, inner_size=inner.size)
    return dataclasses.replace(
        layer,
        mixer=own(layer.mixer),
        cross=own(layer.cross),
        feed_forward=feed_forward,
        linears=linears,
    )


def _divided(layer: LayerSpec) -> Iterator[Divided]:
    """Yield what ranks have to share equally."""
    for mixer in layer.mixers:
        yield from mixer.divisors()
    for name in (DOWN, SHARED_DOWN):
        if name in layer.linears:
            size = layer.linears[name].in_features
            yield Divided(f"an inner size of {size}", size)


def _within(part: OutputSpan, inner: OutputSpan) -> OutputSpan:
    """Return the outputs of a part, the gate's or those that it multiplies, of inner units."""
    return OutputSpan(part.first + inner.first, part.first + inner.end)


def _indivisible(spec: ModelSpec, place: TensorShard, what: str) -> ConfigError:
    divided = list(itertools.chain.from_iterable(map(_divided, spec.adapted_layers)))
    sizes = [size for size in range(1, 65) if all(each.allows(size) for each in divided)]
    return ConfigError(
        f"{spec.architecture} has layers with {what}, which {place.size} ranks cannot share "
        f"equally: tensor_parallel_size must be one of {', '.join(map(str, sizes))}",
        param="tensor_parallel_size",
    )
