"""The other client programs against a Triton server over an EchoService.

A token is a byte, and the output for "hi" is "echo: hi"; see support.echo_service.
"""

import json
import re

import numpy as np
import pytest

from loraplex.compat.client import benchmark, ensemble_test, queue_test, text_client, vllm_client
from loraplex.compat.client.programs import (
    BENCHMARK_FLAGS,
    ENSEMBLE_TEST_FLAGS,
    QUEUE_FLAGS,
    TEXT_FLAGS,
    VLLM_FLAGS,
)
from loraplex.core.adapter import ByName
from loraplex.core.errors import ConfigError, QueueFullError
from loraplex.frontends.kserve.models.kinds import VLLM
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration
from loraplex.text.tokenizer import load_tokenizer
from support.echo_service import EchoModel
from support.naming import naming
from support.program_options import program_options
from support.served_triton import served_triton
from support.tiny_tokenizers import write_byte_level


def write_pair(folder):
    np.save(folder / "model.lora_weights.npy", np.ones((1, 1, 8), np.float16))
    np.save(folder / "model.lora_config.npy", np.array([[[1, 0, 1]]], np.int32))
    return str(folder)


# ---------------------------------------------------------------- end_to_end_grpc_client.py


@pytest.fixture
def texts(triton, said):
    def run(prompt, **given):
        options = program_options(TEXT_FLAGS, url=triton.grpc, prompt=prompt, **given)
        return text_client.run(options, said.append), said

    return run


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_one_text(texts, model):
    assert texts("hi", model_name=model) == (0, ["0: hiecho: hi"])


def test_a_verbose_program_logs_what_it_sends(texts):
    code, lines = texts("hi", verbose=True)
    assert code == 0
    assert lines[0] == "text_input: object [1, 1]"
    assert "max_tokens: int32 [1, 1]" in lines
    assert lines[-1] == "0: hiecho: hi"


@pytest.mark.parametrize("batch", [False, True])
def test_several_texts(texts, backend, batch):
    _, lines = texts('["hi", "ho"]', batch_inputs=batch, exclude_input_in_output=True)
    assert lines == ["0: echo: hi", "1: echo: ho"]
    assert len(backend.requests) == 2


@pytest.mark.parametrize("batch", [False, True])
def test_streamed_texts(texts, batch):
    _, lines = texts('["hi", "ho"]', streaming=True, batch_inputs=batch)
    assert lines == ["0: echo: hi", "1: echo: ho"]


def test_several_completions_of_a_text(texts):
    _, lines = texts("hi", num_return_sequences=2, exclude_input_in_output=True)
    assert lines == ["0: echo: hi", "0: echo: hi #1"]


def test_the_tensors_of_a_text_request(texts, backend):
    texts(
        "hi",
        output_len=3,
        stop_words=("a", "b"),
        bad_words=("zz",),
        embedding_bias_words=("x",),
        embedding_bias_weights=(-1.5,),
        end_id=5,
        request_id="me",
    )
    (request,) = backend.requests
    assert (request.sampling.max_tokens, request.client_request_id) == (3, "me")
    assert set(request.sampling.stop) == {"a", "b"}
    assert dict(request.sampling.logit_bias) == {ord("x"): -1.5}


@pytest.mark.parametrize(("expected", "code"), [('["hiecho: hi"]', 0), ('["other"]', 1)])
def test_expected_texts(texts, expected, code):
    assert texts("hi", check_outputs=True, expected_outputs=expected)[0] == code


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (
            {"lora_path": "x"},
            ("Must specify `lora-task-id` with `lora-path` argument",),
        ),  # TensorRT-LLM's text.
        ({"embedding_bias_words": ("a",)}, (1, 0)),
        ({"check_outputs": True}, ("--expected-outputs",)),
        ({"check_outputs": True, "expected_outputs": '["a", "b"]'}, (2, 1)),
        ({"prompt": "[1]"}, ("[1]",)),
    ],
)
def test_what_is_refused_of_texts(texts, given, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        texts(**{"prompt": "hi"} | given)


def test_a_text_with_an_adapter(texts, backend, tmp_path):
    code, _ = texts("hi", lora_path=write_pair(tmp_path), lora_task_id=4)
    assert code == 0
    assert len(backend.adapter_tensors) == 1


# ---------------------------------------------------------------- end_to_end_test.py

ROWS = [
    {"input": "one", "instruction": "two", "output": "a b c"},
    {"input": "three", "instruction": "four", "output": "d"},
]


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps(ROWS))
    return str(path)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("extra", [{}, {"test_bls": True, "return_log_probs": True}])
