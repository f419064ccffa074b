"""Repositories that were written for Triton, served to Triton's own clients."""

import contextlib
import json
import queue
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc

from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.testing.running_server import running
from support.triton_repositories import local_flags
from support.triton_requests import i32, tensors, text_request

pytestmark = pytest.mark.slow

COMPAT = Path(__file__).parents[2] / "compat"
PROMPT = "What is the capital of France?"


@contextlib.contextmanager
def serving_repository(repository, state_dir, *flags):
    command = [
        sys.executable,
        "-m",
        "loraplex",
        "compat",
        "triton",
        "--model-repository",
        str(repository),
    ]
    command += [*local_flags(state_dir), *flags]
    output = state_dir.parent / "output.txt"
    with output.open("w") as lines, running(command, lines) as server:
        yield server, output


def responses(client, model, inputs):
    results = queue.Queue()
    client.start_stream(lambda result, error: results.put(error or result))
    client.async_stream_infer(model, inputs, enable_empty_final_response=True)
    pieces = []
    while True:
        piece = results.get(timeout=60)
        assert not isinstance(piece, Exception), piece
        pieces.append(piece)
        if piece.get_response().parameters["triton_final_response"].bool_param:
            client.stop_stream()
            return pieces


def text_of(pieces):
    outputs = (piece.as_numpy("text_output") for piece in pieces)
    return b"".join(output.flat[0] for output in outputs if output is not None).decode()


def test_the_shipped_template_with_two_values_filled_in(tmp_path):
    repository = tmp_path / "triton_model_repo"
    shutil.copytree(
        COMPAT / "tensorrtllm_backend" / "all_models" / "inflight_batcher_llm", repository
    )
    # As the founding example has it: the engine is copied into the repository, which is mounted
    # at another path.
    shutil.copytree(BASE_PATH, repository / "tensorrt_llm" / "1" / "1-gpu")
    pbtxt = repository / "tensorrt_llm" / "config.pbtxt"
    text = pbtxt.read_text().replace("${decoupled_mode}", "True")
    pbtxt.write_text(text.replace("${engine_dir}", "/triton_model_repo/tensorrt_llm/1/1-gpu/"))
    with serving_repository(repository, tmp_path / "state") as (server, output):
        address = f"127.0.0.1:{server.grpc_port}"
        started = [line for line in output.read_text().splitlines() if "Started" in line]
        assert started == [
            f"Started GRPCInferenceService at {address}",
            f"Started HTTPService at 127.0.0.1:{server.http_port}",
            f"Started Metrics Service at 127.0.0.1:{server.metrics_port}",
        ]
        with tritonclient.grpc.InferenceServerClient(address) as client:
            grpc = tritonclient.grpc
            whole = responses(client, "ensemble", text_request(grpc, PROMPT, 8))
            assert len(whole) == 1
            assert text_of(whole) == f"{PROMPT}Paris"
            stream = np.array([[True]])
            pieces = responses(client, "ensemble", text_request(grpc, PROMPT, 8, stream=stream))
            assert text_of(pieces) == "Paris"
            # So long that no reader is slow enough to find it in one piece.
            endless = {"stream": stream, "end_id": i32(-1)}
            pieces = responses(client, "ensemble", text_request(grpc, PROMPT, 600, **endless))
            assert len(pieces) > 1
            (ids,) = responses(client, "preprocessing", query(PROMPT))
            prompt, end_id = ids.as_numpy("INPUT_ID"), ids.as_numpy("OUT_END_ID")
            request = tensors(
                grpc,
                input_ids=prompt,
                input_lengths=i32(prompt.size),
                request_output_len=i32(8),
                end_id=end_id,
            )
            (tokens,) = responses(client, "tensorrt_llm", request)
            batch, lengths = tokens.as_numpy("output_ids"), tokens.as_numpy("sequence_length")
            request = tensors(grpc, TOKENS_BATCH=batch, SEQUENCE_LENGTH=lengths)
            (decoded,) = responses(client, "postprocessing", request)
            assert decoded.as_numpy("OUTPUT").flat[0].decode().endswith("Paris")
            pieces = responses(client, "tensorrt_llm_bls", text_request(grpc, PROMPT, 8))
            assert text_of(pieces) == f"{PROMPT}Paris"
            config = client.get_model_config("tensorrt_llm").config
            assert config.model_transaction_policy.decoupled
        assert server.stop() == 0


def query(text):
    return tensors(
        tritonclient.grpc,
        QUERY=np.array([[text]], dtype=object),
        REQUEST_OUTPUT_LEN=i32(8),
    )


