"""`loraplex compat triton`: tritonserver's flags, settings over the repository's, `init`."""

import json
import re

import pytest
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.cli.triton import (
    FLAGS,
    as_settings,
    build_config,
    serve_repositories,
    split_flags,
    without_effect,
)
from loraplex.compat.triton.repository import read_repositories
from loraplex.core.config import ModelConfig
from loraplex.core.errors import ConfigError
from loraplex.core.server_config import ServerConfig
from loraplex.core.support import Support
from loraplex.frontends.kserve.models.model_control import ControlMode
from support.naming import naming


@pytest.fixture
def engine(tmp_path):
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return folder


@pytest.fixture
def repository(tmp_path, engine):
    folder = tmp_path / "repository"
    done = CliRunner().invoke(app, ["triton", "init", str(folder), "--model", str(engine)])
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def served(monkeypatch):
    """What would have been served."""
    calls = []
    monkeypatch.setattr(
        "loraplex.app.launch.run_server",
        lambda *arguments, process_name: calls.append((*arguments, process_name)),
    )
    monkeypatch.setattr("loraplex.app.launch.set_up_logging", lambda level: None)
    monkeypatch.setattr("loraplex.compat.triton.model_folder.has_gpu", lambda: False)
    return calls


def run(*arguments):
    return CliRunner().invoke(app, ["triton", *arguments])


SWITCH = "--disable-auto-complete-config"


def flags(support):
    return [flag.name for flag in FLAGS if flag.support is support]


def test_every_flag_is_there_once_and_hides_no_setting():
    names = [flag.name for flag in FLAGS]
    assert len(names) == len(set(names))
    ours = {*ServerConfig.__struct_fields__, *ModelConfig.__struct_fields__}
    assert ours & {name[2:].replace("-", "_") for name in names} == set()


def test_both_names_of_a_repository_and_every_flag(served, repository):
    given = [f"{name}=1" for name in flags(Support.NO_EFFECT) if name != SWITCH]
    given += ["--http-port=0", "--grpc-port", "0", "--exit-timeout-secs=7", "--log-verbose=1"]
    given += ["--http-max-input-size=4096", SWITCH]
    for name in ("--model-repository", "--model-store"):
        done = run(f"{name}={repository}", *given)
        assert done.exit_code == 0, done.output
    config, _, declarations, control, process_name = served[0]
    assert process_name == "tritonserver"
    assert config.server.host == "0.0.0.0"
    assert (config.server.http_port, config.server.grpc_port) == (0, 0)
    assert config.server.shutdown_seconds == 7
    assert config.server.max_body_bytes == 4096
    assert config.server.log_level == "debug"
    assert len(declarations) == 5
    assert control.mode is ControlMode.NONE
    assert served[1][0] == config


def test_the_environment_and_flags_win_over_the_repository(repository, monkeypatch):
    read = read_repositories([repository])
    assert build_config(read, {}, {}).models["tensorrt_llm"].enable_prefix_cache is False
    monkeypatch.setenv("LORAPLEX_ENABLE_KV_CACHE_REUSE", "true")
    monkeypatch.setenv("LORAPLEX_MAX_NUM_SEQS", "5")
    config = build_config(read, {}, {"max_num_seqs": 6, "host": "127.0.0.1"})
    assert config.models["tensorrt_llm"].enable_prefix_cache is True
    assert config.models["tensorrt_llm"].max_num_seqs == 6
    assert config.server.host == "127.0.0.1"


def test_what_has_no_effect_is_reported(repository, served, caplog):
    caplog.set_level("INFO")
    serve_repositories([repository], [], {"id": "mine", "rate_limit": None})
    reported = [record.message for record in caplog.records]
    assert reported.count("flag --id has no effect: the server is called triton") == 1
    assert not any("rate-limit" in text for text in reported)
    assert any("may use this server without a key" in text for text in reported)
    caplog.clear()
    serve_repositories([repository], [], {"host": "127.0.0.1"})
    assert "may use this server without a key" not in caplog.text


