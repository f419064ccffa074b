"""Decoding options through tritonclient, and the output tensors that they produce."""

import queue
import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from loraplex.core.beam_search import BeamSearch, EarlyStopping
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.retention import KVRetention, TokenRangeRetention
from support import byte_tokenizer
from support.naming import naming
from support.triton_requests import TRUE, f32, i32, tensors, text_request, token_request

VOCABULARY = byte_tokenizer.VOCAB_SIZE
HI = "echo: hi"


def words(*texts: str) -> np.ndarray:
    return np.array([texts], dtype=object)


def beams(module: ModuleType, width: int = 2, **more: Any) -> list[Any]:
    return tensors(
        module,
        input_ids=i32(*b"hi"),
        input_lengths=i32(2),
        request_output_len=i32(50),
        end_id=i32(257),
        beam_width=i32(width),
        **more,
    )


def test_beams_are_one_padded_tensor(wire, backend):
    module, client = wire
    result = client.infer("tensorrt_llm", beams(module, return_log_probs=TRUE))
    ids, lengths = result.as_numpy("output_ids"), result.as_numpy("sequence_length")
    assert ids.shape == (1, 2, 2 + len(HI) + len(" #1"))
    assert lengths.tolist() == [[2 + len(HI), 2 + len(HI) + len(" #1")]]
    assert bytes(ids[0, 0, : lengths[0, 0]].tolist()).decode() == f"hi{HI}"
    assert (ids[0, 0, lengths[0, 0] :] == -1).all()
    assert result.as_numpy("cum_log_probs").shape == (1, 2)
    assert result.as_numpy("output_log_probs").shape == (1, 2, len(HI) + len(" #1"))
    assert result.as_numpy("sequence_index") is None
    beam = backend.requests[-1].sampling.beam
    assert beam == BeamSearch(width=2, length_penalty=0.0, early_stopping=EarlyStopping.AT_ONCE)


def test_the_requested_number_of_beams_is_returned(wire, backend):
    module, client = wire
    inputs = text_request(
        module,
        beam_width=i32(3),
        num_return_sequences=i32(2),
        length_penalty=f32(1.5),
        early_stopping=np.array([[False]]),
        exclude_input_in_output=TRUE,
    )
    result = client.infer("ensemble", inputs)
    assert result.as_numpy("text_output").tolist() == [HI.encode(), f"{HI} #1".encode()]
    sampling = backend.requests[-1].sampling
    assert (sampling.n, sampling.beam.width, sampling.beam.length_penalty) == (2, 3, 1.5)
    assert sampling.beam.early_stopping is EarlyStopping.WHEN_UNLIKELY


@pytest.mark.parametrize("is_streamed", [True, False])
def test_over_a_stream_beams_share_one_response(triton, is_streamed):
    results: queue.Queue[Any] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(triton.grpc) as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        inputs = beams(tritonclient.grpc, streaming=np.array([[is_streamed]]))
        client.async_stream_infer("tensorrt_llm", inputs, enable_empty_final_response=True)
        result, error = results.get(timeout=60)
        client.stop_stream()
    assert error is None
    assert result.as_numpy("output_ids").shape[:2] == (1, 2)
    assert result.get_response().parameters["triton_final_response"].bool_param
    assert results.empty()


def test_logits_are_tensors_of_the_whole_vocabulary(wire):
    module, client = wire
    inputs = token_request(module, return_context_logits=TRUE, return_generation_logits=TRUE)
    result = client.infer("tensorrt_llm", inputs)
    prompt, new = result.as_numpy("context_logits"), result.as_numpy("generation_logits")
    assert prompt.shape == (1, 2, VOCABULARY)
    assert prompt[0].argmax(axis=-1).tolist() == list(b"hi")
    assert new.shape == (1, 1, len(HI), VOCABULARY)
    assert bytes(new[0, 0].argmax(axis=-1).tolist()).decode() == HI
    assert client.infer("tensorrt_llm", token_request(module)).as_numpy("context_logits") is None


def test_logits_of_a_batch_end_with_zeros(wire):
    module, client = wire
    texts = np.array([["hi"], ["hello"]], dtype=object)
    limits = np.array([[50], [50]], dtype=np.int32)
    flags = {"return_context_logits": np.array([[True], [True]])}
    result = client.infer("ensemble", tensors(module, text_input=texts, max_tokens=limits, **flags))
    logits = result.as_numpy("context_logits")
    # With the token that begins a text.
    assert logits.shape == (2, 1 + len("hello"), VOCABULARY)
    assert logits[0, 3:].any() == np.False_
    assert logits[1].any(axis=-1).all()


