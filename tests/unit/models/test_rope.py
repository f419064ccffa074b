"""The angles of each rope type, against transformers' own initialisers and against algebra."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from loraplex.models.rope import RotaryTable, attention_scale, inverse_frequencies
from loraplex.models.spec import RopeConfig

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
@pytest.mark.parametrize("max_model_len", [32, 33])
def test_same_as_transformers(name: str, max_model_len: int) -> None:
    rope_type = name.split()[0]
    expected, scale = ROPE_INIT_FUNCTIONS[rope_type](
        transformers_config(rope_type, ROPES[name]), torch.device("cpu"), seq_len=max_model_len
    )
    rope = rope_config(rope_type, ROPES[name])
    actual = inverse_frequencies(rope, HEAD_DIM, max_model_len)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    assert attention_scale(rope) == pytest.approx(scale, rel=1e-12)


def test_longrope_of_the_served_length() -> None:
    rope = rope_config("longrope", ROPES["longrope"])
    short, long = (inverse_frequencies(rope, HEAD_DIM, length) for length in (32, 33))
    assert not torch.equal(short, long)
    unstretched = dataclasses.replace(rope, factor=1.0)
    assert attention_scale(unstretched) == 1.0


def test_dynamic_follows_the_length_so_far() -> None:
    """Position p has the angle that transformers gives a sequence of p + 1 tokens."""
    values = {"factor": 3.0}
    table = rotary_table(rope_config("dynamic", values), 300)
    for position in (0, 5, MAX_POSITIONS - 1, MAX_POSITIONS, 299):
        frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](
            transformers_config("dynamic", values), torch.device("cpu"), seq_len=position + 1
        )
        cos, sin = table.cos[[position]], table.sin[[position]]
        torch.testing.assert_close(cos[0], (position * frequencies).cos(), rtol=0, atol=2e-5)
        torch.testing.assert_close(sin[0], (position * frequencies).sin(), rtol=0, atol=2e-5)


def test_table_holds_scaled_cosines_and_sines() -> None:
    rope = rope_config("yarn", ROPES["yarn"])
    table = rotary_table(rope, 10)
    cos, sin = table.cos[[9, 0]], table.sin[[9, 0]]
    assert cos.shape == sin.shape == (2, HEAD_DIM // 2)
    scale = 0.1 * math.log(4.0) + 1
    torch.testing.assert_close(cos[1], torch.full((HEAD_DIM // 2,), scale))
    torch.testing.assert_close(cos[0] ** 2 + sin[0] ** 2, torch.full((HEAD_DIM // 2,), scale**2))


def test_default_frequencies_are_a_geometric_series() -> None:
    frequencies = inverse_frequencies(RopeConfig(theta=100.0), 4, 10)
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1]))
