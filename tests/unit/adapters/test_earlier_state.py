"""Adapters in the one folder of earlier versions are found again in the folder of each model."""

import contextlib
import hashlib
import os
from pathlib import Path

import pytest

from loraplex.adapters import earlier_state
from loraplex.adapters.earlier_state import adopt_state
from loraplex.adapters.staged import StagedAdapter
from loraplex.adapters.state_files import StateLock, canonical_path
from loraplex.adapters.store import AdapterStore
from loraplex.core.adapter import AdapterRef, AdapterSource, ByName, LoraTarget
from loraplex.core.errors import ConfigError
from support.naming import naming

MODELS = ("llama", "qwen")


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A folder as earlier versions wrote it: adapters of two models, with a history each."""
    folder = tmp_path / "loraplex"
    with contextlib.closing(AdapterStore.open(folder)) as store:
        for model in MODELS:
            for content in (f"first of {model}", f"second of {model}"):
                staged = put(folder, content)
                store.register(model, "", "zh", staged, path="/zh", task_id=7, replace=True)
            store.alias(ref(model, "zh"), "chinese")
    return folder


def put(folder: Path, content: str) -> StagedAdapter:
    digest = hashlib.sha256(content.encode()).hexdigest()
    path = canonical_path(folder, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    targets = (LoraTarget(0, "q_proj", 4, 8, 8),)
    return StagedAdapter(
        source=AdapterSource(digest, str(path), len(content), targets),
        dtypes=("BF16",),
        num_tensors=2,
    )


def ref(model: str, name: str) -> AdapterRef:
    return AdapterRef(model, "", ByName(name))


def contents(state_dir: Path, model: str) -> list[str]:
    """Return the contents of an adapter's versions, newest first."""
    with contextlib.closing(AdapterStore.open(state_dir)) as store:
        assert store.resolve(ref(model, "chinese")).task_id == 7
        assert not store.missing()
        return [Path(one.source.path).read_text() for one in store.history(ref(model, "zh"))]


@pytest.mark.parametrize("has_links", [True, False])
def test_nothing_is_lost(earlier: Path, has_links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_links:

        def link(*_: object) -> None:
            raise OSError(18, "EXDEV")

        monkeypatch.setattr(earlier_state.os, "link", link)
    for model in MODELS:
        state_dir = earlier / "models" / model
        adopt_state(earlier, state_dir)
        assert contents(state_dir, model) == [f"second of {model}", f"first of {model}"]
    assert contents(earlier, "llama") == ["second of llama", "first of llama"]


def test_it_happens_once(earlier: Path) -> None:
    state_dir = earlier / "models" / "llama"
    adopt_state(earlier, state_dir)
    with contextlib.closing(AdapterStore.open(state_dir)) as store:
        store.remove(ref("llama", "zh"))
    adopt_state(earlier, state_dir)
    with contextlib.closing(AdapterStore.open(state_dir)) as store:
        assert store.find(ref("llama", "zh")) is None


def test_an_interrupted_copy_is_made_again(earlier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state_dir = earlier / "models" / "llama"

    def interrupt(*_: object) -> None:
        raise OSError("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(earlier_state, "_copy_database", interrupt)
        with pytest.raises(ConfigError, match=naming("interrupted", "--state-dir")):
            adopt_state(earlier, state_dir)
    adopt_state(earlier, state_dir)
    assert contents(state_dir, "llama") == ["second of llama", "first of llama"]


def test_no_earlier_state(tmp_path: Path) -> None:
    adopt_state(tmp_path, tmp_path / "models" / "llama")
    assert not (tmp_path / "models").exists()


def test_an_earlier_version_that_still_runs(earlier: Path) -> None:
    with (
        contextlib.closing(StateLock.own(earlier)),
        pytest.raises(ConfigError, match=naming(earlier, os.getpid())),
    ):
        adopt_state(earlier, earlier / "models" / "llama")
