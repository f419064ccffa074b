"""What the flags and the file of `loraplex serve` become."""

import pytest
import typer

from loraplex.cli.options import errors_to_exit_code, parse_adapters
from loraplex.cli.serve import build_config
from loraplex.core.config import AdapterConfig
from loraplex.core.errors import ConfigError, InvalidAdapterError


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
        ("specs", "text"),
        [
            (["zh"], "NAME=PATH"),
            (["=x"], "NAME=PATH"),
            (["zh="], "NAME=PATH"),
            (["zh=,task_id=1"], "NAME=PATH"),
            ([""], "got ''"),
            (["zh=/zh,task_id="], "task_id must be an integer, got ''"),
            (["zh=/zh,task_id=one"], "got 'one'"),
            (["zh=/zh,task_id=-1"], "got '-1'"),
            (["zh=/zh,task_id=²"], "must be an integer"),
            (["zh=/a", "zh=/b"], "names 'zh' twice"),
        ],
    )
    def test_bad(self, specs, text):
        with pytest.raises(ConfigError, match=text):
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
        ("arguments", "text"),
        [
            ({}, "no model: give a folder"),
            ({"name": "m"}, "--name is the name of the argument MODEL"),
            ({"model": "/m", "dtype": "int4"}, "flag --dtype: models.m.dtype: must be one of"),
            ({"model": "/m", "http_port": 99999}, "flag --http-port: server.http_port: "),
            ({"model": "/m", "adapters": ["zh"]}, "NAME=PATH"),
        ],
        ids=str,
    )
    def test_what_is_wrong_is_reported(self, arguments, text):
        with pytest.raises(ConfigError, match=text):
            config_of(**arguments)

    def test_one_models_flags_need_one_model(self, file):
        path = file('[models.a]\npath = "/a"\n[models.b]\npath = "/b"\n')
        for arguments in ({"adapters": ["zh=/zh"]}, {"adapter_dirs": ["/x"]}):
            with pytest.raises(ConfigError, match=r"exactly one model.*\[models.NAME.adapters\]"):
                config_of(file=path, **arguments)

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("LORAPLEX_HTP_PORT", "environment variable LORAPLEX_HTP_PORT is not a setting"),
            ("LORAPLEX_PATH", "belongs to one model"),
            ("LORAPLEX_HTTP_PORT", "variable LORAPLEX_HTTP_PORT: server.http_port: Expected `int`"),
        ],
    )
    def test_a_wrong_variable_is_named(self, monkeypatch, name, text):
        monkeypatch.setenv(name, "x")
        with pytest.raises(ConfigError, match=text):
            config_of("/m")

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("models = 3", r"loraplex\.toml: models: must be a table"),
            ("[modles.m]\npath = '/m'", "modles: unknown setting"),
            ("[models]\nm = 3", r"loraplex\.toml: models\.m: must be a table"),
            ("[models.m]", r"loraplex\.toml: models\.m: .*`path`"),
            ("[models.m", "is not TOML"),
            ('[models.m]\npath = "/m"\n[servers]\n', "servers: unknown setting"),
        ],
    )
    def test_a_wrong_file_is_named(self, file, text, reason):
        with pytest.raises(ConfigError, match=reason):
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
