"""`loraplex cache`: what is listed, what is removed, and what stays."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from click.testing import Result
from typer.testing import CliRunner

from loraplex.adapters.state_files import StateLock
from loraplex.adapters.state_models import note_models
from loraplex.adapters.store import AdapterStore
from loraplex.cli.main import app
from loraplex.execution.weights import hub
from loraplex.execution.weights.file_locks import use
from loraplex.execution.weights.packed_cache import PackedCache

OLD = time.time() - 40 * 86400


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("LORAPLEX_STATE_DIR", "LORAPLEX_WEIGHTS_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["cache", *arguments])


def listed() -> list[dict[str, Any]]:
    done = run("list", "--json")
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def grow_old(folder: Path) -> None:
    for file in [folder, *folder.rglob("*")]:
        os.utime(file, (OLD, OLD))


@pytest.fixture
def state(home: Path) -> Path:
    folder = home / "state" / "loraplex" / "models" / "llama-1234abcd"
    AdapterStore.open(folder).close()
    grow_old(folder)
    return folder


@pytest.fixture
def weights(home: Path) -> Path:
    cache = PackedCache(home / "cache" / "loraplex" / "weights", 1 << 30)
    cache.folder.mkdir(parents=True)
    with cache.turn("key", "/models/llama"):
        (cache.folder / "key.weights").write_bytes(b"x" * 3000)
    grow_old(cache.folder)
    return cache.folder / "key.weights"


@pytest.fixture
def download(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model that loraplex has downloaded, in a process that has ended."""
    folder = home / "hub" / "models--Qwen--Qwen2.5-1.5B"
    snapshot = folder / "snapshots" / "abc"

    def take(*_: object, **__: object) -> str:
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / "model.safetensors").write_bytes(b"x" * 5000)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", take)
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda *_, **__: snapshot.is_dir() or None
    )
    assert hub.resolve_model("Qwen/Qwen2.5-1.5B") == snapshot
    while hub._USED:
        os.close(hub._USED.popitem()[1])
    grow_old(home / "cache" / "loraplex" / "hub")
    yield folder
    while hub._USED:
        os.close(hub._USED.popitem()[1])


def test_nothing(home: Path) -> None:
    assert run("list").stdout == "0 entries, 0 B\n"
    assert run("clean").stdout == "0 B freed\n"


def test_what_is_listed(state: Path, weights: Path, download: Path) -> None:
    found = {one["kind"]: one for one in listed()}
    assert {kind: one["model"] for kind, one in found.items()} == {
        "state": "llama",
        "weights": "llama",
        "hub": "Qwen/Qwen2.5-1.5B",
    }
    assert [found[kind]["path"] for kind in ("state", "weights", "hub")] == [
        str(state),
        str(weights),
        str(download),
    ]
    assert found["weights"]["num_bytes"] == 3000 + len("/models/llama")
    assert found["hub"]["num_bytes"] == 5000 + len(str(download))
    assert not any(one["is_used"] for one in found.values())
    assert all(abs(one["last_use"] - OLD) < 1 for one in found.values())
    lines = run("list").stdout.splitlines()
    assert lines[0].split("  ")[0] == "KIND"
    assert sum("used 40 days ago" in line for line in lines) == 3


def test_paths_of_models_distinguish_states_of_one_name(home: Path, state: Path) -> None:
    other = state.with_name("llama-5678abcd")
    AdapterStore.open(other).close()
    for folder, model in ((state, "a"), (other, "b")):
        note_models(folder, {"llama": str(home / model / "llama")})
    paths = [str(home / model / "llama") for model in "ab"]
    assert [one["model_path"] for one in listed()] == paths
    lines = run("list").stdout.splitlines()
    assert [line.split()[2] for line in lines[1:3]] == paths


def test_states_stay_without_a_flag(state: Path, weights: Path, download: Path) -> None:
    done = run("clean")
    assert done.exit_code == 0, done.output
    assert "freed" in done.stdout
    assert state.exists()
    assert not weights.exists()
    assert not download.exists()
    run("clean", "--with-state")
    assert not state.exists()
    assert listed() == []


def test_a_dry_run(weights: Path) -> None:
    assert "would remove" in run("clean", "--dry-run").stdout
    assert weights.exists()


def test_what_was_used_lately_stays(weights: Path) -> None:
    run("clean", "--older-than", "41d")
    assert weights.exists()
    run("clean", "--older-than", "39d")
    assert not weights.exists()


def test_one_model(state: Path, weights: Path, download: Path) -> None:
    run("clean", "--model", "Qwen2.5-1.5B")
    assert weights.exists()
    assert not download.exists()
    run("clean", "--model", "llama", "--with-state")
    assert not weights.exists()
    assert not state.exists()


def test_a_state_in_use(state: Path) -> None:
    with contextlib.closing(StateLock.own(state)):
        (one,) = listed()
        assert (one["is_used"], one["used_by"]) == (True, [os.getpid()])
        done = run("clean", "--with-state", "--older-than", "0m")
        assert f"in use by process {os.getpid()}" in done.stdout
        assert state.exists()


def test_weights_in_use(weights: Path) -> None:
    descriptor = os.open(weights, os.O_RDONLY)
    use(descriptor)
    assert "in use" in run("clean").stdout
    assert weights.exists()
    os.close(descriptor)
    run("clean")
    assert not weights.exists()


def test_a_download_in_use(download: Path) -> None:
    hub.resolve_model("Qwen/Qwen2.5-1.5B")
    assert "in use" in run("clean", "--older-than", "0m").stdout
    assert download.exists()


def test_a_download_of_another_program_is_none_of_ours(
    home: Path, download: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "cache" / "loraplex" / "hub" / download.name).unlink()
    hub.resolve_model("Qwen/Qwen2.5-1.5B")
    assert listed() == []


def test_the_folder_of_earlier_versions(home: Path, state: Path) -> None:
    root = home / "state" / "loraplex"
    AdapterStore.open(root).close()
    for file in root.glob("*.*"):
        os.utime(file, (OLD, OLD))
    assert [one["kind"] for one in listed()] == ["earlier state", "state"]
    run("clean", "--with-state", "--model", "llama")
    assert [one["kind"] for one in listed()] == ["earlier state"]
    run("clean", "--with-state")
    assert list(root.iterdir()) == [root / "models"]


def test_the_folders_of_gguf_files_are_no_earlier_state(home: Path, state: Path) -> None:
    root = home / "state" / "loraplex"
    AdapterStore.open(root).close()
    for file in root.glob("*.*"):
        os.utime(file, (OLD, OLD))
    (root / "gguf" / "tiny-Q8_0-0f0510f01dda").mkdir(parents=True)
    run("clean", "--with-state")
    assert sorted(root.iterdir()) == [root / "gguf", root / "models"]


def test_a_state_directory_of_ones_own(home: Path, tmp_path: Path) -> None:
    AdapterStore.open(tmp_path / "mine").close()
    found = run("list", "--state-dir", str(tmp_path / "mine"))
    assert found.stdout.splitlines()[1].startswith("state ")
    assert str(tmp_path / "mine") in found.stdout


def test_a_wrong_time(home: Path) -> None:
    done = run("clean", "--older-than", "soon")
    assert done.exit_code == 1
    assert "--older-than must be a time such as 30d" in done.output
