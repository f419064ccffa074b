"""vLLM's flags on `loraplex serve`, as KServe's LLMInferenceService writes them."""

from pathlib import Path

import pytest
import typer.testing

from loraplex.cli import serve as serve_module
from loraplex.cli.main import app
from loraplex.cli.serve import build_config
from loraplex.cli.vllm_flags import FLAGS
from loraplex.core.errors import ConfigError


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
        ('{"name": "a", "path": "/x", "rank": 8}', "unknown field 'rank'; known are name, path"),
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
    ("flags", "text"),
    [
        ({"lora_modules": ["a=/x", "a=/y"]}, "--lora-modules names 'a' twice"),
        ({"lora_modules": ["a=/x"], "adapter": ["a=/y"]}, "--adapter and --lora-modules both"),
        ({"port": "1", "http_port": 2}, "--port and --http-port are the same"),
        ({"served_model_name": ["a"], "name": "b"}, "--name and --served-model-name both name"),
        ({"port": "x"}, "server.http_port: Expected `int`"),
    ],
)
def test_flags_that_contradict_each_other(flags, text):
    assert text in error_of(**flags)


def test_a_name_belongs_to_one_model(tmp_path):
    path = tmp_path / "loraplex.toml"
    path.write_text('[models.a]\npath = "/a"\n[models.b]\npath = "/b"\nserved_names = ["a"]\n')
    with pytest.raises(ConfigError, match="served_names: 'a' is a name of model 'a', too"):
        build_config(None, None, path, [], [], {})


def test_names_need_a_model():
    with pytest.raises(ConfigError, match="--served-model-name is the name of the argument MODEL"):
        build_config(None, None, None, [], [], {"served_model_name": ["a"]})


def test_help_has_every_flag():
    text = typer.testing.CliRunner().invoke(app, ["serve", "--help"]).output
    assert all(flag.name in text for flag in FLAGS)


def test_the_page_has_every_flag():
    page = (Path(__file__).parents[3] / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert [flag.name for flag in FLAGS if f"`{flag.name}`" not in page] == []
