"""Whole steps on a GPU that is not there: the shapes of the logits, and how many launches it takes.

A launch within a CUDA graph costs about as much as to read some megabytes: their number is watched.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

_LAYERS = 32
_BETWEEN_PRODUCTS = 6
"""Launches of a layer: two norms, the rotation, KV, attention, the gate."""
_PRODUCTS = 4
_LORA = 2 * 4
"""Launches of a layer with four fused linear layers: what shrinks, and what expands."""
_OUTSIDE = 4
"""Cosines, sines, embeddings, the first norm."""
_BETWEEN_WITH_EXPERTS = 14
"""Those, a second one of attention, as there are few heads of keys, the norms of query and key, two
for the routes, two products of experts and their sum."""
_PRODUCTS_WITH_EXPERTS = 3
_LORA_WITH_EXPERTS = 2 * 5
_VOCAB = {"8b": 128256, "7b": 32000, "a3b": 151936}


@pytest.fixture(scope="module")
def steps() -> list[dict[str, Any]]:
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "support.fake_steps"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_every_row_gets_its_logits(steps: list[dict[str, Any]]) -> None:
    assert len(steps) == 12
    for step in steps:
        num_logits = 32 if step["step"].startswith("decode") else 5
        assert step["shape"] == [num_logits, _VOCAB[step["model"]]]
        assert step["dtype"] == "torch.bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["8b", "7b"])
def test_a_decode_step_takes_few_launches(steps: list[dict[str, Any]], model: str) -> None:
    found = {step["step"]: step for step in steps if step["model"] == model}
    base = _OUTSIDE + _LAYERS * _BETWEEN_PRODUCTS
    assert found["decode"]["kernels"] <= base
    assert found["decode, LoRA"]["kernels"] <= base + _LAYERS * _LORA
    for step in ("decode", "decode, LoRA"):
        assert found[step]["torch_ops"] <= _LAYERS * _PRODUCTS + 2


@pytest.mark.slow
@pytest.mark.parametrize("model", ["8b", "7b"])
def test_a_mixed_step_takes_little_more(steps: list[dict[str, Any]], model: str) -> None:
    """Rows of one token, and the others, are attended by kernels of their own.

    One launch more takes the tokens whose logits are wanted.
    """
    found = {step["step"]: step for step in steps if step["model"] == model}
    base = _OUTSIDE + 1 + _LAYERS * (_BETWEEN_PRODUCTS + 2)
    assert found["mixed"]["kernels"] <= base
    assert found["mixed, LoRA"]["kernels"] <= base + _LAYERS * _LORA


@pytest.mark.slow
def test_a_step_with_experts_takes_few_launches(steps: list[dict[str, Any]]) -> None:
    """What the host computes for experts would be operations of torch."""
    found = {step["step"]: step for step in steps if step["model"] == "a3b"}
    decode = _OUTSIDE + _LAYERS * _BETWEEN_WITH_EXPERTS
    mixed = decode + 1 + _LAYERS * 2
    assert found["decode"]["kernels"] <= decode
    assert found["decode, LoRA"]["kernels"] <= decode + _LAYERS * _LORA_WITH_EXPERTS
    assert found["mixed"]["kernels"] <= mixed
    # Each of two products of experts needs the adapters by token: a launch, and an operation. One
    # more operation is attention's.
    assert found["mixed, LoRA"]["kernels"] <= mixed + _LAYERS * (_LORA_WITH_EXPERTS + 2)
    products = _LAYERS * _PRODUCTS_WITH_EXPERTS
    for step in ("decode", "decode, LoRA"):
        assert found[step]["torch_ops"] <= products + 2
    assert found["mixed, LoRA"]["torch_ops"] <= products + _LAYERS * (2 + 1) + 2
