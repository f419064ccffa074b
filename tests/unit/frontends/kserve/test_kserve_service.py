"""TritonService over an EchoService, without a wire."""

import asyncio

import msgspec
import numpy as np
import pytest

from loraplex.core.adapter import AdapterChoice, ByDigest
from loraplex.core.errors import (
    AdapterNotFoundError,
    InvalidAdapterError,
    InvalidParameterError,
    InvalidRequestError,
    InvalidTensorError,
    PermissionDeniedError,
    QueueFullError,
    RowFailedError,
)
from loraplex.core.principal import LOCAL, NONE, Principal, Rights
from loraplex.frontends.kserve.inference import MAX_UNREAD_STEPS, StreamScope
from loraplex.frontends.kserve.messages import InferRequest
from loraplex.frontends.kserve.models.model_control import ControlMode, ModelControl
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.kserve.tensors import from_values
from support.echo_service import EchoService
from support.naming import refused


@pytest.fixture
def backend():
    return EchoService()


@pytest.fixture
def service(backend):
    return TritonService(backend, max_batch_size=4)


def request(texts=("hi",), request_id="", parameters=None, requested=(), **inputs):
    """Request for `ensemble`; each extra input has its one value in every element."""
    types = {"max_tokens": "INT32", "end_id": "INT32", "stream": "BOOL", "lora_task_id": "UINT64"}
    types["num_return_sequences"] = "INT32"
    values = {"max_tokens": 50, **inputs}
    size = len(texts)
    tensors = [from_values("text_input", "BYTES", [size, 1], list(texts))]
    tensors += [from_values(k, types[k], [size, 1], [v] * size) for k, v in values.items()]
    return InferRequest(
        model="ensemble",
        request_id=request_id,
        inputs=tuple(tensors),
        requested=requested,
        parameters=parameters or {},
    )


def stop(request_id=""):
    tensor = from_values("stop", "BOOL", [1, 1], [True])
    return InferRequest(model="tensorrt_llm", request_id=request_id, inputs=(tensor,))


def text_of(response):
    return next(t for t in response.outputs if t.name == "text_output").array.tolist()


async def test_one_response(backend, service):
    response = await service.infer(request(request_id="7"), LOCAL)
    assert text_of(response) == [b"hiecho: hi"]
    assert (response.request_id, response.version, response.is_final) == ("7", "1", True)
    assert backend.requests[0].client_request_id == "7"
    assert service.num_active == 0


async def test_a_timeout_is_in_microseconds(backend, service):
    await service.infer(request(parameters={"timeout": 1_500_000}), LOCAL)
    await service.infer(request(parameters={"timeout": "1500000"}), LOCAL)
    await service.infer(request(parameters={"timeout": 0, "Streaming": "x"}), LOCAL)
    await service.infer(request(parameters={"timeout": "0"}), LOCAL)
    await service.infer(request(parameters={"timeout": 2**63 - 1}), LOCAL)
    seconds = [r.timeout_seconds for r in backend.requests]
    assert seconds == [1.5, 1.5, None, None, (2**63 - 1) / 1e6]


@pytest.mark.parametrize(
    "timeout",
    [True, False, 1.5, 1000.0, -1, 2**63, "", "x", "-1", "1.5", "٣", "9" * 19, "9" * 5000],
)
async def test_a_timeout_that_is_no_number_of_microseconds_is_refused(backend, service, timeout):
    with refused(InvalidParameterError, "'timeout'", param="timeout") as caught:
        await service.infer(request(parameters={"timeout": timeout}), LOCAL)
    assert len(caught.value.message) < 200
    assert not backend.requests


async def test_the_adapter_that_was_used_is_reported(backend, service):
    card = backend.register("sheep", task_id=3)
    response = await service.infer(request(lora_task_id=3), LOCAL)
    assert response.parameters["adapter"] == "sheep"
    assert response.parameters["adapter_digest"] == card.digest
    # TensorRT-LLM's text.
    with pytest.raises(AdapterNotFoundError, match=r"^LoRA task 4 not found in cache\. Please"):
        await service.infer(request(lora_task_id=4), LOCAL)


def with_adapters(texts=("hi",), values=(1.0,), task_id=None):
    """Each element brings its adapter [[value]]."""
    size = len(texts)
    sent = request(texts) if task_id is None else request(texts, lora_task_id=task_id)
    inputs = (
        *sent.inputs,
        from_values("lora_weights", "FP32", [size, 1, 1], list(values)),
        from_values("lora_config", "INT32", [size, 1, 3], [1, 0, 8] * size),
    )
    return msgspec.structs.replace(sent, inputs=inputs)


