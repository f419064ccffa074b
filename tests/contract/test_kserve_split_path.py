"""The five models of a TensorRT-LLM repository: one path in one piece, and in three."""

import itertools
import queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from loraplex.frontends.kserve.models.kinds import (
    BLS,
    ENSEMBLE,
    POSTPROCESSING,
    PREPROCESSING,
    TENSORRT_LLM,
)
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration, ModelOptions
from support.byte_tokenizer import BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID, VOCAB_SIZE
from support.naming import naming
from support.served_triton import served_triton
from support.triton_requests import TRUE, f32, i32, tensors, text_request

KINDS = (PREPROCESSING, TENSORRT_LLM, POSTPROCESSING, ENSEMBLE, BLS)


def words(*texts: str) -> np.ndarray:
    return np.array([texts], dtype=object)


def declared(**options: Any) -> list[ModelDeclaration]:
    return [
        ModelDeclaration(
            name=kind.name,
            kind=kind,
            base_model="echo",
            max_batch_size=8,
            options=ModelOptions(**options),
        )
        for kind in KINDS
    ]


def outputs(result: Any) -> dict[str, Any]:
    response = result.get_response()
    rows = response["outputs"] if isinstance(response, dict) else response.outputs
    names = [row["name"] if isinstance(row, dict) else row.name for row in rows]
    return {name: result.as_numpy(name) for name in names}


def preprocessed(wire: tuple[Any, Any], prompt: str, **more: Any) -> dict[str, Any]:
    module, client = wire
    inputs = tensors(module, QUERY=words(prompt), REQUEST_OUTPUT_LEN=i32(50), **more)
    return outputs(client.infer("preprocessing", inputs))


def split_text(wire: tuple[Any, Any], prompt: str, words_sent: dict[str, Any]) -> str:
    """Send a request through the three models, connected as in their ensemble."""
    module, client = wire
    made = preprocessed(wire, prompt, **words_sent)
    inputs = tensors(
        module,
        input_ids=made["INPUT_ID"],
        input_lengths=made["REQUEST_INPUT_LEN"],
        request_output_len=made["REQUEST_OUTPUT_LEN"],
        decoder_input_ids=made["DECODER_INPUT_ID"],
        decoder_input_lengths=made["REQUEST_DECODER_INPUT_LEN"],
        end_id=made["OUT_END_ID"],
        pad_id=made["OUT_PAD_ID"],
        stop_words_list=made["STOP_WORDS_IDS"],
        bad_words_list=made["BAD_WORDS_IDS"],
        embedding_bias=made["EMBEDDING_BIAS"],
    )
    tokens = client.infer("tensorrt_llm", inputs)
    after = tensors(
        module,
        TOKENS_BATCH=tokens.as_numpy("output_ids"),
        SEQUENCE_LENGTH=tokens.as_numpy("sequence_length"),
    )
    return client.infer("postprocessing", after).as_numpy("OUTPUT")[0].decode()


@pytest.mark.parametrize("prompt", ["hi", "żółw 亀", "two  blanks, <s>and a special token"])
@pytest.mark.parametrize("stops", [[], ["o:"], ["never", ""]])
def test_three_ways_give_one_text(wire, prompt, stops):
    module, client = wire
    given = {"stop_words": words(*stops)} if stops else {}
    sent = {"STOP_WORDS_DICT": words(*stops)} if stops else {}
    texts = {
        model: client.infer(model, text_request(module, prompt, **given))
        .as_numpy("text_output")[0]
        .decode()
        for model in ("ensemble", "tensorrt_llm_bls")
    }
    assert texts["ensemble"] == texts["tensorrt_llm_bls"] == split_text(wire, prompt, sent)
    assert texts["ensemble"].endswith("o:") is (stops == ["o:"])


