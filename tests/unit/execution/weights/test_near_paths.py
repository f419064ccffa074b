"""Errors for missing paths name what is near."""

import re
from pathlib import Path

import pytest

from loraplex.core.errors import ConfigError
from loraplex.execution.weights.near_paths import check_exists
from support.naming import naming


def message(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_exists(str(path), "folder")
    return caught.value.message


def test_a_path_that_exists(tmp_path: Path) -> None:
    check_exists(str(tmp_path), "folder")


def test_a_typo_in_the_last_name(tmp_path: Path) -> None:
    (tmp_path / "llama-1b").mkdir()
    (tmp_path / "other").mkdir()
    wrong = tmp_path / "lama-1b"
    assert re.search(naming(wrong, tmp_path / "llama-1b"), message(wrong))


def test_a_typo_in_a_folder_above(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    assert re.search(naming(tmp_path / "models"), message(tmp_path / "modles" / "x"))


def test_nothing_is_near(tmp_path: Path) -> None:
    wrong = tmp_path / "quite" / "else"
    assert re.search(naming(wrong, tmp_path), message(wrong))


def test_a_path_that_cannot_be(tmp_path: Path) -> None:
    assert "cannot open the folder" in message(tmp_path / ("x" * 300))
