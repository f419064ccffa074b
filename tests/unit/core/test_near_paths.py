"""Errors for missing paths name what is near."""

from pathlib import Path

import pytest

from loraplex.core.errors import ConfigError
from loraplex.core.near_paths import check_exists


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
    assert message(wrong) == f"there is no folder {wrong}; did you mean {tmp_path / 'llama-1b'}?"


def test_a_typo_in_a_folder_above(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    assert message(tmp_path / "modles" / "x").endswith(f"; did you mean {tmp_path / 'models'}?")


def test_nothing_is_near(tmp_path: Path) -> None:
    wrong = tmp_path / "quite" / "else"
    assert message(wrong) == f"there is no folder {wrong}; {tmp_path} has nothing of that name"


def test_a_path_that_cannot_be(tmp_path: Path) -> None:
    assert "cannot open the folder" in message(tmp_path / ("x" * 300))
