"""Repositories as folders: which of them are models, and what a model is."""

import os
import re

import pytest

from loraplex.compat.triton.model_folder import Notes, read_model_folder, read_model_folders
from loraplex.compat.triton.repository import read_repositories
from loraplex.compat.triton.roles import Role, role_of
from loraplex.core.errors import ConfigError
from loraplex.core.gpus import num_gpus
from support.naming import naming

TENSOR = '{ name: "%s" data_type: TYPE_INT32 dims: [ 1 ] }'


def model(path, text, *versions):
    path.mkdir(parents=True)
    (path / "config.pbtxt").write_text(text)
    for version in versions:
        (path / version).mkdir()
    return read_model_folder(path)


def inputs(*names):
    return "".join(f"input [ {TENSOR % name} ]\n" for name in names)


def test_folders_without_a_configuration_are_left_out(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / ".git").mkdir()
    (tmp_path / "empty").mkdir()
    notes = Notes()
    with pytest.raises(ConfigError, match=naming("config.pbtxt")):
        read_model_folders(tmp_path, notes, {})
    assert notes.warnings == [f"{tmp_path / 'empty'} is left out: it has no config.pbtxt"]
    with pytest.raises(ConfigError, match=naming("repository")):
        read_model_folders(tmp_path / "gone", notes, {})


def test_entries_that_cannot_be_read_leave_the_others(tmp_path, monkeypatch):
    model(tmp_path / "a", "")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "long").symlink_to("x" * 300)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.pbtxt").symlink_to("config.pbtxt")
    (tmp_path / "closed").mkdir()
    real = os.stat

    def refusing(path, *args, **kwargs):
        if "closed" in os.fspath(path):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refusing)
    assert [each.name for each in read_model_folders(tmp_path, Notes(), {})] == ["a"]


def test_names_and_versions(tmp_path):
    assert model(tmp_path / "a", "").version == "1"
    assert model(tmp_path / "b", 'name: "b"', "2", "10", "x", "03").version == "10"
    with pytest.raises(ConfigError, match=naming("c", "d")):
        model(tmp_path / "c", 'name: "d"')


def test_a_name_that_is_there_twice(tmp_path):
    for repository in ("a", "b"):
        model(tmp_path / repository / "same", 'backend: "vllm"')
    with pytest.raises(ConfigError, match=naming("same", "a/same", "b/same")):
        read_repositories([tmp_path / "a", tmp_path / "b"])


@pytest.mark.parametrize(
    ("text", "role"),
    [
        ('platform: "ensemble"', Role.ENSEMBLE),
        ('backend: "vllm"', Role.VLLM),
        ('backend: "tensorrtllm"', Role.TENSORRT_LLM),
        ('backend: "python"' + inputs("input_ids", "request_output_len"), Role.TENSORRT_LLM),
        ('backend: "${triton_backend}"' + inputs("input_ids", "request_output_len"),
         Role.TENSORRT_LLM),
        ('backend: "python"' + inputs("QUERY"), Role.PREPROCESSING),
        ('backend: "python"' + inputs("TOKENS_BATCH"), Role.POSTPROCESSING),
        ('backend: "python"' + inputs("text_input", "max_tokens"), Role.BLS),
    ],
)  # fmt: skip
def test_roles(tmp_path, text, role):
    assert role_of(model(tmp_path / "m", text)) is role


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('\nbackend: "onnxruntime"', (2, "m", "onnxruntime")),
        ('platform: "tensorrt_plan"', ("tensorrt_plan", "m", "TOKENS_BATCH")),
        ('backend: "python"' + inputs("text_input"), ("python", "m", "text_input")),
        ("", ("m", "TOKENS_BATCH", "input_ids")),
    ],
)
def test_what_is_not_served_says_what_is(tmp_path, text, named):
    with pytest.raises(ConfigError, match=naming(*named)) as caught:
        role_of(model(tmp_path / "m", text))
    assert re.search(naming("m", "text_input", "TOKENS_BATCH"), caught.value.message)


def test_models_of_the_llm_api(tmp_path):
    folder = model(tmp_path / "m", 'backend: "python"' + inputs("text_input"), "1")
    (folder.version_path / "model.yaml").write_text("model: x")
    with pytest.raises(ConfigError, match=naming("LLM", "API", "loraplex serve")):
        role_of(folder)


def test_gpus_are_seen_by_their_files(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert num_gpus(tmp_path) == 0
    (tmp_path / "nvidiactl").touch()
    assert num_gpus(tmp_path) == 0
    (tmp_path / "nvidia0").touch()
    assert num_gpus(tmp_path) == 1
    (tmp_path / "nvidia11").touch()
    assert num_gpus(tmp_path) == 2
    for visible, number in (("1", 1), ("", 0), ("0,1,2", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert num_gpus(tmp_path) == number


def test_notes_are_reported_once():
    notes = Notes()
    for _ in range(2):
        notes.info("a")
        notes.warning("b")
    assert (notes.infos, notes.warnings) == (["a"], ["b"])
