"""Commands of client programs: spellings, lists, exit codes; and the flags of each program.

What argparse took from a user of the original programs must be taken here.
"""

import sys
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from loraplex.cli.compat import add_program, client_app
from loraplex.compat.client.programs import (
    BENCHMARK_FLAGS,
    ENSEMBLE_TEST_FLAGS,
    PROGRAMS,
    SPECULATION_FLAGS,
    TEXT_FLAGS,
    TOKEN_FLAGS,
    VLLM_FLAGS,
    Program,
)
from loraplex.compat.flags import REQUIRED, FlagKind, here
from loraplex.core.errors import ConfigError
from support.program_options import program_options

ROWS = (
    here("place", FlagKind.TEXT, "Where.", default=REQUIRED, is_positional=True),
    here("some-text", FlagKind.TEXT, "A text.", "t", default="none"),
    here("top-p", FlagKind.NUMBER, "A number.", default=0.0),
    here("stop-words", FlagKind.TEXTS, "Words.", default=()),
    here("weights", FlagKind.NUMBERS, "Numbers.", default=()),
    here("is-on", FlagKind.BARE, "A switch.", default=False),
    here("limit", FlagKind.WHOLE, "May be none.", default=None),
)


@pytest.fixture
def ran(monkeypatch):
    """Runs the command; its result and the options that the program got."""
    program = ModuleType("loraplex.compat.client.planted_program")
    monkeypatch.setitem(sys.modules, program.__name__, program)

    def run(*args: str, code: int = 0, error: Exception | None = None):
        seen = []

        def of_program(options, say):
            seen.append(options)
            if error is not None:
                raise error
            say("a line")
            return code

        program.run = of_program
        planted = typer.Typer()
        add_program(planted, Program("planted", ROWS, "planted_program", "Runs", "x.py"))
        result = CliRunner().invoke(planted, list(args))
        return result, seen[0] if seen else None

    return run


def test_defaults(ran):
    result, options = ran("here")
    assert result.exit_code == 0
    assert result.stdout == "a line\n"
    assert options == program_options(ROWS, place="here")


@pytest.mark.parametrize(
    "args",
    [
        ["--some-text", "a", "--top-p", "0.5", "here", "--is-on", "--limit=3"],
        ["--some_text", "a", "--top_p=0.5", "--is_on", "here", "--limit", "3"],
        ["here", "-t", "a", "--top-p=0.5", "--is-on", "--limit", "3"],
    ],
)
def test_spellings_and_places(ran, args):
    _, options = ran(*args)
    assert options == program_options(
        ROWS, place="here", some_text="a", top_p=0.5, is_on=True, limit=3
    )


def test_values_keep_their_underscores_and_hyphens(ran):
    _, options = ran("a_b", "--some-text=--top_p", "--stop-words", "x_y", "--is-on")
    assert (options.place, options.some_text) == ("a_b", "--top_p")
    assert options.stop_words == ["x_y"]


def test_a_value_that_looks_like_a_flag(ran):
    _, options = ran("here", "--some-text", "--is_on")
    assert options.some_text == "--is_on"
    assert not options.is_on


def test_lists_take_values_up_to_the_next_flag(ran):
    _, options = ran("here", "--stop-words", "a", "b c", "--weights", "-1", "-.5", "2", "--is-on")
    assert options.stop_words == ["a", "b c"]
    assert options.weights == [-1.0, -0.5, 2.0]
    assert options.is_on


def test_lists_by_repetition(ran):
    _, options = ran("--stop-words", "a", "--stop_words=b", "--top-p", "1", "here")
    assert options.stop_words == ["a", "b"]


def test_what_follows_two_hyphens_is_no_flag(ran):
    _, options = ran("--", "--top_p")
    assert options.place == "--top_p"


def test_an_unknown_flag(ran):
    result, options = ran("here", "--some_txt", "a")
    assert result.exit_code == 2
    assert options is None


@pytest.mark.parametrize("flags", [["--top-p"], ["--limit", "many"], []])
def test_a_flag_without_a_right_value(ran, flags):
    result, _ = ran(*(["here"] if flags else []), *flags)
    assert result.exit_code == 2


def test_the_exit_code_is_that_of_the_program(ran):
    assert ran("here", code=3)[0].exit_code == 3


def test_an_error_is_one_line(ran):
    result, _ = ran("here", error=ConfigError("that was wrong"))
    assert result.exit_code == 1
    assert result.stderr == "loraplex: that was wrong\n"


# ---------------------------------------------------------------- the programs' own flags

TLS = {"-s --ssl", "-r --root-certificates", "-p --private-key", "-x --certificate-chain"}
TLS |= {"-C --grpc-compression-algorithm", "-t --stream-timeout"}
GRPC = {"-v --verbose", "-u --url"}
REQUESTED = {"--return-log-probs", "--return-context-logits", "--return-generation-logits"}
PENALTIES = {"--repetition-penalty", "--presence-penalty", "--frequency-penalty"}


def names(text: str) -> set[str]:
    """Divided by semicolons."""
    return set(text.split(";"))


