"""Hooks of the site's build (mkdocs.yml): what its search finds, and its pages for language models.

The site has `llms.txt`, an index of its pages with links to their Markdown, and `llms-full.txt`,
all pages in one file. Decisions (ADRs) are in neither, and the search does not find them: a reader
who looks for "kubernetes" wants the guide, not the reasons. mkdocs-llmstxt would do the same, but
needs the public address of the site.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LEFT_OUT = "Decisions"
"""Section of the navigation whose pages are read one after another, not found."""
SEARCH_BOOSTS = {"Contributing": 0.5, "Tutorials": 2.0, "How-to guides": 2.0, "Installation": 2.0}
"""Weights of sections and pages of the navigation; the innermost counts, and others have 1."""

_pages: list[Any] = []
"""Pages of this build in the order of the navigation, without those that are left out."""


def on_nav(nav: Any, *, config: Any, files: Any) -> None:
    """Take the pages of a build; `mkdocs serve` has several builds."""
    del config, files
    _pages[:] = [page for page in nav.pages if LEFT_OUT not in _names(page)]


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> None:
    """Weigh a page for the search, which reads this from the page's metadata."""
    del markdown, config, files
    names = _names(page)
    boost = next((SEARCH_BOOSTS[name] for name in names if name in SEARCH_BOOSTS), 1.0)
    page.meta["search"] = {"exclude": True} if LEFT_OUT in names else {"boost": boost}


def on_post_build(config: Any) -> None:
    """Write the Markdown of each page, llms.txt and llms-full.txt."""
    site = Path(config.site_dir)
    for page in _pages:
        target = site / page.file.src_uri
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page.markdown, encoding="utf-8")
    head = f"# {config.site_name}\n\n> {config.site_description}\n"
    (site / "llms.txt").write_text("\n".join([head, *_index()]), encoding="utf-8")
    texts = [page.markdown.strip() for page in _pages]
    (site / "llms-full.txt").write_text("\n\n".join([head, *texts, ""]), encoding="utf-8")


def _names(page: Any) -> list[str]:
    """Return the titles of a page and of the sections around it, the innermost first."""
    return [page.title, *(section.title for section in page.ancestors)]


def _index() -> Iterator[str]:
    section = ""
    for page in _pages:
        name = page.ancestors[-1].title if page.ancestors else "Start"
        if name != section:
            section = name
            yield f"## {section}\n"
        yield f"- [{page.title}]({page.file.src_uri}): {_summary(page.markdown)}"
    yield ""


def _summary(markdown: str) -> str:
    """Return the first sentence of a page's text, without links."""
    paragraphs = (part.strip() for part in re.split(r"\n\s*\n", markdown))
    text = next((part for part in paragraphs if part and part[0] not in "#<`|!-:"), "")
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(text.split()))
    return re.split(r"(?<=[.:!?]) ", text, maxsplit=1)[0].rstrip(":")
