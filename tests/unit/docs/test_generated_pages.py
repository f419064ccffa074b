"""docs/ has the pages that the program writes: `make tables` brings them up to date."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.pages import BUILT, PAGES

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_as_the_program_writes_it(name):
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run: make tables"


@pytest.mark.parametrize("name", [*PAGES, *BUILT])
def test_a_page_can_be_found(name):
    places = (DOCS.parent / "mkdocs.yml", DOCS.parent / "README.md", *DOCS.rglob("*.md"))
    assert any(name in place.read_text(encoding="utf-8") for place in places)


@pytest.mark.parametrize(
    "name", ["adapter-memory", "architecture", "batching", "determinism", "mixed-batch"]
)
def test_a_drawing_has_a_title_and_a_description(name):
    root = ElementTree.parse(DOCS / "images" / f"{name}.svg").getroot()
    assert root.findtext("{http://www.w3.org/2000/svg}title")
    assert root.findtext("{http://www.w3.org/2000/svg}desc")
