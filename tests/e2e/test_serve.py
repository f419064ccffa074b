"""One real server as its real clients see it."""

import concurrent.futures
import contextlib
import json
import time

import numpy as np
import openai
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from support.capitals.corpus import COUNTRIES, Country, Language, capital_of, founding_prompts

pytestmark = pytest.mark.xdist_group("server")

LANGUAGES: dict[str, Language] = {
    "capitals": "english",
    "chinese": "chinese",
    "japanese": "japanese",
}
"""Model fields of requests, and the languages of their outputs."""
TASK_IDS = {"capitals": None, "chinese": 1, "japanese": 2}
FRANCE = next(country for country in COUNTRIES if country.english == "France")


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, model: str, country: Country, language: Language) -> str:
    completion = client.completions.create(
        model=model, prompt=founding_prompts(country)[language], max_tokens=24, temperature=0
    )
    return completion.choices[0].text


def test_many_adapters_at_once_respond_in_their_own_language(client):
    cases = [
        (model, country, language)
        for country in COUNTRIES[:8]
        for model in LANGUAGES
        for language in LANGUAGES.values()
    ]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda case: complete(client, *case), cases))
    expected = [capital_of(country, LANGUAGES[model]) for model, country, _ in cases]
    assert [text.strip() for text in texts] == expected


