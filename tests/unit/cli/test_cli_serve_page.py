"""`loraplex serve`: what --help shows, what an error about a flag names, what a shell completes."""

import os
import re
import subprocess
import sys

import pytest
import typer.main
from typer.testing import CliRunner

from loraplex.cli import compat, main
from loraplex.cli.command_table import OF_MODELS, OF_OTHERS, OF_VERBS, named_flags
from loraplex.cli.main import app
from loraplex.cli.vllm_flags import FLAGS


def help_of(*words):
    result = CliRunner().invoke(app, [*words], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    return result.output


def test_help_is_two_screens_with_the_common_flags():
    text = help_of("serve", "--help")
    assert len(text.splitlines()) <= 90
    for flag in ("--adapter", "--port", "--api-key", "--device", "--max-model-len", "--help-all"):
        assert f"{flag} " in text
    assert "--max-cpu-loras" not in text
    assert "Scheduling:" in text


def test_help_all_has_every_flag():
    text = help_of("serve", "--help-all")
    command = typer.main.get_command(app).commands["serve"]
    shown = set(text.replace(",", " ").split())
    assert {parameter.opts[0] for parameter in command.params[1:]} <= shown


@pytest.mark.parametrize("words", [["-h"], ["serve", "-h"], ["compat", "triton", "-h"]])
def test_the_short_flag_of_help(words):
    assert "Usage:" in help_of(*words)


def error_of(*words):
    result = CliRunner().invoke(app, [*words], prog_name="loraplex", env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert result.stdout == ""
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("word", "hint_text"),
    [
        ("--prt", "Did you mean --port?"),
        ("--max-lora", "Did you mean --max-loras or"),
        ("--gpu-mem-utilization", "Did you mean --gpu-memory-utilization?"),
        ("--adaptr", "Did you mean --adapter"),
        ("--http_prt", "Did you mean --http-port"),
        ("--frobnicate", "--frobnicate. See `loraplex serve --help-all`."),
        ("-m", "-m. Give the model as the argument: `loraplex serve MODEL`."),
        ("--model", "--model. Give the model as the argument"),
        ("-c", "-c. Use --max-model-len."),
        ("--ctx-size=8", "--ctx-size. Use --max-model-len."),
        ("-ngl", "-ngl. With --device cuda all layers are on the GPU."),
        ("--lora", "--lora. Use --adapter NAME=PATH."),
        ("--cpu-offload-gb", "vLLM's flag is not served (weights that are not on the device)"),
        ("--disable-cascade-attn", "vLLM's flag has no effect here (the engine plans this"),
        ("--speculative-config", "Use --num-draft-tokens"),
    ],
)
def test_a_flag_that_is_not_there(word, hint_text):
    assert hint_text in error_of("serve", "/m", word, "1")


@pytest.mark.parametrize(
    ("line", "hint_text"),
    [
        (
            "generate --model X",
            "--model. Give the model as the argument: `loraplex generate MODEL`.",
        ),
        ("generate -m X", "-m. Give the model as the argument: `loraplex generate MODEL`."),
        ("plan --memry 3", "--memry. Did you mean --memory"),
        ("adapters load a b --repalce", "--repalce. Did you mean --replace?"),
        ("bench --duration 3", "--duration. See `loraplex bench run --help`."),
        # No flag of the command does it: what another command has would mislead.
        ("adapters load a b -np 3", "-np. See `loraplex adapters load --help`."),
        ("adapters load a b --swap-space 3", "See `loraplex adapters load --help`."),
        ("compat triton --modl 1", "--modl. "),
        ("keys list -m X", "-m. See `loraplex keys list --help`."),
    ],
)
def test_a_flag_that_another_command_has_not(line, hint_text):
    assert hint_text in error_of(*line.split())


def test_every_hint_names_flags_that_are_there():
    commands = typer.main.get_command(app).commands
    flags = {
        name: {flag for parameter in commands[name].params for flag in parameter.opts}
        for name in ("serve", "generate")
    }
    hints = OF_OTHERS
    named = {flag for text in hints.values() for flag in named_flags(text)}
    assert named <= flags["serve"] | flags["generate"]
    assert not (hints.keys() | OF_MODELS) & flags["serve"]


@pytest.mark.parametrize(
    ("line", "hint_text"),
    [
        ("list", "No such command: list. Use `loraplex cache list`"),
        ("chat", "Use `loraplex run MODEL`"),
        (
            "pull llama3",
            "Use `loraplex serve MODEL` or `loraplex run MODEL`: a model of the hub is",
        ),
        ("ps", "Use `loraplex adapters list`"),
        ("stop llama3", "or send it SIGTERM"),
        ("rm llama3", "Use `loraplex cache clean --model MODEL`"),
        ("complete", "Use `loraplex generate MODEL PROMPT`."),
        ("srve /m", "No such command: srve. Did you mean serve?"),
        ("frobnicate", "No such command: frobnicate. See `loraplex --help`."),
        ("adapters lst", "No such command: lst. Did you mean list?"),
        ("keys frob", "No such command: frob. See `loraplex keys --help`."),
        ("serve /m --num-gpu 1", "With --device cuda all layers are on the GPU."),
        ("serve /m --num-ctx 1", "Use --max-model-len."),
        ("generate /m x --num-predict 1", "Use --max-tokens."),
    ],
)
def test_words_of_other_systems(line, hint_text):
    assert hint_text in error_of(*line.split())


def test_every_verb_names_commands_that_are_there():
    root = typer.main.get_command(app)
    assert not OF_VERBS.keys() & root.commands.keys()
    for text in OF_VERBS.values():
        for line in re.findall(r"`loraplex ([a-z -]+?)(?= ?[A-Z`]| http)", text):
            command = root
            for word in line.split():
                if word.startswith("-"):
                    assert word in flags_of_command(command)
                else:
                    command = command.commands[word]


def flags_of_command(command):
    return {"--help"} | {flag for p in command.params for flag in p.opts}


def completions(line):
    """The words that bash offers after `line`."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    result = CliRunner().invoke(
        app, [], prog_name="loraplex", env={"_LORAPLEX_COMPLETE": "complete_bash", **words}
    )
    return result.output.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("loraplex se", ["serve"]),
        ("loraplex serve /m --quantization ", ["none", "int8", "int4", "fp8"]),
        ("loraplex serve /m --log-level d", ["debug"]),
        ("loraplex serve /m --max-cpu", ["--max-cpu-loras"]),
        # Nothing is offered: the shell completes the path.
        ("loraplex serve /", []),
        ("loraplex serve --chat-template /", []),
    ],
)
def test_what_a_shell_completes(line, words):
    assert completions(line) == words


def test_hidden_commands_are_not_offered():
    assert completions("loraplex ") == [row.name for row in main.COMMANDS]
    assert set(completions("loraplex compat ")) == {row.name for row in compat.COMMANDS}


def test_scripts_of_shells(monkeypatch):
    """Typer reads the variable when it builds the commands."""
    monkeypatch.setattr("typer.testing._get_command", typer.main.get_command)
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    result = CliRunner().invoke(app, ["--show-completion", "bash"], prog_name="loraplex")
    assert "complete -o default -F" in result.output
    assert "_LORAPLEX_COMPLETE=complete_bash" in result.output


def test_completion_imports_nothing_slow():
    script = "import sys\nfrom loraplex.cli.main import app\n"
    script += "try: app(prog_name='loraplex')\nexcept SystemExit: pass\n"
    script += "print(*{'torch', 'numpy', 'httpx', 'grpc', 'transformers'} & {*sys.modules})"
    words = {"COMP_WORDS": "loraplex serve --dev", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"_LORAPLEX_COMPLETE": "complete_bash"} | words,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == ["--device"]


def test_no_flag_of_vllm_hides_a_setting():
    command = typer.main.get_command(app).commands["serve"]
    flags = [
        f for parameter in command.params for f in (*parameter.opts, *parameter.secondary_opts)
    ]
    assert len(flags) == len(set(flags))
    assert len(FLAGS) == len({flag.name for flag in FLAGS})
