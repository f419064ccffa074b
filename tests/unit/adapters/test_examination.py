"""Every tensor of an adapter is accounted for, with the reasons of all that are refused."""

import re

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from loraplex.adapters.examination import examine
from loraplex.adapters.staged import StageRequest
from loraplex.adapters.tensor_file import StagingLimits
from loraplex.core.errors import InvalidAdapterError
from loraplex.core.rank_limits import RankLimits
from support.naming import naming


@pytest.fixture
def examined(tmp_path, shapes):
    """A function (path, **fields of the request) -> Examination."""

    def run(path, **fields):
        fields = {"shapes": shapes, "pool_dtype": "float32"} | fields
        state = str(tmp_path / "state")
        return examine(StageRequest(request_id=1, path=str(path), state_dir=state, **fields))

    return run


def reasons(examination) -> dict[str, str | None]:
    return {t.name: t.reason for t in examination.tensors if t.refused}


def test_all_tensors_of_a_good_adapter_are_applied(examined, peft_folder):
    folder = peft_folder(rank=3)
    folder.config["base_model_name_or_path"] = "meta/llama"
    found = examined(folder.write())
    assert found.trained_on == "meta/llama"
    assert (found.format, found.num_tensors, found.num_refused) == ("PEFT", 12, 0)
    first = next(t for t in found.tensors if ".1.self_attn.k_proj.lora_A" in t.name)
    assert (first.module, first.layer, first.expert, first.rank) == ("k_proj", 1, None, 3)
    assert (first.shape, first.dtype, first.applied, first.reason) == ((3, 8), "F32", True, None)
    assert {t.rank for t in found.tensors} == {3}


def test_each_refused_tensor_has_its_reason(examined, staged, peft_folder):
    folder = peft_folder()
    q, k, down = folder.name(0, "q_proj"), folder.name(1, "k_proj"), folder.name(0, "down_proj")
    folder.tensors[f"{q}.lora_B.weight"] = np.ones((5, 2), "f4")  # the base needs 12 outputs
    folder.tensors[f"{k}.lora_A.weight"][0, 0] = np.nan
    del folder.tensors[f"{down}.lora_B.weight"]
    folder.tensors["base_model.model.model.layers.0.strange.thing"] = np.ones((1, 1), "f4")
    folder.tensors["base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"] = np.ones(
        (2, 8), "f4"
    )
    folder.tensors["base_model.model.model.layers.9.self_attn.q_proj.lora_B.weight"] = np.ones(
        (12, 2), "f4"
    )
    path = folder.write()
    found = examined(path)
    refused = reasons(found)
    assert re.search(
        naming("[5, 2]", "[12, 2]", "model.layers.0.self_attn.q_proj.lora_B"),
        refused[f"{q}.lora_B.weight"],
    )
    assert "NaN" in refused[f"{k}.lora_A.weight"]
    assert re.search(
        naming("lora_B", "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"),
        refused[f"{down}.lora_A.weight"],
    )
    assert re.search(
        naming("base_model.model.model.layers.0.strange.thing"),
        refused["base_model.model.model.layers.0.strange.thing"],
    )
    assert re.search(
        naming(9, 2), refused["base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"]
    )
    assert found.num_refused == len(refused) == 8
    assert all(t.refused for t in found.tensors[:8]), "the refused ones come first"
    applied = [t for t in found.tensors if t.applied]
    assert len(applied) == found.num_tensors - 8 == 6
    with pytest.raises(InvalidAdapterError):
        staged(path)


def test_what_is_wrong_with_one_module_hides_no_other_of_its_layer(examined, peft_folder, shapes):
    """A base that computes q and k by itself has them in no group with each other's fate."""
    folder = peft_folder()
    q, k = folder.name(0, "q_proj"), folder.name(0, "k_proj")
    folder.tensors[f"{q}.lora_B.weight"] = np.ones((5, 2), "f4")
    refused = reasons(examined(folder.write()))
    assert set(refused) == {f"{q}.lora_A.weight", f"{q}.lora_B.weight"}
    assert f"{k}.lora_A.weight" not in refused


