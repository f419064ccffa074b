"""`loraplex run`: a conversation with a source that only reports what it was sent."""

import json
import os
import re
import stat
import threading
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from typer.testing import CliRunner

from loraplex.cli.chat_sources import LocalSource, OutputPiece, ServerSource
from loraplex.cli.main import app
from loraplex.cli.run import ChatSession, line_editing
from loraplex.cli.server_client import ServerClient
from loraplex.core.errors import (
    ConfigError,
    InvalidParameterError,
    InvalidRequestError,
    NotReadyError,
)
from loraplex.core.sampling_params import SamplingParams
from loraplex.frontends.openai import openai_fallback_routes, openai_routes
from support.echo_service import EchoService
from support.naming import naming
from support.served import served


class FakeSource:
    """Repeats the last message by the name of the adapter."""

    def __init__(self, names=("fr", "legal"), *, has_chat_template=True):
        self.names = list(names)
        self.has_chat_template = has_chat_template
        self.sent = []

    def adapters(self):
        return self.names

    def stream(self, messages, adapter, options):
        self.sent.append(([dict(m) for m in messages], adapter, dict(options)))
        text = messages[-1]["content"]
        if text == "fail":
            raise NotReadyError("the engine is away")
        yield OutputPiece(f"{adapter or 'base'}: ", 2)
        if text == "interrupt":
            raise KeyboardInterrupt
        yield OutputPiece(text, 1)


@pytest.fixture
def source():
    return FakeSource()