def test_a_repository_of_the_vllm_backend(tmp_path):
    repository = tmp_path / "model_repository"
    shutil.copytree(COMPAT / "vllm_backend" / "samples" / "model_repository", repository)
    files = repository / "vllm_model" / "1"
    arguments = {
        "model": str(BASE_PATH),
        "disable_log_requests": "true",
        "gpu_memory_utilization": 0.8,
        "tensor_parallel_size": 2,
        "block_size": 16,
        "enforce_eager": "true",
        "enable_lora": "true",
        "max_lora_rank": 16,
    }
    (files / "model.json").write_text(json.dumps(arguments))
    broken = tmp_path / "broken"
    shutil.copytree(ADAPTER_PATHS["japanese"], broken)
    (broken / "adapter_model.safetensors").write_bytes(b"torn")
    later = tmp_path / "later"
    adapters = {
        "chinese": str(ADAPTER_PATHS["chinese"]),
        "lost": "/nowhere/lost",
        "later": str(later),
        "japanese": str(broken),
    }
    (files / "multi_lora.json").write_text(json.dumps(adapters))
    with serving_repository(repository, tmp_path / "state") as (server, _):

        def generate(**parameters):
            parameters |= {"temperature": "0", "max_tokens": "8", "exclude_input_in_output": True}
            body = {"text_input": PROMPT, "parameters": parameters}
            return server.post("/v2/models/vllm_model/generate", body)

        assert generate()[1]["text_output"] == "Paris"
        assert generate(lora_name="chinese")[1]["text_output"] == "巴黎"
        status, response = generate(lora_name="lost")
        assert status in (400, 404)
        # vLLM's text.
        assert response["error"].startswith("LoRA lost could not be loaded: ")
        assert "/nowhere/lost" in response["error"]
        assert generate(lora_name="later")[0] == status
        shutil.copytree(ADAPTER_PATHS["chinese"], later)
        assert generate(lora_name="later")[1]["text_output"] == "巴黎"
        status, response = generate(lora_name="japanese")
        assert status in (400, 404)
        # vLLM's text.
        assert response["error"].startswith("LoRA japanese could not be loaded: ")
        assert str(broken / "adapter_model.safetensors") in response["error"]
        shutil.copytree(ADAPTER_PATHS["japanese"], broken, dirs_exist_ok=True)
        assert generate(lora_name="japanese")[1]["text_output"] == "パリ"
        # vLLM's text.
        assert "LoRA gone is not supported" in generate(lora_name="gone")[1]["error"]
        assert server.get("/v2/models/vllm_model/ready")[0] == 200
        assert server.stop() == 0


def test_models_are_loaded_while_the_server_runs(tmp_path):
    repository = tmp_path / "models"
    for name, model in {"first": BASE_PATH, "second": BASE_PATH, "torn": "/nowhere"}.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text('backend: "vllm"')
        arguments = json.dumps({"model": str(model)})
        (repository / name / "1" / "model.json").write_text(arguments)
    (repository / "chat").mkdir()
    (repository / "chat" / "config.pbtxt").write_text(
        """platform: "ensemble" max_batch_size: 1
        input { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] }
        output { name: "reply" data_type: TYPE_STRING dims: [ -1 ] }
        ensemble_scheduling { step { model_name: "second" model_version: -1
          input_map { key: "text_input" value: "text_input" }
          output_map { key: "text_output" value: "reply" } } }"""
    )
    (repository / "add_sub").mkdir()
    (repository / "add_sub" / "config.pbtxt").write_text('backend: "python"')
    log = tmp_path / "log.txt"
    flags = ("--model-control-mode=explicit", "--load-model=first", f"--log-file={log}")
    with serving_repository(repository, tmp_path / "state", *flags) as (server, _):
        assert "model first: vllm" in log.read_text()
        comm = Path(f"/proc/{server.process.pid}/comm")
        assert not comm.exists() or comm.read_text() == "tritonserver\n"
        load = "/v2/repository/models/{}/load"
        rows = server.post("/v2/repository/index", {})[1]
        assert {row["name"]: row["state"] for row in rows} == {
            "chat": "UNAVAILABLE",
            "first": "READY",
            "second": "UNAVAILABLE",
            "torn": "UNAVAILABLE",
        }
        for name in ("torn", "add_sub"):
            status, response = server.post(load.format(name), {})
            assert status == 400
            # Triton's text.
            assert f"failed to load '{name}'" in response["error"]
        assert server.post(load.format("chat"), {})[0] == 200
        assert server.get("/v2/models/second/ready")[0] == 200
        address = f"127.0.0.1:{server.grpc_port}"
        with tritonclient.grpc.InferenceServerClient(address) as client:
            request = tensors(tritonclient.grpc, text_input=np.array([[PROMPT]], dtype=object))
            (response,) = responses(client, "chat", request)
            reply = response.as_numpy("reply")
            assert reply.shape == (1, 1)
            assert reply.flat[0].decode().startswith(f"{PROMPT}Paris")
        assert server.stop() == 0


def test_a_server_starts_with_nothing_loaded(tmp_path):
    repository = tmp_path / "models"
    files = repository / "chat" / "1"
    files.mkdir(parents=True)
    (repository / "chat" / "config.pbtxt").write_text('backend: "vllm"')
    (files / "model.json").write_text(json.dumps({"model": str(BASE_PATH)}))
    explicit = "--model-control-mode=explicit"
    with serving_repository(repository, tmp_path / "state", explicit) as (server, _):
        assert server.get("/v2/health/ready")[0] == 200
        rows = server.post("/v2/repository/index", {})[1]
        assert [(row["name"], row["state"]) for row in rows] == [("chat", "UNAVAILABLE")]
        assert json.loads(server.get("/v1/models")[1])["data"] == []
        assert server.get("/metrics", server.metrics_port)[0] == 200
        body = {"model": "chat", "prompt": PROMPT}
        status, response = server.post("/v1/completions", body)
        assert (status, response["error"]["code"]) == (404, "model_not_found")
        assert server.post("/v2/repository/models/chat/load", {})[0] == 200
        body = {"text_input": PROMPT, "parameters": {"temperature": 0, "max_tokens": 8}}
        status, response = server.post("/v2/models/chat/generate", body)
        assert (status, response["text_output"]) == (200, f"{PROMPT}Paris")
        assert server.stop() == 0