def test_end_to_end(triton, said, dataset, protocol, extra):
    url = triton.http if protocol == "http" else triton.grpc
    options = program_options(
        ENSEMBLE_TEST_FLAGS, url=url, protocol=protocol, dataset=dataset, **extra
    )
    assert ensemble_test.run(options, said.append) == 0
    shown = [re.sub(r"[\d.]+ ms", "T ms", line) for line in said]
    assert shown[:5] == [
        "[INFO] Start testing on 2 prompts.",
        "[INFO] Functionality test succeed.",
        "[INFO] Warm up for benchmarking.",
        "[INFO] Start benchmarking on 2 prompts.",
        "[INFO] Total Latency: T ms",
    ]
    assert shown[5:] == (["[INFO] Total request latencies: T ms"] if protocol == "grpc" else [])


def test_end_to_end_streamed(triton, said, dataset):
    options = program_options(
        ENSEMBLE_TEST_FLAGS, url=triton.grpc, protocol="grpc", dataset=dataset, streaming=True
    )
    assert ensemble_test.run(options, said.append) == 0


def test_end_to_end_sees_a_difference(triton, said, dataset, monkeypatch):
    monkeypatch.setattr(EchoModel, "detokenize", lambda self, ids, **options: "otherwise")
    options = program_options(
        ENSEMBLE_TEST_FLAGS, url=triton.grpc, protocol="grpc", dataset=dataset
    )
    assert ensemble_test.run(options, said.append) == 1
    assert said[-1].startswith("[ERROR] Functionality test failed: ensemble on the prompt")


# ---------------------------------------------------------------- benchmark_core_model.py


@pytest.fixture
def bench(triton, said):
    def run(protocol="grpc", **given):
        url = given.pop("url", triton.http if protocol == "http" else triton.grpc)
        lengths = {"input_mean": 8, "input_stdev": 2, "output_mean": 5, "output_stdev": 0}
        ids = {"vocab_size": 200, "workload": "token_norm_dist", "num_requests": 20}
        options = program_options(
            BENCHMARK_FLAGS, url=url, protocol=protocol, **lengths | ids | given
        )
        return benchmark.run(options, said.append), said

    return run


def figure(lines, name):
    (line,) = [line for line in lines if line.startswith("|") and name in line]
    return float(line.split("|")[2])


@pytest.mark.parametrize(
    "given",
    [
        {"protocol": "http", "request_rate": 500.0},
        {"protocol": "grpc", "request_rate": 500.0, "time_delay_dist": "constant"},
        {"decoupled": True},
        {"exclude_input_in_output": True, "verbose": True},
    ],
)
def test_the_core_benchmark(bench, backend, given):
    code, lines = bench(**given)
    assert code == 0
    assert lines[:2] == [
        "[INFO] Warm up for benchmarking.",
        "[INFO] Start benchmarking on 20 prompts.",
    ]
    assert lines[2].startswith("[INFO] Total Latency: ")
    assert lines[3].startswith("[INFO] Total request latencies: ")
    assert figure(lines, "Total requests") == 20
    assert figure(lines, "Avg. OP tokens per request") == 5
    assert len(backend.requests) == 30


def test_the_core_benchmark_of_a_decoupled_model(bench, decoupled, said):
    code, lines = bench(url=decoupled.grpc)
    assert code == 0
    assert figure(lines, "Avg. OP tokens per request") == 5
    with pytest.raises(ConfigError, match=naming("decoupled", "-i grpc")):
        bench(url=decoupled.http, protocol="http")


def test_the_core_benchmark_reports_failures(bench, backend, monkeypatch):
    generate = type(backend).generate
    full = QueueFullError("Maximum queue size of 1 has been reached, please try again later")

    async def fails_later(self, request, principal):
        if len(self.requests) == 15:
            self.plant(full)
        return await generate(self, request, principal)

    monkeypatch.setattr(type(backend), "generate", fails_later)
    code, lines = bench()
    assert code == 1
    assert lines[-1].startswith("[ERROR] 1 of 20 requests failed, the first: the server at")


