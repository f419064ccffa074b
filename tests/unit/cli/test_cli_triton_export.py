"""`loraplex compat triton export`."""

import json
import re

import pytest
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.compat.triton.model_folder import read_pbtxt
from loraplex.compat.triton.repository import read_repositories
from support.naming import naming


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr("loraplex.compat.triton.model_folder.has_gpu", lambda: False)


@pytest.fixture
def engine(tmp_path):
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return folder


def run(*arguments):
    return CliRunner().invoke(app, ["triton", "export", *map(str, arguments)])


def command_of(model):
    value = read_pbtxt(model / "config.pbtxt").parameters["loraplex_command"].string_value
    return json.loads(value)


def test_a_model_gets_a_repository_of_its_own_below_the_exported_one(engine, tmp_path):
    done = run(tmp_path / "r", "--model", engine, "--decoupled", "--server-flag=--device=cpu")
    assert done.exit_code == 0, done.stderr
    assert "tensorrt_llm_bls" in done.stdout
    command = command_of(tmp_path / "r" / "ensemble")
    (flag,) = (part for part in command if part.startswith("--model-repository="))
    source = tmp_path / "r" / "tensorrt_llm" / "1" / "source"
    assert flag == f"--model-repository={source}"
    assert command[-1] == "--device=cpu"
    assert read_repositories([source]).declarations[0].is_decoupled


def test_a_repository_and_a_backend_directory_at_once(engine, tmp_path):
    assert (
        CliRunner()
        .invoke(app, ["triton", "init", str(tmp_path / "ours"), "--model", str(engine)])
        .exit_code
        == 0
    )
    done = run(
        *(tmp_path / "r", "--model-repository", tmp_path / "ours"),
        *("--backend-directory", tmp_path / "backends", "--execution-env", "/envs/triton"),
    )
    assert done.exit_code == 0, done.stderr
    assert f"--model-repository={tmp_path / 'ours'}" in command_of(tmp_path / "r" / "ensemble")
    assert (tmp_path / "backends" / "vllm" / "model.py").is_file()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], ("--backend-directory",)),
        (["r"], ("--model-repository", "DIR", "--model", "MODEL")),
        (["r", "--model", "m", "--model-repository", "n"], ("--model-repository", "DIR")),
        (["r", "--model", "/nowhere/m"], ("/nowhere/m",)),
        (["r", "--model-repository", "/nowhere/r"], ("/nowhere/r",)),
        (["r", "--join", "--model", "m"], ("--join", "--request-socket")),
    ],
)
def test_what_cannot_be_exported_is_reported(arguments, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.exit_code == 1
    assert re.search(naming(*named), done.stderr)
    assert list(tmp_path.iterdir()) == []
