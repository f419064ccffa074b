"""The functions between the two products of an MLP without a gate. Free of torch."""

import enum


class Activation(enum.StrEnum):
    GELU = "gelu"
    """x Phi(x), with the normal distribution's Phi (arXiv:1606.08415)."""
    GELU_TANH = "gelu_tanh"
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2: the same article's approximation."""
    RELU = "relu"
