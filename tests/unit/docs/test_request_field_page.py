"""The files that docs/how-to-add-a-request-field.md lists are those that know its two examples."""

import re
from pathlib import Path

import loraplex

PACKAGE = Path(loraplex.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "how-to-add-a-request-field.md"
KNOWS = re.compile(r"(?i)\bmin_?p\b|(?<!use )\bno_repeat_ngram_size\b")
"""The names of the fields, but no advice that an error gives."""


def test_the_page_lists_the_files_that_a_field_touches() -> None:
    rows = re.findall(r"^\| `(\S+\.(?:py|js))` \|", PAGE.read_text(), re.MULTILINE)
    files = (*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.js"))
    found = {str(file.relative_to(PACKAGE)) for file in files if KNOWS.search(file.read_text())}
    assert found == set(rows)
