"""Hugging Face's names of activations. Free of torch."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from loraplex.kernels.activations import Activation

ACTIVATIONS: Final[Mapping[str, Activation]] = MappingProxyType(
    {
        "gelu": Activation.GELU,
        "gelu_new": Activation.GELU_TANH,
        "gelu_fast": Activation.GELU_TANH,
        "gelu_pytorch_tanh": Activation.GELU_TANH,
        "relu": Activation.RELU,
    }
)
"""Of MLPs without a gate."""