def test_what_preprocessing_gives(wire):
    made = preprocessed(wire, "ab")
    assert {name: (str(a.dtype), a.tolist()) for name, a in made.items() if a.size} == {
        "INPUT_ID": ("int32", [[BOS_TOKEN_ID, 97, 98]]),
        "REQUEST_INPUT_LEN": ("int32", [[3]]),
        "DECODER_INPUT_ID": ("int32", [[PAD_TOKEN_ID]]),
        "REQUEST_DECODER_INPUT_LEN": ("int32", [[1]]),
        "REQUEST_OUTPUT_LEN": ("int32", [[50]]),
        "OUT_END_ID": ("int32", [[EOS_TOKEN_ID]]),
        "OUT_PAD_ID": ("int32", [[PAD_TOKEN_ID]]),
    }
    empty = {name: a.shape for name, a in made.items() if not a.size}
    assert empty == {
        "BAD_WORDS_IDS": (1, 2, 0),
        "STOP_WORDS_IDS": (1, 2, 0),
        "EMBEDDING_BIAS": (1, 0),
    }


def test_words_are_runs_with_their_ends(wire):
    made = preprocessed(
        wire,
        "ab",
        STOP_WORDS_DICT=words("cd", "", "e"),
        BAD_WORDS_DICT=words("", ""),
        EMBEDDING_BIAS_WORDS=words("aab", "b"),
        EMBEDDING_BIAS_WEIGHTS=f32(1.5, 2.0),
        END_ID=i32(7),
        PAD_ID=i32(8),
        PROMPT_TABLE_EXTRA_ID=np.array([[9]], dtype=np.uint64),
    )
    assert made["STOP_WORDS_IDS"].tolist() == [[[99, 100, 101], [2, 3, -1]]]
    assert made["BAD_WORDS_IDS"].tolist() == [[[0], [-1]]]
    assert made["EMBEDDING_BIAS"].shape == (1, VOCAB_SIZE)
    assert made["EMBEDDING_BIAS"][0, [97, 98, 99]].tolist() == [3.0, 3.5, 0.0]
    assert (made["OUT_END_ID"].tolist(), made["OUT_PAD_ID"].tolist()) == ([[7]], [[8]])
    assert made["DECODER_INPUT_ID"].tolist() == [[8]]
    assert made["OUT_PROMPT_TABLE_EXTRA_IDS"].tolist() == [[9]]


def test_a_batch_is_padded_on_the_right(wire):
    module, client = wire
    inputs = tensors(
        module,
        QUERY=np.array([["a"], ["abc"]], dtype=object),
        REQUEST_OUTPUT_LEN=np.array([[5], [6]], dtype=np.int32),
        STOP_WORDS_DICT=np.array([["x", "yz"], ["", ""]], dtype=object),
    )
    made = outputs(client.infer("preprocessing", inputs))
    assert made["INPUT_ID"].tolist() == [
        [BOS_TOKEN_ID, 97, PAD_TOKEN_ID, PAD_TOKEN_ID],
        [BOS_TOKEN_ID, 97, 98, 99],
    ]
    assert made["REQUEST_INPUT_LEN"].tolist() == [[2], [4]]
    assert made["REQUEST_OUTPUT_LEN"].tolist() == [[5], [6]]
    assert made["STOP_WORDS_IDS"].tolist() == [
        [[120, 121, 122], [1, 3, -1]],
        [[0, 0, 0], [-1, -1, -1]],
    ]
    assert made["BAD_WORDS_IDS"].shape == (2, 2, 0)


def test_a_large_batch_is_read_beside_the_event_loop(wire, backend):
    module, client = wire
    prompts = [f"{index} " + "x" * 3000 for index in range(8)]
    inputs = tensors(
        module,
        QUERY=np.array([[prompt] for prompt in prompts], dtype=object),
        REQUEST_OUTPUT_LEN=np.full((8, 1), 5, np.int32),
    )
    made = client.infer("preprocessing", inputs)
    ids, lengths = made.as_numpy("INPUT_ID"), made.as_numpy("REQUEST_INPUT_LEN")
    for prompt, row, [length] in zip(prompts, ids, lengths, strict=True):
        assert row[:length].tolist() == backend.model("echo").tokenize(prompt)


