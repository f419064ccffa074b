import pytest

from loraplex.core.adapter import AdapterChoice, ByName, ByTaskId
from loraplex.core.errors import (
    AdapterNotFoundError,
    NotReadyError,
    PromptTooLongError,
    QueueFullError,
)
from loraplex.core.request import GenerateRequest
from loraplex.frontends.kserve.errors import (
    FailedResponse,
    as_loraplex_error,
    in_tensorrt_words,
    message_of,
    status_of,
    unknown_lora,
    vllm_failure,
)
from loraplex.frontends.kserve.grpc.codec import encode_failure
from loraplex.frontends.kserve.statistics import failure_reason

WOLF = "LoRA wolf is not supported, we currently support ['goat', \"o'x\"]"


def request(*keys):
    adapters = tuple(AdapterChoice(key) for key in keys)
    return GenerateRequest(request_id=1, model="m", prompt="ab", adapters=adapters)


def in_words(error, requested=None):
    return in_tensorrt_words(error, requested or request(), lambda: 9, 7)


def texts(failure):
    return [tensor.array.tolist() for tensor in failure.outputs]


def test_an_unknown_lora_is_reported_with_the_known_ones():
    error = AdapterNotFoundError("no wolf")
    failure = unknown_lora(error, request(ByName("wolf")), ["goat", "o'x"])
    assert (failure.error.message, texts(failure)) == (WOLF, [[WOLF.encode()]])
    assert unknown_lora(error, request(ByTaskId(1)), []) is error
    assert unknown_lora(error, request(ByName("a"), ByName("b")), []) is error


def test_any_other_failure_has_no_text():
    error = QueueFullError("full", param="p", retry_after_seconds=2.0)
    failure = vllm_failure(error)
    assert texts(failure) == [[b"N/A"]]
    reported = as_loraplex_error(failure)
    assert (reported.param, reported.retry_after_seconds) == ("p", 2.0)
    assert status_of(reported) == status_of(error)
    # vLLM's text.
    assert "Error generating stream: full" in message_of(reported)


def test_over_grpc_the_text_comes_beside_the_error():
    failure = vllm_failure(NotReadyError("ill"))
    message = encode_failure(
        type("R", (), {"model_name": "m", "model_version": "1", "id": "x"}),
        str(failure),
        failure.outputs,
    )
    # vLLM's text.
    assert message.error_message == "Error generating stream: ill"
    [output] = message.infer_response.outputs
    assert (output.name, list(output.shape)) == ("text_output", [1])
    assert message.infer_response.raw_output_contents[0] == b"\x03\0\0\0N/A"


def test_the_sentences_of_tensorrt():
    error = in_words(PromptTooLongError("ours", param="prompt"))
    # TensorRT-LLM's text.
    assert error.message == "Prompt length (9) exceeds maximum input length (7). ours"
    error = in_words(AdapterNotFoundError("ours"), request(ByTaskId(5)))
    # TensorRT-LLM's text.
    assert error.message.startswith("LoRA task 5 not found in cache. Please send LoRA weights with")


@pytest.mark.parametrize(
    ("error", "requested"),
    [
        (PromptTooLongError("ours", param="max_tokens"), request()),
        (AdapterNotFoundError("ours"), request(ByName("a"))),
        (QueueFullError("ours"), request()),
    ],
)
def test_other_errors_stay_as_they_are(error, requested):
    assert in_words(error, requested) is error


def test_it_is_an_exception_with_the_errors_text():
    assert str(FailedResponse(QueueFullError("full"), ())) == "full"


def test_statistics_count_it_by_the_error_inside():
    assert failure_reason(vllm_failure(QueueFullError("full"))) == failure_reason(
        QueueFullError("full")
    )
