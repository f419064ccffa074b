"""The documentation's site, built by MkDocs: what its search shows first, and llms.txt."""

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("site")]
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a built site, whose OpenAPI document is a stand-in."""
    folder = tmp_path_factory.mktemp("site")
    docs = folder / "docs"
    shutil.copytree(DOCS, docs, ignore=shutil.ignore_patterns("__pycache__"))
    (docs / "openapi.json").write_text("{}")
    for name in ("mkdocs.yml", "src"):
        os.symlink(ROOT / name, folder / name)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder / "site"


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(_Silent, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("kubernetes", "kubernetes/"),
        ("api key", "security/"),
        ("memory limit", "sizing/"),
        ("nginx", "proxies/"),
        ("first adapter", "tutorials/first-adapter/"),
    ],
)
def test_the_search_finds_guides_first(browser, address: str, query: str, first: str) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{address}?q={query}")
    results = page.locator(".md-search-result__item .md-search-result__link")
    results.first.wait_for(state="attached")
    found = [link.get_attribute("href") for link in results.all()]
    context.close()
    paths = [link.removeprefix(address).partition("?")[0].partition("#")[0] for link in found]
    assert paths[0] == first, paths
    assert [path for path in paths if path.startswith("adr/")] == []


def entries(part: object) -> Iterator[str]:
    """Yield the pages of a part of the navigation."""
    if isinstance(part, str):
        yield part
    else:
        for each in part if isinstance(part, list) else part.values():
            yield from entries(each)


def test_llms_txt_leads_to_the_markdown_of_each_page(site: Path) -> None:
    index = (site / "llms.txt").read_text(encoding="utf-8")
    assert index.startswith("# loraplex\n\n> ")
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    expected = [page for page in entries(navigation) if not page.startswith("adr/")]
    lines = re.findall(r"^- \[(.+)\]\((.+)\): (.+)$", index, re.MULTILINE)
    assert [page for _, page, _ in lines] == expected
    whole = (site / "llms-full.txt").read_text(encoding="utf-8")
    for page in expected:
        text = (site / page).read_text(encoding="utf-8")
        assert text.startswith("#")
        assert text.strip() in whole
