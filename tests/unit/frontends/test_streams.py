import asyncio
import threading

import msgspec
import pytest

from loraplex.core.errors import InternalError, QueueFullError
from loraplex.core.output import BeamLogprobs, PromptLogprobs, RequestOutput, TokenLogprob
from loraplex.core.principal import LOCAL
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.frontends import streams
from loraplex.frontends.long_json import SENT_BYTES, send_pieces
from loraplex.frontends.streams import (
    ClientDisconnectedError,
    gather_all,
    generate_all,
    merge_outputs,
    until_disconnect,
    written,
)
from support.echo_service import EchoService


def requests(*prompts: str, max_tokens: int = 20) -> list[GenerateRequest]:
    sampling = SamplingParams(max_tokens=max_tokens)
    return [
        GenerateRequest(request_id=i, model="echo", prompt=prompt, task=Generate(sampling))
        for i, prompt in enumerate(prompts)
    ]


async def never() -> dict[str, str]:
    await asyncio.Event().wait()
    raise AssertionError


async def gone() -> dict[str, str]:
    return {"type": "http.disconnect"}


async def test_gather_all_gives_whole_outputs_in_order():
    outputs = await gather_all(EchoService(), requests("long prompt", "b"), LOCAL)
    assert [output.sequences[0].text for output in outputs] == ["echo: long prompt", "echo: b"]


async def test_outputs_of_several_requests_come_interleaved():
    indices = [i async for i, _ in generate_all(EchoService(), requests("a", "b"), LOCAL)]
    assert indices[:6] == [0, 1] * 3
    assert indices.count(0) == indices.count(1) == len("echo: a") + 1


async def test_the_requests_are_one_batch_which_is_closed_when_all_are_admitted():
    backend = EchoService()
    await gather_all(backend, requests("a", "b"), LOCAL)
    first, second = (request.batch for request in backend.requests)
    assert first is second
    assert not first.is_open


class Turns:
    """Number of turns of the event loop while the context lasts."""

    async def __aenter__(self) -> "Turns":
        self.number = 0
        self._task = asyncio.create_task(self._count())
        await asyncio.sleep(0)  # until it counts
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._task.cancel()

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.number += 1


async def test_other_tasks_run_between_the_admissions_of_many_prompts():
    turns, seen = Turns(), []

    class Counting(EchoService):
        async def generate(self, request, principal):
            seen.append(turns.number)
            return await super().generate(request, principal)

    async with turns:
        await gather_all(Counting(), requests(*"abcd"), LOCAL)
    assert len(set(seen)) == 4


@pytest.mark.parametrize(("num_pieces", "in_thread"), [(2, False), (1500, True)])
async def test_many_pieces_are_merged_off_the_loop(monkeypatch, num_pieces, in_thread):
    threads = []

    def merge(outputs):
        threads.append(threading.get_ident())
        return merge_outputs(outputs)

    monkeypatch.setattr(streams, "merge_outputs", merge)
    (output,) = await gather_all(EchoService(), requests("x" * num_pieces, max_tokens=2000), LOCAL)
    assert output.sequences[0].text == f"echo: {'x' * num_pieces}"
    assert (threads != [threading.get_ident()]) is in_thread


async def test_other_tasks_run_between_the_parts_of_a_long_response():
    turns, seen = Turns(), []

    async def send(message) -> None:
        seen.append(turns.number)

    async with turns:
        await send_pieces([bytes(SENT_BYTES + 1)] * 4, send)
    assert len(seen) == 8
    assert len(set(seen)) == 8


async def test_a_refused_request_aborts_those_before_it():
    backend = EchoService()
    backend.plant(InternalError("late"), after_outputs=99)
    backend.plant(QueueFullError("full"))
    with pytest.raises(QueueFullError):
        await gather_all(backend, requests("a", "b"), LOCAL)
    assert backend.aborted == [0]


async def test_a_failing_request_aborts_the_others():
    backend = EchoService()
    backend.plant(InternalError("broke"), after_outputs=2)
    with pytest.raises(InternalError):
        await gather_all(backend, requests("a", "b", "c"), LOCAL)
    assert sorted(backend.aborted) == [1, 2]


