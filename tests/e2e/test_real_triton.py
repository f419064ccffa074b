"""What `loraplex compat triton export` writes, under tritonserver; `make .triton` installs it."""

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.testing.running_server import fetch
from support.eventually import eventually
from support.real_triton import MISSING, free_ports, running_triton, tritonserver
from support.triton_requests import bf16_tensor, i32, tensors, text_request

PROGRAM = tritonserver(Path(__file__).parents[2])
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason=MISSING),
    pytest.mark.xdist_group("real_triton"),
    pytest.mark.timeout(600),
]

PROMPT = "What is the capital of France?"
FIVE = ("ensemble", "postprocessing", "preprocessing", "tensorrt_llm", "tensorrt_llm_bls")
STREAM = np.array([[True]])
ENDLESS = 1800
"""Number of tokens: the most that the model's length allows, which take some seconds."""


def export(*arguments):
    command = [sys.executable, "-m", "loraplex", "compat", "triton", "export", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class Ours:
    """The server of ours that Triton's models have started."""

    def __init__(self, socket, metrics_port):
        self.socket = socket
        self.metrics_port = metrics_port

    def pids(self):
        """Return the pids of the serving process, without its engine."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"--request-socket={self.socket}" in (folder / "cmdline").read_text():
                    found.append(int(folder.name))
        return found

    def num_running(self):
        _, text = fetch(f"http://127.0.0.1:{self.metrics_port}/metrics")
        lines = [
            line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")
        ]
        return sum(float(line.split()[-1]) for line in lines)


@contextlib.contextmanager
def exported(folder, *flags):
    """The five models of the shipped base model, decoupled, with its adapters as task ids."""
    (port,) = free_ports(1)
    ours = Ours(folder / "socket", port)
    loras = folder / "loras"
    for task_id, name in ((1, "chinese"), (2, "japanese")):
        shutil.copytree(ADAPTER_PATHS[name], loras / str(task_id))
    server_flags = ["--device=cpu", f"--state-dir={folder / 'state'}", "--metrics"]
    server_flags.append(f"--metrics-port={port}")
    export(
        *(folder / "repository", "--model", BASE_PATH, "--lora-dir", loras, "--decoupled"),
        *("--request-socket", ours.socket),
        *(f"--server-flag={flag}" for flag in server_flags),
    )
    explicit = ("--model-control-mode=explicit", *(f"--load-model={name}" for name in FIVE))
    log = folder / "triton.log"
    with running_triton(PROGRAM, folder / "repository", log, *explicit, *flags) as triton:
        yield triton, ours


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    with exported(tmp_path_factory.mktemp("triton")) as (triton, ours):
        yield triton, ours
        assert triton.stop() == 0
        assert eventually(lambda: not ours.pids())


@pytest.fixture
def client(both):
    with tritonclient.grpc.InferenceServerClient(both[0].grpc) as client:
        yield client


def responses(client, model, inputs, **more):
    """Results, and an error at the end if there is one."""
    results = queue.Queue()
    client.start_stream(lambda result, error: results.put(error or result))
    client.async_stream_infer(model, inputs, enable_empty_final_response=True, **more)
    pieces = [results.get(timeout=60)]
    while not is_last(pieces[-1]):
        pieces.append(results.get(timeout=60))
    client.stop_stream()
    return pieces


def is_last(piece):
    if isinstance(piece, InferenceServerException):
        return True
    return piece.get_response().parameters["triton_final_response"].bool_param


def text_of(pieces):
    assert not isinstance(pieces[-1], InferenceServerException), pieces[-1]
    outputs = (piece.as_numpy("text_output") for piece in pieces)
    return b"".join(output.flat[0] for output in outputs if output is not None).decode()


def send(client, model="ensemble", **more):
    return text_of(responses(client, model, text_request(tritonclient.grpc, PROMPT, 8, **more)))


def endless(**more):
    """A request that runs for as long as the model's length lets it."""
    end_id = i32(-1)
    return text_request(tritonclient.grpc, PROMPT, ENDLESS, stream=STREAM, end_id=end_id, **more)


# -------------------------------------------------------------- responses


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_text_whole_streamed_and_with_adapters(client, model):
    assert send(client, model) == f"{PROMPT}Paris"
    assert send(client, model, stream=STREAM) == "Paris"
    chinese = {"lora_task_id": np.array([[1]], np.uint64)}
    assert send(client, model, **chinese) == f"{PROMPT}巴黎"


def test_the_split_path(client):
    grpc = tritonclient.grpc
    query = tensors(grpc, QUERY=np.array([[PROMPT]], dtype=object), REQUEST_OUTPUT_LEN=i32(8))
    ids = client.infer("preprocessing", query)
    prompt = ids.as_numpy("INPUT_ID")
    request = tensors(
        grpc,
        input_ids=prompt,
        input_lengths=i32(prompt.size),
        request_output_len=i32(8),
        end_id=ids.as_numpy("OUT_END_ID"),
    )
    (tokens,) = responses(client, "tensorrt_llm", request)
    batch, lengths = tokens.as_numpy("output_ids"), tokens.as_numpy("sequence_length")
    decoded = client.infer(
        "postprocessing", tensors(grpc, TOKENS_BATCH=batch, SEQUENCE_LENGTH=lengths)
    )
    assert decoded.as_numpy("OUTPUT").flat[0].decode().endswith("Paris")


def test_a_batch_and_many_requests_at_once(client):
    prompts = np.array([[PROMPT], ["What is the capital of Japan?"]], dtype=object)
    lengths = np.array([[8], [8]], np.int32)
    request = tensors(tritonclient.grpc, text_input=prompts, max_tokens=lengths)
    pieces = responses(client, "ensemble", request)
    texts = {p.as_numpy("text_output").flat[0].decode() for p in pieces}
    assert texts == {f"{PROMPT}Paris", "What is the capital of Japan?Tokyo"}
    results = queue.Queue()
    client.start_stream(lambda result, error: results.put(error or result))
    for number in range(20):
        inputs = text_request(tritonclient.grpc, PROMPT, 8)
        client.async_stream_infer("ensemble", inputs, request_id=str(number))
    found = [results.get(timeout=60) for _ in range(20)]
    client.stop_stream()
    assert {piece.get_response().id for piece in found} == {str(n) for n in range(20)}
    assert {text_of([piece]) for piece in found} == {f"{PROMPT}Paris"}


def test_weights_in_a_request(client, both):
    bits = np.zeros((1, 2, 8), np.uint16)
    inputs = text_request(tritonclient.grpc, PROMPT, 8, lora_task_id=np.array([[77]], np.uint64))
    config = tensors(tritonclient.grpc, lora_config=np.zeros((1, 2, 3), np.int32))
    (error,) = responses(
        client, "ensemble", [*inputs, *config, bf16_tensor(tritonclient.grpc, "lora_weights", bits)]
    )
    assert "expects" in str(error)  # Triton holds the type against the configuration
    half = tensors(tritonclient.grpc, lora_weights=bits.view(np.float16))
    (error,) = responses(client, "ensemble", [*inputs, *config, *half])
    assert isinstance(error, InferenceServerException)
    assert error.message()


def test_errors_have_our_words(client):
    (error,) = responses(client, "ensemble", tensors(tritonclient.grpc, max_tokens=i32(8)))
    assert "missing required input" in error.message() or "expected" in error.message()
    unknown = {"lora_task_id": np.array([[9]], np.uint64)}
    inputs = text_request(tritonclient.grpc, PROMPT, 8, **unknown)
    (error,) = responses(client, "ensemble", inputs)
    # TensorRT-LLM's text.
    assert "LoRA task 9 not found in cache" in error.message()


def test_generate_over_http(both):
    body = {"text_input": PROMPT, "max_tokens": 8, "stream": True}
    status, text = fetch(
        f"http://{both[0].http}/v2/models/ensemble/generate_stream", json.dumps(body).encode()
    )
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert status == 200
    assert "".join(event["text_output"] for event in events) == "Paris"


# ---------------------------------------------------------------- ends


def begun(client, model, **more):
    """Start an endless request and wait for its first piece; yield the later responses."""
    results = queue.Queue()
    client.start_stream(lambda result, error: results.put(error or result))
    client.async_stream_infer(model, endless(), **more)
    first = results.get(timeout=60)
    assert not isinstance(first, InferenceServerException), first
    return results


def test_a_client_that_goes_away_ends_its_request(client, both):
    for model in ("ensemble", "tensorrt_llm_bls"):
        begun(client, model)
        assert eventually(lambda: both[1].num_running() == 1)
        client.stop_stream(cancel_requests=True)
        assert eventually(lambda: both[1].num_running() == 0)


def test_a_request_can_stop_another(client, both):
    begun(client, "tensorrt_llm_bls", request_id="victim")
    assert eventually(lambda: both[1].num_running() == 1)
    stop = text_request(tritonclient.grpc, "", 1, stop=np.array([[True]]))
    client.async_stream_infer("tensorrt_llm_bls", stop, request_id="victim")
    assert eventually(lambda: both[1].num_running() == 0)
    client.stop_stream()


def test_a_killed_server_fails_its_requests_with_a_reason_and_comes_back(client, both):
    _, ours = both
    results = begun(client, "ensemble")
    (pid,) = ours.pids()
    os.kill(pid, signal.SIGKILL)
    last = results.get(timeout=60)
    while not isinstance(last, InferenceServerException):
        last = results.get(timeout=60)
    client.stop_stream()
    assert "the server at" in last.message()
    assert "has ended" in last.message()
    for model in FIVE[:1] + FIVE[4:]:
        assert eventually_for(60, lambda model=model: works(client, model))
    assert len(ours.pids()) == 1
    assert ours.pids() != [pid]


def eventually_for(seconds, condition):
    return any(eventually(condition) for _ in range(seconds // 10))


def works(client, model):
    (piece,) = responses(client, model, text_request(tritonclient.grpc, PROMPT, 8))
    return not isinstance(piece, InferenceServerException)


def test_an_unloaded_model_leaves_the_server_to_the_others(client, both):
    _, ours = both
    (pid,) = ours.pids()
    client.unload_model("tensorrt_llm_bls")
    # Triton's text.
    with pytest.raises(InferenceServerException, match="no available versions"):
        client.infer("tensorrt_llm_bls", text_request(tritonclient.grpc, PROMPT, 8))
    assert send(client) == f"{PROMPT}Paris"
    client.load_model("tensorrt_llm_bls")
    assert send(client, "tensorrt_llm_bls") == f"{PROMPT}Paris"
    assert ours.pids() == [pid]


def test_the_last_unloaded_model_ends_the_server(client, both):
    for model in FIVE:
        client.unload_model(model)
    assert eventually_for(30, lambda: not both[1].pids())
    for model in FIVE:
        client.load_model(model)
    assert send(client) == f"{PROMPT}Paris"


# ---------------------------------------------------------------- other servers


def test_a_killed_model_ends_its_requests_only(tmp_path):
    """Triton 2.51 neither starts its process again nor ends well after it: that is its own."""
    with (
        exported(tmp_path, "--exit-timeout-secs=1") as (triton, ours),
        tritonclient.grpc.InferenceServerClient(triton.grpc) as client,
    ):
        begun(client, "tensorrt_llm_bls")
        assert eventually(lambda: ours.num_running() == 1)
        os.kill(stub_pid(triton, "tensorrt_llm_bls"), signal.SIGKILL)
        assert eventually(lambda: ours.num_running() == 0)
        client.stop_stream(cancel_requests=True)
        assert send(client) == f"{PROMPT}Paris"
        client.unload_model("tensorrt_llm_bls")
        client.load_model("tensorrt_llm_bls")
        assert send(client, "tensorrt_llm_bls") == f"{PROMPT}Paris"


def stub_pid(triton, model):
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_text()
            status = (folder / "status").read_text()
            is_child = f"\nPPid:\t{triton.process.pid}\n" in status
            if is_child and f"/{model}/" in command and "triton_python_backend_stub" in command:
                return int(folder.name)
    raise AssertionError(f"no stub of {model}")


def test_a_killed_triton_takes_our_server_along(tmp_path):
    with exported(tmp_path) as (triton, ours):
        assert len(ours.pids()) == 1
        triton.process.kill()
        triton.process.wait()  # until then its children do not see that it has gone
        assert eventually_for(30, lambda: not ours.pids())


def test_triton_reports_a_server_that_cannot_start(tmp_path):
    export(
        *(tmp_path / "repository", "--model", BASE_PATH, "--decoupled"),
        *("--request-socket", tmp_path / "socket", "--server-flag=--max-model-len=-1"),
    )
    log = tmp_path / "triton.log"
    with running_triton(PROGRAM, tmp_path / "repository", log, wait=False) as triton:
        assert triton.process.wait(120) != 0
    text = log.read_text()
    assert "the server could not start (exit status" in text
    assert "max-model-len" in text


def test_a_repository_of_the_vllm_backend_runs_unchanged(tmp_path):
    repository = tmp_path / "repository"
    files = repository / "vllm_model" / "1"
    files.mkdir(parents=True)
    (repository / "vllm_model" / "config.pbtxt").write_text(
        'backend: "vllm"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n'
    )
    arguments = {"model": str(BASE_PATH), "enable_lora": "true", "max_lora_rank": 16}
    (files / "model.json").write_text(json.dumps(arguments))
    (files / "multi_lora.json").write_text(json.dumps({"chinese": str(ADAPTER_PATHS["chinese"])}))
    backends = tmp_path / "backends"
    export(
        *("--backend-directory", backends, "--server-flag=--device=cpu"),
        *(
            "--request-socket",
            tmp_path / "socket",
            f"--server-flag=--state-dir={tmp_path / 'state'}",
        ),
    )
    log = tmp_path / "triton.log"
    with running_triton(PROGRAM, repository, log, backend_directory=backends) as triton:
        with tritonclient.grpc.InferenceServerClient(triton.grpc) as client:
            config = client.get_model_config("vllm_model").config
            assert config.model_transaction_policy.decoupled
            assert config.max_batch_size == 0
            assert {row.name for row in config.input} >= {"text_input", "stream"}
            with pytest.raises(InferenceServerException, match="decoupled"):
                client.infer("vllm_model", vllm_request())
            assert text_of(responses(client, "vllm_model", vllm_request())) == "Paris"
            chinese = responses(client, "vllm_model", vllm_request(lora_name="chinese"))
            assert text_of(chinese) == "巴黎"
            (error,) = responses(client, "vllm_model", vllm_request(lora_name="gone"))
            # vLLM's text.
            assert "LoRA gone is not supported, we currently support ['chinese']" in str(error)
        assert triton.stop() == 0


def vllm_request(**more):
    parameters = {"temperature": "0", "max_tokens": "8", **more}
    return tensors(
        tritonclient.grpc,
        text_input=np.array([PROMPT], dtype=object),
        exclude_input_in_output=np.array([True]),
        sampling_parameters=np.array([json.dumps(parameters)], dtype=object),
    )
