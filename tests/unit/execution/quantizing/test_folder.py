"""Folders that quantize_folder writes: what is in them, and what is refused."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.demo import BASE_PATH
from loraplex.execution.quantizing import shards
from loraplex.execution.quantizing.calibration import CalibrationInputs
from loraplex.execution.quantizing.folder import NoInputs, quantize_folder
from loraplex.execution.quantizing.report import QuantizeReport
from loraplex.execution.quantizing.rounding import IntegerForm
from loraplex.execution.weights.checkpoint import Checkpoint
from loraplex.execution.weights.stored_head import read_model
from loraplex.models.parameters import checkpoint_shapes
from loraplex.models.sentence_transformers import read_vector_format, read_vector_layers
from support.checkpoints import save_random_model, tiny_gpt2, tiny_sizes
from support.families import every
from support.families.case import VOCAB_SIZE, parameters
from support.naming import naming
from support.quantized_checkpoints import CASES as STORED_CASES
from support.quantized_checkpoints import quantize_folder as store_quantised

FAMILIES = every.CASES
QUICK = ("gemma2-no-caps", "opt-350m", "mixtral", "gpt-oss")
FORM = IntegerForm(4, 16)
TEXTS = [[(5 * i + k * k) % VOCAB_SIZE for i in range(20)] for k in range(12)]
GIB = 1 << 30


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    spec = read_model(folder)
    with Checkpoint(folder, spec) as checkpoint:
        return {name: checkpoint.read(name).clone() for name in checkpoint_shapes(spec)}


def write(
    source: Path,
    output: Path,
    *,
    texts: list[list[int]] | None = None,
    form: IntegerForm = FORM,
    max_shard_bytes: int = GIB,
) -> QuantizeReport:
    spec = read_model(source)
    inputs = NoInputs() if texts is None else CalibrationInputs(source, spec, texts)
    return quantize_folder(source, output, spec, form, inputs, max_shard_bytes)


def save(name: str, folder: Path) -> None:
    if name == "gpt2":
        save_random_model(folder, tiny_gpt2(VOCAB_SIZE))
    else:
        FAMILIES[name].save(folder)


@pytest.mark.parametrize("name", ["gpt2", *parameters(FAMILIES, QUICK)])
def test_a_family(name: str, tmp_path: Path) -> None:
    save(name, tmp_path / "source")
    wanted = read_all(tmp_path / "source")
    spec = read_model(tmp_path / "source")
    shares_kv = any(mixer.kv_distance for layer in spec.layers for mixer in layer.mixers)
    # Calibration refuses layers that read more than the hidden state.
    for texts in (None,) if shares_kv or spec.layer_input_size else (None, TEXTS):
        output = tmp_path / f"output-{texts is None}"
        report = write(tmp_path / "source", output, texts=texts)
        found = read_all(output)
        changed = {weight for weight in wanted if not torch.equal(found[weight], wanted[weight])}
        assert found.keys() == wanted.keys()
        paths = [layer.name for layer in report.layers]
        for weight in changed:
            assert any(
                weight.removesuffix(".weight").startswith(path.partition("*")[0]) for path in paths
            )
            error = (found[weight] - wanted[weight]).norm() / wanted[weight].norm()
            assert 0.01 < error < (0.2 if texts is None else 0.6), weight
        assert len(changed) >= len(paths)
        for layer in report.layers:
            assert (layer.error.relative_output is not None) == (texts is not None)


def test_what_reaches_all_layers_stays(tmp_path: Path) -> None:
    save("gemma4", tmp_path / "source")
    report = write(tmp_path / "source", tmp_path / "output")
    names = [layer.name for layer in report.layers]
    assert any("per_layer_input_gate" in name for name in names)
    kept = "model.per_layer_model_projection"
    assert kept not in names
    weight = f"{kept}.weight"
    assert torch.equal(read_all(tmp_path / "output")[weight], read_all(tmp_path / "source")[weight])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    sizes = tiny_sizes(64, hidden_size=64, intermediate_size=80)
    save_random_model(tmp_path / "source", LlamaConfig(**sizes))
    return tmp_path / "source"


def test_moments_are_those_of_the_inputs(source: Path) -> None:
    """Compare them with hooks on transformers' layers; the weights stay as they are."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    wanted: dict[str, torch.Tensor] = {}

    def note(name: str) -> Any:
        def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: object) -> None:
            x = inputs[0].flatten(0, -2)
            wanted[name] = wanted.get(name, torch.zeros(())) + x.T @ x

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(note(name))
    texts = [[token % 64 for token in text] for text in TEXTS]
    with torch.inference_mode():
        for text in texts:
            model(torch.tensor([text]))
    spec = read_model(source)
    inputs = CalibrationInputs(source, spec, texts)
    for index, layer in enumerate(spec.layers):
        found = inputs.moments(index)
        inputs.proceed(index, {})
        for group, linears in layer.linears.items():
            for path in linears.paths:
                torch.testing.assert_close(found[group], wanted[path], rtol=1e-3, atol=1e-3)


