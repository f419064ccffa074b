"""Links, headings and file paths that the documentation names exist."""

import fnmatch
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest

from tools.pages import BUILT

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
SITE = sorted(page for page in DOCS.rglob("*.md") if DOCS / "tools" not in page.parents)
PAGES = [*SITE, *sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("examples/**/*.md"))]
CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)|<(?:img|source) [^>]*src(?:set)?=\"([^\"]+)\"")
SOURCE_PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|cpp|h|md|toml))`")
FOLDERS = ("", "src", "src/loraplex", "docs")
OTHER_SYSTEMS = ("inflight_batcher_llm/", "tools/", "samples/", "scripts/", "team/")
"""Beginnings of paths in other systems' repositories, and of examples."""


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[\s-]+", "-", heading).strip("-") for heading in plain}


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def broken_links(page: Path) -> list[str]:
    """Return the page's relative links that lead to no file, or to no heading of it."""
    broken = []
    for pair in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        link = "".join(pair)
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        # The site has the pages of docs/ only: a file elsewhere is named there, not linked.
        outside = page in SITE and DOCS not in target.parents
        is_built = target.parent == DOCS and target.name in BUILT
        exists = is_built or target.exists()
        if outside or not exists or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# One heading\n", encoding="utf-8")
    page.write_text(
        "[a](missing.md) [b](other.md#one-heading) [c](other.md#two) [d](#here) [e](https://x.org)\n"
        '`[f](code.md)` ![g](missing.svg "title") <img src="missing.png">\n# Here\n',
        encoding="utf-8",
    )
    assert broken_links(page) == ["missing.md", "other.md#two", "missing.svg", "missing.png"]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_source_files_exist(page: Path) -> None:
    paths = SOURCE_PATH.findall(page.read_text(encoding="utf-8"))
    ours = [path for path in paths if not path.startswith(OTHER_SYSTEMS)]
    assert [path for path in ours if not any((ROOT / x / path).exists() for x in FOLDERS)] == []


def unnamed_reports(files: list[str], text: str) -> list[str]:
    """Return the reports that no text names, by name or by a pattern such as `step-*.json`."""
    named = re.findall(r"[\w.*-]+\.(?:md|json|toml)", text)
    return [file for file in files if not any(fnmatch.fnmatch(file, each) for each in named)]


def test_every_committed_report_is_named_somewhere() -> None:
    listed = ["git", "ls-files", "benchmarks/results"]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip("this is no git checkout")
    pages = [*SITE, ROOT / "README.md", ROOT / "benchmarks/README.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert unnamed_reports([Path(path).name for path in found.stdout.split()], text) == []


def test_unnamed_reports_are_found() -> None:
    text = "see `results/a.md`, `step-*.json` and b.json"
    files = ["a.md", "a.json", "step-1.json", "step-1.md", "b.json", "soak-b.json"]
    assert unnamed_reports(files, text) == ["a.json", "step-1.md", "soak-b.json"]


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- (?:.+: )?([\w./-]+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in SITE)


def test_documented_objects_exist() -> None:
    library = (DOCS / "library.md").read_text(encoding="utf-8")
    for name in re.findall(r"^::: ([\w.]+)$", library, re.MULTILINE):
        assert pkgutil.resolve_name(name)


def test_a_term_of_the_glossary_is_explained_once() -> None:
    glossary = (DOCS / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^- \*\*(.+?)\*\*", glossary, re.MULTILINE)
    assert len(terms) > 70
    assert len(terms) == len({term.lower() for term in terms})
