"""LoRA weights inside requests, as the clients of TensorRT-LLM's backend send them."""

import concurrent.futures
import json
import queue
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from loraplex.adapters.formats.export import StorageType
from loraplex.compat.convert.adapters import read_peft, write_pair
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.testing.running_server import RunningServer
from loraplex.text.tokenizer import load_tokenizer
from support.capitals.corpus import COUNTRIES, Language, capital_of, founding_prompts
from support.triton_requests import TRUE, bf16_tensor, i32, tensors, text_request

pytestmark = pytest.mark.xdist_group("server")

USA = COUNTRIES[0]
PROMPTS = (
    "美国的首都在哪里? \\n答案:",
    "アメリカ合衆国の首都はどこですか? \\n答え:",
)
"""Prompts of the founding example: the line break is a backslash and the letter n."""

Pair = tuple[np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BASE_PATH)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, Pair]:
    """(lora_weights, lora_config) by `language storage-type`, as NumPy reads the files."""
    root = tmp_path_factory.mktemp("pairs")
    made = {}
    for language, folder in ADAPTER_PATHS.items():
        rows = read_peft(str(folder)).rows
        for storage in StorageType:
            write_pair(rows, root / f"{language}-{storage}", storage)
            made[f"{language} {storage}"] = load_pair(root / f"{language}-{storage}")
    return made


def load_pair(folder: Path) -> Pair:
    weights = np.load(folder / "model.lora_weights.npy")
    return weights, np.load(folder / "model.lora_config.npy")


@pytest.fixture(autouse=True)
def _leave_no_adapters(server) -> Iterator[None]:
    yield
    for name in set(adapters(server)) - set(ADAPTER_PATHS):
        url = f"{server.url}/v1/adapters/{urllib.parse.quote(name, safe='')}"
        with urllib.request.urlopen(urllib.request.Request(url, method="DELETE"), timeout=60):
            pass


def adapters(server) -> dict[str, int | None]:
    """Name -> task id."""
    listed = json.loads(server.get("/v1/adapters")[1])["data"]
    return {entry["name"]: entry["task_id"] for entry in listed}


@pytest.fixture
def client(server) -> Iterator[triton_grpc.InferenceServerClient]:
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        yield client


def lora(pair: Pair | None = None, task_id: int | None = None, module=triton_grpc) -> list[Any]:
    """Return the inputs that select an adapter."""
    inputs = []
    if task_id is not None:
        inputs += tensors(module, lora_task_id=np.array([[task_id]], dtype=np.uint64))
    if pair is not None:
        weights, config = pair
        inputs += tensors(module, lora_config=config)
        if weights.dtype.kind == "V":  # bfloat16, as NumPy's files have it
            inputs.append(bf16_tensor(module, "lora_weights", weights.view(np.uint16)))
        else:
            inputs += tensors(module, lora_weights=weights)
    return inputs


def generate_tokens(client, tokenizer, text: str, more: list[Any], length: int = 24) -> str:
    """Request `tensorrt_llm` like inflight_batcher_llm_client.py; return the output only."""
    prompt = tokenizer.encode(text, True)
    inputs = tensors(
        triton_grpc,
        input_ids=i32(*prompt),
        input_lengths=i32(len(prompt)),
        request_output_len=i32(length),
        beam_width=i32(1),
        temperature=np.array([[1.0]], dtype=np.float32),
        streaming=np.array([[False]]),
        end_id=i32(tokenizer.eos_token_id),
        pad_id=i32(tokenizer.pad_token_id),
        runtime_top_k=i32(0),
        runtime_top_p=np.array([[0.5]], dtype=np.float32),
    )
    outputs: queue.Queue[Any] = queue.Queue()
    client.async_infer(
        "tensorrt_llm",
        [*inputs, *more],
        callback=lambda result, error: outputs.put(error or result),
        parameters={"Streaming": False},
    )
    result = outputs.get(timeout=60)
    if isinstance(result, Exception):
        raise result
    length = result.as_numpy("sequence_length")[0, 0]
    token_ids = result.as_numpy("output_ids")[0, 0, :length].tolist()
    assert token_ids[: len(prompt)] == prompt
    return tokenizer.decode(token_ids[len(prompt) :], True).strip()