def test_a_layer_reads_what_quantised_layers_give(source: Path) -> None:
    spec, texts = read_model(source), [[token % 64 for token in text] for text in TEXTS]
    weights = {name: tensor * 0.5 for name, tensor in read_all(source).items()}
    plain, changed = (CalibrationInputs(source, spec, texts) for _ in range(2))
    for inputs, replaced in ((plain, {}), (changed, weights)):
        inputs.moments(0)
        inputs.proceed(0, replaced)
    assert not torch.allclose(plain.moments(1)["qkv"], changed.moments(1)["qkv"], rtol=0.01)


def test_files_are_no_larger_than_wanted(source: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    write(source, whole)
    report = write(source, parts, max_shard_bytes=12_000)
    one, many = read_all(whole), read_all(parts)
    assert all(torch.equal(tensor, many[name]) for name, tensor in one.items())
    files = sorted(parts.glob("*.safetensors"))
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert index["metadata"]["total_size"] == report.written_bytes
    for file in files:
        with safe_open(file, "pt") as opened:
            names = list(opened.keys())
            sizes = [opened.get_tensor(name).nbytes for name in names]
        assert sum(sizes) <= 12_000 or len(names) == 1
        assert {index["weight_map"][name] for name in names} == {file.name}
    assert not (whole / "model.safetensors.index.json").exists()
    assert {file.name for file in whole.iterdir()} >= {"model.safetensors", "config.json"}


def test_equal_runs_write_equal_bytes(source: Path, tmp_path: Path) -> None:
    texts = [[token % 64 for token in text] for text in TEXTS]
    files = []
    for name in ("one", "two"):
        write(source, tmp_path / name, texts=texts)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_the_configuration(source: Path, tmp_path: Path) -> None:
    write(source, tmp_path / "output", form=IntegerForm(4, 32))
    config = json.loads((tmp_path / "output" / "config.json").read_text())
    described = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert described["format"] == "pack-quantized"
    assert described["ignore"] == ["lm_head"]
    # 80 inputs are no multiple of 32, nor of a smaller size that kernels have.
    named, others = described["config_groups"].values()
    assert (others["targets"], others["weights"]["group_size"]) == (["Linear"], 32)
    assert named["weights"]["strategy"] == "channel"
    assert named["targets"] == [f"model.layers.{n}.mlp.down_proj" for n in range(2)]


def no_space(path: Path, mode: str) -> BinaryIO:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards.os, "fsync", lambda _: no_space(tmp_path, "wb"))
    # The system's text.
    with pytest.raises(ConfigError, match="No space left on device"):
        write(source, tmp_path / "output")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_error_on_the_way_leaves_nothing(source: Path, tmp_path: Path) -> None:
    from support.quantized_checkpoints import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ConfigError, match=naming("model.layers.1.mlp.up_proj.weight")):
        write(source, tmp_path / "output")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_output_that_is_there(source: Path, tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    write(source, tmp_path / "output")
    for output in (tmp_path / "output", source, source / "config.json"):
        with pytest.raises(ConfigError, match="is there already"):
            write(source, output)


def test_a_source_without_weights(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=naming("model.safetensors", "pytorch_model.bin")):
        write(source, tmp_path / "output")
    assert not (tmp_path / "output").exists()


def test_a_source_that_is_quantised(source: Path, tmp_path: Path) -> None:
    store_quantised(source, STORED_CASES["gptq-4"])
    with pytest.raises(ConfigError, match=naming("gptq")):
        write(source, tmp_path / "output")


def test_an_unknown_family(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["Unknown"]}))
    with pytest.raises(
        UnsupportedModelError, match=naming("Unknown", "Qwen2_5_VLForConditionalGeneration")
    ):
        write(source, tmp_path / "output")


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    write(BASE_PATH, tmp_path / "output")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "output" / name).read_bytes() == (BASE_PATH / name).read_bytes()


def test_what_the_folder_states_of_vectors_comes_along(tmp_path: Path) -> None:
    """The quantised model would else make vectors in another way."""
    source, output = tmp_path / "source", tmp_path / "output"
    shutil.copytree(BASE_PATH, source)
    size = read_model(BASE_PATH).hidden_size
    modules = [
        {"idx": index, "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (path, name) in enumerate(
            (("", "Transformer"), ("1_Pooling", "Pooling"), ("parts/dense", "Dense"))
        )
    ]
    files: dict[str, Any] = {
        "modules.json": modules,
        "config_sentence_transformers.json": {"prompts": {"query": "Q: "}},
        "sentence_bert_config.json": {"max_seq_length": 30},
        "1_Pooling/config.json": {"pooling_mode": "mean"},
        "parts/dense/config.json": {"in_features": size, "out_features": 3, "bias": False},
    }
    for name, content in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(json.dumps(content))
    tensors = {"linear.weight": torch.ones(3, size)}
    save_file(tensors, source / "parts" / "dense" / "model.safetensors")
    write(source, output)
    assert read_vector_format(output) == read_vector_format(source)
    assert read_vector_layers(output, size) == read_vector_layers(source, size) != ()
    for name in (*files, "parts/dense/model.safetensors"):
        assert (output / name).read_bytes() == (source / name).read_bytes()
