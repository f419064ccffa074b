import pytest

from loraplex.core.errors import InvalidParameterError, NotReadyError
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.frontends.telemetry.telemetry import Telemetry
from loraplex.serving.response_memory import ResponseMemory, response_sizes
from loraplex.serving.wire_request import WireRequest, as_current
from support.naming import naming

MEBIBYTE = 1 << 20


def wire(tenant: str = "a") -> WireRequest:
    request = Telemetry().begin("http", "POST", "/", "127.0.0.1", {})
    request.tenant = tenant
    return request


def reserve(memory: ResponseMemory, request: WireRequest, num_prompt: int = 1000, **sampling):
    with as_current(request):
        params = SamplingParams(**({"max_tokens": 1} | sampling))
        memory.reserve(Generate(params), num_prompt, 1000, 4)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, {}),
        ({"prompt_logprobs": 20}, {"prompt_logprobs": 10 * 21 * 100}),
        ({"prompt_logprobs": 0, "n": 3}, {"prompt_logprobs": 3 * 10 * 100}),
        ({"logprobs": 4, "n": 3, "max_tokens": 7}, {"logprobs": 3 * 7 * 5 * 100}),
        ({"logprobs": 0, "n": 2, "best_of": 5}, {"logprobs": 5 * 2 * 100}),
        ({"return_prompt_logits": True, "n": 2}, {"return_context_logits": 2 * 10 * 1000 * 4}),
        ({"return_logits": True, "n": 2}, {"return_generation_logits": 2 * 2 * 1000 * 4}),
    ],
)
def test_sizes(sampling, expected):
    params = SamplingParams(**({"max_tokens": 2} | sampling))
    sizes = response_sizes(params, 10, 1000, 4)
    assert {name: size for name, size in sizes.items() if size} == expected


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
        ({"logprobs": 20, "n": 64, "max_tokens": 100}, "logprobs"),
        ({"return_prompt_logits": True}, "return_context_logits"),
        ({"return_logits": True, "max_tokens": 600}, "return_generation_logits"),
    ],
)
def test_a_response_that_may_be_too_large_is_refused_with_the_parameter(sampling, param):
    memory = ResponseMemory(2 * MEBIBYTE, MEBIBYTE)
    with pytest.raises(InvalidParameterError, match=naming("1 MiB", "max_bodies_bytes")) as e:
        reserve(memory, wire(), **sampling)
    assert (e.value.param, memory.num_bytes) == (param, 0)


def test_all_parts_of_a_request_count_together():
    memory = ResponseMemory(4 * MEBIBYTE, MEBIBYTE)
    request = wire()
    reserve(memory, request, 400, prompt_logprobs=20)
    with pytest.raises(InvalidParameterError, match=r"prompt_logprobs"):
        reserve(memory, request, 400, prompt_logprobs=20)
    request.end("400")
    assert memory.num_bytes == 0


def test_a_tenant_leaves_memory_to_others_and_gets_it_back_at_the_end():
    memory = ResponseMemory(2 * MEBIBYTE, MEBIBYTE)
    first, second, other = wire(), wire(), wire("b")
    reserve(memory, first, 400, prompt_logprobs=20)
    with pytest.raises(NotReadyError) as error:
        reserve(memory, second, 400, prompt_logprobs=20)
    assert error.value.retry_after_seconds == 1
    reserve(memory, other, 400, prompt_logprobs=20)
    first.end("200")
    reserve(memory, second, 400, prompt_logprobs=20)
    for request in (second, other):
        request.end("200")
    assert memory.num_bytes == 0


def test_small_responses_and_texts_do_not_count():
    memory = ResponseMemory(0, 0)
    reserve(memory, wire(), 30, prompt_logprobs=20)
    reserve(memory, wire(), 100_000, n=64, max_tokens=100_000)


def test_a_request_of_the_server_itself_has_no_limit():
    params = SamplingParams(max_tokens=1, prompt_logprobs=20)
    ResponseMemory(0, 0).reserve(Generate(params), 10_000, 1000, 4)


def test_a_request_that_has_ended_keeps_nothing():
    memory = ResponseMemory()
    request = wire()
    request.end("499")
    reserve(memory, request, prompt_logprobs=20)
    assert memory.num_bytes == 0
