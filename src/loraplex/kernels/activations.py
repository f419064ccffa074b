"""Activation functions of feed-forward layers. Free of torch."""

import enum


class Activation(enum.StrEnum):
    GELU = "gelu"
    """x Phi(x), with the normal distribution's Phi (arXiv:1606.08415)."""
    GELU_TANH = "gelu_tanh"
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2: the same article's approximation."""
    RELU = "relu"
    SQUARED_RELU = "squared_relu"
    """relu(x)^2 (arXiv:2109.08668)."""
    SILU = "silu"
    """x sigmoid(x)."""
    CLAMPED_SWIGLU = "clamped_swiglu"
    """Only as a gate, of GPT-OSS: (u + 1) g sigmoid(1.702 g), g = min(gate, 7), u = up within 7."""
