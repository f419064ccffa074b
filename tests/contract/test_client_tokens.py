"""inflight_batcher_llm_client.py against a Triton server over an EchoService: what it prints.

A token is a byte, and the output for "hi" is "echo: hi"; see support.echo_service.
"""

import json

import numpy as np
import pytest

from loraplex.compat.client import token_client
from loraplex.compat.client.programs import TOKEN_FLAGS
from loraplex.core.adapter import ByTaskId
from loraplex.core.errors import ConfigError
from loraplex.demo import BASE_PATH
from loraplex.frontends.kserve.models.kinds import TENSORRT_LLM
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration
from support.echo_service import EchoService
from support.naming import naming
from support.program_options import program_options
from support.served_triton import served_triton

HI = [256, *b"hi"]


@pytest.fixture
def tokens(triton, said):
    """Runs inflight_batcher_llm_client.py: its exit code and its lines."""

    def run(**given):
        options = program_options(TOKEN_FLAGS, **{"url": triton.grpc, "text": "hi"} | given)
        return token_client.run(options, lambda text: said.extend(text.split("\n"))), said

    return run


def after(lines, begin):
    """Return the value that is printed after a fixed text."""
    (line,) = [line for line in lines if line.startswith(begin)]
    return line.removeprefix(begin)


def test_lines_of_the_founding_example(tokens):
    code, lines = tokens()
    assert code == 0
    assert lines == [
        "=========",
        "Using pad_id:  258",
        "Using end_id:  257",
        f"Input sequence:  {HI}",
        "Got completed request",
        "Input: hi",
        "Output beam 0: echo: hi",
        f"Output sequence:  {[*HI, *b'echo: hi']}",
    ]


def test_what_it_sends(tokens, backend):
    tokens(
        request_output_len=5,
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        request_id="mine",
    )
    (request,) = backend.requests
    sampling = request.sampling
    assert request.prompt == tuple(HI)
    assert request.client_request_id == "mine"
    assert (sampling.max_tokens, sampling.temperature) == (5, 0.5)
    assert (sampling.top_k, sampling.top_p, sampling.repetition_penalty) == (7, 0.25, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)


@pytest.mark.parametrize("given", [{}, {"exclude_input_in_output": True}])
def test_streamed_and_whole_responses_are_alike(tokens, said, given):
    tokens(**given)
    whole = list(said)
    said.clear()
    tokens(streaming=True, **given)
    assert said == whole


def test_without_the_prompt(tokens):
    _, lines = tokens(exclude_input_in_output=True)
    assert after(lines, "Output beam 0: ") == "echo: hi"
    assert after(lines, "Output sequence:  ") == str(list(b"echo: hi"))


def test_several_completions(tokens):
    _, lines = tokens(num_return_sequences=2, top_k=0, request_output_len=40)
    beams = [line for line in lines if line.startswith("Output beam")]
    assert beams == ["Output beam 0: echo: hi", "Output beam 0: echo: hi #1"]


def test_a_long_prompt(tokens):
    _, lines = tokens(text="x" * 300)
    shown = json.loads(after(lines, "Input sequence starts with:  "))
    assert len(shown) == 256
    assert not any(line.startswith("Input sequence:") for line in lines)


def test_a_tokenizer_of_a_folder(tokens, backend):
    code, lines = tokens(text="a", tokenizer_dir=str(BASE_PATH), request_output_len=4)
    assert code == 0
    assert after(lines, "Using end_id:  ") == "2"
    (request,) = backend.requests
    assert request.prompt == (1, 69)


def test_token_ids_of_a_file(tokens, tmp_path):
    path = tmp_path / "in.csv"
    path.write_text("104,105")
    code, lines = tokens(input_tokens_csv=str(path), end_id=257)
    assert code == 0
    assert after(lines, "Using pad_id:  ") == "50256"
    assert after(lines, "Output sequence:  ") == str([*b"hi", *b"echo: hi"])
    assert not any(line.startswith(("Input: ", "Output beam")) for line in lines)


@pytest.mark.parametrize(
    ("expected", "threshold", "passed"),
    [("echo: hi", 1.0, True), ("echo: ho", 1.0, False), ("echo: ho", 0.8, True)],
)
def test_check_output(tokens, tmp_path, expected, threshold, passed):
    path = tmp_path / "out.csv"
    path.write_text(",".join(map(str, [*HI, *expected.encode()])))
    code, lines = tokens(
        check_output=True, output_tokens_csv=str(path), correctness_threshold=threshold
    )
    assert code == (0 if passed else 1)
    assert ("PASS!" in lines, "FAIL!" in lines) == (passed, not passed)


def test_check_output_with_what_gpt2_says(tokens):
    code, lines = tokens(check_output=True)
    assert code == 1
    assert json.loads(after(lines, "expected_output_ids =  "))[: len(HI) + 1] == [*HI, 21221]


def test_details(tokens):
    _, lines = tokens(
        return_log_probs=True,
        return_context_logits=True,
        return_generation_logits=True,
        return_perf_metrics=True,
        request_output_len=4,
    )
    assert len(json.loads(after(lines, "output_log_probs:  "))[0][0]) == 4
    assert after(lines, "context_logits.shape:  ") == "(1, 3, 259)"
    assert after(lines, "generation_logits.shape:  ") == "(1, 1, 4, 259)"


