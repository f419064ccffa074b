"""Errors of architectures that are not served: the nearest family, and what differs from it."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from loraplex.core.errors import UnsupportedModelError
from loraplex.models.parameters import checkpoint_shapes
from loraplex.models.registry import read_config
from support.families import published, published_experts, published_recent

MODELS = {**published.MODELS, **published_recent.MODELS, **published_experts.MODELS}
NEW: dict[str, Any] = {"architectures": ["InventedForCausalLM"], "model_type": "invented"}
INDEX = "model.safetensors.index.json"


def write(folder: Path, config: dict[str, Any], tensors: Iterable[str] = ()) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    if weight_map:
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def tensors_of(folder: Path, name: str) -> set[str]:
    """Return the tensors of a published model."""
    write(folder, dict(MODELS[name].config))
    return set(checkpoint_shapes(read_config(folder)))


def report(folder: Path) -> str:
    """Return what the error of the folder's architecture has about the nearest family."""
    with pytest.raises(UnsupportedModelError) as refused:
        read_config(folder)
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith(f"{folder / 'config.json'}: architecture Invented")
    return message.partition("; ")[2].partition("; supported: ")[0]


def test_fields_and_tensors_that_differ(tmp_path: Path) -> None:
    tensors = tensors_of(tmp_path, "hunyuan-7b")
    gains = {f"model.layers.{layer}.self_attn.output_gain" for layer in range(32)}
    kept = {name for name in tensors if "post_attention_layernorm" not in name}
    config = {**MODELS["hunyuan-7b"].config, **NEW, "output_gain_init": 0.5}
    write(tmp_path, config, kept | gains)
    assert report(tmp_path) == (
        "nearest is HunYuanDenseV1ForCausalLM, which does not read attention_head_dim, mlp_bias, "
        "output_gain_init; does not know the tensors model.layers.*.self_attn.output_gain; needs "
        "the tensors model.layers.*.post_attention_layernorm.weight"
    )


@pytest.mark.parametrize(
    "name",
    [
        *("gemma-2b", "gemma-2-27b", "olmo-2-7b", "glm-4-9b-0414", "exaone-4.0-1.2b"),
        *("gemma-4-26b-a4b-it", "apertus-8b"),
    ],
)
def test_a_family_under_another_name_is_found_by_its_tensors(tmp_path: Path, name: str) -> None:
    tensors = tensors_of(tmp_path, name)
    write(tmp_path, {**MODELS[name].config, **NEW}, tensors)
    (architecture,) = MODELS[name].config["architectures"]
    assert report(tmp_path).startswith(f"nearest is {architecture}, ")
    assert "tensors " not in report(tmp_path)


def test_without_files_fields_and_then_the_name_count(tmp_path: Path) -> None:
    config = {**MODELS["granite-3.1-8b"].config, **NEW, "focus": 2, "attention_dropout": 0.1}
    write(tmp_path, config)
    assert report(tmp_path) == "nearest is GraniteForCausalLM, which does not read focus"
    plain = {**MODELS["afm-4.5b"].config, "architectures": ["InventedArceeForCausalLM"]}
    write(tmp_path, plain)
    assert report(tmp_path) == "nearest is ArceeForCausalLM, from which no field differs"


def stacked(tensors: set[str]) -> set[str]:
    """Return the names with those of transformers 5 for the experts."""
    kept = {name for name in tensors if ".experts." not in name}
    layers = {name.partition(".block")[0] for name in tensors if ".experts." in name}
    parts = ("gate_up_proj", "down_proj")
    return kept | {f"{layer}.mlp.experts.{part}" for layer in layers for part in parts}


def quantised(tensors: set[str]) -> set[str]:
    """Return the names with those of GPTQ for the linear layers."""
    linears = {
        name for name in tensors if "_proj." in name or ".w" in name.rpartition("experts")[2]
    }
    parts = ("qweight", "qzeros", "scales", "g_idx")
    others = {f"{name.removesuffix('.weight')}.{part}" for name in linears for part in parts}
    return (tensors - linears) | others


@pytest.mark.parametrize("change", [stacked, quantised])
def test_other_forms_of_tensors_do_not_differ(
    tmp_path: Path, change: Callable[[set[str]], set[str]]
) -> None:
    tensors = change(tensors_of(tmp_path, "mixtral-8x7b"))
    write(tmp_path, {**MODELS["mixtral-8x7b"].config, **NEW}, tensors)
    assert report(tmp_path) == (
        "nearest is MixtralForCausalLM, from which no field and no tensor differs"
    )


def test_a_wrapper_of_images(tmp_path: Path) -> None:
    config = {**MODELS["mistral-small-3.1-24b"].config, "merges_audio": True}
    write(tmp_path, {**config, "architectures": ["InventedForConditionalGeneration"]})
    assert report(tmp_path).startswith("nearest is Mistral3ForConditionalGeneration, which does")
    assert "merges_audio" in report(tmp_path)


def test_a_value_that_no_family_reads(tmp_path: Path) -> None:
    config = {**MODELS["seed-oss-36b"].config, "rope_scaling": {"rope_type": "spiral"}}
    write(tmp_path, {**config, "architectures": ["InventedSeedOssForCausalLM"]})
    assert report(tmp_path).startswith("nearest is SeedOssForCausalLM, which refuses it (")
    assert "'spiral'" in report(tmp_path)


def test_many_differences_are_counted(tmp_path: Path) -> None:
    more = {f"field_{number}": number for number in range(11)}
    write(tmp_path, {**MODELS["granite-3.1-8b"].config, **NEW, **more})
    assert report(tmp_path).endswith(
        " field_0, field_1, field_10, field_2, field_3, field_4, field_5, field_6 and 3 more"
    )


def test_names_of_a_single_file(tmp_path: Path) -> None:
    write(tmp_path, {**MODELS["granite-3.1-8b"].config, **NEW})
    save_file({"model.layers.0.mlp.vortex.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert "does not know the tensors model.layers.*.mlp.vortex.weight; needs" in report(tmp_path)


def test_a_broken_file_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, {**MODELS["granite-3.1-8b"].config, **NEW})
    (tmp_path / "model.safetensors").write_bytes(b"none")
    assert report(tmp_path) == "nearest is GraniteForCausalLM, from which no field differs"
