"""The playground by clicks: the base and adapters side by side, as one batch."""

import json
import re

import pytest
from playwright.sync_api import expect

from support.engine_kills import generated_tokens, held_engine, wait_until_generated
from support.playground_page import (
    CHINESE_PROMPT,
    OUTPUTS,
    column,
    run,
    send,
    set_option,
    set_structure,
    text_of,
    wait_for_states,
    wait_for_text,
    wait_until_done,
    write_for_long,
)


def test_the_founding_example_by_clicks(visits):
    page = visits.open()
    send(page)
    wait_until_done(page)
    assert {name: text_of(page, name) for name in OUTPUTS} == OUTPUTS
    page.get_by_text(re.compile(r"3 rows, steps \d+–\d+: one batch")).wait_for()
    for name in ("chinese", "japanese"):
        assert "Differs from token 0." in column(page, name).text_content()
    assert re.search(r"prefill .*decode", column(page, "chinese").text_content())


def test_a_chat_goes_on_with_an_output(visits):
    page = visits.open()
    page.get_by_label("Chat").check()
    page.get_by_label("user 1").fill("What is the capital of the United States?")
    page.keyboard.press("Control+Enter")
    wait_until_done(page)
    first = text_of(page, "Base")
    assert first
    column(page, "Base").get_by_role("button", name="Go on with this output").click()
    assert page.get_by_label("assistant 2").input_value().strip() == first
    page.get_by_label("user 3").fill("And of Japan?")
    run(page)
    wait_until_done(page)


def test_tools_are_called_in_a_chat(visits):
    page = visits.open()
    page.get_by_label("Chat").check()
    page.get_by_label("user 1").fill("The weather?")
    set_option(page, "parallel_tool_calls", "false")
    # More than any call has, with all the white space that its grammar allows.
    set_option(page, "max_tokens", "400")
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    page.locator("label", has_text="tools").first.locator("textarea").fill(json.dumps([tool]))
    page.locator("label", has_text="tool_choice").locator("select").select_option("required")
    run(page)
    wait_until_done(page)
    for name in OUTPUTS:
        assert "weather(" in column(page, name).locator(".call").text_content()
    assert "end: tool_calls" in column(page, "Base").text_content()


def test_a_regular_expression_and_a_choice(visits):
    page = visits.open()
    set_structure(page, "regex", "[0-9]{4}")
    send(page)
    wait_until_done(page)
    assert all(re.fullmatch(r"\d{4}", text_of(page, name)) for name in OUTPUTS)
    page.get_by_label("Form").select_option("choice")
    page.get_by_label("Choices, one a line").fill("Lima\nQuito")
    run(page)
    wait_until_done(page)
    assert {text_of(page, name) for name in OUTPUTS} <= {"Lima", "Quito"}


def test_what_the_server_refuses_is_said_at_its_field(visits):
    page = visits.open()
    visits.expect_status(400)
    set_structure(page, "regex", "(")
    send(page)
    page.locator("details[open]").get_by_role("alert").wait_for()
    # What can be known before is not sent.
    set_option(page, "temperature", "hot")
    page.get_by_text("It must be a number.").wait_for()
    assert page.get_by_role("button", name=re.compile("^Run")).is_disabled()


def test_a_scale_and_a_composition(visits):
    page = visits.open()
    slider = page.get_by_label("Scale of chinese")
    slider.fill("0")
    column(page, "japanese").get_by_role("button", name="+ adapter").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Search adapters").fill("chin")
    dialog.get_by_role("button", name=re.compile("chinese")).click()
    with page.expect_request("**/v1/compare") as sent:
        send(page)
    assert sent.value.post_data_json["adapters"] == [
        None,
        {"name": "chinese", "scale": 0},
        ["japanese", "chinese"],
    ]
    wait_until_done(page)
    # With scale 0 an adapter is the base, token by token.
    assert text_of(page, "0 × chinese") == OUTPUTS["Base"]
    assert "The same tokens." in column(page, "0 × chinese").text_content()


