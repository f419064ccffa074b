"""Published hybrid models: what is read of their config.json, their plans, and what is refused."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from loraplex.app.plan import plan_memory
from loraplex.core.config import ModelConfig
from loraplex.core.errors import ConfigError, LoraplexError, UnsupportedModelError
from loraplex.models.parameters import checkpoint_shapes
from loraplex.models.registry import read_config
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import AttentionSpec
from loraplex.models.specs.convolution import ConvSpec
from loraplex.models.specs.delta import DeltaSpec
from loraplex.models.specs.ssm import SsmSpec
from support.families.published_hybrids import MODELS, PublishedHybrid
from support.naming import naming

LETTERS = {AttentionSpec: "A", DeltaSpec: "D", SsmSpec: "S", ConvSpec: "C", type(None): "-"}
NUM_SEQS = 4


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> PublishedHybrid:
    return MODELS[request.param]


def write(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read(folder: Path, name: str, **changes: Any) -> ModelSpec:
    """Read a config.json with changes; those of a wrapper are of its text_config."""
    config = copy.deepcopy(dict(MODELS[name].config))
    config.get("text_config", config).update(changes)
    return read_config(write(folder, config))


def test_layers_and_parameters(model: PublishedHybrid, tmp_path: Path) -> None:
    spec = read_config(write(tmp_path, model.config))
    assert "".join(LETTERS[type(layer.mixer)] for layer in spec.layers) == model.kinds
    shapes = checkpoint_shapes(spec)
    assert sum(map(math.prod, shapes.values())) == model.num_parameters
    parts = [layer.feed_forward for layer in spec.layers]
    assert sum(part is not None and part.routing is not None for part in parts) == (
        model.num_expert_layers
    )
    assert spec.default_max_model_len == model.default_max_model_len
    assert [spec.names.canonical(name) for name in model.ignored] == [None] * len(model.ignored)


def test_a_plan_has_a_state_of_each_sequence(model: PublishedHybrid, tmp_path: Path) -> None:
    folder = write(tmp_path, model.config)
    settings = ModelConfig(
        path=str(folder), device="cuda", memory_bytes=400 << 30, max_num_seqs=NUM_SEQS
    )
    memory = plan_memory(settings, ()).memory
    assert memory.weights_bytes == pytest.approx(2 * model.num_parameters, rel=0.02)
    assert memory.kv.tokens >= model.default_max_model_len
    states = [group for group in memory.kv.groups if group.state_tokens]
    sizes = [_state_bytes(layer.mixer) for layer in read_config(folder).layers]
    assert sum(group.block_bytes for group in states) == sum(sizes)
    assert all(group.blocks >= 2 * NUM_SEQS for group in states)


def _state_bytes(mixer: object) -> int:
    """Return the bytes of a layer's state, which is float32."""
    match mixer:
        case DeltaSpec():
            return 4 * mixer.num_value_heads * mixer.key_size * mixer.value_size
        case SsmSpec():
            return 4 * mixer.num_heads * mixer.head_size * mixer.state_size
    return 0


@pytest.mark.parametrize(
    ("name", "changes", "error", "named"),
    [
        (
            "bamba-9b",
            {"architectures": ["FalconH1ForCausalLM"]},
            UnsupportedModelError,
            ("FalconH1ForCausalLM", "side by side"),
        ),
        *(
            ("bamba-9b", {"architectures": [other]}, UnsupportedModelError, (other,))
            for other in ("JambaForCausalLM", "Zamba2ForCausalLM", "Mamba2ForCausalLM")
        ),
        *(
            (name, {"mamba_ssm_dtype": "bfloat16"}, UnsupportedModelError, ("mamba_ssm_dtype",))
            for name in ("qwen3.5-4b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b")
        ),
        (
            "qwen3.5-4b",
            {"attn_output_gate": False},
            UnsupportedModelError,
            ("attn_output_gate", "text_config"),
        ),
        (
            "qwen3.5-27b",
            {"linear_num_value_heads": 40},
            ConfigError,
            ("linear_num_value_heads", 40, "linear_num_key_heads", 16),
        ),
        (
            "qwen3.5-4b",
            {"layer_types": [*["linear_attention"] * 31, "sliding_attention"]},
            UnsupportedModelError,
            ("sliding_attention", "linear_attention"),
        ),
        (
            "qwen3-next-80b-a3b",
            {"num_experts_per_tok": 513},
            ConfigError,
            ("num_experts_per_tok", 513, 512),
        ),
        (
            "granite-4.0-h-tiny",
            {"position_embedding_type": "alibi"},
            UnsupportedModelError,
            ("position_embedding_type", "alibi", "rope"),
        ),
        (
            "granite-4.0-h-micro",
            {"mamba_n_groups": 5},
            ConfigError,
            ("mamba_n_heads", 64, "mamba_n_groups", 5),
        ),
        (
            "granite-4.0-h-small",
            {"layer_types": ["mamba"] * 39},
            ConfigError,
            ("layer_types", 39, "num_hidden_layers", 40),
        ),
        (
            "granite-4.0-h-small",
            {"time_step_limit": [0.5, 0.1]},
            ConfigError,
            ("time_step_limit", 0.5, 0.1),
        ),
        (
            "nemotron-h-8b",
            {"hybrid_override_pattern": "M-M?" * 13},
            UnsupportedModelError,
            ("?", "M"),
        ),
        (
            "nemotron-h-8b",
            {"mlp_bias": True},
            UnsupportedModelError,
            ("mlp_bias",),
        ),
        (
            "nemotron-h-47b",
            {"mamba_hidden_act": "gelu"},
            UnsupportedModelError,
            ("mamba_hidden_act", "gelu", "silu"),
        ),
        (
            "nemotron-3-nano-30b-a3b",
            {"num_experts_per_tok": 129},
            ConfigError,
            ("num_experts_per_tok", 129, "n_routed_experts", 128),
        ),
        (
            "lfm2-350m",
            {"layer_types": ["mamba"] * 16},
            UnsupportedModelError,
            ("mamba", "conv"),
        ),
        ("lfm2-8b-a1b", {"num_experts": 3}, ConfigError, ("num_experts_per_tok", 4, 3)),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path,
    name: str,
    changes: dict[str, Any],
    error: type[LoraplexError],
    named: tuple[object, ...],
) -> None:
    with pytest.raises(error, match=naming("config.json", *named)):
        read(tmp_path, name, **changes)
