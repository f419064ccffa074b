"""Published models of the families: what is read of their config.json, and their tensors' names."""

import itertools
import json
import math
import re
from pathlib import Path

import pytest

from loraplex.adapters.formats.peft_names import parse_name
from loraplex.models.parameters import checkpoint_shapes
from loraplex.models.registry import read_config
from loraplex.models.spec import ModelSpec
from support.families import (
    published,
    published_experts,
    published_recent,
    published_recent_experts,
)
from support.families.published import Published

MODELS = {
    **published.MODELS,
    **published_recent.MODELS,
    **published_experts.MODELS,
    **published_recent_experts.MODELS,
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Published:
    return MODELS[request.param]


@pytest.fixture
def spec(model: Published, tmp_path: Path) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    return read_config(tmp_path)


def expanded(names: str) -> list[str]:
    """Return the names with each alternative in braces."""
    pieces = [re.split(r"[{}]", name) for name in names.split()]
    choices = [[piece.split(",") for piece in pieces_of_name] for pieces_of_name in pieces]
    return ["".join(parts) for choice in choices for parts in itertools.product(*choice)]


def test_windows_thetas_and_scale(model: Published, spec: ModelSpec) -> None:
    attention = [layer.mixer for layer in spec.layers]
    assert {layer: attention[layer].window for layer in model.windows} == model.windows
    ropes = {layer: attention[layer].rope for layer in model.thetas}
    assert {layer: rope and rope.theta for layer, rope in ropes.items()} == model.thetas
    scale = attention[0].scale
    assert (attention[0].head_dim ** -0.5 if scale is None else scale) == model.score_scale


def test_names_of_the_tensors(model: Published, spec: ModelSpec) -> None:
    shapes = checkpoint_shapes(spec)
    assert len(shapes) == model.num_tensors
    assert sum(map(math.prod, shapes.values())) == model.num_parameters
    layer = f"{model.root}layers.1."
    stored = [f"{layer}{part}.weight" for part in expanded(model.parts)]
    stored += [f"{layer}{part}.bias" for part in expanded(model.biases)]
    stored += [f"{layer}{part}" for part in expanded(model.others)]
    found = {spec.names.canonical(name) for name in stored}
    assert found == {name for name in shapes if name.startswith("model.layers.1.")}
    ends = {f"{model.root}{name}.weight" for name in ("embed_tokens", "norm", *model.ends.split())}
    if spec.has_lm_head and not spec.tie_word_embeddings:
        ends.add("lm_head.weight" if model.root == "model." else "language_model.lm_head.weight")
    found = {spec.names.canonical(name) for name in ends}
    assert found == {name for name in shapes if ".layers." not in name}
    assert [spec.names.canonical(name) for name in model.ignored] == [None] * len(model.ignored)


@pytest.mark.parametrize("root", ["model.", "model.language_model.", "language_model.model."])
def test_names_of_adapters(model: Published, spec: ModelSpec, root: str) -> None:
    """Find each linear layer by the name that PEFT gives it, in every class it was trained in."""
    paths = [path for path in expanded(model.parts) if "norm" not in path]
    names = [f"base_model.model.{root}layers.1.{path}.lora_A.weight" for path in paths]
    found = [parse_name(name) for name in names]
    assert {name and (name.layer, name.module) for name in found} == {
        (1, module) for module in spec.layers[1].module_shapes
    }
