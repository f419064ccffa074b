"""What an engine folder was built for is what it is served with."""

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.app.model_settings import within_build
from loraplex.core.config import ModelConfig
from loraplex.core.errors import ConfigError
from support.naming import naming

BUILT = {
    "max_batch_size": 8,
    "max_input_len": 500,
    "max_seq_len": 562,
    "max_num_tokens": 100,
    "lora_config": {"max_lora_rank": 4, "lora_target_modules": ["attn_q"]},
    "plugin_config": {"lora_plugin": "float16"},
}


def engine(folder: Path, quantization: str = "none", **changes: Any) -> Path:
    values = {
        "build_config": BUILT | changes,
        "loraplex": {"format": 1, "quantization": quantization, "kv_dtype": "int8"},
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def served(folder: Path, **settings: Any) -> ModelConfig:
    return within_build("m", ModelConfig(path=str(folder), **settings), folder)


def test_a_hugging_face_folder_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    model = ModelConfig(path=str(tmp_path))
    assert within_build("m", model, tmp_path) is model


def test_limits_hold(tmp_path: Path) -> None:
    model = served(engine(tmp_path))
    assert (model.max_model_len, model.max_input_len, model.max_num_seqs) == (562, 500, 8)
    assert (model.max_num_batched_tokens, model.kv_dtype) == (100, "int8")
    assert (model.max_lora_rank, model.optimal_lora_rank) == (4, 4)
    assert model.lora_target_modules == ("attn_q",)
    assert model.enable_lora
    assert model.adapter_dirs == ()


def test_limits_hold_for_each_kind_of_module(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model = served(engine(tmp_path), max_lora_ranks={"experts": 2, "router": 16})
    assert model.max_lora_ranks == {"experts": 2, "router": 4}
    assert "max_lora_ranks of model 'm' is experts=2,router=4" in caplog.text


def test_smaller_settings_stay(tmp_path: Path) -> None:
    settings = {"max_model_len": 100, "max_input_len": 50, "max_num_seqs": 2, "max_lora_rank": 2}
    model = served(
        engine(tmp_path), **settings, lora_target_modules=("attn_v",), kv_dtype="float32"
    )
    assert {name: getattr(model, name) for name in settings} == settings
    assert model.lora_target_modules == ("attn_v",)
    assert model.kv_dtype == "float32"


@pytest.mark.parametrize("setting", ["max_model_len", "max_input_len"])
def test_longer_texts_than_it_was_built_for(tmp_path: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match=naming(setting, 1000, "m")):
        served(engine(tmp_path), **{setting: 1000})


def test_without_the_plugin(tmp_path: Path) -> None:
    model = served(engine(tmp_path, plugin_config={}))
    assert not model.enable_lora


def test_adapters_of_the_build(tmp_path: Path) -> None:
    engine(tmp_path)
    (tmp_path / "lora").mkdir()
    model = served(tmp_path, adapter_dirs=("/mine",))
    assert model.adapter_dirs == ("/mine", str(tmp_path / "lora"))


def test_quantization(tmp_path: Path) -> None:
    assert served(engine(tmp_path, "int8")).quantization == "int8"
    assert served(engine(tmp_path), quantization="int4").quantization == "int4"
    with pytest.raises(ConfigError, match=naming("int4", "int8")):
        served(engine(tmp_path, "int8"), quantization="int4")


@pytest.mark.parametrize(
    ("mapping", "settings", "num_gpus", "expected"),
    [
        ({"tp_size": 2}, {"device": "cuda"}, 2, 2),
        ({"tp_size": 2}, {"device": "cuda"}, 1, 1),
        ({"tp_size": 2}, {"device": "cuda:1"}, 2, 1),
        ({"tp_size": 2}, {}, 2, 1),
        ({"tp_size": 2, "pp_size": 2}, {"device": "cuda"}, 4, 1),
        ({"tp_size": 2}, {"device": "cuda", "tensor_parallel_size": 4}, 4, 4),
        ({"tp_size": 2}, {"tensor_parallel_size": 4}, 0, 4),
        ({}, {"device": "cuda"}, 4, 1),
    ],
)
def test_ranks_of_a_build(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mapping: dict[str, int],
    settings: dict[str, Any],
    num_gpus: int,
    expected: int,
) -> None:
    monkeypatch.setattr("loraplex.app.model_settings.num_gpus", lambda: num_gpus)
    values = {
        "build_config": BUILT,
        "loraplex": {"format": 1, "quantization": "none", "kv_dtype": "int8"},
        "pretrained_config": {"mapping": mapping},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert served(tmp_path, **settings).tensor_parallel_size == expected
    assert ("runs as one process" in caplog.text) == (bool(mapping) and expected == 1)
