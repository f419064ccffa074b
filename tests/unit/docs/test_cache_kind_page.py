"""The files that docs/how-to-add-a-cache-kind.md lists are those that know a kind of cache."""

import re
from pathlib import Path
from typing import get_args

import loraplex
from loraplex.core.cache import CacheSpec

PACKAGE = Path(loraplex.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "how-to-add-a-cache-kind.md"
KINDS = [kind.__name__ for kind in get_args(CacheSpec)]


def files_that_know(kind: str) -> set[str]:
    """Return the file of the kinds and those that import one of them."""
    known = re.compile(rf"^from loraplex\.core\.cache import (\([^)]*|.*)\b{kind}\b", re.MULTILINE)
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if known.search(path.read_text())
    }
    return found | {"core/cache.py"}


def test_the_page_lists_the_files_that_a_kind_touches() -> None:
    page = PAGE.read_text()
    rows = re.findall(r"^\| `(\S+\.py)` \|", page, re.MULTILINE)
    readers = re.findall(r"^\| `(\w+)` \| `(\S+\.py)` \|", page, re.MULTILINE)
    assert rows[-1] == "models/specs/<mixer>.py"
    assert {kind for kind, _ in readers} <= set(KINDS)
    for kind in KINDS:
        assert files_that_know(kind) == {*rows[:-1], *(path for k, path in readers if k == kind)}


def test_the_page_describes_all_members_of_a_policy() -> None:
    policy = (PACKAGE / "memory/cache_policy.py").read_text()
    protocol = policy.split("class CachePolicy(Protocol)")[1].split("@dataclasses")[0]
    members = set(re.findall(r"    def (\w+)", protocol))
    table = PAGE.read_text().split("## 2.")[1].split("## 3.")[0]
    assert members == set(re.findall(r"`(\w+)(?:\([^)]*\))?`(?=[^|\n]*\|)", table)) - {
        "CachePolicy",
        "member",
    }


def test_the_files_of_the_page_are_there() -> None:
    for path in re.findall(r"`((?:src|tests)/[^`<>]+\.py)`", PAGE.read_text()):
        assert (PAGE.parents[1] / path).is_file(), path
