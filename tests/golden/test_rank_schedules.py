"""Engines of several ranks under pressure: preempted, cached, with more adapters than fit."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from loraplex.core.adapter import AdapterHandle, AdapterSource, AdapterUse
from loraplex.core.clock import SystemClock
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.core.stats import EngineStats
from loraplex.engine.engine import build_engine
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.sizing.capacity import smallest_pool
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.models.linear_group import TensorShard
from loraplex.models.registry import read_config
from loraplex.models.sharding import shard
from support.engine_requests import engine_request
from support.fake_loader import FakeLoad
from support.families import experts, first
from support.families.case import VOCAB_SIZE, FamilyCase, sizes
from support.random_schedules import RandomAdapters
from support.rank_threads import RankThreads

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = sizes(hidden_size=64, intermediate_size=256, head_dim=32, num_hidden_layers=2)
CASES = {
    "gemma2": FamilyCase(config=lambda: first.gemma2(**SIZES)),
    "mixtral": FamilyCase(config=lambda: experts.mixtral(**SIZES, num_local_experts=4)),
}
"""Models whose row layers have four blocks, so that ranks give the same bits."""
RANKS = (8, 7, 5, 6, 8, 3)
AMPLE = {"num_blocks": 400, "lora_device_bytes": 8 << 20}
SCARCE = {"num_blocks": 24}


class RankLoader(RandomAdapters):
    """Puts each adapter on all ranks; the handle is the engine's."""

    def __init__(self, ranks: RankThreads, folder: Path, sizes: Sequence[int]) -> None:
        super().__init__(HostAdapters(), read_config(folder), sizes)
        self._ranks = ranks

    def start(self, handle: AdapterHandle, source: AdapterSource) -> None:
        self._ranks.put(handle, self._make(source))
        self._loaded.append(FakeLoad(handle))

    def discard(self, handle: AdapterHandle) -> None:
        for rank in self._ranks.ranks:
            rank.host_adapters.pop(handle, None)


def few_adapters(sources: list[AdapterSource]) -> list[EngineRequest]:
    """Return requests whose prompts share beginnings, some of them sampled or with two adapters."""
    rng = random.Random(5)
    beginnings = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(12)) for _ in range(3)]
    requests = []
    for number in range(18):
        chosen = rng.sample(sources, rng.choice((0, 1, 1, 2)))
        digests = tuple(source.digest for source in chosen)
        sampling = SamplingParams(
            temperature=rng.choice((0.0, 1.0)),
            seed=number,
            max_tokens=rng.randint(4, 20),
            ignore_eos=True,
            presence_penalty=rng.choice((0.0, 0.5)),
        )
        tail = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 9)))
        requests.append(
            engine_request(
                rng.choice(beginnings) + tail,
                sampling,
                request_id=number + 1,
                adapters=tuple(AdapterUse(digest, 0.5) for digest in digests),
                kv_salt="+".join(digests).encode(),
                arrival_ns=number,
            )
        )
    return requests


def each_adapter(sources: list[AdapterSource]) -> list[EngineRequest]:
    """Return a request of each adapter, and then another of each in the opposite order."""
    rng = random.Random(6)
    return [
        engine_request(
            tuple(rng.randrange(VOCAB_SIZE) for _ in range(5)),
            SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
            request_id=number,
            adapters=(AdapterUse(source.digest),),
            kv_salt=source.digest.encode(),
            arrival_ns=number,
        )
        for number, source in enumerate(sources + sources[::-1], start=1)
    ]


def adapters_bytes(folder: Path, size: int, count: int) -> int:
    """Return the bytes of so many adapters of rank 8 on all modules."""
    spec = shard(read_config(folder), TensorShard(0, size))
    pool = smallest_pool(RunnerSettings(max_lora_rank=8), spec, torch.float32)
    return count * size * pool.num_pages * pool.page_bytes


def outputs(
    folder: Path,
    size: int,
    *,
    overlap: bool = False,
    together: bool = True,
    sizes: Sequence[int] = RANKS,
    requests_of: Callable[[list[AdapterSource]], list[EngineRequest]] = few_adapters,
    **settings: Any,
) -> tuple[dict[int, list[int]], EngineStats]:
    """Return the tokens by request, and what the engine did with adapters of these ranks."""
    fixed = {"block_size": 4, "max_num_seqs": 8, "max_model_len": 48, "max_lora_rank": 8}
    with_sizes = RunnerSettings(**(fixed | {"lora_device_bytes": adapters_bytes(folder, size, 2)}))
    with RankThreads(folder, msgspec.structs.replace(with_sizes, **settings), size) as ranks:
        loader = RankLoader(ranks, folder, sizes)
        engine = build_engine(
            ranks,
            loader,
            SystemClock(),
            SchedulerSettings(enable_prefix_cache=together, max_num_batched_tokens=40),
            adapter_host_bytes=1 << 30,
            overlap=overlap,
        )
        for source in loader.sources:
            engine.register_adapter(source)
        found: dict[int, list[int]] = {}
        for request in requests_of(loader.sources):
            engine.add(request)
            found[request.request_id] = []
            while not (together or engine.is_idle):
                absorb(engine.step().outputs, found)
        while not engine.is_idle:
            absorb(engine.step().outputs, found)
        engine.check()
        return found, engine.stats()


def absorb(outputs: Any, found: dict[int, list[int]]) -> None:
    for output in outputs:
        assert output.error is None, output.error
        for delta in output.deltas:
            found[output.request_id] += delta.token_ids


@pytest.mark.parametrize(
    ("name", "size", "overlap"),
    [
        ("gemma2", 2, False),
        *(
            pytest.param(name, size, overlap, marks=pytest.mark.slow)
            for name in CASES
            for size in (1, 2, 4)
            for overlap in (False, True)
            if (name, size, overlap) != ("gemma2", 2, False)
        ),
    ],
)
def test_scarce_memory_changes_no_token(
    name: str, size: int, overlap: bool, tmp_path: Path
) -> None:
    """Tokens are those of one rank that computes each request alone."""
    CASES[name].save(tmp_path)
    alone, _ = outputs(tmp_path, 1, together=False, **AMPLE)
    found, stats = outputs(tmp_path, size, overlap=overlap, **SCARCE)
    assert found == alone
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert stats.adapters.device_evictions > 0


def test_fifty_adapters_take_turns_in_memory_for_eight(tmp_path: Path) -> None:
    CASES["gemma2"].save(tmp_path)
    fifty = {"sizes": [8 - number % 3 for number in range(50)], "requests_of": each_adapter}
    alone, _ = outputs(tmp_path, 1, together=False, **fifty, **AMPLE)
    lora_bytes = adapters_bytes(tmp_path, 2, 8)
    found, stats = outputs(tmp_path, 2, **fifty, num_blocks=200, lora_device_bytes=lora_bytes)
    assert len(found) == 100
    assert found == alone
    assert len(set(map(tuple, found.values()))) > 50, "adapters differ"
    # Adapters of a lower rank take fewer pages: in some orders more than eight stay.
    assert stats.adapters.device_evictions >= 50 - stats.adapters.device_pages_total
