"""`loraplex compat llgtrt`: llgtrt's flags, file and environment; what it prints and refuses."""

import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.demo import BASE_PATH
from support.naming import naming


@pytest.fixture
def engine(tmp_path):
    return shutil.copytree(
        BASE_PATH, tmp_path / "engine", ignore=shutil.ignore_patterns("*.safetensors")
    )


@pytest.fixture
def served(monkeypatch):
    """(configuration, given keys) of what would have been served."""
    calls = []

    def run_server(config, say, given_keys, process_name):
        assert process_name == "llgtrt"
        calls.append((config, given_keys))

    monkeypatch.setattr("loraplex.app.launch.run_server", run_server)
    monkeypatch.setattr("loraplex.app.launch.set_up_logging", lambda level: None)
    return calls


def run(*arguments, **environment):
    return CliRunner().invoke(app, ["llgtrt", *map(str, arguments)], env=environment)


def test_the_defaults_are_llgtrts(engine, served, caplog):
    done = run("--engine", engine)
    assert done.exit_code == 0, done.output
    [(config, keys)] = served
    assert (config.server.host, config.server.http_port) == ("0.0.0.0", 3000)
    assert (config.server.grpc, config.server.metrics) == (False, False)
    assert (config.server.dialect, config.server.persist_adapters) == ("llgtrt", False)
    assert (list(config.models), keys) == (["engine"], ())
    assert config.models["engine"].path == str(engine)
    assert any("may use this server without a key" in record.message for record in caplog.records)


def test_every_flag(engine, served, tmp_path):
    (tmp_path / "t.j2").write_text("template")
    (tmp_path / "a.json5").write_text("{runtime: {max_batch_size: 3, max_num_tokens: 5}}")
    (tmp_path / "b.json5").write_text("{runtime: {max_batch_size: 4}}")
    other = shutil.copytree(engine, tmp_path / "other")
    long = ("--host", "::1", "--port", 5, "--tokenizer", other, "--config", tmp_path / "a.json5")
    long += ("--config", tmp_path / "b.json5", "--chat-template", tmp_path / "t.j2", "--debug")
    long += ("--debug-llg", "--lora-root", tmp_path, "--api-key", "k" * 20, "--llgtrt-compat")
    short = ("-H", "::1", "-p", 5, "-T", other, "-C", tmp_path / "a.json5", "-d", "-D")
    short += ("-C", tmp_path / "b.json5", "--chat-template", tmp_path / "t.j2")
    short += ("--lora-root", tmp_path, "--api-key", "k" * 20, "--llgtrt-compat")
    for flags in (("--engine", engine, *long), ("-E", engine, *short)):
        done = run(*flags)
        assert done.exit_code == 0, done.output
    assert served[0] == served[1]
    config, keys = served[0]
    assert (config.server.host, config.server.http_port) == ("::1", 5)
    assert (config.server.log_level, config.server.dialect) == ("debug", "llgtrt_compat")
    assert config.server.health_needs_key
    assert keys == ("k" * 20,)
    model = config.models["engine"]
    assert (model.max_num_seqs, model.max_num_batched_tokens) == (4, 5)
    assert (model.tokenizer, model.lora_root) == (str(other), str(tmp_path))
    assert model.chat_template == str(tmp_path / "t.j2")


def test_a_key_in_the_arguments_is_warned_of_and_not_reported(engine, served, caplog):
    assert run("-E", engine, "--api-key", "the-secret-key-of-all").exit_code == 0
    reported = " ".join(record.message for record in caplog.records)
    assert "is visible in the list of processes" in reported
    assert "the-secret-key-of-all" not in reported
    assert "may use this server without a key" not in reported


def test_the_file_of_the_folder_the_environment_and_our_flags(engine, served):
    (engine / "llgtrt.json5").write_text("{runtime: {max_batch_size: 3, max_num_tokens: 5}}")
    (engine / "chat_template.j2").write_text("")
    done = run("-E", engine, "--grpc-port", 0, "-q", LORAPLEX_MAX_NUM_SEQS="7")
    assert done.exit_code == 0, done.output
    config, _ = served[0]
    model = config.models["engine"]
    assert (model.max_num_seqs, model.max_num_batched_tokens) == (7, 5)
    assert model.chat_template == str(engine / "chat_template.j2")
    assert (config.server.grpc, config.server.metrics) == (True, False)
    assert config.server.log_level == "warning"


def test_what_has_no_effect_is_reported(engine, served, caplog):
    caplog.set_level("INFO")
    (engine / "llgtrt.json5").write_text("{runtime: {enable_batch_size_tuning: false}}")
    run("-E", engine)
    reported = [record.message for record in caplog.records]
    assert f"{engine}/llgtrt.json5: runtime.enable_batch_size_tuning has no effect" in str(reported)


def test_printing_ends_it(engine, served, tmp_path):
    (tmp_path / "a.json5").write_text("{runtime: {max_batch_size: 3}}")
    done = run("-E", engine, "-C", tmp_path / "a.json5", "--print-config")
    printed = json.loads(done.output)
    assert printed["runtime"]["max_batch_size"] == 3
    assert printed["tokenizer"] == {}
    printed = json.loads(run("-E", engine, "--print-complete-config").output)
    assert printed["tokenizer"]["bos_token"] == "<s>"
    template = run("-E", engine, "--print-chat-template").output
    assert template.strip() == printed["tokenizer"]["chat_template"].strip()
    assert served == []


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--test-py",), ("--test-py",)),
        (("-d", "-q"), ("--debug", "--quiet")),
        (("-p", 70000), ("--http-port", "server.http_port", 70000)),
        (("-C", "/gone.json5"), ("/gone.json5",)),
    ],
)
def test_what_is_refused(engine, served, flags, named):
    done = run("-E", engine, *flags)
    assert done.exit_code == 1
    assert re.search(naming(*named), done.output)
    assert served == []


def test_an_engine_is_a_folder(served, tmp_path):
    done = run("-E", tmp_path)
    assert (done.exit_code, "it has no config.json" in done.output) == (1, True)
    assert run().exit_code == 2


def test_the_device_is_found_by_default(engine, served):
    run("-E", engine)
    run("-E", engine, "--device", "cpu")
    assert [config.models["engine"].device for config, _ in served] == ["auto", "cpu"]


def test_flags_of_settings_that_llgtrt_has_by_another_name(engine, served):
    run("-E", engine, "--http-port", 7, "--log-level", "error")
    run("-E", engine, "--http-port", 7, "--log-level", "error", "-p", 8, "-q")
    found = [(config.server.http_port, config.server.log_level) for config, _ in served]
    assert found == [(7, "error"), (8, "warning")]