def test_over_a_stream_there_is_one_response(triton):
    results: queue.Queue[Any] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(triton.grpc) as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        inputs = tensors(tritonclient.grpc, QUERY=words("a"), REQUEST_OUTPUT_LEN=i32(1))
        client.async_stream_infer("preprocessing", inputs, request_id="7")
        result, error = results.get(timeout=60)
        client.stop_stream()
    assert error is None
    response = result.get_response()
    assert response.parameters["triton_final_response"].bool_param
    assert response.id == "7"
    assert result.as_numpy("INPUT_ID").tolist() == [[BOS_TOKEN_ID, 97]]


def test_postprocessing_is_flat_over_beams_and_cut_to_length(wire):
    module, client = wire
    ids = np.array([[[97, 98, -1], [99, EOS_TOKEN_ID, 100]], [[101, 5, 5], [0, 0, 0]]])
    inputs = tensors(
        module,
        TOKENS_BATCH=ids.astype(np.int32),
        SEQUENCE_LENGTH=np.array([[2, 3], [1, 0]], dtype=np.int32),
    )
    result = client.infer("postprocessing", inputs)
    assert result.as_numpy("OUTPUT").tolist() == [b"ab", b"cd", b"e", b""]
    assert list(outputs(result)) == ["OUTPUT"]


def test_postprocessing_passes_through_what_it_did_in_2024(wire):
    module, client = wire
    inputs = tensors(
        module,
        TOKENS_BATCH=np.array([[[97]]], dtype=np.int32),
        SEQUENCE_LENGTH=i32(1),
        CUM_LOG_PROBS=f32(-2.0),
        OUTPUT_LOG_PROBS=np.array([[[-2.0, 0.5]]], dtype=np.float32),
        CONTEXT_LOGITS=np.zeros((1, 0, 0), dtype=np.float32),
        GENERATION_LOGITS=np.ones((1, 1, 2, 3), dtype=np.float32),
    )
    made = outputs(client.infer("postprocessing", inputs))
    assert made["OUT_CUM_LOG_PROBS"].tolist() == [[-2.0]]
    assert made["OUT_OUTPUT_LOG_PROBS"].tolist() == [[[-2.0, 0.5]]]
    assert made["OUT_GENERATION_LOGITS"].shape == (1, 1, 2, 3)
    metadata = client.get_model_metadata("postprocessing")
    declared_rows = metadata["inputs"] if isinstance(metadata, dict) else metadata.inputs
    assert len(declared_rows) == 2


