"""vLLM's flags on `loraplex serve`, as KServe's LLMInferenceService writes them."""

import re
from pathlib import Path

import pytest
import typer.main
import typer.testing

from loraplex.app import launch
from loraplex.cli import serve as serve_module
from loraplex.cli.main import app
from loraplex.cli.serve import build_config
from loraplex.cli.vllm_flags import FLAGS, OWN_FLAGS
from loraplex.core.errors import ConfigError
from support.naming import naming


@pytest.fixture
def config_of(monkeypatch):
    """A function (*arguments) -> the configuration of a command line, with the shell's words."""

    def run(*arguments):
        found = []

        def keep(*given):
            found.append(build_config(*given))
            raise ConfigError("no server in this test")

        monkeypatch.setattr(serve_module, "build_config", keep)
        result = typer.testing.CliRunner().invoke(app, ["serve", *arguments])
        assert found, result.output
        return found[0]

    return run


def test_kserves_command(config_of):
    config = config_of(
        *("/mnt/models", "--served-model-name", "llama", "publishers/ns/models/llama"),
        *("--port", "8000", "--enable-ssl-refresh"),
        *("--ssl-certfile", "/var/run/kserve/tls/tls.crt"),
        *("--ssl-keyfile", "/var/run/kserve/tls/tls.key"),
        *("--enable-lora", "--max-lora-rank=16", "--max-loras=4", "--max-cpu-loras=8"),
        *("--lora-modules", """'{"name":"a","path":"/mnt/lora/a"}'"""),
        """'{"name":"publishers/ns/models/a","path":"/mnt/lora/a"}'""",
    )
    assert list(config.models) == ["llama"]
    model = config.models["llama"]
    assert model.path == "/mnt/models"
    assert model.served_names == ("publishers/ns/models/llama",)
    assert model.max_lora_rank == 16
    assert {name: adapter.path for name, adapter in model.adapters.items()} == {
        "a": "/mnt/lora/a",
        "publishers/ns/models/a": "/mnt/lora/a",
    }
    server = config.server
    assert server.http_port == 8000
    assert (server.tls_cert, server.tls_key) == (
        "/var/run/kserve/tls/tls.crt",
        "/var/run/kserve/tls/tls.key",
    )


def test_flags_of_the_server(config_of):
    config = config_of(
        *("/m", "-asc", "4", "--shutdown-timeout", "7", "--runner", "generate"),
        *("--allowed-origins", '["https://app.example.org"]', "--language-model-only"),
    )
    server = config.server
    assert (server.frontend_processes, server.shutdown_seconds) == (4, 7)
    assert server.cors_origins == ("https://app.example.org",)


@pytest.mark.parametrize(
    "module",
    [
        "a=/x",
        '{"name": "a", "path": "/x"}',
        '\'{"name": "a", "path": "/x"}\'',
        '"a=/x"',
        '{"name": "a", "path": "/x", "base_model_name": "m"}',
    ],
)
def test_forms_of_an_adapter(config_of, module):
    config = config_of("/m", "--lora-modules", module, "--adapter", "b=/b")
    adapters = config.models["m"].adapters
    assert {name: adapter.path for name, adapter in adapters.items()} == {"a": "/x", "b": "/b"}