async def test_an_adapter_that_comes_with_the_request(backend, service):
    response = await service.infer(with_adapters(task_id=5), LOCAL)
    assert text_of(response) == [b"hiecho+5: hi"]
    assert response.parameters["adapter"] == "5"
    response = await service.infer(request(lora_task_id=5), LOCAL)
    assert response.parameters["adapter"] == "5"
    [card] = backend.adapters(LOCAL)
    assert (card.name, card.task_id) == ("5", 5)


async def test_other_bytes_under_the_same_task_id(backend, service):
    digests = []
    for value in (1.0, 2.0, 2.0, 1.0):
        response = await service.infer(with_adapters(values=(value,), task_id=0), LOCAL)
        digests.append(response.parameters["adapter_digest"])
        later = await service.infer(request(lora_task_id=0), LOCAL)
        assert later.parameters["adapter_digest"] == digests[-1]
    assert digests[0] == digests[3] != digests[1] == digests[2]
    assert len(backend.adapters(LOCAL)) == 1


async def test_an_adapter_without_a_task_id_is_its_digest(backend, service):
    response = await service.infer(with_adapters(), LOCAL)
    [card] = backend.adapters(LOCAL)
    assert card.task_id is None
    assert card.name == f"inline-{card.digest[:12]}"
    assert response.parameters["adapter_digest"] == card.digest
    assert backend.requests[-1].adapters == (AdapterChoice(ByDigest(card.digest)),)


async def test_a_batch_of_adapters(backend, service):
    response = await service.infer(with_adapters(("a", "b"), (1.0, 2.0), task_id=3), LOCAL)
    assert text_of(response) == [b"aecho+3: a", b"becho+3: b"]
    views = [bytes(weights.view) for weights, _ in backend.adapter_tensors]
    assert views == [np.float32(value).tobytes() for value in (1.0, 2.0)]


async def test_a_bad_adapter_is_the_end_of_its_batch(backend, service):
    backend.plant_load(InvalidAdapterError("lora_weights has to few values for attn_q"))
    # TensorRT-LLM's text.
    with pytest.raises(InvalidAdapterError, match="has to few values"):
        await service.infer(with_adapters(("a", "b"), (1.0, 2.0)), LOCAL)
    assert backend.requests == []
    assert service.num_active == 0
    uploader = Principal("t", rights=Rights(manage=NONE, operator=False))
    with pytest.raises(PermissionDeniedError):
        await service.infer(with_adapters(), uploader)


async def test_a_client_that_leaves_while_its_adapter_is_staged(backend, service):
    backend.delay_seconds = 60.0
    requesting = asyncio.create_task(service.infer(with_adapters(), LOCAL))
    while not backend.adapter_tensors:
        await asyncio.sleep(0)
    requesting.cancel()
    await asyncio.gather(requesting, return_exceptions=True)
    assert requesting.cancelled()
    assert backend.requests == []
    assert service.num_active == 0


async def test_a_digest_that_is_gone_is_not_called_a_task(backend, service):
    backend.plant(AdapterNotFoundError("no adapter has digest d"))
    with refused(AdapterNotFoundError, "d"):
        await service.infer(with_adapters(), LOCAL)


async def test_a_batch_is_admitted_whole_or_not_at_all(backend, service):
    backend.plant(QueueFullError("full"))
    with pytest.raises(QueueFullError):
        await service.infer(request(("a", "b")), LOCAL)
    too_long = "x" * 5000
    with pytest.raises(Exception, match="tokens"):
        await service.infer(request(("a", too_long)), LOCAL)
    assert backend.aborted == [backend.requests[-2].request_id]
    assert service.num_active == 0


async def test_only_several_elements_wait_for_each_other(backend, service):
    await service.infer(request(("a",)), LOCAL)
    await service.infer(request(("b", "c")), LOCAL)
    alone, first, second = (one.batch for one in backend.requests)
    assert alone is None
    assert first is second
    assert not first.is_open


async def test_responses_of_a_stream(service):
    stream = await service.stream(request(stream=True), LOCAL)
    responses = [response async for response in stream]
    await stream.aclose()
    assert b"".join(text_of(r)[0] for r in responses) == b"echo: hi"
    assert [r.is_final for r in responses] == [False] * (len(responses) - 1) + [True]
    assert service.num_active == 0