@pytest.fixture
def chat(source, capsys):
    """A function that types lines, of which an exception is raised; returns what is printed."""

    def type_lines(*lines, **arguments):
        typed = iter(lines)
        prompts = []

        def read_line(prompt):
            prompts.append(prompt)
            line = next(typed, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        session = ChatSession(arguments.pop("source", source), {}, read_line, **arguments)
        session.run()
        shown = capsys.readouterr()
        type_lines.prompts, type_lines.stderr = prompts, shown.err
        return shown.out.splitlines()

    return type_lines


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_a_conversation_goes_on_with_another_adapter(chat, source):
    assert chat("hi", "/adapter fr", "and?", "/base", "", "x") == [
        "base: hi",
        "fr: and?",
        "base: x",
        "",
    ]
    assert source.sent[1] == ([user("hi"), assistant("base: hi"), user("and?")], "fr", {})
    assert chat.prompts == ["base> ", "base> ", "fr> ", "fr> ", "base> ", "base> ", "base> "]


def test_adapters_are_listed_and_near_ones_named(chat):
    lines = chat("/adapter", "/adapter legl", "/adapter legal", "/adapter")
    assert lines[:4] == [
        "* base",
        "  fr",
        "  legal",
        "Error: there is no adapter 'legl'; did you mean legal?",
    ]
    assert lines[4:] == ["  base", "  fr", "* legal", ""]


def test_many_adapters_are_counted(chat):
    lines = chat("/adapter", "/compare hi", source=FakeSource(map(str, range(60))))
    assert lines[50:52] == ["  49", "  and 10 more"]
    assert lines[-2] == "These are the first 16 of 60 adapters."
    assert sum(line.startswith("--- ") for line in lines) == 17


def test_all_adapters_are_compared_and_the_conversation_stays(chat, source):
    assert chat("/system Be brief.", "/compare hi", "/compare") == [
        *("--- base", "base: hi", "--- fr", "fr: hi", "--- legal", "legal: hi"),
        "Error: /compare needs a prompt",
        "",
    ]
    messages = [{"role": "system", "content": "Be brief."}, user("hi")]
    assert sorted(source.sent, key=lambda sent: sent[1] or "") == [
        (messages, name, {}) for name in (None, "fr", "legal")
    ]


def test_outputs_of_a_comparison_are_read_at_the_same_time(chat):
    """The one that is printed first ends after all have begun."""

    class Together(FakeSource):
        barrier = threading.Barrier(3)

        def stream(self, messages, adapter, options):
            self.barrier.wait(60)
            yield from super().stream(messages, adapter, options)

    assert chat("/compare hi", source=Together())[1::2] == ["base: hi", "fr: hi", "legal: hi"]


def test_an_error_in_a_comparison_is_that_of_its_adapter(chat):
    lines = chat("/compare fail", "fail", "hi")
    error = "Error: the engine is away"
    assert lines == ["--- base", error, "--- fr", error, "--- legal", error, error, "base: hi", ""]


def test_a_failed_message_is_forgotten(chat, source):
    chat("fail", "hi")
    assert source.sent[1][0] == [user("hi")]


def test_options_are_set_shown_and_reset(chat, source):
    lines = chat(
        *("/set temperature 0.5", "/set top_k 3", "/set stop END", "a", "/set"),
        *("/set temperature none", "b", "/set temperature 500", "/set temprature 1", "/set seed x"),
    )
    assert source.sent[0][2] == {"temperature": 0.5, "top_k": 3, "stop": ["END"]}
    assert source.sent[1][2] == {"top_k": 3, "stop": ["END"]}
    assert {"  temperature 0.5", "  seed none"} <= set(lines)
    errors = [line for line in lines if line.startswith("Error")]
    assert re.search(naming("temperature", "[0, 100]"), errors[0])
    assert re.search(naming("temprature", "temperature"), errors[1])
    assert re.search(naming("Error", "x"), errors[2])


def test_retry_clear_and_the_system_message(chat, source):
    chat("/retry", "hi", "/system Rhyme.", "/retry", "/clear", "/system", "new")
    system = {"role": "system", "content": "Rhyme."}
    assert [sent[0] for sent in source.sent] == [[user("hi")], [system, user("hi")], [user("new")]]


def test_a_failed_retry_keeps_the_output(chat, source):
    def fail(messages, adapter, options):
        raise NotReadyError("away")
        yield

    def read_line(_):
        step = next(steps)
        if step == "fail":
            source.stream = fail
            return "/retry"
        return step

    steps = iter(["hi", "fail", "/bye"])
    session = ChatSession(source, {}, read_line)
    session.run()
    assert session._messages == [user("hi"), assistant("base: hi")]


def test_several_lines(chat, source):
    chat('"""one', "  two", 'three"""', '"""four"""')
    assert source.sent[0][0] == [user("one\n  two\nthree")]
    assert source.sent[1][0][-1] == user("four")
    assert chat.prompts[1:3] == ["... ", "... "]


def test_ctrl_c_stops_an_output_and_its_part_stays(source, capsys, monkeypatch):
    session = ChatSession(source, {})
    begun = threading.Event()

    def stream(messages, adapter, options):
        yield OutputPiece("half", 1)
        begun.wait(60)
        yield OutputPiece("rest", 1)

    def print_one(pieces, output):
        output.append(next(pieces).text)
        raise KeyboardInterrupt

    source.stream = stream
    monkeypatch.setattr(session, "_print_output", print_one)
    session.reply("hi")
    begun.set()
    assert capsys.readouterr().out == "\n(stopped)\n"
    assert session._messages[-1] == assistant("half")


def test_ctrl_c_twice_at_the_prompt_ends(chat):
    c = KeyboardInterrupt()
    assert chat(c, "hi", c, c, "not reached") == [
        *("", "Press Ctrl-C again to end."),
        "base: hi",
        *("", "Press Ctrl-C again to end.", ""),
    ]


@pytest.mark.parametrize("end", ["/bye", "/exit", "/quit"])
def test_words_that_end(chat, end):
    assert chat(end, "not reached") == []


def test_help_and_an_unknown_command(chat):
    lines = chat("/help", "/hlp")
    assert any(line.startswith("  /compare PROMPT ") for line in lines)
    assert "Error: there is no command /hlp; did you mean /help?; try /help" in lines


def test_no_chat_template_is_said_once(chat):
    assert chat("a", "b", source=FakeSource(has_chat_template=False)) == ["base: a", "base: b", ""]
    notice = "The model has no chat template: it completes each text without earlier ones.\n"
    assert chat.stderr == notice


def test_figures_are_on_standard_error(chat):
    assert chat("hi", is_verbose=True) == ["base: hi", ""]
    assert chat.stderr.startswith("(3 tokens, ")
    assert "tokens/s, first after 0." in chat.stderr


def test_tab_completes_commands_adapters_and_options(source):
    session = ChatSession(source, {})
    assert session.completions("/a") == ["/adapter"]
    assert session.completions("/adapter l") == ["legal"]
    assert session.completions("/set top") == ["top_p", "top_k"]
    assert session.completions("hello /a") == []


def test_what_a_session_refuses_at_its_start(source):
    with pytest.raises(ConfigError, match=naming("frr", "fr")):
        ChatSession(source, {}, adapter="frr")
    with pytest.raises(InvalidParameterError, match="top_p"):
        ChatSession(source, {"top_p": 7})


class TestHistory:
    def test_only_the_user_may_read_it(self, tmp_path):
        readline = pytest.importorskip("readline")
        file = tmp_path / "new" / "chat_history"
        readline.clear_history()
        with line_editing(lambda line: [], file):
            readline.add_history("secret")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert "secret" in file.read_text(encoding="utf-8")
        os.chmod(file, 0o644)
        readline.clear_history()
        with line_editing(lambda line: [], file):
            assert readline.get_history_item(readline.get_current_history_length()) == "secret"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        readline.clear_history()

    def test_a_folder_that_is_none_is_reported(self, tmp_path, capsys):
        (tmp_path / "file").touch()
        with line_editing(lambda line: [], tmp_path / "file" / "chat_history"):
            pass
        assert "The history is not kept" in capsys.readouterr().err


@pytest.fixture(scope="module")
def url():
    backend = EchoService()
    backend.register("fr")
    http = Starlette()
    http.routes.extend(openai_routes(backend))
    http.routes.extend(openai_fallback_routes())
    with served(http) as url:
        yield url


class TestServer:
    def test_its_adapters_and_outputs(self, url):
        source = ServerSource(ServerClient(url))
        assert source.has_chat_template
        assert source.adapters() == ["fr"]
        pieces = list(source.stream([user("hi")], "fr", {"max_tokens": 50, "top_k": 2}))
        assert "".join(piece.text for piece in pieces) == "echo+fr: user: hi\nassistant: "
        assert sum(piece.num_tokens for piece in pieces) > 0
        source.has_chat_template = False
        pieces = source.stream([user("hi")], None, {"max_tokens": 50})
        assert "".join(piece.text for piece in pieces) == "echo: hi"

    def test_a_server_that_refuses_to_render_a_chat_completes_texts(self, url, monkeypatch):
        def refuse(self, path, body):
            raise InvalidRequestError("this model has no chat template")

        monkeypatch.setattr(ServerClient, "post", refuse)
        assert not ServerSource(ServerClient(url)).has_chat_template

    def test_piped_input_is_one_message(self, url):
        result = CliRunner().invoke(app, ["run", url, "--adapter", "fr"], input="hi\nyou\n")
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout == "echo+fr: user: hi\nyou\n\nassistant: \n"

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (["--adapter", "frr"], ("frr", "fr")),
            (["--adapter", "fr=/x"], ("--adapter", "fr=/x")),
            (["--dtype", "float32"], ("--dtype",)),
            (["--api-key", "a\nb"], ("ASCII",)),
            (["--top-p", "7"], ("top_p", "(0, 1]", 7.0)),
        ],
    )
    def test_what_is_refused(self, url, arguments, named):
        result = CliRunner().invoke(app, ["run", url, *arguments], input="hi")
        assert result.exit_code == 1
        assert re.search(naming(*named), result.stderr)
        assert result.stdout == ""


