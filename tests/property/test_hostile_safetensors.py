"""Safetensors files with changed headers: each loads or is refused, and takes little memory."""

import contextlib
import shutil
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.execution.weights.checkpoint import Checkpoint
from loraplex.execution.weights.stored_head import read_model
from loraplex.models.parameters import checkpoint_shapes
from support.checkpoints import save_random_model, tiny_sizes
from support.examples import examples
from support.reference_quantizers import QUANTIZERS

MAX_BYTES = 64 << 20
FORMATS = ("plain", "gptq-4", "ct-int4", "fp8-block")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in FORMATS}
    for name, folder in folders.items():
        save_random_model(folder, LlamaConfig(**tiny_sizes(199)))
        if name in QUANTIZERS:
            QUANTIZERS[name](folder)
    return folders


@examples(2)
@given(data=st.data(), name=st.sampled_from(FORMATS))
def test_changed_headers(
    data: st.DataObject,
    name: str,
    models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(models[name], folder, dirs_exist_ok=True)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    places = st.one_of(st.integers(0, 7), st.integers(8, 7 + size))
    digits = st.sampled_from(b"0123456789")
    values = st.one_of(digits, st.integers(0, 255))
    changes = data.draw(st.dictionaries(places, values, min_size=1, max_size=4))
    for place, value in changes.items():
        content[place] = value
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    path.write_bytes(content)
    tracemalloc.start()
    try:
        _read(folder)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


def _read(folder: Path) -> None:
    with contextlib.suppress(ConfigError, UnsupportedModelError):
        spec = read_model(folder)
        with Checkpoint(folder, spec) as checkpoint:
            for name in checkpoint_shapes(spec):
                checkpoint.read(name)