@pytest.mark.parametrize("num_read", [0, 1, 3])
async def test_closing_a_stream_aborts(backend, service, num_read):
    stream = await service.stream(request(stream=True, end_id=-1), LOCAL)
    for _ in range(num_read):
        await anext(stream)
    await stream.aclose()
    await stream.aclose()
    assert backend.aborted == [1]
    assert service.num_active == 0


async def test_cancelling_a_response_aborts(backend, service):
    backend.delay_seconds = 0.01
    task = asyncio.create_task(service.infer(request(max_tokens=4000, end_id=-1), LOCAL))
    while not backend.requests:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.aborted == [1]
    assert service.num_active == 0


async def test_an_error_in_a_batch_ends_all_of_it(backend, service):
    backend.plant(RowFailedError("one failed"), after_outputs=2)
    stream = await service.stream(request(("a", "b"), stream=True, end_id=-1), LOCAL)
    with pytest.raises(RowFailedError):
        async for _ in stream:
            pass
    await stream.aclose()
    assert backend.aborted == [2]


async def test_stop_by_id(backend, service):
    stream = await service.stream(request(stream=True, end_id=-1, request_id="7"), LOCAL)
    await anext(stream)
    reply = await service.infer(stop("7"), LOCAL)
    assert reply.outputs == ()
    rest = [response async for response in stream]
    await stream.aclose()
    assert rest[-1].is_final
    assert text_of(rest[-1]) == [b""]
    assert len(rest) <= 2
    assert backend.aborted == [1]


async def test_stop_reaches_a_request_that_is_still_being_admitted(backend, service):
    admitted = asyncio.Event()
    generate = backend.generate

    async def slow_generate(*args):
        await admitted.wait()
        return await generate(*args)

    backend.generate = slow_generate
    opening = asyncio.create_task(service.stream(request(stream=True, request_id="7"), LOCAL))
    await asyncio.sleep(0)
    await service.infer(stop("7"), LOCAL)
    admitted.set()
    stream = await opening
    responses = [response async for response in stream]
    await stream.aclose()
    assert [r.is_final for r in responses] == [True]


async def test_a_stopped_batch_responds_with_what_it_has(backend, service):
    backend.delay_seconds = 0.001
    task = asyncio.create_task(
        service.infer(request(("a", "b"), "7", end_id=-1, max_tokens=4000), LOCAL)
    )
    while not backend.requests:
        await asyncio.sleep(0)
    await service.infer(stop("7"), LOCAL)
    first, second = text_of(await task)
    assert (first[:1], second[:1]) == (b"a", b"b")
    assert sorted(backend.aborted) == [1, 2]


async def test_stop_without_an_id_means_its_own_stream(service):
    mine, other = StreamScope(), StreamScope()
    streams = [
        await service.stream(request(stream=True, end_id=-1), LOCAL, scope)
        for scope in (mine, other, None)
    ]
    for stream in streams:
        await anext(stream)
    await (await service.stream(stop(), LOCAL, mine)).aclose()
    await service.infer(stop(), LOCAL, mine)
    assert (await anext(streams[0])).is_final
    assert not (await anext(streams[1])).is_final
    assert not (await anext(streams[2])).is_final
    for stream in streams:
        await stream.aclose()
    # Triton's text.
    with pytest.raises(InvalidRequestError, match="request ID is not provided"):
        await service.infer(stop(), LOCAL)


async def test_tenants_do_not_stop_each_other(service):
    mine = Principal(tenant="mine")
    stream = await service.stream(request(stream=True, end_id=-1, request_id="7"), mine)
    await service.infer(stop("7"), LOCAL)
    await anext(stream)
    assert not (await anext(stream)).is_final
    await stream.aclose()


async def test_a_streaming_request_has_no_single_response(service):
    with refused(InvalidRequestError, "stream", param="stream"):
        await service.infer(request(stream=True), LOCAL)


async def test_statistics(service):
    await service.infer(request(("a", "b")), LOCAL)
    async for _ in await service.stream(request(), LOCAL):
        pass
    with pytest.raises(InvalidParameterError):
        await service.infer(request(max_tokens=0), LOCAL)
    with pytest.raises(InvalidParameterError):
        await service.stream(request(max_tokens=0), LOCAL)
    (row,) = service.statistics("ensemble")
    assert (row["inference_count"], row["execution_count"]) == (3, 2)
    assert (
        row["inference_stats"]["success"]["count"],
        row["inference_stats"]["fail"]["count"],
    ) == (
        2,
        2,
    )
    assert [r["inference_count"] for r in service.statistics()] == [3, 3, 3, 3, 0, 0]