class TestLocal:
    class FakeLLM:
        def __init__(self, *, has_chat_template=True):
            self.has_chat_template = has_chat_template
            self.prompts = []

        def stream(self, prompt, sampling, *, adapter):
            self.prompts.append((prompt, sampling, adapter))
            sequence = SimpleNamespace(token_ids=(1, 2))
            yield SimpleNamespace(text="fine", sequences=(sequence,))

    def test_a_conversation(self):
        llm = self.FakeLLM()
        pieces = LocalSource(llm).stream([user("hi")], "fr", {"temperature": 0.5})
        assert list(pieces) == [OutputPiece("fine", 2)]
        sampling = SamplingParams(max_tokens=None, temperature=0.5)
        assert llm.prompts == [([user("hi")], sampling, "fr")]

    def test_a_model_without_a_chat_template_completes_the_text(self):
        llm = self.FakeLLM(has_chat_template=False)
        list(LocalSource(llm).stream([user("a"), assistant("b"), user("c")], None, {}))
        assert [prompt for prompt, _, _ in llm.prompts] == ["c"]


def test_the_key_of_the_flag_is_sent():
    keys = []

    async def models(request):
        keys.append(request.headers.get("authorization"))
        return Response(status_code=401)

    http = Starlette()
    http.add_route("/v1/models", models)
    with served(http) as url:
        CliRunner().invoke(app, ["run", url, "--api-key", "secret"], input="hi")
    assert keys == ["Bearer secret"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], ("run", "http://127.0.0.1:8000")),
        (["/m", "--api-key", "x"], ("--api-key", "/m")),
        (["/m", "--adapter", "zh"], ("NAME=PATH", "--adapter", "zh")),
        (["/m", "--adapter", "base=/x"], ("base", "--adapter")),
        (["http://127.0.0.1:1"], ("http://127.0.0.1:1", "[Errno 111]")),
    ],
)
def test_arguments_that_are_refused(arguments, named):
    result = CliRunner().invoke(app, ["run", *arguments], input="hi")
    assert result.exit_code == 1
    assert re.search(naming(*named), result.stderr)
    assert result.stdout == ""


def test_an_empty_input_is_refused(tmp_path, monkeypatch):
    class FakeLLM:
        has_chat_template = True

        def __init__(self, model, adapters, **settings):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *exc_info):
            pass

    monkeypatch.setattr("loraplex.app.llm.LLM", FakeLLM)
    result = CliRunner().invoke(app, ["run", "m"], input="\n")
    assert (result.exit_code, result.stderr) == (
        1,
        "loraplex: standard input is empty: it is the message\n",
    )


def test_events_of_a_server_end_with_its_error():
    async def failing(request):
        events = [{"choices": []}, {"error": {"code": "not_ready", "message": "it stops"}}]
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return Response(lines, media_type="text/event-stream")

    http = Starlette()
    http.add_route("/events", failing, ["POST"])
    with served(http) as url:
        events = ServerClient(url).stream("/events", {})
        assert next(events) == {"choices": []}
        with pytest.raises(NotReadyError, match="it stops"):
            next(events)
