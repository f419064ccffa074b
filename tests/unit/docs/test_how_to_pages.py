"""The private names in a table of docs/how-to-add-*.md are in the file of their row."""

import re
from pathlib import Path

import pytest

import loraplex

PACKAGE = Path(loraplex.__file__).parent
PAGES = sorted((Path(__file__).parents[3] / "docs").glob("how-to-add-*.md"))


def unknown_names(page: str, root: Path) -> list[tuple[str, str]]:
    """Return (file, name) of private names that the file of their row does not have."""
    folder = re.search(r"^\| file in `src/loraplex/?(\S*)` \|", page, re.MULTILINE)
    inside = root / (folder[1] if folder else "")
    found = []
    for path, text in re.findall(r"^\| `(\S+\.py)` \| (.*) \|$", page, re.MULTILINE):
        file = inside / path
        if file.is_file():
            source = file.read_text()
            names = re.findall(r"`(_[A-Za-z_]+)`", text)
            found += [(path, name) for name in names if not re.search(rf"\b{name}\b", source)]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_are_in_their_files(page: Path) -> None:
    assert unknown_names(page.read_text(), PACKAGE) == []


def test_a_name_that_is_gone_is_found() -> None:
    page = (
        "| file in `src/loraplex` | |\n|---|---|\n| `core/errors.py` | `_GONE`, `LoraplexError` |\n"
    )
    assert unknown_names(page, PACKAGE) == [("core/errors.py", "_GONE")]


def test_the_pages_have_names_to_check() -> None:
    num_names = sum(len(re.findall(r"`_[A-Za-z_]+`", page.read_text())) for page in PAGES)
    assert num_names > 10