def error_of(**flags):
    with pytest.raises(ConfigError) as caught:
        build_config("/m", flags.pop("name", None), None, flags.pop("adapter", []), [], flags)
    return caught.value.message


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("a", "must be NAME=PATH"),
        ("''", "must be NAME=PATH"),
        ("{", "is not JSON"),
        ('{"name": "a"}', "must be NAME=PATH"),
        ('{"name": 1, "path": "/x"}', "must be NAME=PATH"),
        ('{"name": "a", "path": "/x", "rank": 8}', "unknown field 'rank'; known: name, path"),
        ("''a=/x''", "unknown"),
    ],
)
def test_what_is_no_adapter(module, text):
    if text == "unknown":
        # Only one pair of quotes is removed: the rest belongs to the name and the path.
        config = build_config("/m", None, None, [], [], {"lora_modules": [module]})
        assert list(config.models["m"].adapters) == ["'a"]
        return
    assert text in error_of(lora_modules=[module])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"lora_modules": ["a=/x", "a=/y"]}, ("--lora-modules", "a")),
        ({"lora_modules": ["a=/x"], "adapter": ["a=/y"]}, ("--adapter", "--lora-modules")),
        ({"port": "1", "http_port": 2}, ("--port", "--http-port")),
        ({"served_model_name": ["a"], "name": "b"}, ("--name", "--served-model-name")),
        ({"port": "x"}, ("server.http_port", "int")),
        ({"swap_space": "x"}, ("--swap-space", "x")),
        ({"load_format": "dummy"}, ("--load-format", "dummy")),
        ({"data_parallel_size": "2"}, ("--data-parallel-size", 2)),
        ({"kv_cache_dtype": "fp8"}, ("--kv-cache-dtype", "models.m.kv_dtype", "fp8")),
        (
            {"gpu_memory_utilization": "2"},
            ("--gpu-memory-utilization", "models.m.kv_cache_fraction"),
        ),
        ({"api_key": [""]}, ("--api-key",)),
        ({"task": "reward"}, ("--task", "reward")),
        ({"runner": "draft"}, ("--runner", "draft")),
        ({"api_server_count": "0"}, ("server.frontend_processes", 0)),
        ({"api_server_count": "2", "frontend_processes": 2}, ("same",)),
        ({"allowed_origins": "*"}, ("--allowed-origins",)),
        ({"allowed_origins": "[1]"}, ("--allowed-origins", "[1]")),
        ({"allowed_origins": '["x"]'}, ("server.cors_origins",)),
        ({"enforce_eager": True, "cuda_graphs": True}, ("--enforce-eager", "--cuda-graphs")),
        (
            {"enable_log_requests": True, "disable_log_requests": True},
            ("--enable-log-requests", "--disable-log-requests"),
        ),
    ],
)
def test_flags_that_contradict_each_other(flags, named):
    assert re.search(naming(*named), error_of(**flags))


def test_a_name_belongs_to_one_model(tmp_path):
    path = tmp_path / "loraplex.toml"
    path.write_text('[models.a]\npath = "/a"\n[models.b]\npath = "/b"\nserved_names = ["a"]\n')
    with pytest.raises(ConfigError, match=naming("models.b.served_names", "a")):
        build_config(None, None, path, [], [], {})


@pytest.mark.parametrize("task", ["embed", "classify", "score", "generate"])
def test_a_server_has_every_task_that_vllm_has_one_server_for(task):
    config = build_config("/m", None, None, [], [], {"task": task, "runner": "pooling"})
    assert config == build_config("/m", None, None, [], [], {})


def test_names_need_a_model():
    with pytest.raises(ConfigError, match=naming("--served-model-name", "MODEL")):
        build_config(None, None, None, [], [], {"served_model_name": ["a"]})


def test_help_has_every_flag():
    text = typer.testing.CliRunner().invoke(app, ["serve", "--help-all"]).output
    assert all(flag.name in text for flag in FLAGS)


def test_the_page_has_every_flag():
    page = (Path(__file__).parents[3] / "docs" / "support-vllm.md").read_text(encoding="utf-8")
    flags = [*FLAGS, *OWN_FLAGS]
    assert [flag.name for flag in flags if f"`{flag.name}`" not in page] == []


def test_the_table_and_the_command_agree():
    """Every flag of the table is one of the command, and no flag of the command is left out."""
    command = typer.main.get_command(app).commands["serve"]
    panels = {
        flag: parameter.rich_help_panel
        for parameter in command.params
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }
    names = {name for flag in (*FLAGS, *OWN_FLAGS) for name in flag.names}
    assert names <= panels.keys()
    theirs = {flag for flag, panel in panels.items() if panel == "vLLM"}
    assert {flag for flag in theirs if not flag.startswith("--no-")} <= names


