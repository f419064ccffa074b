"""Activation functions of feed-forward layers. Free of torch."""

import enum
from typing import Final


class Activation(enum.StrEnum):
    GELU = "gelu"
    """x Phi(x), with the normal distribution's Phi (arXiv:1606.08415)."""
    GELU_TANH = "gelu_tanh"
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2: the same article's approximation."""
    RELU = "relu"
    SILU = "silu"
    """x sigmoid(x)."""


UNGATED: Final = (Activation.GELU, Activation.GELU_TANH, Activation.RELU)
"""Activations that every backend applies alone (`Kernels.activate`)."""

GATES: Final = (Activation.SILU,)
"""Activations that every backend multiplies by a second projection (`Kernels.gate`)."""