async def test_closing_aborts_all():
    backend = EchoService()
    outputs = generate_all(backend, requests("a", "b", "c"), LOCAL)
    await anext(outputs)
    await outputs.aclose()
    assert sorted(backend.aborted) == [0, 1, 2]


async def test_closing_before_the_first_output_admits_nothing():
    backend = EchoService()
    await generate_all(backend, requests("a"), LOCAL).aclose()
    assert backend.requests == []


@pytest.mark.parametrize("prompts", [("a",), ("a", "b")])
async def test_disconnect_aborts_and_waits_for_it(prompts):
    backend = EchoService(delay_seconds=60)
    with pytest.raises(ClientDisconnectedError):
        await until_disconnect(_after(0.01), gather_all(backend, requests(*prompts), LOCAL))
    assert sorted(backend.aborted) == list(range(len(prompts)))


def _after(seconds: float):
    async def receive():
        await asyncio.sleep(seconds)
        return await gone()

    return receive


async def test_result_and_error_of_work_pass_through():
    async def response() -> int:
        return 42

    async def fail() -> int:
        raise QueueFullError("full")

    assert await until_disconnect(never, response()) == 42
    with pytest.raises(QueueFullError):
        await until_disconnect(never, fail())


async def test_other_messages_are_no_disconnect():
    messages = iter([{"type": "http.request"}, {"type": "http.disconnect"}])

    async def receive():
        return next(messages)

    with pytest.raises(ClientDisconnectedError):
        await until_disconnect(receive, never())


async def test_work_that_never_waits_has_no_task_beside_it():
    num_requested = 0

    async def receive():
        nonlocal num_requested
        num_requested += 1
        return await never()

    async def response() -> int:
        return 42

    assert await until_disconnect(receive, response()) == 42
    await asyncio.sleep(0.01)
    assert num_requested == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_client_that_leaves_when_all_is_done_cancels_nothing():
    async def wait() -> int:
        await asyncio.sleep(0.01)
        return 42

    left = asyncio.Event()

    async def receive():
        await left.wait()
        return await gone()

    assert await until_disconnect(receive, wait()) == 42
    left.set()
    await asyncio.sleep(0.01)
    assert asyncio.current_task().cancelling() == 0


async def test_cancelling_from_outside_cancels_work():
    backend = EchoService(delay_seconds=60)
    task = asyncio.create_task(until_disconnect(never, gather_all(backend, requests("a"), LOCAL)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.aborted == [0]


@pytest.mark.parametrize(
    ("lengths", "is_beside"), [([4000], False), ([2500, 2500], True), ([5000], True), ([], False)]
)
async def test_a_long_response_is_written_off_the_loop(lengths, is_beside):
    outputs = await gather_all(EchoService(), requests(*["a"] * len(lengths)), LOCAL)
    long = [_with_text(output, length) for output, length in zip(outputs, lengths, strict=True)]
    thread = await written(threading.current_thread, *long)
    assert (thread is not threading.current_thread()) == is_beside


@pytest.mark.parametrize(("num_tokens", "num_top", "is_beside"), [(12, 20, False), (13, 20, True)])
@pytest.mark.parametrize("kind", ["outputs", "prompt", "beam"])
async def test_many_log_probabilities_are_written_off_the_loop(
    num_tokens, num_top, is_beside, kind
):
    [output] = await gather_all(EchoService(), requests("a"), LOCAL)
    logprobs = (TokenLogprob(1, -1.0, 1, ((1, -1.0),) * num_top),) * num_tokens
    sequence = msgspec.structs.replace(output.sequences[0], text="", logprobs=())
    if kind == "prompt":
        packed = PromptLogprobs.of(logprobs)
        output = msgspec.structs.replace(output, sequences=(sequence,), prompt_logprobs=packed)
    else:
        given = BeamLogprobs.of(logprobs) if kind == "beam" else logprobs
        sequence = msgspec.structs.replace(sequence, logprobs=given)
        output = msgspec.structs.replace(output, sequences=(sequence,))
    thread = await written(threading.current_thread, output)
    assert (thread is not threading.current_thread()) == is_beside


def _with_text(output: RequestOutput, length: int) -> RequestOutput:
    sequence = msgspec.structs.replace(output.sequences[0], text="x" * length)
    return msgspec.structs.replace(output, sequences=(sequence,))