FLAGS = {
    TOKEN_FLAGS: GRPC
    | TLS
    | PENALTIES
    | REQUESTED
    | names(
        "--text;--input-tokens-csv;--draft-tokens-csv;--output-tokens-csv;--end-id;--pad-id;"
        "-S --streaming;-c --check-output;--correctness-threshold;-n --num-return-sequences;"
        "-b --beam-width;--temperature;--request-output-len;--stop-after-ms;"
        "--stop-via-request-cancel;--tokenizer-dir;--tokenizer-type;--request-id;"
        "--prompt-embedding-table-path;--prompt-task-id;--dtype;--lora-path;--lora-task-id;"
        "--exclude-input-in-output;--return-perf-metrics;--top-k;--top-p;--requested-outputs;"
        "--model-name;--prompt-table-extra-id;--vocab-size;--lookahead-config"
    ),
    TEXT_FLAGS: GRPC
    | PENALTIES
    | REQUESTED
    | names(
        "--expected-outputs;--check-outputs;-p --prompt;--model-name;-S --streaming;"
        "-n --num-return-sequences;-b --beam-width;--temperature;-o --output-len;--request-id;"
        "--stop-words;--bad-words;--embedding-bias-words;--embedding-bias-weights;"
        "--overwrite-output-text;--return-perf-metrics;--batch-inputs;--end-id;--pad-id;"
        "--lora-path;--lora-task-id;--exclude-input-in-output;--guided-decoding-guide-type;"
        "--guided-decoding-guide"
    ),
    ENSEMBLE_TEST_FLAGS: GRPC
    | REQUESTED
    | names(
        "-i --protocol;-c --concurrency;--max-input-len;--dataset;--test-bls;--test-llmapi;"
        "--model-name;--streaming;--output-config;--sampling-params"
    ),
    BENCHMARK_FLAGS: GRPC
    | names(
        "-i --protocol;--decoupled;-t --stream-timeout;--tensorrt-llm-model-name;-c --concurrency;"
        "--max-input-len;--request-rate;--time-delay-dist;--dump-perfetto-trace;--op-stats-csv;"
        "--exclude-input-in-output;--num-requests;--check-perf-json;--check-perf-key;"
        "--check-perf-atol;--check-perf-rtol;--test-llmapi;--dataset;--tokenizer-dir;"
        "--tokenizer-type;--op-tokens-per-word;--input-mean;--input-stdev;--output-mean;"
        "--output-stdev;--histogram-key"
    ),
    VLLM_FLAGS: GRPC
    | names(
        "-m --model;-t --stream-timeout;--offset;--input-prompts;--results-file;--iterations;"
        "-s --streaming-mode;--exclude-inputs-in-outputs;-l --lora-name"
    ),
}
"""Flags of the original clients, with their short names."""

DEFAULTS = {
    TOKEN_FLAGS: {
        "url": "localhost:8001",
        "text": "Born in north-east France, Soyer trained as a",
        "end_id": -1,
        "pad_id": 50256,
        "temperature": 1.0,
        "request_output_len": 16,
        "stop_after_ms": 0,
        "top_k": 1,
        "top_p": 0.0,
        "beam_width": 1,
        "model_name": "tensorrt_llm",
        "correctness_threshold": 1.0,
        "lora_task_id": None,
    },
    TEXT_FLAGS: {"model_name": "ensemble", "output_len": 100, "temperature": 1.0},
    SPECULATION_FLAGS: {
        "url_draft": None,
        "draft_tensorrt_llm_model_name": "tensorrt_llm",
        "preprocessor_model_name": "preprocessing",
        "output_len": 100,
        "num_draft_tokens": 5,
        "request_id": "1",
    },
    ENSEMBLE_TEST_FLAGS: {"protocol": "http", "concurrency": 128, "max_input_len": None},
    BENCHMARK_FLAGS: {
        "protocol": "http",
        "concurrency": 128,
        "request_rate": -1.0,
        "time_delay_dist": "exponential_dist",
        "num_requests": 30000,
        "check_perf_atol": 50.0,
        "check_perf_rtol": 0.05,
        "op_tokens_per_word": 1.3,
    },
    VLLM_FLAGS: {
        "model": "vllm_model",
        "url": "localhost:8001",
        "offset": 0,
        "input_prompts": "prompts.txt",
        "results_file": "results.txt",
        "iterations": 1,
        "lora_name": None,
    },
}


def program_of(rows):
    return next(program.command for program in PROGRAMS if program.flags is rows)


@pytest.mark.parametrize("options", FLAGS, ids=program_of)
def test_every_flag_of_the_original_is_there(options):
    there = {" ".join(reversed(row.feature.names)) for row in options}
    assert FLAGS[options] - there == set()


@pytest.mark.parametrize("options", DEFAULTS, ids=program_of)
def test_defaults_of_the_original(options):
    there = {row.key: row.default for row in options}
    assert {name: there[name] for name in DEFAULTS[options]} == DEFAULTS[options]


@pytest.mark.parametrize("program", [program.command for program in PROGRAMS])
def test_every_program_lists_its_flags(program):
    result = CliRunner().invoke(client_app, [program, "--help"])
    assert result.exit_code == 0
    assert "--url" in result.stdout


def test_a_flag_without_effect_says_so():
    command = ["inflight-batcher-llm", "--help"]
    output = CliRunner().invoke(client_app, command, env={"COLUMNS": "200"}).stdout
    help_text = " ".join(output.split())
    assert "No effect: the folder's files determine it." in help_text