def test_performance_metrics(wire, backend):
    module, client = wire
    backend.num_cached_tokens = 1
    result = client.infer("tensorrt_llm", token_request(module, return_perf_metrics=TRUE))
    response = result.get_response()
    value = {
        name: result.as_numpy(name).tolist()
        for name in (
            "kv_cache_alloc_new_blocks",
            "kv_cache_reused_blocks",
            "kv_cache_alloc_total_blocks",
            "arrival_time_ns",
            "first_scheduled_time_ns",
            "first_token_time_ns",
            "last_token_time_ns",
            "acceptance_rate",
            "total_accepted_draft_tokens",
            "total_draft_tokens",
        )
    }
    assert value.pop("kv_cache_alloc_total_blocks") == [[1]]
    assert value.pop("kv_cache_alloc_new_blocks") == [[1]]
    times = [value.pop(name)[0][0] for name in list(value) if name.endswith("_time_ns")]
    assert times == sorted(times), "in the order in which they happen"
    assert times[0] > 0
    assert all(tensor == [[0]] for tensor in value.values())
    if module is tritonclient.http:
        assert response["parameters"]["num_cached_tokens"] == 1
    else:
        assert response.parameters["num_cached_tokens"].int64_param == 1
    plain = client.infer("tensorrt_llm", token_request(module))
    assert plain.as_numpy("kv_cache_reused_blocks") is None


def test_stop_words_are_runs_of_tokens(wire):
    """The words (" "), ("o", ":") as TensorRT-LLM's preprocessing writes them: the run ends it."""
    module, client = wire
    run = np.array([[[ord("#"), ord("o"), ord(":")], [1, 3, -1]]], dtype=np.int32)
    result = client.infer(
        "tensorrt_llm", token_request(module, stop_words_list=run, exclude_input_in_output=TRUE)
    )
    assert bytes(result.as_numpy("output_ids").ravel().tolist()) == b"echo:"


def test_everything_else_arrives(wire, backend):
    module, client = wire
    client.infer(
        "tensorrt_llm",
        token_request(
            module,
            bad_words_list=np.array([[[5, 6, 7], [1, 3, -1]]], dtype=np.int32),
            embedding_bias=np.eye(1, VOCABULARY, 9, dtype=np.float32),
            runtime_top_p_decay=f32(0.5),
            runtime_top_p_min=f32(0.25),
            runtime_top_p_reset_ids=i32(4),
            no_repeat_ngram_size=i32(3),
            guided_decoding_guide_type=words("regex"),
            guided_decoding_guide=words("a+"),
            retention_token_range_starts=i32(0),
            retention_token_range_ends=i32(-1),
            retention_token_range_priorities=i32(90),
            retention_token_range_durations_ms=i32(-1),
            lookahead_window_size=i32(3),
            lookahead_ngram_size=i32(4),
            lookahead_verification_set_size=i32(3),
        ),
        priority=1,
    )
    request = backend.requests[-1]
    sampling = request.sampling
    assert sampling.bad_token_ids == ((5,), (6, 7))
    assert sampling.logit_bias == ((9, 1.0),)
    assert (sampling.top_p_decay, sampling.top_p_min, sampling.top_p_reset_id) == (0.5, 0.25, 4)
    assert sampling.no_repeat_ngram_size == 3
    assert sampling.grammar == Grammar(GrammarKind.REGEX, "a+")
    assert sampling.num_draft_tokens == 3
    assert request.retention == KVRetention((TokenRangeRetention(0, None, 90),))
    assert request.priority < 0, "the highest of Triton's levels"


def test_words_of_the_ensemble(wire, backend):
    module, client = wire
    inputs = text_request(
        module,
        bad_words=words("rude", ""),
        embedding_bias_words=words("ab"),
        embedding_bias_weights=f32(1.5),
        num_draft_tokens=i32(2),
    )
    client.infer("ensemble", inputs)
    sampling = backend.requests[-1].sampling
    assert sampling.bad_words == ("rude",)
    assert sampling.logit_bias == ((97, 1.5), (98, 1.5))
    assert sampling.num_draft_tokens == 2


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"beam_width": i32(0)}, ("beam_width", "[1, 128]", 0)),
        (
            {"guided_decoding_guide_type": words("xml")},
            ("guided_decoding_guide_type", "xml", "json", "json_schema"),
        ),
        ({"guided_decoding_guide": words("a")}, ("guided_decoding_guide_type",)),
        ({"embedding_bias_words": words("a")}, ("embedding_bias_words", 1, 0)),
        ({"bad_words": words("x" * 5000)}, ("bad_words", 1, 4096, 5000)),
        ({"num_draft_tokens": i32(65)}, ("num_draft_tokens", "[0, 64]", 65)),
    ],
)
def test_a_wrong_value_is_reported_with_its_tensor(wire, fields, named):
    module, client = wire
    with pytest.raises(InferenceServerException) as caught:
        client.infer("ensemble", text_request(module, **fields))
    assert re.search(naming(*named), caught.value.message())