@pytest.mark.parametrize("flag", flags(Support.REFUSED))
def test_flags_that_request_protection_are_refused(flag):
    protecting, neutral = ("false", "true") if flag == "--allow-client-shm" else ("true", "false")
    variable = flag[2:].replace("-", "_")
    with pytest.raises(ConfigError, match=f"flag {flag}: "):
        split_flags({variable: protecting})
    assert split_flags({variable: neutral})[1] == {}


def test_what_is_opened_and_shown():
    shut = dict.fromkeys(("allow_http", "allow_grpc", "allow_metrics"), "false")
    assert as_settings(shut) == {"http": False, "grpc": False, "metrics": False}
    assert as_settings({"allow_gpu_metrics": "0", "allow_cpu_metrics": "TRUE"}) == {}
    with pytest.raises(ConfigError, match=naming("--allow-grpc", "maybe")):
        as_settings({"allow_grpc": "maybe"})


def test_tls_needs_both_files():
    files = {"grpc_server_cert": "c.pem", "grpc_server_key": "k.pem"}
    assert as_settings({"grpc_use_ssl": "true", **files}) == {
        "tls_cert": "c.pem",
        "tls_key": "k.pem",
    }
    assert as_settings(files) == {}
    with pytest.raises(ConfigError, match=naming("--grpc-use-ssl", "--grpc-server-key")):
        as_settings({"grpc_use_ssl": "1", "grpc_server_cert": "c.pem"})


def test_one_address():
    same = {"http_address": "::1", "grpc_address": "::1"}
    assert as_settings(same) == {"host": "::1"}
    with pytest.raises(
        ConfigError, match=r"--http-address ::1, --metrics-address 0\.0\.0\.0 differ"
    ):
        as_settings({"http_address": "::1", "metrics_address": "0.0.0.0"})
    with pytest.raises(ConfigError, match=naming("--log-verbose", "much")):
        as_settings({"log_verbose": "much"})
    assert list(without_effect({"http_address": "::1"})) == []


def test_model_control(repository, served):
    store = f"--model-repository={repository}"
    explicit = "--model-control-mode=explicit"
    assert run(store, explicit, "--load-model=ensemble", "--load-model=tensorrt_llm").exit_code == 0
    assert run(store, explicit).exit_code == 0
    assert run(store, explicit, "--load-model=*").exit_code == 0
    assert run(store, "--model-control-mode=poll").exit_code == 0
    some, none, everything, poll = (call[3] for call in served)
    assert some.mode is none.mode is everything.mode is ControlMode.EXPLICIT
    assert poll.mode is ControlMode.POLL
    assert [
        some.is_loaded(name) for name in ("ensemble", "postprocessing", "tensorrt_llm_bls")
    ] == [
        True,
        True,
        False,
    ]
    assert not none.is_loaded("ensemble")
    assert everything.is_loaded("tensorrt_llm_bls")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], ("--model-repository", "DIR")),
        (["--model-repository=/nowhere/r"], ("/nowhere/r",)),
        (["--model-repository=x", "--model-control-mode=all"], ("none", "poll", "explicit")),
        (["--model-repository=x", "--load-model=a"], ("--model-control-mode",)),
        (["--model-repository=x", "--grpc-root-cert=a.pem"], ("API",)),
    ],
)
def test_mistakes_are_one_line(arguments, named):
    done = run(*arguments)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert re.search(naming(*named), line)


def test_init_writes_what_is_said(tmp_path, engine):
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    folder = tmp_path / "r"
    arguments = ["init", str(folder), "--model", str(engine), "--lora-dir", str(adapters)]
    assert run(*arguments, "--decoupled").exit_code == 0
    repository = read_repositories([folder])
    model = build_config(repository, {}, {}).models["tensorrt_llm"]
    assert (model.path, model.adapter_dirs) == (str(engine), (str(adapters),))
    decoupled = {d.name: d.is_decoupled for d in repository.declarations}
    assert decoupled["ensemble"]
    assert decoupled["tensorrt_llm_bls"]
    again = run(*arguments)
    assert again.exit_code == 1
    assert re.search(naming("exists"), again.stderr)


def test_init_wants_folders(tmp_path):
    done = run("init", str(tmp_path / "r"), "--model", "owner/name")
    assert done.exit_code == 1
    assert re.search(naming("owner/name"), done.stderr)
    assert not (tmp_path / "r").exists()
