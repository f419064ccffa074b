"""A repository as its user writes it."""

import json
from pathlib import Path

import pytest

from loraplex.compat.triton.five_models import write_five_models
from support.triton_repositories import Written


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the tests run."""
    monkeypatch.setattr("loraplex.compat.triton.model_folder.has_gpu", lambda: False)
    monkeypatch.setattr("loraplex.compat.triton.vllm.has_gpu", lambda: False)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    repository = Written(tmp_path / "repository", engine)
    write_five_models(repository.path)
    repository.fill("tensorrt_llm", decoupled_mode="True", engine_dir=str(engine))
    return repository
