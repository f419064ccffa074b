"""The note of a state directory about its models, and states of models that have moved."""

import json
import logging
from pathlib import Path

import pytest

from loraplex.adapters.state_files import canonical_path
from loraplex.adapters.state_models import models_of, note_models, states_elsewhere
from loraplex.adapters.store import AdapterStore
from loraplex.app.builder import note_state

DIGEST = "ab" * 32


def write_model(folder: Path, size: int = 10) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8}))
    (folder / "model.safetensors").write_bytes(b"x" * size)
    return folder


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The state of a model at /here/llama with one adapter."""
    folder = tmp_path / "models" / "llama-1"
    AdapterStore.open(folder).close()
    note_models(folder, {"llama": str(write_model(tmp_path / "here" / "llama"))})
    file = canonical_path(folder, DIGEST)
    file.parent.mkdir(parents=True)
    file.touch()
    return folder


@pytest.fixture
def new(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "llama-2"
    AdapterStore.open(folder).close()
    return folder


def found_from(new: Path, **models: Path) -> list[tuple[Path, bool]]:
    noted = note_models(new, {name: str(path) for name, path in models.items()})
    return [(one.folder, one.is_same_content) for one in states_elsewhere(new, noted)]


def test_a_note_is_read_again(old: Path, tmp_path: Path) -> None:
    (model,) = models_of(old)
    assert (model.name, model.path) == ("llama", str(tmp_path / "here" / "llama"))
    assert models_of(tmp_path) == []
    (old / "models.json").write_text("[1]")
    assert models_of(old) == []


def test_a_folder_that_moved(old: Path, new: Path, tmp_path: Path) -> None:
    (tmp_path / "here").rename(tmp_path / "there")
    assert found_from(new, llama=tmp_path / "there" / "llama") == [(old, True)]


def test_a_link_that_leads_to_other_files(old: Path, new: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "here" / "llama", size=11)
    assert found_from(new, llama=tmp_path / "here" / "llama") == [(old, False)]


def test_other_models_and_states_without_adapters(old: Path, new: Path, tmp_path: Path) -> None:
    assert found_from(new, llama=write_model(tmp_path / "there" / "llama", size=11)) == []
    canonical_path(old, DIGEST).unlink()
    assert found_from(new, llama=write_model(tmp_path / "there" / "llama")) == []


@pytest.mark.parametrize("name", ["llama", "prod"])
def test_the_log_says_how_to_take_it_over(
    old: Path, new: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "here").rename(tmp_path / "there")
    store = AdapterStore.open(new)
    note_state(new, store, {name: str(tmp_path / "there" / "llama")})
    store.close()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(tmp_path / "here" / "llama") in record.message
    flags = f"--state-dir {old}" + ("" if name == "llama" else " --name llama")
    assert record.message.endswith(f"start the server with {flags}")


def test_the_first_model_is_no_news(
    new: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = AdapterStore.open(new)
    note_state(new, store, {"llama": str(write_model(tmp_path / "llama"))})
    store.close()
    assert caplog.records == []
