import itertools

import pytest
from comparison import held_streams
from comparison.held_streams import HeldFigures, HeldStreams, Rung, measure_held

from loraplex.bench.statistics import Percentiles


def rung(num_streams: int, p90: float, p99: float) -> Rung:
    return Rung(
        num_streams=num_streams,
        output_tokens_per_second=10.0 * num_streams,
        between_tokens=Percentiles(p90 / 2, p90, p99),
    )


def test_the_most_streams_within_the_limit():
    rungs = (rung(1, 0.02, 0.03), rung(2, 0.05, 0.12), rung(3, 0.09, 0.4), rung(4, 0.2, 0.5))
    figures = HeldFigures(limit_seconds=0.1, rungs=rungs)
    assert figures.most("p90") == rungs[2]
    assert figures.most("p99") == rungs[0]
    assert HeldFigures(limit_seconds=0.01, rungs=rungs).most("p90") is None


async def test_more_streams_until_the_limit_is_passed(monkeypatch, fake_system, start_bare):
    """The load generator's figures are given: nothing here depends on the machine's speed."""
    taken, sent = itertools.count(1), []
    run_load = held_streams.run_load

    async def timed(running, requests, concurrency):
        sent.append(requests)
        figures = await run_load(running, requests, concurrency)
        gap = 0.04 * next(taken)
        latency = Percentiles(gap, gap, 2 * gap)
        return held_streams.msgspec.structs.replace(figures, inter_token_latency=latency)

    monkeypatch.setattr(held_streams, "run_load", timed)
    load = HeldStreams(prompt_tokens=5, output_tokens=4, rungs=(1, 2, 4, 8))
    running = await start_bare(fake_system())
    figures = await measure_held(running, load, range(300, 400), seed=1, repeat=1)
    assert [len(requests) for requests in sent] == [1, 2, 4]
    prompts = [request.prompt_token_ids for requests in sent for request in requests]
    assert len(set(prompts)) == len(prompts) == 7
    assert figures.most("p90").num_streams == 2
    assert figures.most("p99").num_streams == 1


async def test_a_failed_request_is_no_result(fake_system, start_bare):
    system = fake_system()
    running = await start_bare(system)
    read = running.read

    def failing(exchange):
        exchange.error = "broken"
        return read(exchange)

    running.read = failing
    with pytest.raises(RuntimeError, match="1 streams: broken"):
        await measure_held(running, HeldStreams(), range(300, 400), seed=1, repeat=1)
