"""AsyncLLM: the methods of LLM for asyncio, on an event loop that goes on."""

import asyncio
import contextlib
import threading

import pytest

from loraplex import (
    LLM,
    AdapterNotFoundError,
    AsyncLLM,
    ConfigError,
    InvalidRequestError,
    NotReadyError,
    SamplingParams,
)
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from support.eventually import eventually

PROMPT = "What is the capital of France?"
CHAT = [{"role": "user", "content": PROMPT}]
GREEDY = SamplingParams(max_tokens=24, temperature=0)
ENDLESS = SamplingParams(max_tokens=1500, ignore_eos=True)
SMALL = {"kv_cache_bytes": "8MiB", "num_threads": 1}


@pytest.fixture(scope="module")
def same(tmp_path_factory):
    """One model, as both classes have it: (LLM, AsyncLLM)."""
    folder = tmp_path_factory.mktemp("state")
    with LLM(BASE_PATH, ADAPTER_PATHS, state_dir=folder, **SMALL) as llm:
        other = AsyncLLM(BASE_PATH)
        other._started = llm._model
        yield llm, other


async def joined(outputs):
    return "".join([output.text async for output in outputs])


async def test_results_are_those_of_the_llm(same):
    llm, other = same
    names = [None, "chinese", {"chinese": 0.5, "japanese": 0.5}]
    expected = [one.text for one in llm.generate([PROMPT] * 3, GREEDY, adapter=names)]
    found = await other.generate([PROMPT] * 3, GREEDY, adapter=names)
    assert [one.text for one in found] == expected
    streams = [joined(other.stream(PROMPT, GREEDY, adapter=name)) for name in names]
    assert await asyncio.gather(*streams) == expected
    [chat] = llm.chat(CHAT, GREEDY, adapter="japanese")
    [same_chat] = await other.chat(CHAT, GREEDY, adapter="japanese")
    assert same_chat.text == chat.text
    assert await joined(other.stream(CHAT, GREEDY, adapter="japanese")) == chat.text
    [base, chinese] = await other.compare(PROMPT, [None, "chinese"])
    assert [base.text, chinese.text] == [one.text for one in llm.compare(PROMPT, [None, "chinese"])]
    assert other.has_chat_template


async def test_adapters_come_and_go(same):
    _, llm = same
    await llm.add_adapter("zh", ADAPTER_PATHS["chinese"])
    await llm.alias_adapter("zh", "cn")
    await llm.pin_adapter("zh")
    assert (await llm.adapter("cn")).name == "zh"
    assert "zh" in [card.name for card in llm.adapters()]
    await llm.add_adapter("zh", ADAPTER_PATHS["japanese"], replace=True)
    await llm.rollback_adapter("zh")
    await llm.remove_adapter("zh", "immediate")
    with pytest.raises(AdapterNotFoundError):
        await llm.adapter("zh")


async def test_other_tasks_run_meanwhile(tmp_path):
    """A start, a computation or an end on this loop would leave no turn to the counter."""
    llm = AsyncLLM(BASE_PATH, state_dir=tmp_path, **SMALL)

    async def turns_of(work):
        task, turns = asyncio.ensure_future(work), 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        task.result()
        return turns

    assert await turns_of(llm.start()) > 10
    assert await turns_of(llm.generate(PROMPT, SamplingParams(max_tokens=64, ignore_eos=True))) > 10
    assert await turns_of(llm.close()) > 10


async def test_a_task_that_is_cancelled_ends_its_requests(same):
    _, llm = same
    task = asyncio.ensure_future(llm.generate([PROMPT] * 2, ENDLESS))
    while not llm.stats().num_running:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert eventually(lambda: not llm.stats().num_running and not llm.stats().num_waiting)


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_stream_closed_early_ends_its_request(same, is_begun):
    _, llm = same
    async with contextlib.aclosing(llm.stream(PROMPT, ENDLESS)) as outputs:
        if is_begun:
            await anext(outputs)
    assert eventually(lambda: not llm.stats().num_running and not llm.stats().num_waiting)


@pytest.mark.parametrize(
    ("prompt", "adapter", "error"),
    [
        ("", None, InvalidRequestError),
        ([{"role": "king", "content": "x"}], None, InvalidRequestError),
        (PROMPT, "french", AdapterNotFoundError),
    ],
)
async def test_errors_of_streams(same, prompt, adapter, error):
    _, llm = same
    with pytest.raises(error):
        await anext(llm.stream(prompt, GREEDY, adapter=adapter))


async def test_one_that_is_not_started_or_closed(tmp_path):
    llm = AsyncLLM(BASE_PATH, state_dir=tmp_path, **SMALL)
    with pytest.raises(NotReadyError, match="not started"):
        await llm.generate(PROMPT)
    await llm.close()
    async with llm:
        await llm.start()
        assert (await llm.generate(PROMPT, GREEDY))[0].text
    for _ in range(2):
        await llm.close()
    with pytest.raises(NotReadyError, match="closed"):
        await llm.generate(PROMPT)


async def test_a_wrong_model_is_an_error_each_time(tmp_path):
    llm = AsyncLLM(tmp_path / "none")
    for _ in range(2):
        with pytest.raises(ConfigError):
            await llm.start()
    await llm.close()


async def test_a_start_that_is_cancelled_leaves_nothing_behind(tmp_path, monkeypatch):
    closed = []

    class Slow:
        """A model that is loaded when the start is cancelled already."""

        def __init__(self, *_):
            started.set()
            assert cancelled.wait(60)
            self.loop = self

        def close(self):
            closed.append(self)

    started, cancelled = threading.Event(), threading.Event()
    monkeypatch.setattr("loraplex.app.async_llm.LocalModel", Slow)
    task = asyncio.ensure_future(AsyncLLM(BASE_PATH).__aenter__())
    await asyncio.to_thread(started.wait)
    task.cancel()
    await asyncio.sleep(0)
    cancelled.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(closed) == 1