def test_columns_come_and_go(visits):
    page = visits.open()
    page.get_by_role("button", name="+ Add an output").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Base").click()
    dialog.get_by_role("button", name="Close").click()
    page.get_by_label("Remove the output of chinese").click()
    expect(page.locator(".column")).to_have_count(3)
    send(page)
    wait_until_done(page)
    assert [t.strip() for t in page.locator(".output").all_text_contents()] == [
        OUTPUTS["Base"],
        OUTPUTS["japanese"],
        OUTPUTS["Base"],
    ]


def test_tokens_by_arrow_keys_and_pointer(visits):
    page = visits.open()
    send(page)
    wait_until_done(page)
    output = column(page, "Base").locator(".output")
    output.focus()
    page.keyboard.press("ArrowRight")
    shown = column(page, "Base").locator(".token")
    assert re.search(r"Token 0: “Wash” -?\d", shown.text_content())
    expect(shown.locator("li")).to_have_count(5)
    page.keyboard.press("End")
    assert re.search(r"Token 8: ", shown.text_content())
    # A character of several tokens is one; its parts are not shown as broken text.
    column(page, "chinese").locator(".output").hover(position={"x": 16, "y": 16})
    assert "“华”" in column(page, "chinese").locator(".token").text_content()


def test_stop_keeps_the_text_and_ends_the_requests(visits, server):
    page = visits.open()
    write_for_long(page, 1500)
    before = generated_tokens(server)
    send(page)
    wait_until_generated(server, before + 600)
    with held_engine(server):
        wait_for_text(page, "Base", 20)
        page.keyboard.press("Escape")
        wait_for_states(page, "cut")
    assert len(text_of(page, "Base")) >= 20
    assert "Not whole" in column(page, "Base").text_content()
    page.wait_for_function(
        "async () => (await (await fetch('/v1/internal/stats')).text())"
        ".match(/\"num_running\": ?(\\d+)/)?.[1] === '0'"
    )


def test_history_is_kept_in_the_tab_and_can_be_cleared(visits):
    page = visits.open()
    send(page)
    wait_until_done(page)
    page.reload()
    page.get_by_label("Prompt").wait_for()
    assert page.get_by_label("Prompt").input_value() == CHINESE_PROMPT
    page.get_by_label("Prompt").fill("")
    page.get_by_role("button", name="History").click()
    page.get_by_role("dialog").get_by_role("button", name=re.compile("美国")).click()
    assert page.get_by_label("Prompt").input_value() == CHINESE_PROMPT
    assert text_of(page, "chinese") == OUTPUTS["chinese"]
    page.get_by_role("button", name="History").click()
    page.get_by_role("button", name="Clear").click()
    page.get_by_text("Nothing has run in this tab yet.").wait_for()
    assert page.evaluate("Object.keys(localStorage)") == []


def test_markdown_becomes_nodes(visits):
    page = visits.open()
    text = "# Title\n\n- **bold** [link](https://example.org/) [bad](javascript:alert(1))"
    set_structure(page, "choice", text.replace("\n", " "))
    send(page)
    wait_until_done(page)
    page.get_by_label("Markdown").check()
    output = column(page, "Base").locator(".output")
    assert output.locator("strong").text_content() == "bold"
    links = output.locator("a")
    assert links.evaluate_all("all => all.map(a => a.getAttribute('href'))") == [
        "https://example.org/"
    ]
    assert links.first.get_attribute("rel") == "noopener noreferrer nofollow"


@pytest.mark.parametrize("language", ["zh-CN", "ja-JP"])
def test_other_languages_run_as_well(visits, language):
    page = visits.open(locale=language)
    page.locator("textarea.prompt").fill(CHINESE_PROMPT)
    page.keyboard.press("Control+Enter")
    wait_until_done(page)
    expect(page.locator(".column .output[lang=zh-Hans]")).to_have_count(1)
    expect(page.locator(".column .output[lang=ja]")).to_have_count(1)


def test_a_narrow_page_shows_one_output_at_a_time(visits):
    page = visits.open(viewport={"width": 360, "height": 740})
    send(page)
    wait_until_done(page)
    for name, text in OUTPUTS.items():
        page.get_by_role("group", name="Outputs").get_by_role("button", name=name).click()
        [shown] = page.locator(".column:visible .output").all_text_contents()
        assert shown.strip() == text
