"""The angles of each rope type, against transformers' own initialisers and against algebra."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from loraplex.core.errors import UnsupportedModelError
from loraplex.core.plan import RotationBorder
from loraplex.models.batch import RotatedSpan
from loraplex.models.rope import (
    RotaryTable,
    attention_scale,
    inverse_frequencies,
    rotation_border,
)
from loraplex.models.specs.part import RopeConfig
from support.naming import naming
from support.tiny_decoder import tiny_spec

HEAD_DIM = 32
MAX_POSITIONS = 128
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.5},
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.25},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn without truncation": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
        "attention_factor": 1.5,
    },
    "yarn with mscale": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.5,
        "mscale_all_dim": 2.0,
        "beta_fast": 4.0,
        "beta_slow": 4.0,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
LENGTH_ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 3.0},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0 + i / 10 for i in range(HEAD_DIM // 2)],
        "long_factor": [2.0 + i for i in range(HEAD_DIM // 2)],
    },
}


def rotary_table(rope: RopeConfig, max_model_len: int) -> RotaryTable:
    return RotaryTable(
        rope,
        HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        max_model_len=max_model_len,
        device=torch.device("cpu"),
    )


def rope_config(rope_type: str, values: dict[str, Any]) -> RopeConfig:
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return RopeConfig(rope_type=rope_type, theta=5000.0, **values)


def transformers_config(rope_type: str, values: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": rope_type, "rope_theta": 5000.0, **values},
    )


@pytest.mark.parametrize("name", ROPES)
def test_same_as_transformers(name: str) -> None:
    rope_type = name.split()[0]
    expected, scale = ROPE_INIT_FUNCTIONS[rope_type](
        transformers_config(rope_type, ROPES[name]), torch.device("cpu")
    )
    rope = rope_config(rope_type, ROPES[name])
    torch.testing.assert_close(inverse_frequencies(rope, HEAD_DIM), expected, rtol=1e-6, atol=0)
    assert attention_scale(rope) == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("name", LENGTH_ROPES)
@pytest.mark.parametrize("rotation_length", [0, 33, 130, 200])
def test_each_position_has_the_angle_that_transformers_gives_its_length(
    name: str, rotation_length: int
) -> None:
    values = LENGTH_ROPES[name]
    rope = rope_config(name, values)
    table = rotary_table(rope, 300)
    cos, sin = table.cos.clone(), table.sin.clone()
    if rotation_length:
        table.rotate_span(cos, sin, RotatedSpan(0, 0, rotation_length - 1, rotation_length))
    for position in (0, 5, 31, 32, MAX_POSITIONS - 1, MAX_POSITIONS, 199, 200, 299):
        frequencies, scale = ROPE_INIT_FUNCTIONS[name](
            transformers_config(name, values),
            torch.device("cpu"),
            seq_len=max(position + 1, rotation_length),
        )
        angles = position * frequencies
        torch.testing.assert_close(cos[position], angles.cos() * scale, rtol=0, atol=3e-5)
        torch.testing.assert_close(sin[position], angles.sin() * scale, rtol=0, atol=3e-5)


def test_a_span_in_the_middle_of_a_batch() -> None:
    table = rotary_table(rope_config("dynamic", LENGTH_ROPES["dynamic"]), 300)
    whole, part = table.cos[:210].clone(), table.cos[:210].clone()
    table.rotate_span(whole, whole.clone(), RotatedSpan(0, 0, 199, 200))
    table.rotate_span(part, part.clone(), RotatedSpan(7, 50, 20, 200))
    assert torch.equal(part[7:27], whole[50:70])
    assert torch.equal(part[:7], table.cos[:7])
    assert torch.equal(part[27:], table.cos[27:210])


def test_an_unstretched_longrope_has_no_scale() -> None:
    rope = rope_config("longrope", LENGTH_ROPES["longrope"])
    assert attention_scale(dataclasses.replace(rope, factor=1.0)) == 1.0


def test_where_the_length_begins_to_count() -> None:
    def border(*ropes: RopeConfig, max_model_len: int = 300) -> RotationBorder | None:
        spec = tiny_spec(num_hidden_layers=len(ropes), max_position_embeddings=MAX_POSITIONS)
        layers = (
            dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, rope=rope))
            for layer, rope in zip(spec.layers, ropes, strict=True)
        )
        return rotation_border(dataclasses.replace(spec, layers=tuple(layers)), max_model_len)

    plain = RopeConfig()
    dynamic = rope_config("dynamic", LENGTH_ROPES["dynamic"])
    longrope = rope_config("longrope", LENGTH_ROPES["longrope"])
    phi = dataclasses.replace(longrope, recomputes=True)
    assert border(plain) is None
    assert border(dynamic, max_model_len=MAX_POSITIONS) is None
    assert border(dynamic, plain) == RotationBorder(MAX_POSITIONS, by_prompt_length=True)
    assert border(longrope) == RotationBorder(32)
    assert border(phi, phi) == RotationBorder(32, recomputes=True)
    with pytest.raises(UnsupportedModelError, match=naming("longrope", "dynamic")):
        border(longrope, dynamic)


def test_table_holds_scaled_cosines_and_sines() -> None:
    rope = rope_config("yarn", ROPES["yarn"])
    table = rotary_table(rope, 10)
    cos, sin = table.cos[[9, 0]], table.sin[[9, 0]]
    assert cos.shape == sin.shape == (2, HEAD_DIM // 2)
    scale = 0.1 * math.log(4.0) + 1
    torch.testing.assert_close(cos[1], torch.full((HEAD_DIM // 2,), scale))
    torch.testing.assert_close(cos[0] ** 2 + sin[0] ** 2, torch.full((HEAD_DIM // 2,), scale**2))


def test_default_frequencies_are_a_geometric_series() -> None:
    frequencies = inverse_frequencies(RopeConfig(theta=100.0), 4)
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1]))