def requests_of(row):
    stats = row["inference_stats"]
    return stats["success"]["count"], stats["fail"]["count"], row["execution_count"]


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls", "echo"])
async def test_what_a_model_is_made_of_counts_its_requests(backend, service, model):
    sent = msgspec.structs.replace(request(("a", "b")), model=model)
    await service.infer(sent, LOCAL)
    backend.plant(QueueFullError("full"))
    with pytest.raises(QueueFullError):
        await service.infer(sent, LOCAL)
    with pytest.raises(InvalidTensorError):  # nothing for a step to read
        await service.infer(msgspec.structs.replace(sent, inputs=()), LOCAL)
    rows = {row["name"]: row for row in service.statistics()}
    assert requests_of(rows[model]) == (1, 2, 1)
    assert requests_of(rows["tensorrt_llm"]) == (1, 1, 1)
    assert requests_of(rows["preprocessing"]) == requests_of(rows["postprocessing"]) == (1, 0, 1)
    steps = [rows[name] for name in ("preprocessing", "tensorrt_llm", "postprocessing")]
    assert {row["inference_count"] for row in steps} == {2}
    assert {row["batch_stats"][0]["batch_size"] for row in steps} == {2}
    own, core = rows[model]["inference_stats"], rows["tensorrt_llm"]["inference_stats"]
    assert core["queue"] == own["queue"]
    assert core["compute_infer"] == own["compute_infer"]
    assert core["success"]["ns"] == own["queue"]["ns"] + own["compute_infer"]["ns"]
    texts = [
        rows[name]["inference_stats"]["success"]["ns"]
        for name in ("preprocessing", "postprocessing")
    ]
    assert texts == [own["compute_input"]["ns"], own["compute_output"]["ns"]]
    # Each phase is some step's: the original's test of its metrics asserts that none sums up to 0.
    for phase in ("compute_input", "compute_infer", "compute_output"):
        assert sum(row["inference_stats"][phase]["ns"] for row in steps) == own[phase]["ns"] > 0


async def test_a_request_to_a_step_is_no_other_s(service):
    one = {"input_lengths": 1, "request_output_len": 5, "input_ids": 7}
    inputs = tuple(from_values(name, "INT32", [1, 1], [value]) for name, value in one.items())
    await service.infer(InferRequest(model="tensorrt_llm", inputs=inputs), LOCAL)
    counts = {row["name"]: row["inference_count"] for row in service.statistics()}
    assert counts.pop("tensorrt_llm") == 1
    assert set(counts.values()) == {0}


async def test_an_ensemble_of_which_a_step_is_unloaded():
    control = ModelControl(ControlMode.EXPLICIT)
    service = TritonService(EchoService(), control=control)
    await service.infer(request(), LOCAL)
    service.catalog.unload("preprocessing")
    await service.infer(request(), LOCAL)
    await service.catalog.load("preprocessing", {})
    counts = {row["name"]: row["inference_count"] for row in service.statistics()}
    assert (counts["ensemble"], counts["tensorrt_llm"], counts["preprocessing"]) == (2, 2, 1)


class LateRead(EchoService):
    """A reader finds the outputs of all steps in one."""

    async def generate(self, request, principal):
        return at_once(await super().generate(request, principal))


async def at_once(outputs):
    found = [output async for output in outputs]
    pieces = tuple(piece for output in found for piece in output.sequences)
    yield msgspec.structs.replace(found[-1], sequences=pieces)


async def texts_of(backend, sent):
    responses = [each async for each in await TritonService(backend).stream(sent, LOCAL)]
    assert [each.is_final for each in responses] == [False] * (len(responses) - 1) + [True]
    return [[t.array.tolist() for t in response.outputs] for response in responses]


@pytest.mark.parametrize("n", [1, 3])
async def test_each_step_is_a_response_though_it_is_read_late(n):
    sent = request(stream=True, num_return_sequences=n)
    timely = await texts_of(EchoService(), sent)
    assert len(timely) > len("echo: hi") * n - 1
    assert await texts_of(LateRead(), sent) == timely


async def test_what_a_slow_reader_left_is_one_response():
    long = "a" * MAX_UNREAD_STEPS
    assert await texts_of(LateRead(), request((long,), stream=True)) == [
        [[f"echo: {long}".encode()]]
    ]


@pytest.mark.parametrize("sent", [request(stream=True), stop("7")], ids=["inference", "stop"])
async def test_a_closed_stream_has_no_more_responses(service, sent):
    stream = await service.stream(sent, LOCAL)
    await stream.aclose()
    assert [response async for response in stream] == []
    assert service.num_active == 0
