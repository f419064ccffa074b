"""`loraplex compare` against a server that only echoes."""

import itertools
import json
import re

import pytest
from starlette.applications import Starlette
from typer.testing import CliRunner

from loraplex.cli.compare import side_by_side
from loraplex.cli.main import app
from loraplex.core.errors import NotReadyError
from loraplex.frontends.openai import openai_fallback_routes, openai_routes
from support.echo_service import EchoService
from support.naming import naming
from support.served import served


@pytest.fixture(scope="module")
def backend():
    backend = EchoService()
    backend.register("fr")
    backend.register("org/legal")
    return backend


@pytest.fixture(scope="module")
def url(backend):
    http = Starlette()
    http.routes.extend(openai_routes(backend))
    http.routes.extend(openai_fallback_routes())
    with served(http) as url:
        yield url


@pytest.fixture
def run(url):
    """A function (*arguments) -> (exit code, standard output, standard error)."""

    def invoke(*arguments, text=None, columns=120):
        result = CliRunner(env={"COLUMNS": str(columns)}).invoke(
            app, ["compare", *arguments, "--url", url], input=text
        )
        return result.exit_code, result.stdout, result.stderr

    return invoke


BOTH = '["fr", {"name": "org/legal", "scale": 0.5}]'


def test_the_outputs_stand_side_by_side(run):
    code, out, _ = run("hi", "--adapter", "fr", "--adapter", BOTH)
    assert code == 0
    lines = [[cell.strip() for cell in line.split(" | ")] for line in out.splitlines()]
    assert lines[0] == ["base", "fr", "fr + 0.5 org/legal"]
    assert lines[2] == ["echo: hi", "echo+fr: hi", "echo+fr+org/legal: hi"]
    assert lines[4][0].startswith("9 tokens, log probability -")
    assert max(map(len, out.splitlines())) <= 120
    assert "leaves the base at token 4:" in out
    assert "'+'" in out
    assert "below 20th" in out


def test_in_a_narrow_window_they_stand_below_each_other(run):
    code, out, _ = run("hi", "--adapter", "fr", columns=40)
    assert code == 0
    assert "|" not in out
    lines = out.splitlines()
    assert lines.index("echo: hi") < lines.index("fr") < lines.index("echo+fr: hi")
    assert max(map(len, lines)) <= 40


def test_json_chat_and_standard_input(run):
    code, out, _ = run("-", "--adapter", "fr", "--chat", "--json", "--seed", "3", text="hello")
    assert code == 0
    comparison = json.loads(out)
    assert comparison["seed"] == 3
    assert comparison["answers"][1]["text"] == "echo+fr: user: hello\nassistant: "


def test_one_that_fails_is_reported_and_the_others_respond(run, backend):
    backend.plant(NotReadyError("the engine is away"))
    code, out, _ = run("hi", "--adapter", "fr")
    assert code == 1
    assert "error: the engine is away" in out
    assert "echo+fr: hi" in out


@pytest.mark.parametrize("adapter", ["frr", '["fr", "frr"]', '{"name": "frr", "scale": 2}'])
def test_an_unknown_adapter_is_refused_before_anything_is_computed(run, backend, adapter):
    before = len(backend.requests)
    assert run("hi", "--adapter", "fr", "--adapter", adapter) == (
        1,
        "",
        "loraplex: there is no adapter 'frr'; did you mean fr?\n",
    )
    assert all(request.adapters for request in backend.requests[before:])


def test_errors_are_one_line(run):
    assert run("hi", "--model", "no")[0::2] == (
        1,
        "loraplex: there is no model or adapter 'no' here; there are: 'echo', 'fr', 'org/legal'\n",
    )
    code, _, err = run("hi", "--adapter", '{"name": ')
    assert code == 1
    assert re.search(naming("JSON", "--adapter", '{"name": ', 1), err)


def entry(requested, text):
    return {
        "asked": requested,
        "error": None,
        "text": text,
        "num_tokens": 1,
        "logprob": -1.0,
        "ttft_ms": 1.0,
        "total_ms": 2.0,
        "versus_base": {"first": None},
    }


def test_every_kind_of_entry_has_a_name():
    requested = [None, [], "fr", {"task_id": 0}, ["fr", {"digest": "9f", "scale": -1}]]
    lines = side_by_side([entry(a, "") for a in requested], 30)
    names = [
        lines[0],
        *(line for before, line in itertools.pairwise(lines) if not before),
    ]
    assert {"base", "fr", "0", "fr + -1 9f"} <= set(names)
    assert "the same tokens as the base" in lines


def test_long_and_empty_lines_stay_in_their_column():
    lines = side_by_side([entry(None, "x" * 70 + "\n\nend"), entry("fr", "word " * 20)], 63)
    assert max(map(len, lines)) <= 63
    assert {len(line.split(" | ")[0]) for line in lines if " | " in line} == {30}
    left = "".join(line.split(" | ")[0].strip() for line in lines)
    assert "x" * 70 in left


def test_wide_characters_take_two_columns():
    lines = side_by_side([entry(None, "北京" * 10), entry("zh", "one two " + "a" * 25)], 63)
    text = [line.split(" | ") for line in lines[2:4]]
    assert [row[0].strip() for row in text] == ["北京" * 7 + "北", "京" + "北京" * 2]
    assert [len(row[0]) for row in text] == [15, 25]
    assert [row[1].strip() for row in text] == ["one two", "a" * 25]
