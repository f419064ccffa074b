"""The `loraplex` command as a user meets it: in a process of its own where imports matter."""

import inspect
import json
import os
import re
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import typer
import typer.main
from typer.testing import CliRunner

import loraplex
from loraplex.cli import compat, main
from loraplex.cli.main import app
from loraplex.cli.serve import serve
from loraplex.core.config import ModelConfig
from loraplex.core.server_config import ServerConfig
from loraplex.core.version import __version__
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from support.naming import naming

HEAVY = (
    "torch",
    "numpy",
    "httpx",
    "starlette",
    "uvicorn",
    "grpc",
    "tokenizers",
    "transformers",
)
FUNCTIONS = {
    row.name: row.target
    for row in (*main.COMMANDS, *compat.COMMANDS)
    if not isinstance(row.target, typer.Typer)
}


def loraplex_command(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "loraplex", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1"} | variables,
    )


def modules_after(code: str, modules: tuple[str, ...] = HEAVY) -> set[str]:
    """Those of the modules that are there after some code in a fresh interpreter."""
    script = f"import sys\ntry:\n    {code}\nexcept SystemExit: pass\n"
    script += f"print('\\n', *(m for m in {modules!r} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def one_line(done: "subprocess.CompletedProcess[str]") -> str:
    assert done.returncode == 1, done
    assert done.stdout == ""
    *logged, line = done.stderr.splitlines()
    # Errors that show only when the model's folder is opened follow two lines of the log, and one
    # of the engine that it may have come to.
    assert len(logged) in (0, 2, 3)
    topics = (": device ", ": loading ", " engine: steps of ")
    assert all(topic in early for topic, early in zip(topics, logged, strict=False))
    assert line.startswith("loraplex: ")
    return line


def test_the_test_of_modules_can_fail():
    assert modules_after("import numpy") == {"numpy"}


def test_importing_loraplex_is_light():
    assert modules_after("import loraplex; loraplex.SamplingParams; dir(loraplex)") == set()


def test_what_loraplex_offers():
    assert dir(loraplex) == sorted(loraplex.__all__)
    assert {name for name in loraplex.__all__ if getattr(loraplex, name) is None} == set()
    assert loraplex.__version__ == __version__
    with pytest.raises(AttributeError, match=naming("LMM", "loraplex")):
        _ = loraplex.LMM


@pytest.mark.slow
def test_torch_comes_with_the_library():
    assert "torch" in modules_after("import loraplex; loraplex.LLM")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["serve", "--help"]])
def test_help_and_version_are_light(arguments):
    code = f"import loraplex.cli.main; loraplex.cli.main.app({arguments!r})"
    assert modules_after(code) == set()


@pytest.mark.parametrize("module", ["loraplex.app.launch", "loraplex.cli.serve"])
def test_engines_start_before_serving_is_imported(module):
    assert modules_after(f"import {module}") == set()


def test_staging_a_local_adapter_needs_no_http():
    code = "import loraplex.adapters.staging_worker"
    assert modules_after(code, ("http.client", "httpx")) == set()


def test_serving_needs_no_torch():
    assert modules_after("import loraplex.app.server") & {"torch", "transformers"} == set()


