"""The playground by clicks and keys: the base and adapters side by side, as one batch."""

import json
import re
import time
import urllib.parse

import pytest
from playwright.sync_api import expect

from browser.conftest import settle
from support.engine_kills import generated_tokens, held_engine, wait_until_generated
from support.playground_page import (
    CHINESE_PROMPT,
    MESSAGE,
    OUTPUTS,
    WAIT_MS,
    close_popover,
    column,
    field,
    head,
    open_panel,
    run,
    say,
    send,
    set_option,
    set_structure,
    show_view,
    text_of,
    wait_for_states,
    wait_for_text,
    wait_until_done,
    write_for_long,
)


def test_the_founding_example_as_a_chat_is_one_batch(visits):
    page = visits.open()
    sent = []

    def pass_on(route):
        response = route.fetch()
        sent.append(response.text())
        route.fulfill(response=response)

    page.route("**/v1/compare**", pass_on)
    field(page).fill(MESSAGE)
    page.keyboard.press("Enter")
    wait_until_done(page)
    assert {name: text_of(page, name) for name in OUTPUTS} == OUTPUTS
    page.get_by_text(re.compile(r"3 outputs, one batch \(steps [\d,]+–[\d,]+\)")).wait_for()
    [stream] = sent
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert len({e["timing"]["first_step"] for e in events if e.get("done")}) == 1
    # A chat's field is empty for the next message, and its columns keep their names.
    expect(field(page)).to_have_value("")
    expect(page.locator(".batch")).to_contain_text("context")


def test_a_prompt_is_sent_as_it_is(visits):
    page = visits.open()
    send(page)
    wait_until_done(page)
    assert {name: text_of(page, name) for name in OUTPUTS} == OUTPUTS
    expect(field(page)).to_have_value(CHINESE_PROMPT)
    for name in ("chinese", "japanese"):
        expect(column(page, name)).to_contain_text("First difference: token 1")


def test_a_model_without_a_template_opens_in_completion_and_says_why(visits):
    page = visits.open()
    kind = page.get_by_label("Kind of request")
    expect(kind).to_have_value("chat")
    no_chat = {"chat": False, "tools": False, "reasoning": False, "images": False}
    page = visits.open()
    page.route("**/v1/models?*", lambda route: without_chat(route, no_chat))
    page.evaluate("sessionStorage.clear()")
    page.reload()
    kind = page.get_by_label("Kind of request")
    expect(kind).to_have_value("completion")
    expect(kind.locator("option[value=chat]")).to_be_disabled()
    page.get_by_text("--chat-template sets one").wait_for()


def without_chat(route, capabilities):
    body = route.fetch().json()
    for entry in body["data"]:
        if entry["parent"] is None:
            entry["capabilities"] = capabilities
    route.fulfill(json=body)