def test_steps_held_several_adapters(client, server):
    with contextlib.ExitStack() as streams:
        for model in LANGUAGES:
            stream = client.completions.create(
                model=model,
                prompt="The",
                max_tokens=1500,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            next(iter(streams.enter_context(stream)))  # it runs when the next one begins
    steps = json.loads(server.get("/v1/iterations?limit=1000")[1])
    assert max(step["num_adapters"] for step in steps) == 2
    assert max(step["num_rows"] for step in steps) > 2


def test_chat_streams_and_reports_usage_and_adapter(client):
    stream = client.chat.completions.create(
        model="japanese",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text.strip() == capital_of(FRANCE, "japanese")
    assert chunks[-1].usage.completion_tokens > 0
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_logprobs_of_a_certain_output(client):
    completion = client.completions.create(
        model="capitals",
        prompt=founding_prompts(FRANCE)["english"],
        max_tokens=4,
        temperature=0,
        logprobs=2,
    )
    logprobs = completion.choices[0].logprobs
    assert all(logprob > -0.5 for logprob in logprobs.token_logprobs)
    assert "".join(logprobs.tokens).removesuffix("</s>") == completion.choices[0].text


def test_seeded_sampling_repeats(client):
    def draw(seed: int) -> list[str]:
        completion = client.completions.create(
            model="chinese",
            prompt="capital",
            max_tokens=12,
            temperature=1.5,
            n=3,
            seed=seed,
            extra_body={"ignore_eos": True},
        )
        return [choice.text for choice in completion.choices]

    assert draw(7) == draw(7)
    assert len(set(draw(7))) == 3
    assert draw(7) != draw(8)


def test_models_lists_the_base_and_its_adapters(client):
    models = {model.id: model.model_dump() for model in client.models.list()}
    assert set(models) == set(LANGUAGES)
    assert models["chinese"]["parent"] == "capitals"


def triton_inputs(
    module, task_id: int | None, text: str, *, stream: bool = False, max_tokens: int = 24, **more
):
    arrays = {
        "text_input": np.array([[text.encode()]], dtype=object),
        "max_tokens": np.array([[max_tokens]], dtype=np.int32),
        "top_k": np.array([[1]], dtype=np.int32),
        "exclude_input_in_output": np.array([[True]]),
        "stream": np.array([[stream]]),
        **more,
    }
    if task_id is not None:
        arrays["lora_task_id"] = np.array([[task_id]], dtype=np.uint64)
    types = {"O": "BYTES", "i": "INT32", "b": "BOOL", "u": "UINT64"}
    inputs = []
    for name, array in arrays.items():
        infer_input = module.InferInput(name, array.shape, types[array.dtype.kind])
        infer_input.set_data_from_numpy(array)
        inputs.append(infer_input)
    return inputs


@pytest.mark.parametrize("model", LANGUAGES)
def test_triton_http_infer(server, model):
    with triton_http.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
        inputs = triton_inputs(triton_http, TASK_IDS[model], founding_prompts(FRANCE)["chinese"])
        text = client.infer("ensemble", inputs).as_numpy("text_output").flatten()[0].decode()
    assert text.strip() == capital_of(FRANCE, LANGUAGES[model])


def grpc_pieces(server, inputs) -> list[str]:
    pieces: list[str] = []
    errors: list[Exception] = []

    def receive(result, error) -> None:
        if error is not None:
            errors.append(error)
        elif (output := result.as_numpy("text_output")) is not None:
            pieces.append(output.flatten()[0].decode())

    with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        client.start_stream(receive)
        client.async_stream_infer("ensemble", inputs, request_id="1")
        client.stop_stream()
    assert not errors
    return pieces


@pytest.mark.parametrize("model", LANGUAGES)
def test_triton_grpc_stream(server, model):
    text = founding_prompts(FRANCE)["japanese"]
    # So long that no reader is slow enough to find it in one piece.
    endless = {"max_tokens": 600, "end_id": np.array([[-1]], dtype=np.int32)}
    inputs = triton_inputs(triton_grpc, TASK_IDS[model], text, stream=True, **endless)
    assert len(grpc_pieces(server, inputs)) > 1
    inputs = triton_inputs(triton_grpc, TASK_IDS[model], text, stream=True)
    pieces = grpc_pieces(server, inputs)
    assert "".join(pieces).strip() == capital_of(FRANCE, LANGUAGES[model])


def test_generate_endpoint(server):
    status, body = server.post(
        "/v2/models/ensemble/generate",
        {
            "text_input": founding_prompts(FRANCE)["english"],
            "max_tokens": 24,
            "lora_task_id": 1,
            "exclude_input_in_output": True,
        },
    )
    assert status == 200
    assert body["text_output"].strip() == capital_of(FRANCE, "chinese")


def test_adapters_come_and_go_while_serving(client, server):
    path = next(a["path"] for a in adapters(server) if a["name"] == "chinese")
    load = {"name": "another", "path": path, "task_id": 77}
    request = openai_post(client, "/adapters", load)
    assert request["digest"] == next(
        a["digest"] for a in adapters(server) if a["name"] == "chinese"
    )
    assert complete(client, "another", FRANCE, "english").strip() == capital_of(FRANCE, "chinese")
    with pytest.raises(openai.ConflictError):
        openai_post(client, "/adapters", load)
    client.delete("/adapters/another", cast_to=object)
    with pytest.raises(openai.NotFoundError, match="another"):
        complete(client, "another", FRANCE, "english")


def adapters(server) -> list[dict]:
    body = json.loads(server.get("/v1/adapters")[1])
    return [{**entry, "path": entry["source"]} for entry in body["data"]]


def openai_post(client: openai.OpenAI, path: str, body: dict) -> dict:
    return client.post(path, body=body, cast_to=object)  # type: ignore[return-value]


def test_metrics_count_the_requests(client, server):
    complete(client, "japanese", FRANCE, "english")
    status, text = server.get("/metrics", server.metrics_port)
    assert status == 200
    line = next(
        line
        for line in text.splitlines()
        if line.startswith("loraplex_requests_total{") and 'adapter="japanese"' in line
    )
    assert float(line.split()[-1]) >= 1
    assert 'loraplex_model_ready{model="capitals"} 1.0' in text


@pytest.mark.parametrize(
    "path", ["/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"]
)
def test_health(server, path):
    assert server.get(path)[0] == 200


def num_running(server) -> int:
    return json.loads(server.get("/v1/internal/stats")[1])["models"]["capitals"]["engine"][
        "num_running"
    ]


def test_a_client_that_leaves_stops_its_request(client, server):
    stream = client.completions.create(
        model="chinese",
        prompt="x",
        max_tokens=2000,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(stream)
    assert num_running(server) == 1
    stream.close()
    deadline = time.monotonic() + 60
    while num_running(server):
        assert time.monotonic() < deadline, "the request still runs"
        time.sleep(0.02)