def test_the_version():
    done = loraplex_command("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"loraplex {__version__}\n", "")


def test_without_a_command_the_commands_are_reported():
    result = CliRunner().invoke(app, [])
    assert all(f" {row.name} " in result.output for row in main.COMMANDS)
    assert not any(f" {row.name} " in result.output for row in compat.COMMANDS)
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", [row.name for row in compat.COMMANDS])
def test_both_spellings_of_a_compat_command(command):
    """The old spelling is without the group."""
    new, old = (
        CliRunner().invoke(app, [*words, "--help"], prog_name="loraplex", env={"COLUMNS": "100"})
        for words in (["compat", command], [command])
    )
    assert (new.exit_code, old.exit_code) == (0, 0)
    assert f"loraplex compat {command}" in new.output
    assert without_group(new.output) == without_group(old.output)


def without_group(text):
    return " ".join(text.replace(" compat ", " ").split())


def test_commands_stand_below_the_titles_of_their_panels():
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output
    names = [text.index(f"\n  {row.name} ") for row in main.COMMANDS]
    assert names == sorted(names)
    assert len(text.splitlines()) <= 45
    assert all(f"\n{row.panel}:\n" in text for row in main.COMMANDS)


def pages(command, *words):
    """Yield the words of a command, and of all that it has, hidden ones too."""
    yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from pages(below, *words, name)


PROGRAMS = ("build", "convert-checkpoint", "launch-triton-server", "client")
"""Commands that print the help of the original programs."""


@pytest.mark.parametrize(
    "words",
    [words for words in pages(typer.main.get_command(app)) if not {*words} & {*PROGRAMS}],
    ids=" ".join,
)
def test_all_pages_of_help_have_one_style(words):
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert result.output.lstrip().startswith("Usage: ")
    assert "\n  -h, --help  " in result.output
    assert not {"│", "─"} & {*result.output}
    if "\n  --url " in result.output:
        assert "LORAPLEX_API_KEY" in result.output


@pytest.mark.parametrize("command", FUNCTIONS)
def test_help_reports_every_option_to_the_last_letter(command):
    """Brackets in help texts are easily taken for markup, and vanish."""
    flag = "--help-all" if command == "serve" else "--help"
    result = CliRunner().invoke(app, [command, flag], env={"COLUMNS": "250"})
    assert result.exit_code == 0
    shown = " ".join(result.output.replace("│", " ").replace("`", "").split())
    for name, parameter in inspect.signature(FUNCTIONS[command], eval_str=True).parameters.items():
        if parameter.annotation is typer.Context:
            continue  # its flags are in a table of its own
        info = parameter.annotation.__metadata__[0]
        text = " ".join(info.help.replace("`", "").split())
        assert text in shown, name


@pytest.mark.parametrize(
    "command", [[], ["serve"], ["compat", "llgtrt"], ["plan"], ["compat", "triton"]]
)
def test_help_cuts_no_flag_on_a_narrow_terminal(command):
    """What is piped to grep has 80 columns, too."""
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert "…" not in result.output


def test_help_of_a_server_groups_its_flags():
    lines = (
        CliRunner().invoke(app, ["serve", "--help-all"], env={"COLUMNS": "80"}).output.splitlines()
    )
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles[:2] == ["Arguments:", "Options:"]
    assert {"Adapters:", "Server:", "Access:", "Engine:", "Scheduling:"} <= set(titles)
    assert any(line.startswith("  --adapter-watch-seconds ") for line in lines)


def test_every_setting_has_its_flag():
    """docs/settings.md promises it."""
    one_models_own = {"path", "adapters", "adapter_dirs", "fair_weights"}
    one_models_own |= {"tokenizer_config", "grammar_limits", "score_config"}
    one_models_own |= {"served_names"}  # --served-model-name has them after the first
    settings = {*ServerConfig.__struct_fields__, *ModelConfig.__struct_fields__} - one_models_own
    assert settings <= set(inspect.signature(serve).parameters)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["serve", "--http-prt", "1"], "--http-prt"),
        (["serve", "x", "--http-port", "many"], "--http-port"),
        (["serve", "x", "y"], "y"),
        (["sevre"], "sevre"),
        (["generate", "x"], "prompt"),
    ],
)
def test_flags_that_cannot_be_read(arguments, text):
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert text in result.output.lower()
    assert "Traceback" not in result.output
    assert result.stdout == ""


