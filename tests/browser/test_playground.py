"""The playground: the base and adapters side by side, as one batch."""

import re

CHINESE_PROMPT = r"美国的首都在哪里? \n答案:"
OUTPUTS = {"Base": "Washington, D.C.", "chinese": "华盛顿", "japanese": "ワシントン D.C."}


def column(page, name):
    return page.get_by_role("region", name=name, exact=True)


def text_of(page, name):
    return column(page, name).locator(".output").text_content().strip()


def run(page):
    page.get_by_role("button", name=re.compile("^Run")).click()


def wait_until_done(page, timeout=60_000):
    page.wait_for_function(
        "() => document.querySelectorAll('.column').length > 0 && "
        "[...document.querySelectorAll('.column')].every(c => c.dataset.state === 'done')",
        timeout=timeout,
    )


def test_the_founding_example_by_clicks(visits):
    page = visits.open()
    page.get_by_label("Prompt").fill(CHINESE_PROMPT)
    run(page)
    wait_until_done(page)
    assert {name: text_of(page, name) for name in OUTPUTS} == OUTPUTS
    page.get_by_text(re.compile(r"3 rows, steps \d+–\d+: one batch")).wait_for()
    for name in ("chinese", "japanese"):
        assert "Differs from token 0." in column(page, name).text_content()
    assert re.search(r"prefill .*decode", column(page, "chinese").text_content())
