"""docs/tools.md has a row for every family, and none that is not there."""

import re
from pathlib import Path

from loraplex.core.tools import REASONING_PARSERS, TOOL_CALL_PARSERS

PAGE = (Path(__file__).parents[3] / "docs" / "tools.md").read_text(encoding="utf-8")


def test_every_family_has_a_row() -> None:
    families = PAGE.partition("## Tool call parsers")[2]
    rows = re.findall(r"^\| `([a-z0-9_]+)` \|", families, re.MULTILINE)
    assert sorted(rows) == sorted(TOOL_CALL_PARSERS)


def test_every_kind_of_tags_is_listed() -> None:
    assert all(f"`{name}`" in PAGE for name in REASONING_PARSERS)
