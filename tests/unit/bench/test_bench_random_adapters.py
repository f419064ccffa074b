import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.staged import StageRequest
from loraplex.adapters.staging_worker import stage
from loraplex.bench.random_adapters import MODULES, linear_shapes, write_random_adapters
from loraplex.core.errors import ConfigError
from loraplex.demo import BASE_PATH
from support.naming import naming

CAPITALS = BaseShapes(
    num_layers=4,
    modules={
        "q_proj": (256, 256),
        "k_proj": (256, 128),
        "v_proj": (256, 128),
        "o_proj": (256, 256),
        "gate_proj": (256, 512),
        "up_proj": (256, 512),
        "down_proj": (512, 256),
    },
)


def test_the_shapes_of_the_shipped_model():
    shapes = linear_shapes(BASE_PATH)
    assert len(shapes) == CAPITALS.num_layers * len(MODULES)
    assert shapes["model.layers.3.self_attn.k_proj"] == (128, 256)


def test_the_server_takes_them(tmp_path):
    names = write_random_adapters(tmp_path, linear_shapes(BASE_PATH), count=2, rank=4, seed=0)
    assert names == ["random-0000", "random-0001"]
    for name in names:
        path, state_dir = str(tmp_path / name), str(tmp_path / "state")
        got = stage(StageRequest(request_id=1, path=path, state_dir=state_dir, shapes=CAPITALS))
        assert len(got.source.targets) == CAPITALS.num_layers * len(MODULES)
        assert set(got.source.ranks.values()) == {(4, 4)}
        assert (got.changes_nothing, got.warnings) == (False, ())


def test_adapters_differ_and_seeds_repeat(tmp_path):
    shapes = {"model.layers.0.mlp.up_proj": (6, 4)}

    def weights(folder: str, seed: int) -> list[bytes]:
        names = write_random_adapters(tmp_path / folder, shapes, count=2, rank=2, seed=seed)
        return [
            (tmp_path / folder / name / "adapter_model.safetensors").read_bytes() for name in names
        ]

    first = weights("first", 1)
    assert weights("again", 1) == first
    assert len({*first, *weights("other", 2)}) == 4


def test_both_matrices_are_random(tmp_path):
    [name] = write_random_adapters(
        tmp_path, {"model.layers.0.self_attn.q_proj": (30, 50)}, count=1, rank=3, seed=0
    )
    tensors = load_file(tmp_path / name / "adapter_model.safetensors")
    shapes = {key.rpartition("lora_")[2]: value.shape for key, value in tensors.items()}
    assert shapes == {"A.weight": (3, 50), "B.weight": (30, 3)}
    assert all(np.unique(value).size > value.size // 2 for value in tensors.values())
    config = json.loads((tmp_path / name / "adapter_config.json").read_text())
    assert (config["r"], config["target_modules"]) == (3, ["q_proj"])


@pytest.mark.parametrize("tensors", [None, {"lm_head.weight": np.zeros((2, 2), np.float32)}])
def test_a_folder_without_decoder_layers_is_named(tmp_path, tensors):
    if tensors is not None:
        save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        linear_shapes(tmp_path)


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ConfigError, match=naming("model.safetensors")):
        linear_shapes(tmp_path)
