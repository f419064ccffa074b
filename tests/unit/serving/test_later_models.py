"""Base models that are added while a service runs; the first may be added to none."""

import pytest

from loraplex.core.clock import SystemClock
from loraplex.core.config import ModelConfig
from loraplex.core.errors import ConfigError, ModelNotFoundError, NotReadyError
from loraplex.core.principal import LOCAL
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.service import Service
from support.fake_engine_process import FakeEngineSettings
from support.naming import refused

SETTINGS = ModelConfig(path="/later")


@pytest.fixture
async def empty(make_model, staging):
    made = []

    def build(name, settings):
        assert settings == SETTINGS
        failure = ConfigError("no weights").to_info() if name == "torn" else None
        made.append(make_model(name, FakeEngineSettings(failure=failure)))
        return made[-1]

    service = Service([], staging, RequestMetrics(), SystemClock(), build=build)
    service.made = made
    yield service
    await service.close()


def request(model):
    return GenerateRequest(
        request_id=1, model=model, prompt=(1, 2), task=Generate(SamplingParams(max_tokens=2))
    )


async def test_a_model_is_served_once_it_was_added(empty):
    with pytest.raises(NotReadyError):
        await empty.start_model("a", SETTINGS)
    await empty.start()
    assert empty.health().ready
    with refused(ModelNotFoundError, "'a'", param="model"):
        await empty.generate(request("a"), LOCAL)
    await empty.start_model("a", SETTINGS)
    await empty.start_model("b", SETTINGS)
    assert [card.name for card in empty.models()] == ["a", "b"]
    assert empty.model_ready("a")
    outputs = [output async for output in await empty.generate(request("a"), LOCAL)]
    assert outputs[-1].finished
    await empty._upkeep.run_once()
    assert list(empty._upkeep._models) == empty.made


async def test_one_that_cannot_start_changes_nothing(empty):
    await empty.start()
    with pytest.raises(ConfigError, match="no weights"):
        await empty.start_model("torn", SETTINGS)
    assert empty.models() == []
    assert empty.health().ready
    assert not empty.made[0].engine.is_ready
    await empty.start_model("a", SETTINGS)
    assert empty.model_ready("a")
