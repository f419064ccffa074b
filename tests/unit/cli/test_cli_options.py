"""What the flags and the file of `loraplex serve` become."""

import pytest
import typer

from loraplex.cli.options import errors_to_exit_code, parse_adapters, with_demo
from loraplex.cli.serve import build_config
from loraplex.core.config import AdapterConfig
from loraplex.core.errors import ConfigError, InvalidAdapterError
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from support.naming import naming


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in ("LORAPLEX_HTTP_PORT", "LORAPLEX_DTYPE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path):
    def write(text: str):
        path = tmp_path / "loraplex.toml"
        path.write_text(text)
        return path

    return write


def config_of(model=None, name=None, file=None, adapters=(), adapter_dirs=(), **flags):
    return build_config(model, name, file, list(adapters), list(adapter_dirs), flags)


class TestParseAdapters:
    @pytest.mark.parametrize(
        ("spec", "name", "table"),
        [
            ("zh=/zh", "zh", {"path": "/zh"}),
            ("zh=/zh,task_id=0", "zh", {"path": "/zh", "task_id": 0}),
            ("zh=/a=b,c,task_id=12", "zh", {"path": "/a=b,c", "task_id": 12}),
            ("7=./x", "7", {"path": "./x"}),
        ],
    )
    def test_good(self, spec, name, table):
        assert parse_adapters([spec]) == {name: table}

    @pytest.mark.parametrize(
        ("specs", "named"),
        [
            (["zh"], ("NAME=PATH", "zh", "task_id=N")),
            (["=x"], ("NAME=PATH", "=x", "task_id=N")),
            (["zh="], ("NAME=PATH", "task_id=N")),
            (["zh=,task_id=1"], ("NAME=PATH", "task_id=N")),
            ([""], ("task_id=N",)),
            (["zh=/zh,task_id="], ("task_id",)),
            (["zh=/zh,task_id=one"], ("one", "task_id")),
            (["zh=/zh,task_id=-1"], (-1, "task_id")),
            (["zh=/zh,task_id=²"], ("task_id", "²")),
            (["zh=/a", "zh=/b"], ("zh",)),
        ],
    )
    def test_bad(self, specs, named):
        with pytest.raises(ConfigError, match=naming(*named)):
            parse_adapters(specs)


class TestBuildConfig:
    def test_a_model_is_named_by_its_folder(self, tmp_path, monkeypatch):
        assert list(config_of("/models/tiny").models) == ["tiny"]
        assert list(config_of("/models/tiny/").models) == ["tiny"]
        assert list(config_of("owner/name").models) == ["name"]
        assert list(config_of("/models/tiny", "mine").models) == ["mine"]
        monkeypatch.chdir(tmp_path)
        assert list(config_of(".").models) == [tmp_path.name]
        assert config_of(".").models[tmp_path.name].path == "."

    def test_flags(self):
        config = config_of(
            "/m",
            adapters=["zh=/zh,task_id=3", "ja=/ja"],
            adapter_dirs=["/many", "/more"],
            http_port=1,
            lora_host_bytes="2GiB",
        )
        model = config.models["m"]
        assert model.adapters == {"zh": AdapterConfig("/zh", 3), "ja": AdapterConfig("/ja")}
        assert model.adapter_dirs == ("/many", "/more")
        assert model.lora_host_bytes == 2 << 30
        assert config.server.http_port == 1

    def test_flags_win_over_environment_over_file(self, file, monkeypatch):
        path = file('[server]\nhttp_port = 1\n[models.m]\npath = "/m"\ndtype = "float16"\n')
        assert config_of(file=path).server.http_port == 1
        monkeypatch.setenv("LORAPLEX_HTTP_PORT", "2")
        monkeypatch.setenv("LORAPLEX_DTYPE", "float32")
        config = config_of(file=path)
        assert (config.server.http_port, config.models["m"].dtype) == (2, "float32")
        config = config_of(file=path, http_port=3, dtype="bfloat16")
        assert (config.server.http_port, config.models["m"].dtype) == (3, "bfloat16")

    def test_the_argument_is_a_flag_too(self, file):
        path = file('[models.m]\npath = "/file"\nblock_size = 8\n')
        model = config_of("/argument", "m", path).models["m"]
        assert (model.path, model.block_size) == ("/argument", 8)

    def test_a_flag_of_a_model_holds_for_all(self, file):
        path = file('[models.a]\npath = "/a"\n[models.b]\npath = "/b"\n')
        config = config_of(file=path, max_num_seqs=3)
        assert [model.max_num_seqs for model in config.models.values()] == [3, 3]

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ({}, ("models.NAME",)),
            ({"name": "m"}, ("--name", "MODEL")),
            ({"model": "/m", "dtype": "int4"}, ("--dtype", "models.m.dtype", "int4")),
            ({"model": "/m", "http_port": 99999}, ("--http-port", "server.http_port", 99999)),
            ({"model": "/m", "adapters": ["zh"]}, ("NAME=PATH", "zh", "task_id=N")),
        ],
        ids=str,
    )
    def test_what_is_wrong_is_reported(self, arguments, named):
        with pytest.raises(ConfigError, match=naming(*named)):
            config_of(**arguments)

    def test_one_models_flags_need_one_model(self, file):
        path = file('[models.a]\npath = "/a"\n[models.b]\npath = "/b"\n')
        for arguments in ({"adapters": ["zh=/zh"]}, {"adapter_dirs": ["/x"]}):
            with pytest.raises(ConfigError, match=naming("models.NAME.adapters")):
                config_of(file=path, **arguments)

    @pytest.mark.parametrize(
        ("name", "named"),
        [
            ("LORAPLEX_HTP_PORT", ("LORAPLEX_HTP_PORT", "http_port")),
            ("LORAPLEX_PATH", ("LORAPLEX_PATH", "models.NAME")),
            ("LORAPLEX_HTTP_PORT", ("LORAPLEX_HTTP_PORT", "server.http_port", "int")),
        ],
    )
    def test_a_wrong_variable_is_named(self, monkeypatch, name, named):
        monkeypatch.setenv(name, "x")
        with pytest.raises(ConfigError, match=naming(*named)):
            config_of("/m")

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("models = 3", ("loraplex.toml", 3)),
            ("[modles.m]\npath = '/m'", ("modles", "models", "server")),
            ("[models]\nm = 3", ("loraplex.toml", "models.m", 3)),
            ("[models.m]", ("loraplex.toml", "models.m", "path")),
            ("[models.m", ("TOML",)),
            ('[models.m]\npath = "/m"\n[servers]\n', ("servers", "models")),
        ],
    )
    def test_a_wrong_file_is_named(self, file, text, named):
        with pytest.raises(ConfigError, match=naming(*named)):
            config_of(file=file(text))


