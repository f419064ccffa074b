"""Modules of the playground that need no page, imported in one."""

import json

import pytest


@pytest.fixture(scope="module")
def page(browser, server):
    """One page for all: nothing in it changes."""
    page = browser.new_page()
    page.goto(f"{server.url}/console/")
    yield page
    page.close()


def call(page, function, *arguments, module="columns"):
    return page.evaluate(
        f"async (args) => (await import('/console/screens/playground/{module}.js'))"
        f".{function}(...args)",
        list(arguments),
    )


def tokens(*pieces):
    return [{"bytes": list(piece), "id": i} for i, piece in enumerate(pieces)]


def ranges(page, text, *pieces):
    units = call(page, "unitsOf", text, tokens(*pieces))
    return [(unit["start"], unit["end"], unit["first"], unit["last"]) for unit in units]


def test_tokens_that_are_parts_of_a_character_are_one_unit(page):
    assert ranges(page, "a华b", b"a", b"\xe5\x8d", b"\x8e", b"b") == [
        (0, 1, 0, 0),
        (1, 2, 1, 2),
        (2, 3, 3, 3),
    ]


def test_tokens_that_the_text_leaves_out_have_no_place(page):
    found = ranges(page, "Rome is", b" Rome", b"<s>", b" is", b"</s>")
    assert found == [(0, 4, 0, 0), (4, 4, 1, 1), (4, 7, 2, 2), (7, 7, 3, 3)]


def test_an_output_that_ends_within_a_character(page):
    assert ranges(page, "a\ufffd", b"a", b"\xe5\x8d") == [(0, 1, 0, 0), (1, 1, 1, 1)]


def test_the_token_of_a_character(page):
    units = call(page, "unitsOf", "a华b", tokens(b"a", b"\xe5\x8d", b"\x8e", b"b"))
    assert [call(page, "unitAt", units, offset) for offset in range(4)] == [0, 1, 2, 2]
    assert call(page, "unitAt", [], 0) == -1


@pytest.mark.parametrize(
    ("mine", "its", "first", "others"),
    [
        ([1, 2, 3], [1, 2, 3], -1, []),
        ([1, 2, 3], [1, 9, 3], 1, []),
        ([1, 7, 8, 3], [1, 9, 3], 1, [2]),
        ([1, 2], [1, 2, 3], 2, []),
        ([], [4], 0, []),
    ],
)
def test_differences(page, mine, its, first, others):
    found = call(page, "differences", *([{"id": i} for i in each] for each in (mine, its)))
    assert found == {"first": first, "others": others}


def test_differences_of_long_outputs_take_no_long(page):
    long = [{"id": i % 7} for i in range(50_000)]
    other = [{"id": i % 5} for i in range(50_000)]
    assert call(page, "differences", long, other)["first"] == 5


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("max_tokens", "1.5", "whole number"),
        ("max_tokens", "0", "≥ 1"),
        ("temperature", "101", "0 to 100"),
        ("top_p", "0", "> 0"),
        ("logit_bias", "[1]", "JSON object"),
        ("stop_token_ids", "1, x", "whole number"),
    ],
)
def test_bad_values_are_refused_with_what_would_be_right(page, name, text, message):
    error = page.evaluate(
        """async ([name, text]) => {
            const { FIELDS, valueOf } = await import('/console/screens/playground/setup.js');
            try { return valueOf(FIELDS.find((field) => field.name === name), text); }
            catch (error) { return error.message; }
        }""",
        [name, text],
    )
    assert message in error


def test_every_sampling_field_of_the_api_is_offered(page, server):
    """Fields of one meaning with two names are offered once."""
    schema = server.get("/openapi.json")[1]
    offered = page.evaluate(
        """async () => {
            const options = await import('/console/screens/playground/setup.js');
            return [...options.FIELDS, ...options.CHAT_FIELDS].map(({ name }) => name);
        }"""
    )
    known = json.loads(schema)["components"]["schemas"]["CompareBody"]["properties"]
    synonyms = {"no_stop_trim", "ignore_eos_token", "json_schema", "regex", "ebnf"}
    synonyms |= {name for name in known if name.startswith("guided_")} | {"response_format"}
    elsewhere = {"model", "prompt", "messages", "adapters", "logprobs", "stream"}
    elsewhere |= {"structured_outputs", "add_generation_prompt", "continue_final_message"}
    elsewhere |= {"entries"}
    # In the panel of tools.
    elsewhere |= {"tools", "tool_choice", "parallel_tool_calls"}
    assert set(known) - synonyms - elsewhere == set(offered)
