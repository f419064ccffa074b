"""What an engine of a model with states refuses and logs at its start."""

import msgspec
import pytest

from loraplex.core.beam_search import BeamSearch
from loraplex.core.cache import Blocks, CacheSpec, Chunk, States
from loraplex.core.errors import ConfigError
from loraplex.core.plan import CacheGroupCapacity
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.engine.engine import Engine, build_engine
from loraplex.testing.fake_clock import FakeClock
from support.engine_requests import engine_request
from support.fake_loader import FakeLoader
from support.fake_runner import FAKE_CAPACITY, FakeRunner
from support.naming import refused


def start(first: CacheSpec, settings: SchedulerSettings) -> Engine:
    groups = tuple(CacheGroupCapacity(spec=spec, num_blocks=64) for spec in (first, States(64)))
    capacity = msgspec.structs.replace(FAKE_CAPACITY, cache_groups=groups)
    runner, loader = FakeRunner(capacity), FakeLoader(1)
    return build_engine(runner, loader, FakeClock(1), settings, adapter_host_bytes=1)


def test_checkpoints_are_states() -> None:
    with refused(ConfigError, "state_checkpoint_tokens", 96, 64, param="state_checkpoint_tokens"):
        start(Blocks(), SchedulerSettings(state_checkpoint_tokens=96))
    start(Blocks(), SchedulerSettings(state_checkpoint_tokens=192))


@pytest.mark.parametrize(("num_prompt_tokens", "code"), [(24, "prompt_too_long"), (20, None)])
def test_beams_are_refused_that_would_not_fit_after_a_preemption(
    num_prompt_tokens: int, code: str | None
) -> None:
    """Two texts of 29 tokens fill 16 blocks of 4 tokens, but with one prompt 10."""
    groups = (
        CacheGroupCapacity(num_blocks=15),
        CacheGroupCapacity(num_blocks=64, spec=States(4)),
    )
    capacity = msgspec.structs.replace(FAKE_CAPACITY, block_size=4, cache_groups=groups)
    engine = build_engine(
        FakeRunner(capacity), FakeLoader(1), FakeClock(1), SchedulerSettings(), adapter_host_bytes=1
    )
    sampling = SamplingParams(max_tokens=6, beam=BeamSearch(width=2), ignore_eos=True)
    engine.add(engine_request(tuple(range(1, num_prompt_tokens + 1)), sampling))
    outputs = [output for _ in range(12) for output in engine.step().outputs]
    assert outputs[-1].finished
    assert (outputs[-1].error and outputs[-1].error.code) == code


@pytest.mark.parametrize(
    ("first", "is_wanted", "is_logged"),
    [(Blocks(), True, False), (Chunk(64), True, True), (Chunk(64), False, False)],
)
def test_a_model_that_can_have_no_prefix_cache_logs_it(
    first: CacheSpec, is_wanted: bool, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    start(first, SchedulerSettings(enable_prefix_cache=is_wanted))
    assert ("the prefix cache is off" in caplog.text) == is_logged