class TestErrorsToExitCode:
    def test_an_error_of_ours_is_a_line(self, capsys):
        with pytest.raises(typer.Exit) as caught, errors_to_exit_code():
            raise InvalidAdapterError("it is torn")
        assert caught.value.exit_code == 1
        assert capsys.readouterr() == ("", "loraplex: it is torn\n")

    def test_another_error_is_not_hidden(self):
        with pytest.raises(ZeroDivisionError), errors_to_exit_code():
            raise ZeroDivisionError

    def test_nothing_happens_without_an_error(self, capsys):
        with errors_to_exit_code():
            pass
        assert capsys.readouterr() == ("", "")


class TestDemo:
    """MODEL `demo` is the model that the package contains."""

    @pytest.fixture(autouse=True)
    def _empty_folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)

    def test_it_is_served_under_its_name_with_its_adapters(self):
        models = config_of("demo").models
        assert {name: model.path for name, model in models.items()} == {"demo": str(BASE_PATH)}
        assert models["demo"].adapters == {
            "chinese": AdapterConfig(path=str(ADAPTER_PATHS["chinese"]), task_id=1),
            "japanese": AdapterConfig(path=str(ADAPTER_PATHS["japanese"]), task_id=2),
        }

    def test_names_and_adapters_may_be_others(self):
        (model,) = config_of(
            "demo", "capitals", adapters=["chinese=/zh", "own=/own"]
        ).models.items()
        assert model[0] == "capitals"
        assert {name: table.path for name, table in model[1].adapters.items()} == {
            "chinese": "/zh",
            "japanese": str(ADAPTER_PATHS["japanese"]),
            "own": "/own",
        }

    def test_a_folder_of_that_name_comes_first(self, tmp_path):
        (tmp_path / "demo").mkdir()
        assert config_of("demo").models["demo"].path == "demo"
        assert with_demo("demo", {"own": "/own"}) == ("demo", {"own": "/own"})

    def test_without_a_server(self):
        shipped = {name: str(path) for name, path in ADAPTER_PATHS.items()}
        assert with_demo("demo", {"own": "/own"}) == (str(BASE_PATH), {**shipped, "own": "/own"})
