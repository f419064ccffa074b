"""What is around every screen: headers, navigation, sign-in, languages, themes."""

import pytest
from playwright.sync_api import expect

TITLES = {
    "en": ("Playground", "Adapters", "Live", "Requests", "Settings"),
    "zh": ("试验场", "适配器", "实时", "请求", "设置"),
    "ja": ("プレイグラウンド", "アダプター", "ライブ", "リクエスト", "設定"),
}


def test_the_root_leads_to_the_console(visits, server):
    page = visits.open()
    page.goto(server.url)
    assert page.url == f"{server.url}/console/"
    page.get_by_role("link", name="Playground").wait_for()


@pytest.mark.parametrize("language", TITLES)
def test_every_screen_in_every_language(visits, language):
    page = visits.open(locale={"en": "en-US", "zh": "zh-CN", "ja": "ja-JP"}[language])
    for title in TITLES[language]:
        page.get_by_role("navigation").get_by_role("link", name=title).click()
        page.get_by_role("heading", level=1, name=title).wait_for()
        assert page.title().startswith(title)
    assert page.evaluate("document.documentElement.lang").startswith(language)


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
    page.get_by_label("Language").select_option("ja")
    page.get_by_label("テーマ").select_option("dark")
    page.reload()
    page.get_by_role("heading", level=1, name="ライブ").wait_for()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"


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