@pytest.mark.parametrize(("reference", "code"), [(1e9, 0), (0.0, 1)])
def test_check_perf(bench, tmp_path, reference, code):
    path = tmp_path / "perf.json"
    path.write_text(json.dumps({"mine": reference}))
    given = {"check_perf_json": str(path), "check_perf_key": "mine", "check_perf_atol": 0.0}
    assert bench(**given)[0] == code
    with pytest.raises(ConfigError, match=naming("other")):
        bench(**given | {"check_perf_key": "other"})


def test_models_take_turns(bench, backend):
    code, _ = bench(tensorrt_llm_model_name=("tensorrt_llm", "tensorrt_llm"))
    assert code == 0
    with pytest.raises(ConfigError, match="nobody"):
        bench(tensorrt_llm_model_name=("tensorrt_llm", "nobody"))


# ---------------------------------------------------------------- client_lora.py


@pytest.fixture
def vllm(backend, tmp_path, said):
    declared = ModelDeclaration(name="vllm_model", kind=VLLM, base_model="echo", is_decoupled=True)
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    with served_triton(backend, declarations=[declared]) as triton:

        def run(**given):
            options = program_options(
                VLLM_FLAGS,
                url=triton.grpc,
                input_prompts=str(tmp_path / "prompts.txt"),
                results_file=str(tmp_path / "results.txt"),
                **given,
            )
            code = vllm_client.run(options, said.append)
            return code, (tmp_path / "results.txt").read_text()

        yield run


def test_results(vllm, said):
    code, results = vllm()
    assert code == 0
    assert results == ("one\necho: one\n\n\n=========\n\ntwo\necho: two\n\n\n=========\n\n")
    assert said[0].startswith("Loading inputs from `")
    assert said[1].startswith("Storing results into `")
    assert said[-1] == "PASS: vLLM example"


def test_results_of_an_adapter_streamed(vllm, backend):
    backend.register("fr")
    code, results = vllm(lora_name="fr", streaming_mode=True, iterations=2, offset=5)
    assert code == 0
    assert results.count("echo+fr: one\n") == 2
    assert {r.client_request_id for r in backend.requests} == {"5", "6", "7", "8"}
    assert all(choice.key == ByName("fr") for r in backend.requests for choice in r.adapters)


def test_an_unknown_adapter_fails(vllm, said):
    code, _ = vllm(lora_name="nobody")
    assert code == 1
    assert said[-1] == "FAIL: vLLM example"
    assert any("nobody" in line for line in said)


# ---------------------------------------------------------------- test_max_queue_size.py


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_full_queue(triton, backend, said, protocol):
    url = triton.http if protocol == "http" else triton.grpc
    options = program_options(QUEUE_FLAGS, url=url, protocol=protocol, num_requests=5, input_len=4)
    assert queue_test.run(options, said.append) == 1
    for _ in range(2):
        backend.plant(QueueFullError("Maximum queue size of 1 has been reached"))
    assert queue_test.run(options, said.append) == 0
    assert said[-1] == "[INFO] 2 of 5 requests met a full queue."


def test_what_the_requests_for_a_full_queue_hold(triton, backend, said, tmp_path):
    (tmp_path / "ids.csv").write_text("7,8,9")
    options = program_options(
        QUEUE_FLAGS,
        url=triton.http,
        num_requests=2,
        input_tokens_csv=str(tmp_path / "ids.csv"),
        end_id=5,
        request_output_len=3,
        temperature=0.5,
        top_k=4,
        repetition_penalty=1.5,
    )
    assert queue_test.run(options, said.append) == 1
    for request in backend.requests[-2:]:
        assert tuple(request.prompt) == (7, 8, 9)
        sampling = request.sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (3, 0.5, 4)
        assert sampling.repetition_penalty == 1.5


def test_a_prompt_for_a_full_queue_by_a_folder(triton, backend, said, tmp_path):
    write_byte_level(tmp_path)
    options = program_options(
        QUEUE_FLAGS, url=triton.http, num_requests=1, tokenizer_dir=str(tmp_path), text="Hi"
    )
    assert queue_test.run(options, said.append) == 1
    assert list(backend.requests[-1].prompt) == load_tokenizer(tmp_path).encode("Hi")
