"""Sizes of a step by a device's memory, with GPUs that are not there."""

import json
import logging
from pathlib import Path

import pytest

from loraplex.app import open_step_sizes
from loraplex.app.model_settings import with_device
from loraplex.app.open_step_sizes import with_step_sizes
from loraplex.core.config import ModelConfig
from loraplex.core.devices import Device

GIB = 1 << 30
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return ModelConfig(path=str(tmp_path), device="cuda")


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(open_step_sizes, "choose_device", lambda _: "a GPU that is not there")
    monkeypatch.setattr(open_step_sizes, "free_bytes", lambda _: num_bytes)


def sizes(model: ModelConfig) -> tuple[int | None, int | None]:
    sized = with_step_sizes(model)
    return sized.max_num_seqs, sized.max_num_batched_tokens


def test_a_gpu_with_enough_memory(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free(monkeypatch, 79 * GIB)
    with caplog.at_level(logging.INFO, "loraplex"):
        assert sizes(model) == (256, 8192)
    assert "steps of at most 256 sequences and 8192 tokens" in caplog.text


def test_a_gpu_with_less(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free(monkeypatch, 22 * GIB)
    with caplog.at_level(logging.INFO, "loraplex"):
        seqs, tokens = sizes(model)
    assert seqs is not None
    assert tokens is not None
    assert 64 <= seqs <= 256
    assert 512 <= tokens <= 8192
    assert (seqs, tokens) != (256, 8192)
    assert "the memory does not allow 256 and 8192" in caplog.text


def test_a_gpu_that_hardly_holds_the_weights(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 16 * GIB)
    assert sizes(model) == (64, 512)


def test_memory_bytes_need_no_gpu(model: ModelConfig) -> None:
    limited = ModelConfig(path=model.path, device="cuda", memory_bytes=64 * GIB)
    assert sizes(limited) == (256, 8192)


def test_a_size_that_is_set_stays(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 16 * GIB)
    assert sizes(ModelConfig(path=model.path, device="cuda", max_num_seqs=200)) == (200, 512)


def test_a_cpu_reads_no_model() -> None:
    assert sizes(ModelConfig(path="/nowhere", device="cpu", num_threads=64)) == (256, 1024)


def test_the_choice_of_a_device_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = Device("cuda", "NVIDIA H100")
    monkeypatch.setattr("loraplex.app.model_settings.find_device", lambda: found)
    with caplog.at_level(logging.INFO, "loraplex"):
        assert with_device("m", ModelConfig(path="/m")).device == "cuda"
    assert "model 'm': device cuda: NVIDIA H100" in caplog.text
    assert with_device("m", ModelConfig(path="/m", device="cpu")).device == "cpu"
