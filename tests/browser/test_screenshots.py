"""Pictures of each screen, light and dark, for docs/console.md.

`make screenshots` writes them there; otherwise they are made and thrown away.
"""

import os
import re
import threading
from pathlib import Path

import pytest

from browser.conftest import settle
from support.playground_page import field

DOCS = Path(__file__).parents[2] / "docs"
IMAGES = DOCS / "images" / "console"
IS_WRITING = bool(os.environ.get("WRITE_SCREENSHOTS"))
MESSAGES = ("What is the capital of Japan?", "And of the United States?")
LONG = {"prompt": "Which city is the capital of Japan, and why?", "ignore_eos": True}
SCREENS = {
    "playground": "",
    "adapters": "adapters",
    "adapter": "adapters/chinese",
    "live": "live",
    "requests": "requests",
    "settings": "settings",
}
"""Hash path by picture."""


@pytest.fixture(scope="module")
def traffic(server):
    """Requests to the base model and both adapters, one after another in six threads."""
    ended = threading.Event()

    def send(number):
        model = ("capitals", "chinese", "japanese")[number % 3]
        while not ended.wait(0.05):
            body = {"model": model, "max_tokens": 40 + 30 * number, "temperature": 1, **LONG}
            server.post("/v1/completions", body)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    yield
    ended.set()
    for thread in threads:
        thread.join()


def compare(page):
    for message in MESSAGES:
        field(page).fill(message)
        page.keyboard.press("Enter")
        page.get_by_text("one batch").nth(MESSAGES.index(message)).wait_for()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", SCREENS)
def test_a_picture_of_each_screen(visits, traffic, tmp_path, name, theme):
    page = visits.open(SCREENS[name], color_scheme=theme)
    if name == "playground":
        compare(page)
    settle(page)
    if name == "live":
        # A curve has two points at least, and the picture of steps its legend.
        page.wait_for_function(
            "() => [...document.querySelectorAll('.curve')]"
            ".some(e => e.getAttribute('d').includes('L'))"
        )
        page.locator(".steps-plot").wait_for()
    if IS_WRITING:
        page.wait_for_timeout(5000 if name == "live" else 1500)
    folder = IMAGES if IS_WRITING else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"{name}-{theme}.png"
    page.screenshot(path=picture)
    assert picture.stat().st_size > 10_000, "an empty page is smaller"


def test_the_documentation_shows_each_picture():
    text = (DOCS / "console.md").read_text()
    shown = {f"{name}-{theme}.png" for name in SCREENS for theme in ("light", "dark")}
    assert set(re.findall(r"images/console/([\w-]+\.png)", text)) == shown
    assert {path.name for path in IMAGES.iterdir()} == shown