def test_a_rank_above_the_limit_and_a_value_too_large_for_the_pool(examined, peft_folder):
    folder = peft_folder(rank=4)
    found = examined(folder.write(), limits=StagingLimits(max_ranks=RankLimits(2)))
    assert found.num_refused == 12
    assert "max_lora_rank" in next(iter(reasons(found).values()))
    large = peft_folder("large")
    q = large.name(0, "q_proj")
    large.tensors[f"{q}.lora_A.weight"][0, 0] = 1e9
    refused = reasons(examined(large.write(), pool_dtype="float16"))
    assert set(refused) == {f"{q}.lora_A.weight", f"{q}.lora_B.weight"}


def test_tensors_of_another_tower_are_left_out_and_not_refused(examined, peft_folder):
    folder = peft_folder()
    name = "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight"
    folder.tensors[name] = np.ones((2, 8), "f4")
    found = examined(folder.write())
    (left,) = [t for t in found.tensors if not t.applied]
    assert (left.name, left.refused, found.num_refused) == (name, False, 0)
    assert "left out" in left.reason


def test_keys_that_a_layer_does_not_have_are_left_out(examined, staged, peft_folder, shapes):
    folder = peft_folder()
    path = folder.write()
    layers = {"module_layers": {"k_proj": (0,)}, "unread_layers": {"k_proj": (1,)}}
    bare = msgspec.structs.replace(shapes, **layers)
    left = [t for t in examined(path, shapes=bare).tensors if not t.applied]
    assert {(t.name, t.refused) for t in left} == {
        (f"{folder.name(1, 'k_proj')}.lora_{side}.weight", False) for side in "AB"
    }
    assert all("left out" in t.reason for t in left)
    (warning,) = staged(path, shapes=bare).warnings
    assert re.search(naming(2, "keys", folder.name(1, "k_proj"), "left out"), warning)


def test_numbers_and_texts_have_limits(examined, peft_folder, monkeypatch):
    monkeypatch.setattr("loraplex.adapters.examination._MAX_TENSORS", 3)
    folder = peft_folder()
    name = "x" * 5000
    folder.tensors[name] = np.ones((1, 1), "f4")
    found = examined(folder.write())
    assert (len(found.tensors), found.num_tensors, found.num_refused) == (3, 13, 1)
    assert found.tensors[0].refused
    assert len(found.tensors[0].name) == 1000
    assert len(found.tensors[0].reason) < 1000


def test_each_row_of_a_pair(examined, staged, pair, tmp_path):
    found = examined(pair.write(tmp_path / "pair"))
    assert (found.format, found.num_tensors, found.num_refused) == ("TensorRT-LLM", 3, 0)
    assert [(t.module, t.layer, t.rank) for t in found.tensors] == [
        ("attn_q", 0, 2),
        ("mlp_4h_to_h", 1, 3),
        ("attn_k", 1, 1),
    ]
    config = pair.CONFIG.copy()
    config[0, 0], config[2, 1] = 99, 7
    weights = pair.weights()
    weights[1, 0] = np.nan
    path = pair.write(tmp_path / "bad", weights, config)
    refused = reasons(examined(path))
    assert re.search(naming(0, 99, 2), refused["lora_weights[0]"])
    assert "NaN" in refused["lora_weights[1]"]
    assert re.search(naming(2, 0, 7, 1), refused["lora_weights[2]"])
    with pytest.raises(InvalidAdapterError):
        staged(path)


def test_each_row_of_a_single_file(examined, pair, tmp_path):
    path = tmp_path / "one.safetensors"
    config = pair.CONFIG.copy()
    config[1, 1] = 7
    save_file({"weights": pair.weights(), "config": config}, path)
    found = examined(path)
    assert (found.format, found.num_tensors, found.num_refused) == ("safetensors", 3, 1)
    assert found.tensors[0].name == "lora_weights[1]"


def test_a_canonical_file_lists_what_it_changes(examined, staged, peft_folder):
    state = staged(peft_folder(rank=2).write()).source.path
    found = examined(state)
    assert (found.format, found.num_tensors, found.num_refused) == ("safetensors", 12, 0)
    assert {(t.rank, t.applied) for t in found.tensors} == {(2, True)}


def test_files_without_tensors_raise_as_a_load(examined, tmp_path):
    with pytest.raises(InvalidAdapterError, match=naming(tmp_path, "PEFT", "TensorRT-LLM")):
        examined(tmp_path)
    path = tmp_path / "strange.safetensors"
    save_file({"x": np.ones(3, "f4")}, path)
    with pytest.raises(InvalidAdapterError, match="supported: "):
        examined(path)