@pytest.fixture
def endless(tokens, backend, tmp_path):
    """A request that runs for ever unless it is stopped."""
    backend.delay_seconds = 0.02
    path = tmp_path / "in.csv"
    path.write_text("104,105")

    def run(**given):
        return tokens(input_tokens_csv=str(path), end_id=-1, request_output_len=2000, **given)

    return run


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("request_id", ["", "1"])
def test_stop_after(endless, backend, streaming, request_id):
    code, lines = endless(stop_after_ms=200, streaming=streaming, request_id=request_id)
    assert code == 0
    assert "Got cancellation response from server" in lines
    assert 2 <= len(json.loads(after(lines, "Output sequence:  "))) < 1000
    assert backend.requests[0].client_request_id == request_id or request_id == ""
    assert backend.requests[0].client_request_id


@pytest.mark.parametrize("streaming", [False, True])
def test_stop_by_a_cancelled_call(endless, backend, streaming):
    code, lines = endless(stop_after_ms=200, streaming=streaming, stop_via_request_cancel=True)
    assert code == 0
    assert "Request is cancelled" in lines


def test_a_stop_that_comes_too_late(tokens):
    with pytest.raises(ConfigError, match=naming(3, 100)):
        tokens(stop_after_ms=100, request_output_len=3)


def write_pair(folder):
    np.save(folder / "model.lora_weights.npy", np.ones((1, 1, 8), np.float16))
    np.save(folder / "model.lora_config.npy", np.array([[[1, 0, 1]]], np.int32))
    return str(folder)


@pytest.mark.parametrize("task_id", [None, 0, 7])
def test_an_adapter_in_the_request(tokens, backend, tmp_path, task_id):
    code, _ = tokens(lora_path=write_pair(tmp_path), lora_task_id=task_id)
    assert code == 0
    ((weights, config),) = backend.adapter_tensors
    assert (tuple(weights.shape)[-2:], tuple(config.shape)[-2:]) == ((1, 8), (1, 3))
    if task_id is not None:
        assert tokens(lora_task_id=task_id)[0] == 0
        (choice,) = backend.requests[1].adapters
        assert choice.key == ByTaskId(task_id)


def test_an_adapter_that_is_not_there(tokens):
    # TensorRT-LLM's text.
    with pytest.raises(ConfigError, match="LoRA task 7 not found in cache"):
        tokens(lora_task_id=7)


def test_an_adapter_that_is_there(tokens, backend):
    backend.register("fr", task_id=3)
    _, lines = tokens(lora_task_id=3)
    assert after(lines, "Output beam 0: ") == "echo+fr: hi"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"dtype": "int8"}, ("--dtype", "float16", "float32", "bfloat16", "int8")),
        (
            {"num_return_sequences": 2, "beam_width": 2},
            ("--num-return-sequences", "--beam-width 1"),
        ),
        ({"lookahead_config": (1, 2)}, ("--lookahead-config",)),
        ({"requested_outputs": ("sequence_length",)}, ("--requested-outputs", "output_ids")),
        ({"stop_via_request_cancel": True}, ("--stop-via-request-cancel", "--stop-after-ms")),
        ({"draft_tokens_csv": "x"}, ("--draft-tokens-csv", "--input-tokens-csv")),
        ({"root_certificates": "x"}, ("--root-certificates", "--ssl")),
        ({"ssl": True, "root_certificates": "/none.pem"}, ("/none.pem",)),
        ({"grpc_compression_algorithm": "zip"}, ("zip", "none", "deflate", "gzip")),
        ({"model_name": "nobody"}, ("nobody",)),
    ],
)
def test_what_is_refused(tokens, given, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        tokens(**given)


@pytest.mark.parametrize("algorithm", ["none", "gzip", "deflate"])
@pytest.mark.parametrize("streaming", [False, True])
def test_compression(tokens, algorithm, streaming):
    assert tokens(grpc_compression_algorithm=algorithm, streaming=streaming)[0] == 0


def test_requested_outputs(tokens):
    code, lines = tokens(requested_outputs=("output_ids", "sequence_length"))
    assert (code, after(lines, "Output beam 0: ")) == (0, "echo: hi")


def test_no_server(said):
    with pytest.raises(ConfigError, match="UNAVAILABLE"):
        token_client.run(program_options(TOKEN_FLAGS, url="127.0.0.1:1"), said.append)


def test_a_server_that_cannot_tokenize(said):
    only = ModelDeclaration(
        name="tensorrt_llm", kind=TENSORRT_LLM, base_model="echo", max_batch_size=4
    )
    with (
        served_triton(EchoService(), declarations=[only]) as triton,
        pytest.raises(ConfigError, match=naming("preprocessing", "--tokenizer-dir")),
    ):
        token_client.run(program_options(TOKEN_FLAGS, url=triton.grpc), said.append)


def test_a_decoupled_model_responds_without_streaming_too(decoupled, said, tmp_path):
    path = tmp_path / "in.csv"
    path.write_text("104,105")
    options = program_options(
        TOKEN_FLAGS, url=decoupled.grpc, input_tokens_csv=str(path), end_id=257
    )
    assert token_client.run(options, lambda text: said.extend(text.split("\n"))) == 0
    assert after(said, "Output sequence:  ") == str([*b"hi", *b"echo: hi"])
