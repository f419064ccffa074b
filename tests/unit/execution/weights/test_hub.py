"""Folders are taken as they are; the hub gets requests only for what may be a hub id."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from loraplex.core.errors import ConfigError
from loraplex.core.gguf import gguf_parts
from loraplex.demo import BASE_PATH
from loraplex.execution.weights.hub import model_here, resolve_model
from support.gguf_files import gguf_of_llama
from support.naming import naming


class FakeHub:
    """Stands for snapshot_download."""

    def __init__(self, folder: Path, error: Exception | None = None) -> None:
        self.folder = folder
        self.error = error
        self.calls: list[tuple[str, str | None, list[str]]] = []

    def __call__(self, repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        self.calls.append((repo_id, revision, allow_patterns))
        if self.error:
            raise self.error
        return str(self.folder)


def install(monkeypatch: pytest.MonkeyPatch, hub: Any) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)


def test_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert resolve_model(f"~/{tmp_path.name}") == tmp_path


def test_a_hub_id_with_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").touch()
    hub = FakeHub(tmp_path)
    install(monkeypatch, hub)
    assert resolve_model("owner/model", "main") == tmp_path
    ((hub_id, revision, patterns),) = hub.calls
    assert (hub_id, revision) == ("owner/model", "main")
    assert "*.safetensors" in patterns
    assert not any("bin" in pattern for pattern in patterns)


def test_old_weights_are_requested_only_without_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(tmp_path)
    install(monkeypatch, hub)
    resolve_model("model")
    assert ["*.bin" in patterns for _, _, patterns in hub.calls] == [False, True]


@pytest.mark.parametrize("text", ["/no/such/folder", "./model", "../model", "a/b/c", "models/"])
def test_what_is_no_hub_id_is_a_missing_folder(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    with pytest.raises(ConfigError, match="there is no folder"):
        resolve_model(text)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(ConfigError, match=naming("LoRA", "--adapter", "NAME", tmp_path)):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_missing_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    (tmp_path / "model.gguf").touch()
    wanted = rf"no file {tmp_path}/modle.gguf; did you mean {tmp_path}/model.gguf\?"
    with pytest.raises(ConfigError, match=wanted):
        resolve_model(str(tmp_path / "modle.gguf"))


def test_a_folder_with_a_gguf_file(tmp_path: Path) -> None:
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "mmproj-a.gguf", "config.json"):
        (tmp_path / name).touch()
    found = model_here(str(tmp_path))
    assert found is not None
    assert gguf_parts(found)[0] == tmp_path / "a-00001-of-00002.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ConfigError, match=naming(2, "GGUF", "a-00001-of-00002.gguf")):
        model_here(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert model_here(str(tmp_path)) == tmp_path


def test_a_folder_that_stands_for_a_gguf_file_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "files" / "tiny.gguf"
    file.parent.mkdir()
    file.write_bytes(gguf_of_llama(BASE_PATH))
    folder = resolve_model(str(file.parent), state_dir=str(tmp_path / "state"))
    assert folder.parent == tmp_path / "state" / "gguf"
    assert resolve_model(str(folder), state_dir=str(tmp_path / "state")) == folder


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(
    "error", [LocalEntryNotFoundError("offline\nlong text"), HFValidationError("bad id")]
)
def test_errors_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    install(monkeypatch, FakeHub(tmp_path, error))
    with pytest.raises(ConfigError, match=naming("owner/model")):
        resolve_model("owner/model")


def test_a_name_below_a_folder_that_exists_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "llama").mkdir(parents=True)
    with pytest.raises(ConfigError, match=naming("models/lama", "models/llama")):
        resolve_model("models/lama")


def test_a_name_near_a_folder_that_the_hub_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FakeHub(tmp_path, HFValidationError("bad id")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    with pytest.raises(ConfigError, match=naming("llama")):
        resolve_model("lama")
