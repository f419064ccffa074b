"""Links, headings and file paths that the documentation names exist."""

import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("adr/*.md")), ROOT / "README.md"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
SOURCE_PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|cpp|h|md|toml))`")
FOLDERS = ("", "src", "src/loraplex", "docs")
OTHER_SYSTEMS = ("inflight_batcher_llm/", "tools/", "samples/", "scripts/", "team/")
"""Beginnings of paths in other systems' repositories, and of examples."""


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[\s-]+", "-", heading).strip("-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("http:", "https:")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_source_files_exist(page: Path) -> None:
    paths = SOURCE_PATH.findall(page.read_text(encoding="utf-8"))
    ours = [path for path in paths if not path.startswith(OTHER_SYSTEMS)]
    assert [path for path in ours if not any((ROOT / x / path).exists() for x in FOLDERS)] == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    names = [page.relative_to(DOCS).as_posix() for page in PAGES if DOCS in page.parents]
    assert [name for name in names if f"{name}\n" not in navigation] == []


def test_documented_objects_exist() -> None:
    library = (DOCS / "library.md").read_text(encoding="utf-8")
    for name in re.findall(r"^::: ([\w.]+)$", library, re.MULTILINE):
        assert pkgutil.resolve_name(name)
