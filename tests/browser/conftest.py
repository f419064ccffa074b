"""A real Chromium, and pages that fail their test for whatever a browser complains about.

Without `REQUIRE_BROWSER` (`make test-browser` sets it) these tests are left out where no
browser is. With it, a browser that is missing, a skipped test and fewer passed tests than
pyproject.toml names are failures.
"""

import datetime
import importlib.util
import os
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from loraplex.serving.access.key_file_changes import create_key
from loraplex.testing.running_server import RunningServer, serving
from support.engine_kills import HELD_ENGINE_FLAGS

IS_REQUIRED = bool(os.environ.get("REQUIRE_BROWSER"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HAS_PLAYWRIGHT = importlib.util.find_spec("playwright") is not None
if not HAS_PLAYWRIGHT and not IS_REQUIRED:
    collect_ignore_glob = ["test_*.py"]

FLAGS = (
    *("--headless=new", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-quic"),
    "--force-color-profile=srgb",
)
WIDE = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
TIMEOUT_MS = 120_000
"""Limit for what never comes about: a busy machine takes its time."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that did not test what it was to test."""
    if not IS_REQUIRED or hasattr(session.config, "workerinput") or session.exitstatus:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    passed, skipped = (len(reporter.stats.get(kind, ())) for kind in ("passed", "skipped"))
    whole = tomllib.loads((Path(session.config.rootpath) / "pyproject.toml").read_text())
    least = whole["tool"]["loraplex"]["browser-tests"]
    is_part = (
        bool(session.config.option.keyword)
        or session.config.option.lf
        or len(session.config.args) > 1
        or any(arg.endswith(".py") or "::" in arg for arg in session.config.args)
    )
    if skipped or (passed < least and not is_part):
        reporter.write_line(
            f"{passed} browser tests passed and {skipped} were skipped; at least {least} and 0 are "
            "wanted",
            red=True,
        )
        session.exitstatus = 1


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    if CHROMIUM is None:
        message = "chromium is not installed: run .ci/install_chromium"
        pytest.fail(message) if IS_REQUIRED else pytest.skip(message)
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=TIMEOUT_MS)

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM,
            # Chromium refuses its sandbox to root.
            chromium_sandbox=os.getuid() != 0,
            args=list(FLAGS),
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The capitals model with both adapters, and without keys, for every module that neither
    changes it nor lists what others did.

    Other modules have their own, and are a group: their tests run in one process, so that each
    server is started once.
    """
    with serving(tmp_path_factory.mktemp("console"), *HELD_ENGINE_FLAGS) as running:
        yield running


TENANTS = """
[tenants.acme]
list = ["chinese", "acme-*"]
use = ["chinese", "acme-*"]
manage = ["acme-*"]
[tenants.umbrella]
list = ["japanese", "umbrella-*"]
use = ["japanese", "umbrella-*"]
manage = ["umbrella-*"]
[tenants.reader]
[tenants.ops]
manage = "all"
operator = true
"""


class Keys(NamedTuple):
    path: Path
    """Key file; flag --api-keys-file."""
    of: dict[str, str]
    """Key by tenant."""
    ids: dict[str, str]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """Two tenants, one that may only read, and an operator, for modules whose server has keys."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(TENANTS)
    now = datetime.datetime(2026, 1, 31, tzinfo=datetime.UTC)
    names = ("acme", "umbrella", "reader", "ops")
    made = {name: create_key(path, name, now) for name in names}
    return Keys(
        path,
        {name: key for name, (_, key, _) in made.items()},
        {name: key_id for name, (key_id, _, _) in made.items()},
    )


class Complaints:
    """What a browser complained about on the pages of a context."""

    def __init__(self, origins: set[str]) -> None:
        self.found: list[str] = []
        self.expected: list[str] = []
        """Parts of complaints that a test causes on purpose."""
        self._origins = origins

    def watch(self, page) -> None:
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.found.append(f"page error: {error}"))
        page.on("request", self._on_request)
        page.add_init_script(
            "addEventListener('securitypolicyviolation', e => console.error('CSP: ' + "
            "e.violatedDirective + ' ' + e.blockedURI))"
        )

    def _on_console(self, message) -> None:
        if message.type in ("error", "warning"):
            self.found.append(f"console: {message.text}")

    def _on_request(self, request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme in ("http", "https") and parts.netloc not in self._origins:
            self.found.append(f"request to another origin: {request.url}")

    def unexpected(self) -> list[str]:
        return [c for c in self.found if not any(part in c for part in self.expected)]


class Visits:
    """Opens pages of the console, each in a context of its own."""

    def __init__(self, browser, server: RunningServer) -> None:
        self._browser = browser
        self._server = server
        self._contexts: list[object] = []
        self.complaints = Complaints({f"127.0.0.1:{server.http_port}"})

    def open(self, path: str = "", *, viewport=WIDE, key: str = "", has_clock=False, **context):
        """Open the console at a hash path, such as `adapters/zh`.

        key: sign in with it. has_clock: the test moves the page's clock.
        """
        options = {"viewport": viewport, "locale": "en-US", "reduced_motion": "reduce"} | context
        opened = self._browser.new_context(**options)
        opened.set_default_timeout(TIMEOUT_MS)
        self._contexts.append(opened)
        page = opened.new_page()
        self.complaints.watch(page)
        if has_clock:
            page.clock.install()
        if key:
            # A request without the key: who is not signed in sees the form.
            self.expect_status(401)
        page.goto(f"{self._server.url}/console/#/{path}")
        if key:
            page.get_by_label("API key").fill(key)
            page.get_by_role("button", name="Sign in").click()
        page.locator("main h1").first.wait_for()
        return page

    def expect_status(self, *statuses: int) -> None:
        """Chromium writes an error for each response with such a status."""
        self.complaints.expected += [f"the server responded with a status of {s}" for s in statuses]

    def expect_gone(self) -> None:
        """The server may be unreachable from now on."""
        self.complaints.expected += ["net::ERR_"]

    def close(self) -> None:
        for context in self._contexts:
            for page in context.pages:
                # A page polls: a route may still be waiting for the response that it changes, and
                # its error would be raised in the next test.
                page.unroute_all(behavior="ignoreErrors")
            context.close()


@pytest.fixture
def visits(browser, server) -> Iterator[Visits]:
    """Pages of the module's `server`."""
    opened = Visits(browser, server)
    yield opened
    opened.close()
    assert opened.complaints.unexpected() == []


def settle(page) -> None:
    """Wait until every part of a screen shows its data, and was drawn with it."""
    from playwright.sync_api import expect

    if "add=1" in page.url:
        page.locator("dialog[open]").wait_for()
    expect(page.locator("main .grey-rows, main [aria-busy=true]")).to_have_count(0)
    expect(page.locator(".bar .chip bdi")).not_to_be_empty()
    page.evaluate(
        "async () => { await document.fonts.ready;"
        " for (let i = 0; i < 2; i += 1) await new Promise(requestAnimationFrame); }"
    )


def sent_meanwhile(page, seconds: float) -> list[str]:
    """Return the addresses of what a page requests while its clock moves on by so many seconds."""
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    page.clock.run_for(1000 * seconds)
    # What was requested before it is known when this is.
    with page.expect_response("**/ping"):
        page.evaluate("() => void fetch('/ping')")
    return [url for url in seen if not url.endswith("/ping")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/browser" in item.nodeid:
            item.add_marker(pytest.mark.browser)
