"""Time of a plan where many requests wait, and where long prompts have draft tokens.

    PYTHONPATH=tests python benchmarks/planning.py

The engine is the real one on fake parts (tests/support/fake_engine.py), so only planning is
measured. `waiting adapters`: 2,000 requests for as many adapters wait for two pages that are in
use, while 62 of 64 slots are free. `draft tokens`: one prompt of 20,000 tokens for 8 sequences.
"""

import random
import statistics
import time

from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from support.capacities import changed_capacity
from support.fake_engine import FakeEngine
from support.fake_runner import FAKE_CAPACITY


def plan_times(fakes: FakeEngine, num_steps: int) -> list[float]:
    """Return the milliseconds that each plan of so many steps took."""
    scheduler = fakes.engine._scheduler
    original, times = scheduler.plan, []

    def plan() -> object:
        start = time.perf_counter()
        planned = original()
        times.append(1e3 * (time.perf_counter() - start))
        return planned

    scheduler.plan = plan
    fakes.step(num_steps)
    return times


def waiting_adapters() -> list[float]:
    capacity = changed_capacity(
        FAKE_CAPACITY, block_size=16, num_blocks=4096, max_num_seqs=64, num_adapter_pages=2
    )
    fakes = FakeEngine(capacity)
    for digest in ("a", "b"):
        fakes.register(digest)
        fakes.add([1], digest, sampling=SamplingParams(max_tokens=900, seed=1))
    fakes.step(5)
    for number in range(2000):
        fakes.register(f"waiting {number}")
        fakes.add([1], f"waiting {number}")
    return plan_times(fakes, 200)


def draft_tokens() -> list[float]:
    capacity = changed_capacity(
        FAKE_CAPACITY, block_size=16, num_blocks=16384, max_num_seqs=64, max_model_len=40_000
    )
    settings = SchedulerSettings(num_draft_tokens=4, max_num_batched_tokens=2048)
    fakes = FakeEngine(capacity, settings)
    draws = random.Random(1)
    prompt = [draws.randrange(1, 990) for _ in range(20_000)]
    fakes.add(prompt, sampling=SamplingParams(max_tokens=30, n=8, seed=1))
    return plan_times(fakes, 45)


def main() -> None:
    for name, case in (("waiting adapters", waiting_adapters), ("draft tokens", draft_tokens)):
        times = case()
        print(
            f"{name}: {len(times)} plans, median {statistics.median(times):.2f} ms, "
            f"longest {max(times):.2f} ms"
        )


if __name__ == "__main__":
    main()
