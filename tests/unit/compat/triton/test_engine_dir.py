"""gpt_model_path: where it leads, and what is refused there."""

import json

import pytest

from loraplex.core.errors import ConfigError
from support.naming import naming
from support.triton_repositories import merged


def path_of(repository):
    return merged(repository, "tensorrt_llm")["path"]


def test_a_mounted_repository_is_somewhere_else_here(written):
    """The engine lies in the repository as in the founding example, and is written by the
    path that it has within a container."""
    engine = written.path / "tensorrt_llm" / "1" / "1-gpu"
    written.engine.rename(engine)
    written.replace("tensorrt_llm", **{str(written.engine): "/triton_repo/tensorrt_llm/1/1-gpu/"})
    repository = written.read()
    assert path_of(repository) == str(engine)
    assert any(
        f"/triton_repo/tensorrt_llm/1/1-gpu/ is {engine}" in t for t in repository.notes.infos
    )


@pytest.mark.parametrize("below", ["1/1-gpu", "1-gpu"])
def test_relative_paths(written, below, monkeypatch):
    engine = written.path / "tensorrt_llm" / "1" / "1-gpu"
    written.engine.rename(engine)
    written.replace("tensorrt_llm", **{str(written.engine): below})
    assert path_of(written.read()) == str(engine)
    monkeypatch.chdir(engine.parent)
    assert path_of(written.read()) == str(engine)


def test_the_working_directory_comes_first(written, monkeypatch):
    (written.path / "tensorrt_llm" / "engine").mkdir()
    written.replace("tensorrt_llm", **{str(written.engine): "engine"})
    monkeypatch.chdir(written.engine.parent)
    assert path_of(written.read()) == str(written.engine)


def test_an_engine_that_no_model_names(written):
    line = written.line("tensorrt_llm", '"gpt_model_path"')
    written.replace("tensorrt_llm", **{str(written.engine): "${engine_dir}"})
    with pytest.raises(ConfigError, match=naming(line, "gpt_model_path")):
        written.read()
    (written.engine / "config.json").rename(written.path / "tensorrt_llm" / "1" / "config.json")
    assert path_of(written.read()) == str(written.path / "tensorrt_llm" / "1")


def test_folders_that_are_not_there(written):
    written.replace("tensorrt_llm", **{str(written.engine): "/nowhere/engine"})
    with pytest.raises(ConfigError, match=naming("/nowhere/engine", "gpt_model_path")):
        written.read()


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, ("config.json", "loraplex compat build", "gpt_model_path")),
        ({"rank0.engine": "x"}, ("TensorRT", "loraplex compat build", "gpt_model_path")),
        (
            {"config.json": {"build_config": {}, "pretrained_config": {}}},
            ("TensorRT", "gpt_model_path"),
        ),
        ({"config.json": {"builder_config": {}}}, ("TensorRT", "gpt_model_path")),
        ({"config.json": []}, ("JSON",)),
        ({"config.json": "{"}, ("JSON",)),
    ],
)
def test_what_is_refused_by_name(written, files, named):
    (written.engine / "config.json").unlink()
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (written.engine / name).write_text(text)
    with pytest.raises(ConfigError, match=naming(*named)):
        written.read()


def built(written, **mapping):
    config = {"loraplex": {}, "build_config": {}, "pretrained_config": {"mapping": mapping}}
    (written.engine / "config.json").write_text(json.dumps(config))
    return written.read()


def test_world_sizes(written):
    assert built(written, world_size=1, tp_size=1, pp_size=1).notes.warnings == []
    (warning,) = built(written, world_size=4, tp_size=2, pp_size=2).notes.warnings
    assert "was built for 4 GPUs: it is served by one" in warning
    with pytest.raises(ConfigError, match=naming("world_size", 3, "tp_size", 2, "pp_size", 1)):
        built(written, world_size=3, tp_size=2, pp_size=1)


def test_a_checkpoint_of_tensorrt_llm(written):
    config = {"architecture": "LlamaForCausalLM", "mapping": {"tp_size": 2}}
    (written.engine / "config.json").write_text(json.dumps(config))
    read = written.read()
    assert path_of(read) == str(written.engine)
    assert "was built for 2 GPUs: it is served by one" in read.notes.warnings[0]
