"""A server shows what a latent cache saves: KV memory of a token in layers of V2 Lite's shape."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from loraplex.testing.running_server import running
from support import tiny_tokenizers
from support.tiny_model import TinyCheckpoint
from support.triton_repositories import local_flags

pytestmark = pytest.mark.slow

NUM_HEADS, KEY_SIZE, ROPE_SIZE, VALUE_SIZE, LATENT_SIZE = 16, 128, 64, 128, 512
SIZES = {
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}
LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "q_lora_rank": None,
    "kv_lora_rank": LATENT_SIZE,
    "qk_nope_head_dim": KEY_SIZE,
    "qk_rope_head_dim": ROPE_SIZE,
    "v_head_dim": VALUE_SIZE,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
OF_HEADS = {"head_dim": (KEY_SIZE + ROPE_SIZE + VALUE_SIZE) // 2}
"""Keys and values of so many numbers are those that the heads would have."""


def token_bytes(folder: Path, **fields: Any) -> float:
    """Return the bytes of a token in the KV cache of a server of such a model."""
    folder.mkdir()
    tiny_tokenizers.FAMILIES["byte-level"](folder)
    TinyCheckpoint(folder, **SIZES, **fields).save()
    flags = [*local_flags(folder.parent / "state"), "--kv-cache-bytes", "64MiB"]
    with running([sys.executable, "-m", "loraplex", "serve", str(folder), *flags]) as server:
        body = {"model": folder.name, "prompt": [7, 8, 9], "max_tokens": 2}
        assert server.post("/v1/completions", body)[0] == 200
        status, text = server.get("/v1/memory")
    assert status == 200
    kv = json.loads(text)[folder.name]["kv"]
    return float(kv["num_bytes"] / kv["tokens"])


def test_a_latent_cache_takes_less_than_an_eighth(tmp_path: Path) -> None:
    own = token_bytes(tmp_path / "latent", **LATENT)
    of_heads = token_bytes(tmp_path / "heads", **OF_HEADS)
    numbers = LATENT_SIZE + ROPE_SIZE, NUM_HEADS * (KEY_SIZE + ROPE_SIZE + VALUE_SIZE)
    assert own / of_heads == pytest.approx(numbers[0] / numbers[1])
    assert own <= 0.12 * of_heads
