"""Each base model has a state directory of its own."""

from pathlib import Path

import pytest

from loraplex.core.config import Config, ModelConfig
from loraplex.core.server_config import ServerConfig
from loraplex.core.state_places import name_of, state_place, state_root


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    return tmp_path


def place(*paths: str, **changes: str) -> Path:
    models = {f"m{index}": ModelConfig(path=path) for index, path in enumerate(paths)}
    return state_place(Config(models=models, **changes))


def test_a_folder_for_each_model(home: Path) -> None:
    llama, qwen = place("llama"), place("Qwen/Qwen2.5-1.5B-Instruct")
    assert llama != qwen
    assert llama.parent == qwen.parent == home / "state" / "loraplex" / "models"
    assert llama.name.startswith("llama-")
    assert qwen.name.startswith("Qwen2.5-1.5B-Instruct-")


def test_the_same_model_however_it_is_written(home: Path) -> None:
    (home / "link").symlink_to(home / "llama")
    assert place("llama") == place("./llama") == place(str(home / "llama")) == place("link")


def test_folders_of_one_name_differ(home: Path) -> None:
    (home / "other" / "llama").mkdir(parents=True)
    assert place("llama") != place("other/llama")


def test_several_models(home: Path) -> None:
    assert place("llama", "b/c") == place("b/c", "llama")
    assert place("llama", "b/c") != place("llama")
    assert "+1-" in place("llama", "b/c").name


def test_a_name_that_the_configuration_has(home: Path) -> None:
    assert place("llama", state_name="kept").name == "kept"


def test_a_folder_that_the_operator_sets(home: Path) -> None:
    config = Config(server=ServerConfig(state_dir="/mine"), models={"m": ModelConfig(path="llama")})
    assert state_place(config) == state_root(config) == Path("/mine")


def test_clients_may_read_no_models_state(home: Path) -> None:
    config = Config(models={"m": ModelConfig(path="llama")})
    assert state_root(config) in place("b/c").parents


def test_a_name_is_one_folder(home: Path) -> None:
    assert name_of([]).startswith("no-model-")
    assert "/" not in name_of(["a b/..\\c" + "x" * 200])
    assert len(name_of(["x" * 200])) < 100
