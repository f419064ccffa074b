"""A tiny checkpoint for the tests of this folder."""

from pathlib import Path

import pytest

from support.tiny_model import TinyCheckpoint


@pytest.fixture
def tiny_checkpoint(tmp_path: Path) -> TinyCheckpoint:
    return TinyCheckpoint(tmp_path)
