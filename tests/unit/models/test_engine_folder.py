"""Which kind of model folder it is, and what was decided when it was built."""

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.models.engine_folder import (
    BuildLimits,
    model_fields,
    read_build_limits,
    source_model,
    weights_digest,
)
from support.naming import naming

OURS = {"format": 1, "source": "/models/llama-7b", "quantization": "int8", "kv_dtype": "auto"}


def write(folder: Path, **values: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    write(tmp_path, architectures=["LlamaForCausalLM"])
    assert model_fields(tmp_path).texts("architectures") == ("LlamaForCausalLM",)
    assert read_build_limits(tmp_path) is None
    assert source_model(tmp_path) == tmp_path
    assert weights_digest(tmp_path) is None


def test_an_empty_folder(tmp_path: Path) -> None:
    assert read_build_limits(tmp_path) is None
    with pytest.raises(ConfigError, match=naming("config.json")):
        model_fields(tmp_path)


def test_a_folder_of_ours(tmp_path: Path) -> None:
    write(tmp_path, loraplex=OURS)
    (tmp_path / "hf_config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert model_fields(tmp_path).texts("architectures") == ("LlamaForCausalLM",)
    assert source_model(tmp_path) == Path("/models/llama-7b")
    assert read_build_limits(tmp_path) == BuildLimits(quantization="int8")


def test_another_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path, loraplex=OURS | {"format": 2})
    with pytest.raises(ConfigError, match=naming("format", 2, 1)):
        model_fields(tmp_path)


@pytest.mark.parametrize("plugins", [{}, {"lora_plugin": None}, {"gemm_plugin": "auto"}])
def test_without_the_plugin_there_is_no_lora(tmp_path: Path, plugins: dict[str, Any]) -> None:
    write(tmp_path, build_config={"max_batch_size": 8, "plugin_config": plugins}, loraplex=OURS)
    limits = read_build_limits(tmp_path)
    assert limits is not None
    assert not limits.allows_lora


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"build_config": {}, "pretrained_config": {}}, ("TensorRT",)),
        ({"builder_config": {}}, ("TensorRT",)),
    ],
)
def test_an_engine_of_tensorrt_is_refused(
    tmp_path: Path, values: dict[str, Any], named: tuple[object, ...]
) -> None:
    write(tmp_path, **values)
    with pytest.raises(UnsupportedModelError, match=naming(*named)):
        model_fields(tmp_path)