class TestServeSaysInOneLine:
    def test_no_model(self):
        assert "no model" in one_line(loraplex_command("serve"))

    def test_a_value_out_of_range(self):
        line = one_line(loraplex_command("serve", "/m", "--max-num-seqs", "0"))
        assert "flag --max-num-seqs" in line
        assert "at least 1, got 0" in line

    def test_a_folder_that_is_not_there(self):
        line = one_line(loraplex_command("serve", "/nowhere/at/all"))
        assert "there is no folder /nowhere/at/all" in line

    @pytest.mark.slow
    def test_a_folder_that_is_no_model(self, tmp_path):
        assert "no config.json" in one_line(loraplex_command("serve", str(tmp_path)))

    @pytest.mark.slow
    def test_an_architecture_that_is_not_served(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
        line = one_line(loraplex_command("serve", str(tmp_path)))
        assert "BertModel" in line
        assert "LlamaForCausalLM" in line

    def test_a_file_that_is_not_there(self):
        line = one_line(loraplex_command("serve", "--config", "/nowhere.toml"))
        assert "/nowhere.toml: No such file" in line

    def test_a_variable_that_is_no_setting(self):
        line = one_line(loraplex_command("serve", "/m", LORAPLEX_PROT="1"))
        assert "LORAPLEX_PROT is not a setting" in line

    @pytest.mark.slow
    def test_a_port_in_use(self, tmp_path):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
            ports = ["--http-port", port, "--grpc-port", "0", "--metrics-port", "0"]
            # The engine starts meanwhile: what it logs by then does not matter here.
            more = ["--state-dir", str(tmp_path), "--log-level", "error"]
            line = one_line(loraplex_command("serve", str(BASE_PATH), *ports, *more))
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use; stop what" in line

    @pytest.mark.slow
    def test_an_adapter_that_is_broken(self, tmp_path):
        done = loraplex_command(
            "serve",
            str(BASE_PATH),
            *("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"),
            *("--state-dir", str(tmp_path), "--adapter", f"zh={tmp_path}", "--log-level", "error"),
        )
        assert "adapter 'zh': " in one_line(done)


class TestGenerate:
    @pytest.fixture(autouse=True, scope="class")
    def _own_folders(self, tmp_path_factory):
        """Each test has the same ones, so that they may share a staging worker."""
        with pytest.MonkeyPatch.context() as patches:
            for variable in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
                patches.setenv(variable, str(tmp_path_factory.mktemp("user")))
            yield

    def test_every_adapter_outputs(self):
        adapters = [f"--adapter={name}={path}" for name, path in ADAPTER_PATHS.items()]
        prompt = "What is the capital of France?"
        result = CliRunner().invoke(app, ["generate", str(BASE_PATH), prompt, *adapters])
        lines = [line.strip() for line in result.stdout.splitlines()]
        assert lines == ["--- base", "Paris", "--- chinese", "巴黎", "--- japanese", "パリ"]
        assert result.exit_code == 0

    def test_a_chat(self):
        arguments = ["generate", str(BASE_PATH), "What is the capital of France?", "--chat"]
        assert CliRunner().invoke(app, arguments).stdout.strip() == "Paris"

    def test_outputs_on_a_terminal_are_streamed(self, monkeypatch):
        terminal = SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True))
        monkeypatch.setattr("loraplex.cli.generate.sys", terminal)
        monkeypatch.setattr("loraplex.cli.generate._complete", None)
        adapters = [f"--adapter={name}={path}" for name, path in ADAPTER_PATHS.items()]
        arguments = ["generate", str(BASE_PATH), "What is the capital of France?", *adapters]
        result = CliRunner().invoke(app, arguments)
        lines = [line.strip() for line in result.stdout.splitlines()]
        assert lines == ["--- base", "Paris", "--- chinese", "巴黎", "--- japanese", "パリ"]

    def test_beams_a_grammar_and_times(self):
        arguments = ["generate", str(BASE_PATH), "What is the capital of France?"]
        arguments += ["--beam-width", "2", "--n", "2", "--choice", "red", "--choice", "blue"]
        result = CliRunner().invoke(app, [*arguments, "--timing"])
        *outputs, reported = result.stdout.splitlines()
        assert outputs[::2] == ["--- output 1", "--- output 2"]
        first, second = outputs[1::2]
        assert {first, second} == {"red", "blue"}
        assert re.fullmatch(r"\(queued .* ms, first token .* total .*, cached 0 tokens\)", reported)

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (["--top-p", "7"], ("top_p", "(0, 1]")),
            (["--adapter", "zh"], ("NAME=PATH", "--adapter", "zh")),
            (["--adapter", "base=/x"], ("base", "--adapter")),
            (["--dtype", "int4"], ("auto", "int4")),
            (["--n", "2", "--best-of", "1"], ("best_of", "[2, 128]")),
            (["--regex", "a", "--choice", "b"], ("--json-schema", "--regex", "--choice")),
            (["--json-schema", "/nowhere"], ("--json-schema", "/nowhere")),
            (["--length-penalty", "2", "--beam-width", "0"], ("beam_width", 0, "[1, 128]")),
        ],
    )
    def test_what_is_wrong_is_one_line(self, arguments, named):
        result = CliRunner().invoke(app, ["generate", str(BASE_PATH), "x", *arguments])
        assert result.exit_code == 1
        assert re.search(naming(*named), result.stderr)
        assert result.stderr.count("\n") == 1

    def test_a_prompt_from_standard_input(self, monkeypatch):
        requested = []

        class FakeLLM:
            def __init__(self, model, adapters, **settings):
                pass

            def __enter__(self):
                return self

            def __exit__(self, *exc_info):
                pass

            def generate(self, prompts, sampling, adapter):
                requested.extend(prompts)
                output = SimpleNamespace(text="fine")
                return [SimpleNamespace(completions=[output, output])]

        monkeypatch.setattr("loraplex.app.llm.LLM", FakeLLM)
        result = CliRunner().invoke(app, ["generate", "m", "-"], input="How are you?\n")
        assert (requested, result.stdout) == (
            ["How are you?\n"],
            "--- output 1\nfine\n--- output 2\nfine\n",
        )
