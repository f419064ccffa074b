"""adapter_config.json with any JSON value in any field: the adapter is staged, or refused."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from loraplex.adapters.examination import examine
from loraplex.adapters.formats.peft_config import PeftConfig
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.staged import StageRequest
from loraplex.adapters.staging_worker import stage
from loraplex.core.errors import RequestError
from support.examples import examples

SHAPES = BaseShapes(2, {"q_proj": (8, 12)}, vocab_size=50, hidden_size=8)
FIELDS = (
    *PeftConfig.__struct_encode_fields__,
    *("peft_type", "init_lora_weights", "loftq_config", "use_qalora", "layer_replication"),
    *("fan_in_fan_out", "of_tomorrow"),
)
NAMES = st.sampled_from(["q_proj", "embed_tokens", "lm_head", "model.embed_tokens", ".*", "(", ""])
NUMBERS = st.one_of(
    st.integers(-3, 60),
    st.sampled_from([2**31, 2**63, 2**64, 10**400, -(10**400), 1e38, 1e308, -1e308, 1e-320, 0.5]),
)
SIMPLE = st.one_of(st.none(), st.booleans(), NUMBERS, NAMES, st.text(max_size=5))
VALUES = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(NAMES, st.text(max_size=3)), inner, max_size=3),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with LoRA of q_proj, which adapter_config.json is written into."""
    folder = tmp_path_factory.mktemp("adapter")
    q_proj = "base_model.model.model.layers.0.self_attn.q_proj"
    tokens = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    tensors = {
        f"{q_proj}.lora_A.weight": np.ones((2, 8), "f4"),
        f"{q_proj}.lora_B.weight": np.ones((12, 2), "f4"),
        tokens: np.ones((1, 8), "f4"),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@examples(4)
@example(field="r", value=10**400)
@example(field="rank_pattern", value={"q_proj": 10**400})
@example(field="lora_alpha", value=1e308)
@example(field="alpha_pattern", value={"q_proj": 1e308})
@example(field="trainable_token_indices", value=[2**63])
@example(field="of_tomorrow", value=10**400)
@example(field="layers_to_transform", value=-(10**400))
@given(field=st.sampled_from(FIELDS), value=VALUES)
def test_any_value_is_taken_or_refused(field: str, value: object, folder: Path) -> None:
    config = {
        "peft_type": "LORA",
        "r": 2,
        "target_modules": ["q_proj"],
        "trainable_token_indices": [7],
    }
    check(json.dumps(config | {field: value}), folder)


@pytest.mark.parametrize("depth", [10, 300, 900, 5000])
def test_deeply_nested_values(depth: int, folder: Path) -> None:
    value = "[" * depth + "]" * depth
    check(f'{{"peft_type": "LORA", "of_tomorrow": {value}}}', folder)
    check(f'{{"peft_type": {value}}}', folder)


def check(config: str, folder: Path) -> None:
    """Raise any error but those about the adapter."""
    (folder / "adapter_config.json").write_text(config)
    request = StageRequest(
        request_id=1,
        path=str(folder),
        state_dir=str(folder / "state"),
        shapes=SHAPES,
        pool_dtype="bfloat16",
    )
    with contextlib.suppress(RequestError):
        stage(request)
    with contextlib.suppress(RequestError):
        examine(request)
