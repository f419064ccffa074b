"""Precision of a base model's linear weights while it is served. Independent of torch."""

import enum


class WeightPrecision(enum.StrEnum):
    """Values of the setting `quantization`."""

    NATIVE = "none"
    """The data type of the model."""
    INT8 = "int8"
    """8 bits, a scale for each output and 512 inputs."""
    INT4 = "int4"
    """4 bits, a scale for each output and 128 inputs (64 or 32 where 128 does not divide them)."""
    FP8 = "fp8"
    """8 bits, e4m3, a scale for each output; a GPU multiplies them as they are, by activations that
    are rounded to the same type with a scale for each token. The lm_head is INT8."""
