"""Models that generate nothing: their outputs are a function of their inputs."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from loraplex.frontends.kserve.models.inputs import Inputs
from loraplex.frontends.kserve.models.kinds import ModelKind
from loraplex.frontends.kserve.models.postprocessing import POSTPROCESSING, postprocess
from loraplex.frontends.kserve.models.preprocessing import PREPROCESSING, preprocess
from loraplex.frontends.kserve.models.texts import ModelTexts
from loraplex.frontends.kserve.models.triton_model import TritonModel
from loraplex.frontends.kserve.tensors import Tensor

Computation = Callable[[TritonModel, Sequence[Inputs], ModelTexts], list[Tensor]]

_COMPUTATIONS: Mapping[str, Computation] = MappingProxyType(
    {PREPROCESSING.name: preprocess, POSTPROCESSING.name: postprocess}
)
_INLINE_BYTES = 1 << 14
"""Size of an input that is computed inline: about a millisecond, too short for a thread."""


def is_computation(kind: ModelKind) -> bool:
    return kind.name in _COMPUTATIONS


async def compute(
    model: TritonModel, elements: Sequence[Inputs], texts: ModelTexts, num_bytes: int
) -> list[Tensor]:
    """The outputs of a batch; num_bytes is the size of its inputs."""
    computation = _COMPUTATIONS[model.kind.name]
    if num_bytes <= _INLINE_BYTES:
        return computation(model, elements, texts)
    return await asyncio.to_thread(computation, model, elements, texts)