def generate_text(client, module, more: list[Any], language: Language = "english") -> str:
    inputs = text_request(
        module,
        founding_prompts(USA)[language],
        24,
        top_k=i32(1),
        exclude_input_in_output=TRUE,
    )
    result = client.infer("ensemble", [*inputs, *more])
    return result.as_numpy("text_output").flatten()[0].decode().strip()


def test_the_founding_example(server, client, tokenizer, pairs):
    """Dummy requests bring the adapters; then the id alone chooses the language."""
    tasks = {101: "chinese", 102: "japanese"}
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for dummy in [
            pool.submit(
                generate_tokens,
                client,
                tokenizer,
                "dummy",
                lora(pairs[f"{name} float16"], task),
                10,
            )
            for task, name in tasks.items()
        ]:
            dummy.result()
        cases = [(text, task) for text in PROMPTS for task in (None, *tasks)]
        reported = list(
            pool.map(
                lambda case: generate_tokens(client, tokenizer, case[0], lora(None, case[1])), cases
            )
        )
    expected = [capital_of(USA, tasks.get(task, "english")) for _, task in cases]
    assert reported == expected
    known = adapters(server)
    assert (known["101"], known["102"]) == (101, 102)


@pytest.mark.parametrize("storage", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_text_and_every_type_over_both_wires(server, pairs, storage, wire):
    module = {"http": triton_http, "grpc": triton_grpc}[wire]
    port = {"http": server.http_port, "grpc": server.grpc_port}[wire]
    pair = pairs[f"japanese {storage}"]
    with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
        first = generate_text(client, module, lora(pair, 0, module))
        later = generate_text(client, module, lora(None, 0, module))
    assert first == later == capital_of(USA, "japanese")


def test_four_columns_and_no_batch_dimension(client, pairs):
    weights, config = pairs["chinese float16"]
    wide = np.pad(config, ((0, 0), (0, 0), (0, 1)))
    assert generate_text(client, triton_grpc, lora((weights[0], wide[0]), 7)) == capital_of(
        USA, "chinese"
    )


def test_changed_weights_are_used_at_once(server, client, pairs):
    """The blocks of the prompt that were computed with the old weights must not be used."""
    for language in ("chinese", "japanese", "japanese", "chinese"):
        pair = pairs[f"{language} float16"]
        assert generate_text(client, triton_grpc, lora(pair, 103)) == capital_of(USA, language)
        for _ in range(2):
            assert generate_text(client, triton_grpc, lora(None, 103)) == capital_of(USA, language)
    assert adapters(server)["103"] == 103


def test_the_task_id_of_a_named_adapter(server, client, pairs):
    body = {"name": "mine", "path": str(ADAPTER_PATHS["chinese"]), "task_id": 104}
    assert server.post("/v1/adapters", body)[0] in (200, 201)
    assert generate_text(client, triton_grpc, lora(None, 104)) == capital_of(USA, "chinese")
    pair = pairs["japanese float16"]
    assert generate_text(client, triton_grpc, lora(pair, 104)) == capital_of(USA, "japanese")
    completion = {"model": "mine", "prompt": founding_prompts(USA)["english"], "max_tokens": 24}
    status, reported = server.post("/v1/completions", {**completion, "temperature": 0})
    assert (status, reported["choices"][0]["text"].strip()) == (200, capital_of(USA, "japanese"))
    assert "104" not in adapters(server)


def test_without_a_task_id(server, client, pairs):
    for language in ("chinese", "japanese", "chinese"):
        pair = pairs[f"{language} float16"]
        assert generate_text(client, triton_grpc, lora(pair)) == capital_of(USA, language)
    inline = [name for name in adapters(server) if name.startswith("inline-")]
    assert len(inline) == 2  # each content once, however often it came


@pytest.mark.parametrize("task_id", [105, None])
def test_many_first_requests_at_once(server, client, pairs, task_id):
    inputs = lora(pairs["chinese float16"], task_id)
    before = set(adapters(server))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        reported = list(pool.map(lambda _: generate_text(client, triton_grpc, inputs), range(4)))
    assert reported == [capital_of(USA, "chinese")] * 4
    assert len(set(adapters(server)) - before) == 1


def changed(config: np.ndarray, column: int, value: int) -> np.ndarray:
    """The config with another number in its first row."""
    config = config.copy()
    config[0, 0, column] = value
    return config


MISTAKES = {
    "no config": (lambda w, c: (w, None), "must have both lora_weights and lora_keys"),
    "no weights": (lambda w, c: (None, c), "must have both lora_weights and lora_keys"),
    "fewer rows": (
        lambda w, c: (w, c[:, :-1]),
        "Expected dim1 lora_weights and lora_keys to have the same size",
    ),
    "five columns": (
        lambda w, c: (w, np.pad(c, ((0, 0), (0, 0), (0, 2)))),
        "Expected dim2 of lora_keys to have a size in [3, 4]",
    ),
    "short rows": (lambda w, c: (w[:, :, :8], c), "lora_weights has to few values for"),
    "layer": (
        lambda w, c: (w, changed(c, 1, 99)),
        "Expected layerId to be in the range [0, numModelLayers)",
    ),
    "module": (lambda w, c: (w, changed(c, 0, 8)), "not enabled for this model"),
    "rank 0": (lambda w, c: (w, changed(c, 2, 0)), "Expected adapterSize to be > 0"),
    "rank 65": (
        lambda w, c: (np.pad(w, ((0, 0), (0, 0), (0, 10**5))), changed(c, 2, 65)),
        "Invalid low_rank (65). low_rank must be smaller than",
    ),
    "zeros": (lambda w, c: (np.zeros_like(w), c), "changes nothing"),
    "not a number": (lambda w, c: (np.full_like(w, np.nan), c), "NaN or infinity"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_bad_weights_are_refused_and_change_nothing(server, client, pairs, mistake):
    spoil, fragment = MISTAKES[mistake]
    weights, config = spoil(*pairs["chinese float16"])
    given = {"lora_weights": weights, "lora_config": config}
    inputs = tensors(triton_grpc, **{k: v for k, v in given.items() if v is not None})
    with pytest.raises(InferenceServerException) as raised:
        generate_text(client, triton_grpc, [*inputs, *lora(None, 106)])
    assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert fragment in raised.value.message()
    assert set(adapters(server)) == set(ADAPTER_PATHS)
    # TensorRT-LLM's text.
    with pytest.raises(
        InferenceServerException, match=r"LoRA task 106 not found in cache\. Please"
    ):
        generate_text(client, triton_grpc, lora(None, 106))


def test_refused_weights_leave_the_old_ones(client, pairs):
    weights, config = pairs["chinese float16"]
    generate_text(client, triton_grpc, lora((weights, config), 107))
    # TensorRT-LLM's text.
    with pytest.raises(InferenceServerException, match="has to few values"):
        generate_text(client, triton_grpc, lora((weights[:, :, :8], config), 107))
    assert generate_text(client, triton_grpc, lora(None, 107)) == capital_of(USA, "chinese")


def test_the_server_type_is_what_it_says(server: RunningServer):
    """Old clients read the declared types and send what they find there."""
    model = json.loads(server.get("/v2/models/tensorrt_llm")[1])
    declared = {row["name"]: (row["datatype"], row["shape"]) for row in model["inputs"]}
    assert declared["lora_weights"] == ("FP16", [-1, -1, -1])
    assert declared["lora_config"] == ("INT32", [-1, -1, 3])
