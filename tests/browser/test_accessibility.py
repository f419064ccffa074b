"""Every screen for everyone: rules of WCAG 2.2, narrow screens, keyboard, other languages."""

import json

import pytest
from axe_playwright_python.sync_playwright import Axe

SCREENS = ("playground", "adapters", "adapters/chinese", "live", "requests", "settings")
WIDTHS = (360, 1280)
RULES = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
    "preload": False,
}


def settle(page):
    """Wait until a screen shows its data."""
    page.get_by_text("Loading …", exact=True).wait_for(state="detached")
    page.wait_for_timeout(300)


@pytest.mark.parametrize("screen", SCREENS)
def test_axe_finds_no_violation(visits, screen):
    page = visits.open(screen)
    # axe itself sets styles to measure with.
    visits.complaints.expected += ["Applying inline style", "CSP: style-src"]
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 800})
            settle(page)
            found = Axe().run(page, options=RULES).response["violations"]
            violations = [
                (rule["id"], theme, width, [node["html"][:200] for node in rule["nodes"][:5]])
                for rule in found
            ]
            assert violations == [], json.dumps(violations, indent=1, ensure_ascii=False)


@pytest.mark.parametrize("locale", ["en-US", "zh-CN", "ja-JP"])
@pytest.mark.parametrize("screen", SCREENS)
def test_nothing_is_wider_than_a_phone(visits, screen, locale):
    page = visits.open(screen, viewport={"width": 360, "height": 740}, locale=locale)
    page.wait_for_timeout(1000)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    # A control whose text is cut off.
    assert (
        page.evaluate(
            "[...document.querySelectorAll('button, nav a, th')]"
            ".filter(e => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1)"
            ".map(e => e.textContent)"
        )
        == []
    )


@pytest.mark.parametrize("screen", SCREENS)
def test_every_control_is_reached_by_tab(visits, screen):
    page = visits.open(screen)
    settle(page)
    wanted = page.evaluate(
        "[...document.querySelectorAll('button, a[href], input, select, textarea, summary')]"
        ".filter(e => e.checkVisibility() && !e.disabled && e.tabIndex >= 0 && e.type !== 'radio')"
        ".length"
    )
    page.evaluate("document.activeElement.blur()")
    reached = set()
    for _ in range(wanted + 20):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "(() => { const e = document.activeElement; e.dataset.reached ??= Math.random();"
                " return e === document.body ? '' : e.dataset.reached; })()"
            )
        )
    assert len(reached - {""}) >= wanted * 0.95


@pytest.mark.parametrize("screen", SCREENS)
def test_targets_are_large_enough(visits, screen):
    page = visits.open(screen)
    settle(page)
    small = page.evaluate(
        "[...document.querySelectorAll('button, select, nav a, input')]"
        ".filter(e => e.checkVisibility())"
        ".filter(e => !['checkbox', 'radio'].includes(e.type))"
        ".map(e => [e.getBoundingClientRect(), e.outerHTML.slice(0, 90)])"
        ".filter(([r]) => r.width < 24 || r.height < 24).map(([, h]) => h)"
    )
    assert small == []


def test_the_page_is_light_and_paints_early(visits):
    page = visits.open("playground")
    loaded = page.evaluate(
        "performance.getEntriesByType('resource').filter(r => r.name.includes('/console/'))"
        ".reduce((sum, r) => sum + r.transferSize, 0)"
    )
    page.reload()
    page.locator("main h1").first.wait_for()
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    print(f"page: {loaded} bytes sent; first paint after {paint:.0f} ms, from the browser's cache")
    assert loaded <= 250_000
    # 500 ms on an idle machine; here other tests run, too.
    assert paint <= 3000
