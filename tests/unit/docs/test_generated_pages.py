"""docs/ has the pages that the program writes: `make tables` brings them up to date."""

from pathlib import Path

import pytest

from support.naming import naming
from tools.drawing import Drawing
from tools.pages import BUILT, PAGES

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_as_the_program_writes_it(name):
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run: make tables"


@pytest.mark.parametrize("name", [*PAGES, *BUILT])
def test_a_page_can_be_found(name):
    places = (DOCS.parent / "mkdocs.yml", DOCS.parent / "README.md", *DOCS.rglob("*.md"))
    assert any(name in place.read_text(encoding="utf-8") for place in places)


def test_a_text_that_its_box_does_not_hold_is_refused():
    drawing = Drawing("title", "description", 200, 100)
    with pytest.raises(ValueError, match=naming(60, 20)):
        drawing.box((0, 0), (60, 20), ["a text of more than 60 pixels"])
    with pytest.raises(ValueError, match=naming(200, 100)):
        drawing.text((150, 20), "a text at the edge")
