"""LoRA folders of mlx-lm: adapter_config.json and adapters.safetensors, as PEFT's tensors.

A linear layer has lora_a [in, rank] and lora_b [rank, out], both transposed PEFT's, and with DoRA
its magnitude m [out]; scale * (x lora_a) lora_b is added. Those of an embedding are [vocabulary,
rank] and [rank, hidden], and also change an output layer that is tied to it. Experts lie in one
tensor, [experts, rank, in] and [experts, out, rank]. mlx_lm/tuner/lora.py and dora.py of mlx-lm.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from loraplex.adapters.formats.peft_config import CONFIG_NAME, PeftConfig
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.adapter import EMBEDDING, LM_HEAD
from loraplex.core.errors import InvalidAdapterError, UnsupportedFeatureError

WEIGHTS_NAME: Final = "adapters.safetensors"
_FACTOR: Final = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[ab])")
_MAGNITUDE: Final = ".m"
_EXPERTS: Final = ".switch_mlp."


class _LoraParameters(msgspec.Struct, frozen=True):
    rank: int
    scale: float
    alpha: Any = None


class MlxConfig(msgspec.Struct, frozen=True):
    """Contents of adapter_config.json that concern the weights."""

    lora_parameters: _LoraParameters
    fine_tune_type: str = "lora"
    model: str | None = None
    """The base model."""

    @property
    def as_peft(self) -> PeftConfig:
        """The config of PEFT that has the same effect."""
        own = self.lora_parameters
        return PeftConfig(
            r=own.rank, lora_alpha=own.scale * own.rank, use_dora=self.fine_tune_type == "dora"
        )


def parse_config(content: bytes) -> MlxConfig:
    """Parse adapter_config.json.

    Raises InvalidAdapterError if it is broken, UnsupportedFeatureError for features that are not
    served.
    """
    try:
        config = msgspec.json.decode(content, type=MlxConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidAdapterError(f"not mlx-lm's {CONFIG_NAME}: {error}") from error
    if config.fine_tune_type not in ("lora", "dora"):
        raise UnsupportedFeatureError(
            f"fine_tune_type is {config.fine_tune_type[:80]!r}; 'lora' and 'dora' are served"
        )
    if config.lora_parameters.alpha is not None:
        raise UnsupportedFeatureError(
            "lora_parameters has alpha, by which early versions of mlx-lm multiplied the scale and "
            "later ones do not: put the factor that the training used into scale, and remove alpha"
        )
    if not 1 <= config.lora_parameters.rank < 2**31:
        raise InvalidAdapterError("lora_parameters.rank must be at least 1")
    return config


def peft_tensors(
    tensors: Mapping[str, RawTensor], *, ties_embeddings: bool
) -> dict[str, RawTensor]:
    """Return the tensors as PEFT has them; others keep their names.

    ties_embeddings: whether the output layer of the base is the embedding. Raises
    InvalidAdapterError for a factor of another shape.
    """
    found: dict[str, RawTensor] = {}
    for name, tensor in tensors.items():
        match = _FACTOR.fullmatch(name)
        if match is None:
            module = name.removesuffix(_MAGNITUDE)
            found[name if module == name else f"{module}.lora_magnitude_vector"] = tensor
            continue
        module, factor = match["module"], match["factor"].upper()
        if _EXPERTS in module:
            found |= _of_experts(name, module, factor, tensor)
            continue
        _check_axes(name, tensor, 2)
        if module.rpartition(".")[2] != EMBEDDING:
            found[f"{module}.lora_{factor}.weight"] = _transposed(tensor)
            continue
        found[f"{module}.lora_embedding_{factor}"] = _transposed(tensor)
        if ties_embeddings:
            found[f"{LM_HEAD}.lora_{'B' if factor == 'A' else 'A'}.weight"] = tensor
    return found


def _of_experts(name: str, module: str, factor: str, tensor: RawTensor) -> dict[str, RawTensor]:
    _check_axes(name, tensor, 3)
    data = memoryview(tensor.data)
    size = tensor.num_bytes // max(1, tensor.shape[0])
    return {
        f"{module.replace(_EXPERTS, f'.experts.{expert}.')}.lora_{factor}.weight": RawTensor(
            tensor.dtype, tensor.shape[1:], data[expert * size : (expert + 1) * size]
        )
        for expert in range(tensor.shape[0])
    }


def _check_axes(name: str, tensor: RawTensor, number: int) -> None:
    if len(tensor.shape) != number or not tensor.is_float:
        raise InvalidAdapterError(
            f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}; floats with {number} axes "
            "are needed"
        )


def _transposed(tensor: RawTensor) -> RawTensor:
    bits = tensor.bits().T
    return RawTensor(tensor.dtype, bits.shape, bits.tobytes())
