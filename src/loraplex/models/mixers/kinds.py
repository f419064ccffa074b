"""Which class computes a kind of mixer: the one table that a new kind is added to."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from loraplex.kernels.ops import Kernels
from loraplex.models.mixers.attention import Attention
from loraplex.models.mixers.convolution import Convolution
from loraplex.models.mixers.cross import CrossAttention
from loraplex.models.mixers.delta import Delta
from loraplex.models.mixers.latent import Latent
from loraplex.models.mixers.mixer import LayerPlace, Mixer
from loraplex.models.mixers.ssm import Ssm
from loraplex.models.parameters import LayerParameters
from loraplex.models.specs.attention import AttentionSpec
from loraplex.models.specs.convolution import ConvSpec
from loraplex.models.specs.cross import CrossSpec
from loraplex.models.specs.delta import DeltaSpec
from loraplex.models.specs.latent import LatentSpec
from loraplex.models.specs.part import MixerSpec
from loraplex.models.specs.ssm import SsmSpec

MixerClass = Callable[[Any, LayerPlace, LayerParameters, Kernels], Mixer]
"""Its first parameter has the type of the key."""

MIXERS: Final[Mapping[type[MixerSpec], MixerClass]] = MappingProxyType(
    {
        AttentionSpec: Attention,
        DeltaSpec: Delta,
        SsmSpec: Ssm,
        ConvSpec: Convolution,
        CrossSpec: CrossAttention,
        LatentSpec: Latent,
    }
)


def make_mixer(
    spec: MixerSpec, place: LayerPlace, parameters: LayerParameters, kernels: Kernels
) -> Mixer:
    """Return the mixer of a layer; parameters: packed by these kernels."""
    return MIXERS[type(spec)](spec, place, parameters, kernels)
