"""Systems under comparison whose responses are computed from prompt and adapter."""

import asyncio
import random
import string
import time

import msgspec
import pytest
from comparison.processes import Launch
from comparison.systems import Setup

from loraplex.bench.completions import Exchange, StreamedCompletion
from loraplex.bench.workload import PlannedRequest
from support.bench_workload import WORKLOAD, backend_of_workload
from support.echo_service import EchoService


@pytest.fixture
def workload():
    """A function (**changes) -> Workload."""
    return lambda **changes: msgspec.structs.replace(WORKLOAD, **changes)


@pytest.fixture
def backend() -> EchoService:
    return backend_of_workload()


class FakeSystem:
    """bench.systems.System whose output text is drawn from prompt and adapter.

    mix: a function (adapters of the batch, position) -> adapter whose output is returned.
    """

    is_http = True
    mixes_adapters = True

    def __init__(self, name="loraplex fp32", weight_bits=32, *, mix=None, noise=None) -> None:
        self.name = name
        self.weight_bits = weight_bits
        self.weights = f"{weight_bits}-bit"
        self.variants = {"default": self}
        self.mix = mix or (lambda adapters, position: adapters[position])
        self.noise = noise or (lambda adapter, text, batch_size: text)
        self.seconds_per_token = 0.0
        self.starts: list[Setup] = []
        self.sent: list[PlannedRequest] = []
        self.log: list[str] = []
        self.failures: list[Exception] = []
        """Raised by the next sends."""
        self.start_failures: list[Exception] = []
        self.num_up = 0

    def version(self) -> str:
        return "1.0"

    async def prepare(self, setup: Setup) -> None:
        assert setup.work.is_dir()

    async def start(self, setup: Setup) -> "FakeRunning":
        if self.start_failures:
            raise self.start_failures.pop(0)
        assert setup.work.is_dir()
        self.starts.append(setup)
        self.num_up += 1
        return FakeRunning(self, len(setup.adapters))


class FakeRunning:
    process_ids = ()
    launch = Launch(command=("fake", "serve"))

    def __init__(self, system: FakeSystem, num_adapters: int) -> None:
        self.system = system
        self.num_adapters = num_adapters
        self.batch: list[Exchange] = []
        self.loads = 0

    async def send(self, exchange: Exchange) -> None:
        if self.system.failures:
            raise self.system.failures.pop(0)
        self.system.sent.append(exchange.request)
        self.batch.append(exchange)
        await asyncio.sleep(0)  # requests that are sent now join the same batch
        await asyncio.sleep(0)
        batch = [*self.batch]
        adapters = [each.request.adapter for each in batch]
        position = [each is exchange for each in batch].index(True)
        given = self.system.mix(adapters, position)
        request = exchange.request
        text = output_text(request.prompt_token_ids, given, request.num_output_tokens)
        text = self.system.noise(request.adapter, text, len(batch))
        for start in range(0, len(text), 4):
            await asyncio.sleep(self.system.seconds_per_token)
            exchange.chunks.append((time.perf_counter_ns(), text[start : start + 4].encode()))
        self.batch.remove(exchange)

    def read(self, exchange: Exchange) -> StreamedCompletion:
        return StreamedCompletion(
            chunk_ns=tuple(arrived for arrived, _ in exchange.chunks),
            num_prompt_tokens=len(exchange.request.prompt_token_ids),
            num_output_tokens=len(exchange.chunks),
            text="".join(text.decode() for _, text in exchange.chunks),
            error=exchange.error,
        )

    async def add_adapter(self, adapter) -> int:
        self.system.log.append(f"add {adapter.name}")
        self.num_adapters += 1
        return self.num_adapters - 1

    async def remove_adapter(self, index: int) -> None:
        self.system.log.append(f"remove {index}")

    async def counters(self) -> dict[str, float]:
        self.loads += 3
        return {"adapter_loads": float(self.loads)}

    async def stop(self) -> None:
        self.system.num_up -= 1


def output_text(prompt, adapter, num_tokens: int) -> str:
    draws = random.Random(f"{prompt}/{adapter}")
    return "".join(draws.choices(string.ascii_lowercase, k=4 * num_tokens))


@pytest.fixture
def fake_system():
    return FakeSystem


@pytest.fixture
def start_bare(tmp_path):
    """An async function (system, num_adapters) -> FakeRunning, without a comparison."""

    async def start_bare(system: FakeSystem, num_adapters: int = 4) -> FakeRunning:
        return FakeRunning(system, num_adapters)

    return start_bare