def test_enter_sends_and_a_line_or_a_composition_does_not(visits):
    page = visits.open()
    field(page).fill("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(field(page)).to_have_value("one\ntwo")
    field(page).evaluate(
        "area => { for (const more of [{ isComposing: true }, { keyCode: 229 }])"
        " area.dispatchEvent(new KeyboardEvent('keydown',"
        " { key: 'Enter', bubbles: true, cancelable: true, ...more })); }"
    )
    expect(page.locator(".turn")).to_have_count(0)
    page.keyboard.press("Enter")
    expect(page.locator(".turn")).to_have_count(1)
    assert page.locator(".bubble").text_content() == "one\ntwo"
    wait_until_done(page)


def test_arrow_up_edits_the_last_message_and_escape_leaves_it(visits):
    page = visits.open()
    say(page, "The capital of France?")
    wait_until_done(page)
    field(page).focus()
    page.keyboard.press("ArrowUp")
    expect(field(page)).to_have_value("The capital of France?")
    page.keyboard.press("Escape")
    expect(field(page)).to_have_value("")
    page.keyboard.press("ArrowUp")
    field(page).fill(MESSAGE)
    page.keyboard.press("Enter")
    expect(page.locator(".bubble")).to_have_text([MESSAGE])
    wait_until_done(page)
    assert text_of(page, "Base") == OUTPUTS["Base"]


def test_a_reply_again_is_sent_alone_and_keeps_the_earlier_one(visits):
    page = visits.open()
    say(page, MESSAGE)
    wait_until_done(page)
    again = column(page, "chinese").get_by_role("button", name="Try again")
    expect(again).to_have_attribute("title", "Temperature 0: the same text")
    with page.expect_request("**/v1/compare") as sent:
        head(page, "chinese").get_by_role("button", name="Actions of chinese").click()
        page.get_by_role("button", name="Again at 0.8").click()
    body = sent.value.post_data_json
    assert (body["adapters"], body["temperature"]) == (["chinese"], 0.8)
    wait_until_done(page)
    versions = column(page, "chinese").get_by_role("group", name="Versions of this reply")
    expect(versions).to_contain_text("2/2")
    versions.get_by_role("button", name="Earlier version").click()
    expect(versions).to_contain_text("1/2")
    assert {name: text_of(page, name) for name in OUTPUTS} == OUTPUTS


def test_each_column_goes_on_with_its_own_history_in_one_batch(visits):
    page = visits.open()
    say(page, MESSAGE)
    wait_until_done(page)
    first = {name: text_of(page, name) for name in OUTPUTS}
    with page.expect_request("**/v1/compare") as sent:
        say(page, "What is the capital of Japan?")
    body = sent.value.post_data_json
    assert "messages" not in body
    assert "adapters" not in body
    names = {None: "Base", "chinese": "chinese", "japanese": "japanese"}
    for entry in body["entries"]:
        roles = [message["role"] for message in entry["messages"]]
        assert roles == ["user", "assistant", "user"]
        assert entry["messages"][1]["content"] == first[names[entry["adapters"]]]
    wait_until_done(page)
    page.get_by_text(re.compile(r"3 outputs, one batch")).nth(1).wait_for()
    # All go on from one of them.
    head(page, "chinese").get_by_role("button", name="Actions of chinese").click()
    page.get_by_role("button", name="All go on from this").click()
    with page.expect_request("**/v1/compare") as sent:
        say(page, "And of France?")
    body = sent.value.post_data_json
    assert body["messages"][1]["content"] == first["chinese"]
    assert body["adapters"] == [None, "chinese", "japanese"]
    wait_until_done(page)


def running(server):
    return json.loads(server.get("/v1/internal/stats")[1])["models"]["capitals"]["engine"][
        "num_running"
    ]


def test_stop_of_one_column_lets_the_others_end(visits, server):
    page = visits.open()
    write_for_long(page, 1200)
    before = generated_tokens(server)
    send(page)
    wait_until_generated(server, before + 60)
    head(page, "chinese").get_by_role("button", name="Stop chinese").click()
    page.wait_for_function(
        "() => document.querySelector(\"article[aria-label='chinese']\").dataset.state === 'done'"
    )
    # Its row leaves the engine with the step in flight.
    deadline = time.monotonic() + WAIT_MS / 1000
    while (number := running(server)) > 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert number == 2
    wait_until_done(page)
    expect(column(page, "chinese")).to_contain_text("cancelled")
    for name in ("Base", "japanese"):
        expect(column(page, name)).to_contain_text("1,200 tok")


def test_a_system_prompt_is_the_first_message(visits):
    page = visits.open()
    page.get_by_role("button", name=re.compile("System prompt: none")).click()
    page.get_by_label("System prompt", exact=True).fill("Be brief.")
    close_popover(page)
    with page.expect_request("**/v1/compare") as sent:
        say(page, MESSAGE)
    assert sent.value.post_data_json["messages"][0] == {"role": "system", "content": "Be brief."}
    wait_until_done(page)


WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_a_tool_call_takes_a_typed_result_and_the_chat_goes_on(visits):
    page = visits.open()
    # More than any call has, with all the white space that its grammar allows.
    set_option(page, "max_tokens", "400")
    panel = open_panel(page, "Tools")
    panel.get_by_role("button", name="Paste JSON").click()
    panel.get_by_label("Tool as JSON").fill(json.dumps({"name": "weather", "parameters": WEATHER}))
    panel.get_by_role("button", name="Save").click()
    panel.get_by_text("weather(city)").wait_for()
    panel.get_by_label("Choice").select_option("required")
    panel.get_by_label("Several calls at once").select_option("false")
    say(page, "The weather?")
    wait_until_done(page)
    for name in OUTPUTS:
        expect(column(page, name).locator(".call")).to_contain_text("weather(")
    panel.get_by_label("Choice").select_option("none")
    with page.expect_request("**/v1/compare") as sent:
        column(page, "Base").get_by_label("Result of weather").fill("sunny, 24 °C")
        column(page, "Base").get_by_role("button", name="Send results").click()
    body = sent.value.post_data_json
    assert body["adapters"] == [None]
    *_, called, result = body["messages"]
    [call] = called["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert result == {"role": "tool", "tool_call_id": call["id"], "content": "sunny, 24 °C"}
    wait_until_done(page)
    expect(column(page, "Base").locator(".output")).to_have_count(1)


def test_a_regular_expression_and_a_choice(visits):
    page = visits.open()
    set_structure(page, "regex", "[0-9]{4}")
    send(page)
    wait_until_done(page)
    assert all(re.fullmatch(r"\d{4}", text_of(page, name)) for name in OUTPUTS)
    expect(page.locator(".reply-foot").get_by_text("✓ matches")).to_have_count(3)
    set_structure(page, "choice", "Lima\nQuito")
    run(page)
    wait_until_done(page)
    assert {text_of(page, name) for name in OUTPUTS} <= {"Lima", "Quito"}


def test_a_broken_schema_is_reported_before_it_is_sent(visits):
    page = visits.open()
    set_structure(page, "json", '{"type": ')
    panel = open_panel(page, "Structured output")
    panel.get_by_role("alert").wait_for()
    field(page).fill(MESSAGE)
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_disabled()
    page.keyboard.press("Enter")
    expect(page.locator(".turn")).to_have_count(0)
    panel.get_by_role("button", name="Example").click()
    panel.get_by_text("valid").wait_for()
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_enabled()


def test_a_refused_field_is_seen_focused_and_has_the_words_of_the_server(visits):
    page = visits.open()
    visits.expect_status(400)
    # The page knows no limit of token ids: the server does.
    set_option(page, "stop_token_ids", "999999999")
    page.locator(".panel").get_by_role("button", name="Close").click()
    expect(page.locator(".panel")).to_have_count(0)
    say(page, MESSAGE)
    refused = page.locator("#field-stop_token_ids")
    expect(refused).to_be_focused()
    alert = page.locator(".panel").get_by_role("alert")
    expect(alert).to_contain_text("999999999")
    # What can be known before is not sent.
    set_option(page, "stop_token_ids", "")
    set_option(page, "temperature", "hot")
    page.get_by_text("It must be a number.").wait_for()
    field(page).fill(MESSAGE)
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_disabled()


def test_a_fresh_page_has_eight_parameters_with_the_defaults_of_the_server(visits, server):
    page = visits.open()
    button = page.get_by_role("button", name="Parameters")
    expect(button).to_have_text("Parameters")
    entries = json.loads(server.get("/v1/models")[1])["data"]
    defaults = next(e for e in entries if e["parent"] is None)["defaults"]["compare"]
    panel = open_panel(page, "Parameters")
    first = panel.locator(".parameters > .field")
    expect(first).to_have_count(8)
    words = {"seed": "random", "stop": "one a line"}
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop"):
        shown = panel.locator(f"#field-{name}").get_attribute("placeholder")
        assert shown == words.get(name) or float(shown) == defaults[name], name
    assert f"Default {defaults['max_tokens']}." in first.first.text_content()
    heights = first.locator("p.label").evaluate_all("all => all.map(p => p.offsetHeight)")
    assert heights == [16] * 8
    expect(panel.locator(".undo")).to_have_count(0)
    panel.locator("#field-temperature").fill("0.7")
    expect(panel.locator(".undo")).to_have_count(1)
    expect(button).to_have_text("Parameters · 1")
    panel.locator(".undo").click()
    expect(panel.locator("#field-temperature")).to_have_value("")


def test_parameters_cover_no_reply_and_move_none_down(visits):
    page = visits.open()
    say(page, MESSAGE)
    wait_until_done(page)
    settle(page)
    before = column(page, "Base").bounding_box()["y"]
    panel = open_panel(page, "Parameters").bounding_box()
    settle(page)
    after = [column(page, name).bounding_box() for name in OUTPUTS]
    assert after[0]["y"] == before
    assert max(box["x"] + box["width"] for box in after) <= panel["x"]


def test_a_preset_has_the_parameters_and_the_system_prompt(visits):
    page = visits.open()
    set_option(page, "temperature", "0.3")
    panel = open_panel(page, "Parameters")
    panel.get_by_role("button", name="Save").click()
    panel.get_by_label("Name of the preset").fill("cool")
    page.keyboard.press("Enter")
    panel.get_by_role("button", name="Reset").click()
    expect(panel.locator("#field-temperature")).to_have_value("")
    panel.get_by_label("Preset", exact=True).select_option("cool")
    expect(panel.locator("#field-temperature")).to_have_value("0.3")
    page.reload()
    panel = open_panel(page, "Parameters")
    expect(panel.get_by_label("Preset", exact=True).locator("option")).to_have_count(2)


def test_a_scale_and_a_composition(visits):
    page = visits.open()
    head(page, "chinese").get_by_role("button", name="Scale of the column").click()
    page.get_by_label("Scale of chinese", exact=True).fill("0")
    close_popover(page)
    head(page, "japanese").get_by_role("button", name="Actions of japanese").click()
    menu = page.locator(".menu")
    menu.get_by_text("Add an adapter (sum)").click()
    menu.get_by_label("Search adapters").fill("chin")
    menu.get_by_role("button", name="chinese").click()
    expect(menu).to_have_count(0)
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
    expect(column(page, "0 × chinese")).to_contain_text("The same tokens.")


def test_columns_come_move_and_go(visits):
    page = visits.open()
    say(page, MESSAGE)
    wait_until_done(page)

    def act(name, action):
        head(page, name).get_by_role("button", name=f"Actions of {name}").click()
        page.locator(".popover:popover-open").get_by_role("button", name=action).click()
        expect(page.locator(":popover-open")).to_have_count(0)

    def expect_columns(*labels):
        expect(names).to_have_count(len(labels))
        for index, label in enumerate(labels):
            expect(names.nth(index)).to_have_attribute("aria-label", label)

    names = page.locator(".turn .reply")
    act("japanese", "Move left")
    expect_columns("Base", "japanese", "chinese")
    act("chinese", "Duplicate")
    expect(names).to_have_count(4)
    assert text_of(page, "Base") == OUTPUTS["Base"]
    page.get_by_role("button", name="Add a column").click()
    page.locator(".picker").get_by_role("button", name="Base").click()
    expect(names).to_have_count(3)
    close_popover(page)
    act("japanese", "Remove")
    expect_columns("chinese", "chinese")


def test_one_column_at_full_width_and_back(visits):
    page = visits.open()
    say(page, MESSAGE)
    wait_until_done(page)
    head(page, "chinese").get_by_role("button", name="Show only chinese").click()
    expect(page.locator(".reply:visible")).to_have_count(1)
    settle(page)
    assert column(page, "chinese").bounding_box()["width"] == pytest.approx(760, abs=1)
    page.keyboard.press("Escape")
    expect(page.locator(".reply:visible")).to_have_count(3)


def test_tokens_open_a_card_by_arrow_keys_pointer_and_finger(visits):
    page = visits.open(has_touch=True)
    send(page)
    wait_until_done(page)
    output = column(page, "Base").locator(".output")
    card = page.locator(".token-card")
    output.focus()
    page.keyboard.press("ArrowRight")
    expect(card).to_have_text(re.compile(r"Token 1: “Wash” \d+(\.\d+)?% -?\d"))
    expect(card.locator("li")).to_have_count(5)
    expect(card.locator("li").first).to_have_text(re.compile("%$"))
    page.keyboard.press("End")
    expect(card).to_contain_text("Token 9: ")
    # A character of several tokens is one; its parts are not shown as broken text.
    for name, open_ in (("chinese", "hover"), ("japanese", "tap")):
        getattr(column(page, name).locator(".output"), open_)(position={"x": 20, "y": 12})
        expect(card).to_have_count(1)
        expect(card.locator("li")).to_have_count(5)
        assert "\ufffd" not in card.text_content()
    output = column(page, "chinese").locator(".output")
    output.focus()
    for number in range(4):
        page.keyboard.press("ArrowRight")
        if number == 0:
            expect(card).to_contain_text("Token 1: ")
        assert "\ufffd" not in card.text_content()
    assert "盛" in output.text_content()


def test_columns_of_an_address(visits, server):
    digest = json.loads(server.get("/v1/adapters/chinese")[1])["digest"]
    columns = urllib.parse.quote(json.dumps([None, "japanese", {"digest": digest}]))
    page = visits.open(f"playground?columns={columns}")
    head(page, "japanese").wait_for()
    head(page, digest[:8]).wait_for()
    page.wait_for_url(lambda url: "columns" not in url)
    say(page, MESSAGE)
    wait_until_done(page)
    assert text_of(page, digest[:8]) == OUTPUTS["chinese"]
    page.reload()
    expect(column(page, digest[:8]).locator(".output").last).to_have_text(OUTPUTS["chinese"])


def test_cosines_between_columns_and_labels_of_those_with_a_head(visits, server):
    page = visits.open()
    # The base has no head. The server's own labels are tested without a browser.
    visits.expect_status(400)
    labels = [{"label": "city", "score": 0.75}, {"label": "river", "score": 0.25}]

    def respond(route):
        has_head = route.request.post_data_json["adapters"] == ["chinese"]
        route.fulfill(json=labels) if has_head else route.continue_()

    page.route("**/predict", respond)
    head(page, "chinese").wait_for()
    field(page).fill(MESSAGE)
    page.get_by_role("button", name="Vectors and labels").click()
    dialog = page.get_by_role("dialog", name="Vectors and labels")
    expect(dialog.get_by_label("Prompt")).to_have_value(MESSAGE)
    dialog.get_by_role("button", name="Compute").click()
    table = dialog.get_by_role("table", name="Cosine of the vectors")
    rows = table.locator("tbody tr")
    expect(rows).to_have_count(len(OUTPUTS))
    cosines = [row.locator("td").all_text_contents() for row in rows.all()]
    names = table.locator("thead th").all_text_contents()
    assert sorted(names) == sorted(OUTPUTS)
    vectors = [
        server.post("/v1/embeddings", {"input": MESSAGE, "adapters": adapters})[1]
        for adapters in ([] if name == "Base" else [name] for name in names)
    ]
    of = [one["data"][0]["embedding"] for one in vectors]
    for first, shown in zip(of, cosines, strict=True):
        wanted = [sum(a * b for a, b in zip(first, second, strict=True)) for second in of]
        assert shown == [f"{value:.3f}" for value in wanted]
    assert [row[i] for i, row in enumerate(cosines)] == ["1.000"] * len(OUTPUTS)
    expect(dialog.get_by_role("table")).to_have_count(2)
    bars = dialog.get_by_role("table", name="chinese")
    expect(bars.get_by_role("row")).to_have_text(["city0.750", "river0.250"])
    assert bars.get_by_role("meter", name="city").evaluate("meter => meter.value") == 0.75
    page.unroute("**/predict")
    page.route("**/v1/embeddings", lambda route: route.abort())
    visits.expect_gone()
    dialog.get_by_role("button", name="Compute").click()
    dialog.get_by_role("alert").wait_for()


def test_without_an_adapter_the_way_to_load_one_is_shown(visits):
    page = visits.open("playground?columns=[null]")
    page.get_by_role("link", name="Load an adapter to compare").click()
    page.get_by_role("heading", level=1, name="Adapters").wait_for()


def test_a_difference_is_counted_from_1_and_a_rendered_reply_has_no_marks(visits):
    page = visits.open()
    say(page, MESSAGE)
    wait_until_done(page)
    expect(page.locator(".difference")).to_have_count(0)
    count = "[...CSS.highlights.values()].reduce((sum, marks) => sum + marks.size, 0)"
    assert page.evaluate(count) == 0
    show_view(page, "Diff")
    expect(column(page, "chinese").locator(".difference")).to_have_text(
        re.compile(r"First difference: token 1 “华” [\d.]+% · other: “Wash” [\d.]+%")
    )
    # An effect makes the marks.
    page.wait_for_function("() => CSS.highlights.get('playground-difference').size === 2")
    page.get_by_label("Against").select_option(label="chinese")
    expect(column(page, "Base").locator(".difference")).to_contain_text("token 1")


def test_a_reply_is_as_high_as_its_text_and_nothing_shifts(visits):
    page = visits.open()
    write_for_long(page, 60)
    page.evaluate(
        "() => { window.shift = 0; window.observer = new PerformanceObserver((list) => {"
        " for (const e of list.getEntries()) if (!e.hadRecentInput) window.shift += e.value; });"
        " observer.observe({ type: 'layout-shift' }); }"
    )
    page.wait_for_timeout(700)  # longer than input allows
    say(page, MESSAGE)
    wait_until_done(page)
    settle(page)
    page.evaluate(
        "for (const e of observer.takeRecords()) if (!e.hadRecentInput) window.shift += e.value"
    )
    assert page.evaluate("window.shift") == 0
    blanks = page.locator(".reply").evaluate_all(
        "all => all.map(reply => { const range = document.createRange();"
        " range.selectNodeContents(reply.querySelector('.output'));"
        " return reply.querySelector('.reply-foot').getBoundingClientRect().top"
        " - range.getBoundingClientRect().bottom; })"
    )
    assert len(blanks) == 3
    assert max(blanks) <= 24


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
    expect(column(page, "Base")).to_contain_text("Not whole")
    page.wait_for_function(
        "async () => (await (await fetch('/v1/internal/stats')).text())"
        ".match(/\"num_running\": ?(\\d+)/)?.[1] === '0'"
    )


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_reply_that_was_cut_goes_on_from_its_text(visits, kind):
    page = visits.open("playground?columns=[null]")
    text = {"chat": MESSAGE, "completion": CHINESE_PROMPT}[kind]
    page.get_by_label("Kind of request").select_option(kind)
    say(page, text)
    wait_until_done(page)
    whole = text_of(page, "Base")

    rest = []

    def cut(route):
        events = route.fetch().text().split("\n\n")
        # Up to the first event with a text.
        at = next(
            i for i, event in enumerate(events) if json.loads(event[6:]).get("text", "").strip()
        )
        rest[:] = events[at + 1 :]
        fulfill(route, [*events[: at + 1], ""])

    def fulfill(route, events):
        route.fulfill(body="\n\n".join(events), content_type="text/event-stream")

    page.route("**/v1/compare", cut)
    column(page, "Base").get_by_role("button", name="Try again").click()
    wait_for_states(page, "cut")
    begun = text_of(page, "Base")
    assert whole.startswith(begun)
    assert len(begun) < len(whole)
    page.unroute("**/v1/compare")
    # The demo's template writes no message of an assistant, so that none can be continued.
    page.route("**/v1/compare", lambda route: fulfill(route, rest))
    with page.expect_request("**/v1/compare") as sent:
        column(page, "Base").get_by_role("button", name="Continue").click()
    body = sent.value.post_data_json
    if kind == "chat":
        assert body["messages"][-1]["role"] == "assistant"
        assert body["messages"][-1]["content"].strip() == begun
        assert body["continue_final_message"] is True
    else:
        assert body["prompt"].strip().endswith(begun)
    wait_until_done(page)
    # One text, in one part, as if it had not been cut.
    expect(column(page, "Base").locator(".output")).to_have_count(1)
    assert text_of(page, "Base") == whole


def test_chats_are_kept_in_the_tab_and_can_be_cleared(visits):
    page = visits.open()
    say(page, MESSAGE)
    wait_until_done(page)
    page.reload()
    chinese = column(page, "chinese").locator(".output").last
    expect(chinese).to_have_text(OUTPUTS["chinese"])
    page.get_by_role("heading", level=1).evaluate("() => document.activeElement.blur()")
    page.keyboard.press("n")
    expect(page.locator(".turn")).to_have_count(0)
    page.get_by_role("button", name="Chats").click()
    drawer = page.get_by_role("dialog", name="Chats")
    drawer.get_by_label("Search chats").fill("united")
    drawer.get_by_role("button", name=re.compile("^What is the capital")).click()
    expect(drawer).to_have_count(0)
    expect(chinese).to_have_text(OUTPUTS["chinese"])
    assert page.evaluate("Object.keys(localStorage)") == []
    page.get_by_role("button", name="Chats").click()
    drawer.get_by_label("Keep in this browser").check()
    drawer.get_by_text("The key is not.").wait_for()
    assert any("chats" in name for name in page.evaluate("Object.keys(localStorage)"))
    drawer.get_by_role("button", name="Clear").click()
    drawer.get_by_text("Nothing has run in this tab yet.").wait_for()


def test_markdown_becomes_nodes(visits):
    page = visits.open()
    text = "- **bold** [link](https://example.org/) [bad](javascript:alert(1))"
    set_structure(page, "choice", text)
    say(page, MESSAGE)
    wait_until_done(page)
    output = column(page, "Base").locator(".output")
    expect(output.locator("strong")).to_have_text("bold")
    links = output.locator("a")
    assert links.evaluate_all("all => all.map(a => a.getAttribute('href'))") == [
        "https://example.org/"
    ]
    assert links.first.get_attribute("rel") == "noopener noreferrer nofollow"


@pytest.mark.parametrize("language", ["zh-CN", "ja-JP"])
def test_other_languages_run_as_well(visits, language):
    page = visits.open(locale=language)
    field(page).fill(MESSAGE)
    page.keyboard.press("Enter")
    wait_until_done(page)
    expect(page.locator(".reply .output[lang=zh-Hans]")).to_have_count(1)
    expect(page.locator(".reply .output[lang=ja]")).to_have_count(1)


def test_a_phone_shows_one_column_at_a_time(visits):
    page = visits.open(viewport={"width": 390, "height": 844}, has_touch=True)
    say(page, MESSAGE)
    wait_until_done(page)
    chips = page.get_by_role("group", name="Columns")
    for name, text in OUTPUTS.items():
        chip = chips.get_by_role("button", name=name)
        if name != "Base":
            expect(chip).to_contain_text("≠")
            chip.click()
        expect(page.locator(".reply:visible .output")).to_have_text([text])
    page.locator(".board").evaluate(
        """board => {
          const touch = (x) => new Touch(
            { identifier: 1, target: board, clientX: x, clientY: 300 });
          const send = (type, x) => board.dispatchEvent(new TouchEvent(type, { bubbles: true,
            touches: type === "touchstart" ? [touch(x)] : [], changedTouches: [touch(x)] }));
          send("touchstart", 100); send("touchend", 300);
        }"""
    )
    expect(page.locator(".reply:visible .output")).to_have_text([OUTPUTS["chinese"]])
    chips.get_by_role("button", name="japanese").click()
    expect(chips.locator(".picked")).to_contain_text("japanese")
    # Pressed again, a chip opens the scale and the actions of its column.
    chips.get_by_role("button", name="japanese").click()
    page.get_by_label("Scale of japanese", exact=True).wait_for()
    page.get_by_role("button", name="Duplicate").wait_for()
    close_popover(page)
    page.get_by_role("button", name="Parameters").click()
    sheet = page.get_by_role("dialog", name="Parameters")
    sheet.wait_for()
    settle(page)
    box = sheet.bounding_box()
    assert (box["x"], box["width"], round(box["height"])) == (0, 390, round(844 * 0.85))
    sheet.get_by_role("button", name="Close").click()
    expect(sheet).to_have_count(0)


def test_no_digits_stand_before_a_name_and_lookalikes_have_theirs_after(visits):
    page = visits.open()
    alike = page.evaluate(
        "async () => { const { lookAlikes, lookOf } = await import('/console/parts/basics.js');"
        " const same = ['00000000aa', '00000018bb', '00000001cc'];"
        " return [[...lookAlikes(same)], same.map(d => Object.values(lookOf(d)).join(' '))]; }"
    )
    assert alike[0] == ["00000000aa", "00000018bb"]
    assert len(set(alike[1])) == 2
    for screen in ("", "adapters", "live", "requests"):
        page.goto(f"{page.url.split('#')[0]}#/{screen}")
        page.locator("main h1").first.wait_for()
        settle(page)
        assert (
            page.evaluate(
                "[...document.querySelectorAll('main .digest, main code')].filter(e =>"
                " /^[0-9a-f]{4}$/.test(e.textContent) && e.nextElementSibling?.matches('.name'))"
                ".length"
            )
            == 0
        )
