"""GGUF files with changed bytes: each loads or is refused, and neither takes much memory."""

import contextlib
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.demo import BASE_PATH
from loraplex.execution.weights.gguf_folder import gguf_folder
from loraplex.execution.weights.stored_head import read_model
from loraplex.text.tokenizer import load_tokenizer
from support.examples import examples
from support.gguf_files import gguf_of_llama

MAX_BYTES = 64 << 20


@pytest.fixture(scope="module")
def content() -> bytes:
    return gguf_of_llama(BASE_PATH)


@examples(2)
@given(data=st.data())
def test_changed_bytes(
    data: st.DataObject, content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("gguf")
    # The metadata, its lists, and the descriptions of tensors; the rest is numbers.
    num_bytes = content.index(b"output_norm.weight") + 64
    places = st.one_of(st.integers(0, 1200), st.integers(0, num_bytes - 1))
    changes = data.draw(st.dictionaries(places, st.integers(0, 255), min_size=1, max_size=4))
    changed = bytearray(content)
    for place, value in changes.items():
        changed[place] = value
    path = folder / "model.gguf"
    path.write_bytes(changed)
    tracemalloc.start()
    try:
        _load(path, folder)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


def _load(path: Path, folder: Path) -> None:
    with contextlib.suppress(ConfigError, UnsupportedModelError):
        found = gguf_folder(path, folder / "folders")
        read_model(found)
        load_tokenizer(found)
