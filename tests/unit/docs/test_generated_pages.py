"""docs/ has the pages that the program writes: `make tables` brings them up to date."""

from pathlib import Path

import pytest

from tools.pages import PAGES

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_as_the_program_writes_it(name):
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run: make tables"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_can_be_found(name):
    places = (DOCS.parent / "mkdocs.yml", DOCS / "openapi.md")
    assert any(name in place.read_text(encoding="utf-8") for place in places)
