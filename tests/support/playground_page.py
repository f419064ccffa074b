"""What tests of the playground do with its page."""

import re
from typing import Any

CHINESE_PROMPT = r"美国的首都在哪里? \n答案:"
OUTPUTS = {"Base": "Washington, D.C.", "chinese": "华盛顿", "japanese": "ワシントン D.C."}
STATES = "[...document.querySelectorAll('.column')].map(c => c.dataset.state)"
WAIT_MS = 120_000


def column(page: Any, name: str) -> Any:
    return page.get_by_role("region", name=name, exact=True)


def text_of(page: Any, name: str) -> str:
    return str(column(page, name).locator(".output").text_content()).strip()


def send(page: Any, prompt: str = CHINESE_PROMPT) -> None:
    page.get_by_label("Prompt").fill(prompt)
    run(page)


def run(page: Any) -> None:
    page.get_by_role("button", name=re.compile("^Run")).click()


def set_option(page: Any, name: str, value: str) -> None:
    """Set a field of the sampling options."""
    field = page.locator("label", has=page.get_by_text(name, exact=True)).locator("input, select")
    if not field.is_visible():
        page.get_by_text("Sampling").click()
    if value in ("true", "false"):
        field.select_option(value)
    else:
        field.fill(value)


def set_structure(page: Any, kind: str, text: str) -> None:
    page.get_by_text("Structured output").click()
    page.get_by_label("Form").select_option(kind)
    page.locator("details[open] textarea").fill(text)


def write_for_long(page: Any, num_tokens: int) -> None:
    """Let the next run go on for this many tokens."""
    set_option(page, "max_tokens", str(num_tokens))
    set_option(page, "ignore_eos", "true")


def wait_for_states(page: Any, *states: str) -> None:
    """Wait until every column is in one of the states."""
    wanted = ", ".join(f"'{state}'" for state in states)
    page.wait_for_function(
        f"() => {STATES}.length > 0 && {STATES}.every(s => [{wanted}].includes(s))",
        timeout=WAIT_MS,
    )


def wait_until_done(page: Any) -> None:
    """Wait until every column is done, and the run as a whole."""
    wait_for_states(page, "done")
    page.locator(".playground button[disabled]", has_text="Esc").wait_for(timeout=WAIT_MS)


def wait_for_text(page: Any, name: str, length: int) -> None:
    """Wait until an output has this many characters."""
    page.wait_for_function(
        "([name, length]) => document.querySelector(`section[aria-label='${name}'] .output`)"
        ".textContent.length >= length",
        arg=[name, length],
        timeout=WAIT_MS,
    )