# Most are TensorRT-LLM's text; those of ours name tensors and numbers.
@pytest.mark.parametrize(
    ("model", "arrays", "fragment"),
    [
        (
            "preprocessing",
            {"QUERY": words("a")},
            "REQUEST_OUTPUT_LEN is not present in the request",
        ),
        (
            "preprocessing",
            {"QUERY": words("a"), "REQUEST_OUTPUT_LEN": i32(1), "IMAGE_URL": words("http://a")},
            "input 'IMAGE_URL' requests a multimodal model, which is not served",
        ),
        (
            "preprocessing",
            {
                "QUERY": words("a"),
                "REQUEST_OUTPUT_LEN": i32(1),
                "EMBEDDING_BIAS_WORDS": words("a", "b"),
                "EMBEDDING_BIAS_WEIGHTS": f32(1.0),
            },
            "input 'EMBEDDING_BIAS_WORDS' has 2 words and 'EMBEDDING_BIAS_WEIGHTS' 1 weights",
        ),
        (
            "postprocessing",
            {"TOKENS_BATCH": np.full((1, 1, 1), 5000, np.int32), "SEQUENCE_LENGTH": i32(1)},
            "input 'TOKENS_BATCH' has the token id 5000; those of this model are 0 to 258",
        ),
        (
            "postprocessing",
            {"TOKENS_BATCH": np.full((1, 1, 1), 5, np.int32), "SEQUENCE_LENGTH": i32(1, 1)},
            "input 'SEQUENCE_LENGTH' has 2 lengths, but 'TOKENS_BATCH' has 1 sequences",
        ),
        (
            "postprocessing",
            {"TOKENS_BATCH": np.full((1, 1, 1), 5, np.int32), "SEQUENCE_LENGTH": i32(-1)},
            "a length is not negative",
        ),
        (
            "tensorrt_llm_bls",
            {"text_input": words(""), "max_tokens": i32(1)},
            "text_input is requi",
        ),
        (
            "tensorrt_llm_bls",
            {"text_input": words("a"), "max_tokens": i32(0)},
            "max_tokens must be a single value > 0",
        ),
        (
            "tensorrt_llm_bls",
            {"text_input": words("a"), "max_tokens": i32(1), "num_draft_tokens": i32(1)},
            "cannot perform speculative decoding without draft model",
        ),
        (
            "tensorrt_llm",
            {"input_ids": i32(1), "input_lengths": i32(1)},
            "request_output_len is not present in the request",
        ),
        (
            "ensemble",
            {"text_input": words("x" * 4200), "max_tokens": i32(1)},
            "Prompt length (4201) exceeds maximum input length (4095)",
        ),
    ],
)
def test_errors_have_known_texts(wire, model, arrays, fragment):
    module, client = wire
    with pytest.raises(InferenceServerException) as caught:
        client.infer(model, tensors(module, **arrays))
    assert fragment in caught.value.message()
    assert "Traceback" not in caught.value.message()


def test_disaggregated_serving_is_refused(wire):
    module, client = wire
    kind = {"request_type": "context_only"}
    with pytest.raises(
        InferenceServerException,
        match=naming("request_type", "context_only", "context_and_generation"),
    ):
        client.infer("ensemble", text_request(module), parameters=kind)
    whole = {"request_type": "context_and_generation", "Streaming": "false"}
    client.infer("ensemble", text_request(module), parameters=whole)


# ---------------------------------------------------------------- what a repository sets


def infer(declarations: list[ModelDeclaration], backend: Any, model: str, inputs: Any) -> Any:
    with (
        served_triton(backend, declarations=declarations) as triton,
        tritonclient.grpc.InferenceServerClient(triton.grpc) as client,
    ):
        return client.infer(model, inputs)


def streamed(declarations: list[ModelDeclaration], backend: Any, inputs: Any) -> list[str]:
    """The texts that tensorrt_llm_bls sends, one by one."""
    results: queue.Queue[Any] = queue.Queue()
    texts = []
    with (
        served_triton(backend, declarations=declarations) as triton,
        tritonclient.grpc.InferenceServerClient(triton.grpc) as client,
    ):
        client.start_stream(lambda result, error: results.put((result, error)))
        client.async_stream_infer("tensorrt_llm_bls", inputs)
        is_final = False
        while not is_final:
            result, error = results.get(timeout=60)
            assert error is None
            texts.append(result.as_numpy("text_output")[0].decode())
            is_final = result.get_response().parameters["triton_final_response"].bool_param
        client.stop_stream()
    return texts


def test_accumulated_tokens_give_the_whole_text_every_time(backend):
    inputs = text_request(tritonclient.grpc, stream=TRUE, stop_words=words(" h"))
    pieces = streamed(declared(), backend, inputs)
    assert "".join(pieces) == "echo: h"
    texts = streamed(declared(accumulates_tokens=True), backend, inputs)
    assert texts[-1] == "echo: h"
    assert all(later.startswith(text) for text, later in itertools.pairwise(texts))
    assert len(texts) > 3


