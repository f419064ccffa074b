"""What tests of the playground do with its page."""

from typing import Any

from playwright.sync_api import expect

CHINESE_PROMPT = r"美国的首都在哪里? \n答案:"
MESSAGE = "What is the capital of the United States?"
OUTPUTS = {"Base": "Washington, D.C.", "chinese": "华盛顿", "japanese": "ワシントン D.C."}
"""Output of each column to both of them."""
STATES = (
    "[...document.querySelectorAll('.turn:last-child .reply')]"
    ".filter(r => !r.classList.contains('hidden')).map(r => r.dataset.state)"
)
WAIT_MS = 120_000


def column(page: Any, name: str) -> Any:
    """Return the newest reply of a column."""
    return page.locator(".turn").last.get_by_role("article", name=name, exact=True)


def head(page: Any, name: str) -> Any:
    """Return the head of a column."""
    return page.get_by_role("group", name=f"Column of {name}", exact=True)


def text_of(page: Any, name: str) -> str:
    return str(column(page, name).locator(".output").last.text_content()).strip()


def field(page: Any) -> Any:
    """Return the field of the composer."""
    return page.locator(".composer textarea")


def send(page: Any, prompt: str = CHINESE_PROMPT) -> None:
    """Send a prompt, not a chat."""
    kind = page.locator(".composer select")
    if kind.input_value() != "completion":
        kind.select_option("completion")
    say(page, prompt)


def say(page: Any, text: str) -> None:
    """Send what the chosen kind is: a message or a prompt."""
    field(page).fill(text)
    run(page)


def run(page: Any) -> None:
    page.get_by_role("button", name="Send", exact=True).click()


def close_popover(page: Any) -> None:
    """Close what is open over the page, and wait until it is."""
    page.keyboard.press("Escape")
    expect(page.locator(":popover-open")).to_have_count(0)
    expect(page.locator("[popovertarget][aria-expanded=true]")).to_have_count(0)


def open_panel(page: Any, name: str) -> Any:
    button = page.get_by_role("button", name=name).first
    if button.get_attribute("aria-expanded") != "true":
        button.click()
    return page.get_by_role("region", name=name)


def set_option(page: Any, name: str, value: str) -> None:
    """Set a parameter."""
    panel = open_panel(page, "Parameters")
    panel.get_by_label("Find a parameter").fill(name)
    control = panel.locator(f"#field-{name}")
    if value in ("true", "false"):
        control.select_option(value)
    else:
        control.fill(value)
    panel.get_by_label("Find a parameter").fill("")


def set_structure(page: Any, kind: str, text: str) -> None:
    panel = open_panel(page, "Structured output")
    panel.get_by_label("Form").select_option(kind)
    panel.locator("textarea").fill(text)


def show_view(page: Any, name: str) -> None:
    page.get_by_role("group", name="View").get_by_role("button", name=name).click()


def write_for_long(page: Any, num_tokens: int) -> None:
    """Let the next run go on for this many tokens."""
    set_option(page, "max_tokens", str(num_tokens))
    set_option(page, "ignore_eos", "true")


def wait_for_states(page: Any, *states: str) -> None:
    """Wait until every reply to the last message is in one of the states."""
    wanted = ", ".join(f"'{state}'" for state in states)
    page.wait_for_function(
        f"() => {STATES}.length > 0 && {STATES}.every(s => [{wanted}].includes(s))",
        timeout=WAIT_MS,
    )


def wait_until_done(page: Any) -> None:
    """Wait until every reply to the last message is done, and the run as a whole."""
    wait_for_states(page, "done")
    page.locator(".composer-field button .icon.send").wait_for(timeout=WAIT_MS)


def wait_for_text(page: Any, name: str, length: int) -> None:
    """Wait until an output has this many characters."""
    page.wait_for_function(
        "([name, length]) => document.querySelector("
        "`.turn:last-child article[aria-label='${name}'] .output`).textContent.length >= length",
        arg=[name, length],
        timeout=WAIT_MS,
    )
