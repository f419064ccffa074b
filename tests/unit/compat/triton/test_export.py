"""What is written for the real Triton."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loraplex.compat.triton.export import Export, export_models, export_vllm_backend
from loraplex.compat.triton.model_folder import read_pbtxt
from loraplex.compat.triton.repository import read_repositories
from loraplex.core.errors import ConfigError
from loraplex.frontends.kserve import stub
from loraplex.frontends.kserve.models.kinds import VLLM
from support.naming import naming
from support.triton_repositories import FIVE

EXPORT = Export(python="/p/python", server_flags=("--memory=1GiB",))
COPIED = {file.name for file in Path(stub.__file__).parent.glob("*.py")}


@pytest.fixture
def exported(written, tmp_path):
    folder = tmp_path / "exported"
    export_models(folder, [written.path], written.read().declarations, EXPORT)
    return folder


def parameters_of(config):
    return {key: value.string_value for key, value in config.parameters.items()}


@pytest.mark.parametrize("name", FIVE)
def test_each_model_looks_as_ours_does(exported, written, name):
    config = read_pbtxt(exported / name / "config.pbtxt")
    (declaration,) = (d for d in written.read().declarations if d.name == name)
    shown = declaration.config
    assert (config.name, config.backend, config.platform) == (name, "python", "")
    assert config.max_batch_size == shown["max_batch_size"]
    decoupled = config.model_transaction_policy.decoupled
    assert decoupled == shown["model_transaction_policy"]["decoupled"]
    for rows, declared in ((config.input, shown["input"]), (config.output, shown["output"])):
        assert [row.name for row in rows] == [row["name"] for row in declared]
        assert [list(row.dims) for row in rows] == [row["dims"] for row in declared]
    assert [row.optional for row in config.input] == [row["optional"] for row in shown["input"]]
    assert not config.HasField("ensemble_scheduling")
    assert [(group.kind, group.count) for group in config.instance_group] == [(2, 1)]  # KIND_CPU


def test_the_command_reads_the_repository_and_opens_no_port(exported, written):
    parameters = parameters_of(read_pbtxt(exported / "ensemble" / "config.pbtxt"))
    command = json.loads(parameters["loraplex_command"])
    assert command[:6] == ["/p/python", "-P", "-m", "loraplex", "compat", "triton"]
    assert f"--model-repository={written.path}" in command
    assert {"--no-http", "--no-grpc", "--no-metrics", "--stop-with-stdin"} < set(command)
    assert command[-1] == "--memory=1GiB"
    assert parameters["FORCE_CPU_ONLY_INPUT_TENSORS"] == "yes"
    assert "loraplex_socket" not in parameters
    texts = {(exported / name / "config.pbtxt").read_text().count("/p/python") for name in FIVE}
    assert texts == {1}


def test_a_server_that_runs_already_is_joined_only(written, tmp_path):
    export = Export(socket="/run/lora/socket", starts_server=False, environment="/envs/triton")
    export_models(tmp_path / "out", [written.path], written.read().declarations, export)
    parameters = parameters_of(read_pbtxt(tmp_path / "out" / "ensemble" / "config.pbtxt"))
    assert parameters == {
        "FORCE_CPU_ONLY_INPUT_TENSORS": "yes",
        "loraplex_socket": "/run/lora/socket",
        "EXECUTION_ENV_PATH": "/envs/triton",
    }


def test_the_code_stands_beside_the_model_and_runs_without_loraplex(exported, tmp_path):
    version = exported / "ensemble" / "1"
    assert {file.name for file in (version / "loraplex_stub").iterdir()} == COPIED
    backend = tmp_path / "backend"
    backend.mkdir()
    (backend / "triton_python_backend_utils.py").write_text(
        "TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1\n"
    )
    (backend / "loraplex.py").write_text("raise AssertionError('it is not to be imported')\n")
    program = (
        f"import sys; sys.path[:0] = [{str(backend)!r}, {str(version)!r}]\n"
        "import model; print(model.TritonPythonModel.__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stdout == "loraplex_stub.model\n"


def test_an_existing_model_is_not_written_over(exported, written):
    with pytest.raises(ConfigError, match=naming("repository")):
        export_models(exported, [written.path], written.read().declarations, EXPORT)


def test_a_folder_that_cannot_be_written_is_reported(written, tmp_path):
    (tmp_path / "file").touch()
    # The system's text.
    with pytest.raises(ConfigError, match=r"cannot write to .*Not a directory"):
        export_models(tmp_path / "file" / "x", [written.path], written.read().declarations, EXPORT)


def test_the_vllm_backend_knows_its_tensors_and_its_model(tmp_path):
    backend = export_vllm_backend(tmp_path, Export(python="/p/python", socket="/s/socket"))
    assert backend == tmp_path / "vllm"
    assert {file.name for file in (backend / "loraplex_stub").iterdir()} == COPIED
    defaults = json.loads((backend / "loraplex.json").read_text())
    assert [row["name"] for row in defaults["input"]] == [r.name for r in VLLM.declared_inputs]
    assert [row["name"] for row in defaults["output"]] == [r.name for r in VLLM.declared_outputs]
    assert set(defaults["input"][0]) == {"name", "data_type", "dims", "optional"}
    assert defaults["loraplex_socket"] == "/s/socket"
    assert defaults["loraplex_command"][6:9] == [
        "--model-repository=$$TRITON_MODEL_DIRECTORY/..",
        "--model-control-mode=explicit",
        "--load-model=$$TRITON_MODEL_NAME",
    ]
    with pytest.raises(ConfigError, match=naming("exists")):
        export_vllm_backend(tmp_path, EXPORT)


def test_models_of_other_systems_are_left_out_if_one_of_ours_is_named(written):
    other = written.path / "classifier"
    os.mkdir(other)
    (other / "config.pbtxt").write_text('backend: "onnxruntime"\n')
    with pytest.raises(ConfigError, match=naming("classifier", "onnxruntime", "TOKENS_BATCH")):
        read_repositories([written.path])
    repository = written.read("ensemble")
    assert "classifier" not in [declaration.name for declaration in repository.declarations]
    with pytest.raises(ConfigError, match=naming("classifier", "onnxruntime", "TOKENS_BATCH")):
        read_repositories([written.path], ["classifier"])
