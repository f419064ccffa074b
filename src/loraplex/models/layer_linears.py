"""The linear layers of one decoder layer, in the groups in which they are computed. Torch-free."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from loraplex.models.config import DecoderConfig


@dataclasses.dataclass(frozen=True, slots=True)
class LinearGroup:
    """Layers of one input, computed as one: their outputs lie side by side."""

    paths: tuple[str, ...]
    """Of the modules, in the checkpoint's decoder layer."""
    outputs: Mapping[str, int]
    """out_features by what adapters call the module, in the order of `paths`."""
    in_features: int
    has_bias: bool

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.outputs)

    @property
    def first_outputs(self) -> tuple[int, ...]:
        """Of each module, within the group's."""
        return tuple(itertools.accumulate(self.outputs.values(), initial=0))[:-1]


class LayerLinears(NamedTuple):
    """In the order of use."""

    qkv: LinearGroup
    o: LinearGroup
    up: LinearGroup
    """With the gate, if there is one, before it."""
    down: LinearGroup


def layer_linears(config: DecoderConfig) -> LayerLinears:
    names, hidden, inner = config.names, config.hidden_size, config.intermediate_size
    qkv_sizes: tuple[int, ...] = (config.q_size, config.kv_size, config.kv_size)
    if len(names.qkv) == 1:
        qkv_sizes = (sum(qkv_sizes),)

    def group(
        paths: tuple[str, ...], sizes: tuple[int, ...], in_features: int, has_bias: bool
    ) -> LinearGroup:
        outputs = dict(zip(map(names.module, paths), sizes, strict=True))
        return LinearGroup(paths, outputs, in_features, has_bias)

    return LayerLinears(
        qkv=group(names.qkv, qkv_sizes, hidden, config.qkv_bias),
        o=group((names.o,), (hidden,), config.q_size, config.o_bias),
        up=group(names.up, (inner,) * len(names.up), hidden, config.mlp_bias),
        down=group((names.down,), (hidden,), inner, config.mlp_bias),
    )


def module_shapes(config: DecoderConfig) -> Mapping[str, tuple[int, int]]:
    """(in_features, out_features) of every linear layer of a decoder layer that LoRA may adapt."""
    return {
        module: (group.in_features, out_features)
        for group in layer_linears(config)
        for module, out_features in group.outputs.items()
    }


def biased_modules(config: DecoderConfig) -> tuple[str, ...]:
    """Those of module_shapes that have a bias."""
    return tuple(_biased(config))


def _biased(config: DecoderConfig) -> Iterator[str]:
    for group in layer_linears(config):
        if group.has_bias:
            yield from group.modules
