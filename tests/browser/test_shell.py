"""What is around every screen: headers, navigation, sign-in, languages, themes."""

import json
import re

import pytest
from playwright.sync_api import expect

from browser.conftest import PHONE, settle

TITLES = {
    "en": ("Playground", "Adapters", "Live", "Requests", "Server"),
    "zh": ("试验场", "适配器", "实时", "请求", "服务器"),
    "ja": ("プレイグラウンド", "アダプター", "ライブ", "リクエスト", "サーバー"),
}


def test_the_root_leads_to_the_console(visits, server):
    page = visits.open()
    page.goto(server.url)
    page.get_by_role("link", name="Playground").wait_for()
    assert page.url.startswith(f"{server.url}/console/")


@pytest.mark.parametrize("language", TITLES)
def test_every_screen_in_every_language(visits, language):
    page = visits.open(locale={"en": "en-US", "zh": "zh-CN", "ja": "ja-JP"}[language])
    for title in TITLES[language]:
        page.get_by_role("navigation").get_by_role("link", name=title).click()
        page.get_by_role("heading", level=1, name=title).wait_for()
        expect(page).to_have_title(re.compile(f"^{title}"))
    expect(page.locator("html")).to_have_attribute("lang", re.compile(f"^{language}"))


def test_screens_open_by_keys(visits):
    page = visits.open("adapters")
    page.keyboard.press("g")
    page.keyboard.press("l")
    page.get_by_role("heading", level=1, name="Live").wait_for()
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keyboard").wait_for()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_language_and_theme_are_kept(visits):
    page = visits.open("live")
    page.get_by_role("button", name="More", exact=True).click()
    page.get_by_label("Language").select_option("ja")
    page.get_by_label("テーマ").select_option("dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.reload()
    page.get_by_role("heading", level=1, name="ライブ").wait_for()
    expect(page.locator("body")).to_have_css("background-color", "rgb(20, 23, 28)")


SCREENS = ("playground", "adapters", "live", "requests", "settings")
LOCALES = {"en": "en-US", "zh": "zh-CN", "ja": "ja-JP"}


@pytest.mark.parametrize("language", LOCALES)
def test_no_bar_wraps_on_a_phone_and_main_begins_at_one_place(visits, language):
    page = visits.open(viewport=PHONE, locale=LOCALES[language], has_touch=True)
    tops = set()
    for screen in SCREENS:
        page.goto(f"{page.url.split('#')[0]}#/{screen}")
        page.locator("main h1").first.wait_for()
        settle(page)
        bar, foot = (page.locator(name).bounding_box() for name in ("header.bar", "nav.screens"))
        assert (bar["height"], foot["height"], foot["y"]) == (44, 52, 844 - 52)
        tops.add(page.locator("main").bounding_box()["y"])
        # Words of one line: a line of labels is 16 px high.
        heights = page.evaluate(
            "[...document.querySelectorAll('nav.screens .short, .chip > span')]"
            ".filter(e => e.checkVisibility()).map(e => e.getBoundingClientRect().height)"
        )
        assert len(heights) >= 6
        assert max(heights) <= 20
    assert len(tops) == 1


def test_a_low_page_has_its_screens_in_the_menu(visits):
    page = visits.open(viewport={"width": 390, "height": 400})
    expect(page.locator("nav.screens")).to_be_hidden()
    page.get_by_role("button", name="More", exact=True).click()
    page.get_by_role("link", name="Requests").click()
    page.get_by_role("heading", level=1, name="Requests").wait_for()


def test_the_card_of_the_model_has_its_facts(visits, server):
    page = visits.open("adapters")
    chip = page.get_by_role("button", name="capitals")
    expect(chip).to_have_text(re.compile(r"^\s*capitals · CPU bf16\s*● ready\s*$"))
    chip.click()
    card = page.locator(".model-card")
    facts = next(each for each in models(server) if each["id"] == "capitals")
    device = f"cpu · {facts['device_name']}"
    for text in (device, "bfloat16", "2,048 tokens", f"{server.url}/v1", "ready"):
        card.get_by_text(text).first.wait_for()
    expect(card.get_by_text("loraplex").locator("+ dd")).to_have_text(me(server)["version"])
    page.keyboard.press("Escape")
    expect(card).to_have_count(0)


def test_a_phone_has_the_model_and_the_state_in_its_header(visits):
    page = visits.open(viewport=PHONE)
    chip = page.get_by_role("button", name="capitals")
    expect(chip).to_have_text(re.compile(r"^\s*capitals.*● ready\s*$"))
    expect(chip.locator(".rest")).to_be_hidden()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_are_12_px_and_targets_of_a_finger_40_at_least(visits, theme):
    page = visits.open(viewport=PHONE, has_touch=True, is_mobile=True, color_scheme=theme)
    page.locator(".composer textarea").fill("What is the capital of Japan?")
    page.get_by_role("button", name="Send").click()
    page.locator(".reply-foot .numbers").first.wait_for()
    settle(page)
    small = page.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => e.checkVisibility() &&"
        " [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) &&"
        " parseFloat(getComputedStyle(e).fontSize) < 12).map(e => e.outerHTML.slice(0, 90))"
    )
    assert small == []
    low = page.evaluate(
        "[...document.querySelectorAll('button, select, nav a')].filter(e => e.checkVisibility())"
        ".map(e => [e.getBoundingClientRect(), e.outerHTML.slice(0, 90)])"
        ".filter(([r]) => r.height < 40).map(([r, h]) => [r.height, h])"
    )
    # Chips of one row of 40 px have its height but for the edges.
    assert [each for each in low if "chip" not in each[1]] == []


def models(server):
    return json.loads(server.get("/v1/models")[1])["data"]


def me(server):
    return json.loads(server.get("/v1/me")[1])


def test_inline_scripts_and_html_from_strings_are_refused(visits):
    page = visits.open()
    visits.complaints.expected += [
        "CSP: ",
        "Content Security Policy",
        "requires 'Trusted",
        "https://example.org",
    ]
    refusal = page.evaluate(
        "() => { try { document.body.innerHTML = '<b>x</b>'; } catch (e) { return e.name; } }"
    )
    assert refusal == "TypeError"
    page.evaluate(
        "() => { const s = document.createElement('script'); s.type = 'text/javascript';"
        " try { s.textContent = 'window.ran = 1'; } catch (e) {} document.body.append(s); }"
    )
    page.evaluate(
        "() => { const i = new Image(); i.src = 'https://example.org/x.png'; "
        "document.body.append(i); }"
    )
    assert page.evaluate("window.ran") is None
    assert "CSP: img-src" in " ".join(visits.complaints.found)