def test_special_tokens_are_added_and_skipped_as_said(backend):
    inputs = tensors(tritonclient.grpc, QUERY=words("a"), REQUEST_OUTPUT_LEN=i32(1))
    made = infer(declared(adds_special_tokens=False), backend, "preprocessing", inputs)
    assert made.as_numpy("INPUT_ID").tolist() == [[97]]
    ids = np.array([[[97, BOS_TOKEN_ID]]], dtype=np.int32)
    inputs = tensors(tritonclient.grpc, TOKENS_BATCH=ids, SEQUENCE_LENGTH=i32(2))
    made = infer(declared(skips_special_tokens=False), backend, "postprocessing", inputs)
    assert made.as_numpy("OUTPUT").tolist() == [b"a<s>"]
    options = {"adds_special_tokens": False, "skips_special_tokens": False}
    infer(declared(**options), backend, "ensemble", text_request(tritonclient.grpc))
    assert not backend.requests[-1].add_special_tokens
    assert not backend.requests[-1].sampling.skip_special_tokens


def test_an_output_with_its_prompts_special_tokens(backend):
    inputs = text_request(tritonclient.grpc)
    made = infer(declared(skips_special_tokens=False), backend, "ensemble", inputs)
    assert made.as_numpy("text_output").tolist() == [b"<s>hiecho: hi"]


def test_a_request_can_include_the_input(backend):
    declarations = declared(excludes_input=True)
    made = infer(declarations, backend, "ensemble", text_request(tritonclient.grpc))
    assert made.as_numpy("text_output").tolist() == [b"echo: hi"]
    inputs = text_request(tritonclient.grpc, exclude_input_in_output=np.array([[False]]))
    made = infer(declarations, backend, "ensemble", inputs)
    assert made.as_numpy("text_output").tolist() == [b"hiecho: hi"]


def test_an_engine_without_lora_refuses_adapters(backend):
    backend.register("fr", task_id=3)
    inputs = text_request(tritonclient.grpc, lora_task_id=np.array([[3]], dtype=np.uint64))
    # TensorRT-LLM's text.
    with pytest.raises(InferenceServerException, match="not enabled for this model"):
        infer(declared(lora_enabled=False), backend, "ensemble", inputs)
    infer(declared(), backend, "ensemble", inputs)


def test_a_draft_model_lets_requests_enable_speculation(backend):
    inputs = text_request(tritonclient.grpc, num_draft_tokens=i32(2))
    infer(declared(has_draft_model=True), backend, "tensorrt_llm_bls", inputs)
    assert backend.requests[-1].sampling.num_draft_tokens == 2


def test_models_without_batches_have_no_batch_dimension(backend):
    declarations = [
        ModelDeclaration(name=kind.name, kind=kind, base_model="echo") for kind in KINDS
    ]
    inputs = tensors(
        tritonclient.grpc,
        input_ids=np.array([104, 105], dtype=np.int32),
        input_lengths=np.array([2], dtype=np.int32),
        request_output_len=np.array([3], dtype=np.int32),
    )
    made = infer(declarations, backend, "tensorrt_llm", inputs)
    assert made.as_numpy("output_ids").shape == (1, 5)
    assert made.as_numpy("sequence_length").tolist() == [5]
    batched = text_request(tritonclient.grpc)
    with pytest.raises(InferenceServerException, match=r"Expected \[1\], got \[1,1\]"):
        infer(declarations, backend, "ensemble", batched)


@pytest.mark.parametrize(("datatype", "is_bits"), [("FP32", 0), ("FP16", 0), ("BF16", 1)])
def test_logits_have_the_declared_type(backend, datatype, is_bits):
    flags = {"return_context_logits": TRUE, "return_generation_logits": TRUE}
    inputs = text_request(tritonclient.grpc, **flags)
    declarations = declared(logits_datatype=datatype)
    response = infer(declarations, backend, "ensemble", inputs).get_response()
    rows = {output.name: (index, output) for index, output in enumerate(response.outputs)}
    for name in ("context_logits", "generation_logits"):
        index, output = rows[name]
        assert output.datatype == datatype
        dtype = {"FP32": "<f4", "FP16": "<f2", "BF16": "<u2"}[datatype]
        values = np.frombuffer(response.raw_output_contents[index], dtype)
        assert values.size == np.prod(output.shape)
        assert set(values.tolist()) == {0, 0x3F80 if is_bits else 1}