def test_what_the_issue_names_is_there():
    """The flags that users of vLLM tried first."""
    names = {name for flag in (*FLAGS, *OWN_FLAGS) for name in flag.names}
    assert names >= {
        *("--port", "--api-key", "--served-model-name", "--lora-modules", "--enable-lora"),
        *("--max-loras", "--max-cpu-loras", "--max-lora-rank", "--gpu-memory-utilization"),
        *("--max-model-len", "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"),
        *("--quantization", "-q", "--chat-template", "--tool-call-parser", "--reasoning-parser"),
        *("--enable-auto-tool-choice", "--max-num-seqs", "--max-num-batched-tokens", "--seed"),
        *("--block-size", "--swap-space", "--dtype", "--kv-cache-dtype", "--enforce-eager"),
        *("--enable-prefix-caching", "--enable-chunked-prefill", "--disable-log-requests"),
        *("--uvicorn-log-level", "--root-path", "--revision", "--tokenizer", "--download-dir"),
        *("--trust-remote-code", "--load-format"),
    }


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--gpu-memory-utilization", "0.5"], {"kv_cache_fraction": 0.5}),
        (["--kv-cache-dtype=bfloat16"], {"kv_dtype": "bfloat16"}),
        (["--dtype", "half"], {"dtype": "float16"}),
        (["--enforce-eager"], {"cuda_graphs": False}),
        (["--no-enforce-eager"], {"cuda_graphs": True}),
        (["--swap-space", "2"], {"kv_cache_host_memory_bytes": 2 << 30}),
        (["--no-enable-prefix-caching"], {"enable_prefix_cache": False}),
        (["--enable-prefix-caching"], {"enable_prefix_cache": True}),
        (["-tp", "2", "-q", "int8"], {"tensor_parallel_size": 2, "quantization": "int8"}),
        (["-pp", "2"], {"pipeline_parallel_size": 2}),
        (["--max_model_len", "64"], {"max_model_len": 64}),
        (["--load-format", "auto", "-dp", "1"], {}),
        (["--long-prefill-token-threshold", "8"], {"max_prefill_chunk": 8}),
        (["--no-enable-lora"], {"enable_lora": False}),
    ],
)
def test_settings_of_a_model(config_of, words, settings):
    model = config_of("/m", *words).models["m"]
    assert {name: getattr(model, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["-p", "81"], {"http_port": 81}),
        (["--port", "82"], {"http_port": 82}),
        (["--disable-log-requests"], {"log_requests": "off"}),
        (["--disable-uvicorn-access-log"], {"log_requests": "off"}),
        (["--enable-log-requests"], {"log_requests": "all"}),
        (["--no-enable-log-requests"], {"log_requests": "off"}),
    ],
)
def test_settings_of_the_server(config_of, words, settings):
    server = config_of("/m", *words).server
    assert {name: getattr(server, name) for name in settings} == settings


@pytest.fixture
def served(monkeypatch):
    """Calls of run_server as (configuration, given keys)."""
    calls = []

    def run_server(config, print_line, given_keys=()):
        del print_line
        calls.append((config, given_keys))

    monkeypatch.setattr(launch, "run_server", run_server)
    monkeypatch.setattr(launch, "set_up_logging", lambda settings: None)
    return calls


def test_flags_without_effect_are_logged_once(served, caplog):
    caplog.set_level("INFO")
    flags = ["--max-loras", "4", "--max-cpu-loras", "8", "--trust-remote-code", "--seed", "1"]
    result = typer.testing.CliRunner().invoke(app, ["serve", "/m", *flags])
    assert (result.exit_code, len(served)) == (0, 1)
    said = [record.getMessage() for record in caplog.records]
    for flag in ("--max-loras", "--max-cpu-loras", "--trust-remote-code", "--seed"):
        assert len([line for line in said if line.startswith(f"flag {flag} has no effect: ")]) == 1


def test_api_keys_of_the_command_line(served, caplog, monkeypatch, tmp_path):
    """They add to those of a file, allow other machines, and are in no text."""
    monkeypatch.delenv("LORAPLEX_API_KEYS", raising=False)
    caplog.set_level("INFO")
    flags = ["--host", "0.0.0.0", "--api-key", "s3cret-a", "--api-key=s3cret-b"]
    flags += ["--api-keys-file", str(tmp_path / "keys.toml")]
    result = typer.testing.CliRunner().invoke(app, ["serve", "/m", *flags])
    assert result.exit_code == 0
    [(config, keys)] = served
    assert keys == ("s3cret-a", "s3cret-b")
    assert "s3cret" not in f"{config}{result.output}{caplog.text}"
    assert "--api-key is visible" in caplog.text


def test_an_error_does_not_contain_the_key(served):
    flags = ["--api-key", "s3cret-a", "--max-num-seqs", "0"]
    result = typer.testing.CliRunner().invoke(app, ["serve", "/m", *flags])
    assert result.exit_code == 1
    assert "s3cret" not in result.output
    assert not served
