"""The dialect by configuration, and the preparations of llgtrt's before it is ready."""

import pytest

from loraplex.app.dialects import check_start_tokens, dialect_of, prepare
from loraplex.core.config import Config, ModelConfig
from loraplex.core.errors import ConfigError, QueueFullError
from loraplex.core.server_config import ServerConfig
from loraplex.frontends.openai.context import OPENAI
from loraplex.frontends.openai.llgtrt import CompatDialect, LlgtrtDialect
from support.echo_service import EchoService
from support.naming import naming


def config_of(dialect, **model):
    models = {"echo": ModelConfig(path="/m", **model)}
    return Config(server=ServerConfig(dialect=dialect), models=models)


def test_each_name_is_its_dialect():
    assert dialect_of(config_of("openai")) is OPENAI
    assert type(dialect_of(config_of("llgtrt"))) is LlgtrtDialect
    compat = dialect_of(config_of("llgtrt_compat", json_start_token="<|t|>"))
    assert type(compat) is CompatDialect
    assert compat.json_start_token == "<|t|>"


async def test_the_model_writes_ten_tokens_first():
    backend = EchoService()
    await prepare(backend, config_of("llgtrt"))
    [request] = backend.requests
    assert (request.prompt, request.sampling.max_tokens) == ("Hi", 10)
    assert backend.finished == [request.request_id]
    await prepare(backend, config_of("openai"))
    assert len(backend.requests) == 1


async def test_what_the_first_generation_raises_ends_the_start():
    backend = EchoService()
    backend.plant(QueueFullError("full"))
    with pytest.raises(QueueFullError):
        await prepare(backend, config_of("llgtrt"))


def test_the_start_token_is_one_special_token():
    backend = EchoService()
    with pytest.raises(ConfigError, match=naming("json_start_token", "call")):
        check_start_tokens(backend, config_of("llgtrt", json_start_token="call"))
    check_start_tokens(backend, config_of("llgtrt", json_start_token="<s>"))
