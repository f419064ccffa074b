"""Trace and log settings, and the control of models."""

import json
import logging

import pytest

from loraplex.core.config import ModelConfig
from loraplex.core.errors import (
    ConfigError,
    InvalidRequestError,
    ModelNotFoundError,
    NotReadyError,
    RequestError,
    UnsupportedFeatureError,
)
from loraplex.frontends.kserve.errors import NotFoundError
from loraplex.frontends.kserve.management import TRACE_DEFAULTS, KeptTraceSettings, LiveLogSettings
from loraplex.frontends.kserve.models.catalog import Catalog
from loraplex.frontends.kserve.models.kinds import (
    ENSEMBLE,
    POSTPROCESSING,
    PREPROCESSING,
    TENSORRT_LLM,
)
from loraplex.frontends.kserve.models.model_control import ControlMode, FoundModel, ModelControl
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration
from support.echo_service import EchoService
from support.naming import refused

# ---------------------------------------------------------------- trace


def test_a_model_has_the_servers_settings_but_for_its_own():
    traces = KeptTraceSettings()
    assert traces.of() == traces.of("m") == dict(TRACE_DEFAULTS)
    traces.update({"trace_rate": ["5"], "trace_level": ["TIMESTAMPS", "TENSORS"]})
    assert traces.update({"trace_rate": ["7"]}, "m")["trace_rate"] == "7"
    assert traces.of("m")["trace_level"] == ["TIMESTAMPS", "TENSORS"]
    assert (traces.of()["trace_rate"], traces.of("n")["trace_rate"]) == ("5", "5")
    assert traces.update({"trace_rate": None}, "m")["trace_rate"] == "5"
    assert traces.update({"trace_rate": None, "trace_level": None}) == dict(TRACE_DEFAULTS)


# Triton's text.
@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"trace_rate": ["abc"]}, "Unable to parse 'trace_rate', got: abc"),
        ({"trace_rate": ["-1"]}, "of at least 0"),
        ({"trace_count": ["-2"]}, "of at least -1"),
        ({"trace_count": ["9" * 5000]}, "Unable to parse 'trace_count'"),
        ({"trace_count": ["²"]}, "Unable to parse 'trace_count'"),
        ({"trace_rate": ["1", "2"]}, "expect only 1 value for 'trace_rate'"),
        ({"trace_rate": []}, "expect only 1 value for 'trace_rate'"),
        ({"trace_level": ["FOO"]}, "the levels are OFF, TIMESTAMPS, TENSORS"),
        ({"trace_file": ["x"]}, "trace file location can not be updated through network protocol"),
        ({"trace_mode": ["opentelemetry"]}, "trace mode can not be updated"),
    ],
)
def test_bad_trace_settings_change_nothing(changes, fragment):
    traces = KeptTraceSettings()
    with pytest.raises(RequestError, match=fragment):
        traces.update({"log_frequency": ["3"], **changes})
    assert traces.of() == dict(TRACE_DEFAULTS)
    assert traces.update({"bogus": ["1"]}) == dict(TRACE_DEFAULTS)


# ---------------------------------------------------------------- log


@pytest.fixture
def logger():
    logger = logging.Logger("test")
    logger.setLevel(logging.INFO)
    return logger


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({"log_verbose_level": 2}, logging.DEBUG),
        ({"log_verbose_level": 0}, logging.INFO),
        ({"log_info": False}, logging.WARNING),
        ({"log_info": False, "log_warnings": False}, logging.ERROR),
        ({"log_info": False, "log_warning": False, "log_error": False}, logging.CRITICAL),
        ({"log_format": "ISO8601"}, logging.INFO),
        ({"bogus": 1}, logging.INFO),
    ],
)
def test_log_settings_set_the_level(logger, changes, level):
    settings = LiveLogSettings(logger)
    report = settings.update(changes)
    assert logger.level == level
    assert report == settings.report()
    assert all(report.get(name, value) == value for name, value in changes.items())


def test_log_settings_begin_as_the_log_is(logger):
    logger.setLevel(logging.WARNING)
    report = LiveLogSettings(logger).report()
    assert (report["log_info"], report["log_warning"], report["log_verbose_level"]) == (
        False,
        True,
        0,
    )
    assert logger.level == logging.WARNING


# Triton's text.
@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"log_verbose_level": "x"}, "expect unsigned integer for 'log_verbose_level'"),
        ({"log_verbose_level": -1}, "expect unsigned integer"),
        ({"log_verbose_level": True}, "expect unsigned integer"),
        ({"log_verbose_level": 2**32}, "expect unsigned integer"),
        ({"log_info": 1}, "expect boolean for 'log_info', got 1"),
        ({"log_error": None}, "expect boolean for 'log_error'"),
        ({"log_format": "zzz"}, "invalid argument for --log_format, got: 'zzz'"),
        ({"log_file": "/tmp/x"}, "log file location can not be updated through network protocol"),
    ],
)
def test_bad_log_settings_change_nothing(logger, changes, fragment):
    settings = LiveLogSettings(logger)
    before = settings.report()
    with pytest.raises(RequestError, match=fragment):
        settings.update({"log_warning": False, **changes})
    assert (settings.report(), logger.level) == (before, logging.INFO)


# ---------------------------------------------------------------- models


def catalog(mode=ControlMode.EXPLICIT, **more):
    return Catalog(EchoService(), control=ModelControl(mode, **more))


@pytest.mark.parametrize("mode", [ControlMode.NONE, ControlMode.POLL])
async def test_models_are_controlled_in_explicit_mode_only(mode):
    models = catalog(mode)
    # Triton's text.
    with pytest.raises(NotReadyError, match="not allowed if polling is enabled"):
        await models.load("ensemble", {})
    # Triton's text.
    with pytest.raises(NotReadyError, match="not allowed if polling is enabled"):
        models.unload("ensemble")
    assert models.is_ready("ensemble")


async def test_unloading_takes_the_name_and_loading_gives_it_back():
    models = catalog()
    models.unload("tensorrt_llm")
    models.unload("nope")
    # Triton's text.
    with pytest.raises(ModelNotFoundError, match="'tensorrt_llm' has no available versions"):
        models.find("tensorrt_llm")
    assert not models.is_ready("tensorrt_llm")
    rows = {row["name"]: row for row in models.index()}
    assert (rows["tensorrt_llm"]["state"], rows["tensorrt_llm"]["reason"]) == (
        "UNAVAILABLE",
        "unloaded",
    )
    assert "tensorrt_llm" not in [row["name"] for row in models.index(only_ready=True)]
    await models.load("tensorrt_llm", {})
    assert models.is_ready("tensorrt_llm")


def test_an_ensembles_steps_go_with_it_if_requested():
    models = catalog()
    models.unload("ensemble", with_dependents=True)
    assert [model.name for model in models.models()] == ["tensorrt_llm_bls", "echo"]


async def test_only_some_models_are_loaded_at_the_start():
    models = catalog(loaded=["ensemble"])
    assert [model.name for model in models.models()] == ["ensemble"]
    assert {row["reason"] for row in models.index()} == {"", "not loaded"}
    await models.load("tensorrt_llm_bls", {})
    assert [model.name for model in models.models()] == ["ensemble", "tensorrt_llm_bls"]


async def test_an_ensemble_is_loaded_with_its_steps():
    models = catalog(loaded=[])
    assert models.models() == []
    await models.load("ensemble", {})
    steps = ["tensorrt_llm", "preprocessing", "postprocessing"]
    assert [model.name for model in models.models()] == ["ensemble", *steps]
    models.unload("ensemble")
    assert [model.name for model in models.models()] == steps


async def test_a_step_that_is_loaded_stays_as_it_is():
    models = catalog()
    await models.load("tensorrt_llm", {"config": '{"max_batch_size": 3}'})
    models.unload("preprocessing")
    await models.load("ensemble", {})
    assert models.find("tensorrt_llm").max_batch_size == 3
    assert models.is_ready("preprocessing")


def declared(name, kind, *steps):
    config = {"ensemble_scheduling": {"step": [{"model_name": step} for step in steps]}}
    return ModelDeclaration(
        name=name, kind=kind, base_model="echo", max_batch_size=8, config=config if steps else None
    )


TWO_ENSEMBLES = [
    declared("chat", ENSEMBLE, "chat_pre", "core", "post"),
    declared("raw", ENSEMBLE, "raw_pre", "core", "post"),
    declared("chat_pre", PREPROCESSING),
    declared("raw_pre", PREPROCESSING),
    declared("core", TENSORRT_LLM),
    declared("post", POSTPROCESSING),
]


async def test_the_steps_are_those_that_its_configuration_names():
    control = ModelControl(ControlMode.EXPLICIT, loaded=[])
    models = Catalog(EchoService(), control=control, declarations=TWO_ENSEMBLES)
    await models.load("raw", {})
    assert {model.name for model in models.models()} == {"raw", "raw_pre", "core", "post"}
    await models.load("chat", {})
    steps = {"preprocessing": "raw_pre", "tensorrt_llm": "core", "postprocessing": "post"}
    assert models.steps(models.find("raw")) == steps
    assert models.steps(models.find("chat")) == {**steps, "preprocessing": "chat_pre"}
    assert models.steps(models.find("core")) == {}
    models.unload("raw", with_dependents=True)
    assert [model.name for model in models.models()] == ["chat", "chat_pre"]


async def test_a_step_that_cannot_be_loaded_keeps_its_ensemble_away():
    def reload(declaration, config, files):
        if declaration.name == "postprocessing":
            raise InvalidRequestError("its folder is broken")
        return declaration

    models = catalog(loaded=[], reload=reload)
    with pytest.raises(InvalidRequestError, match="its folder is broken"):
        await models.load("ensemble", {})
    assert models.models() == []


async def test_a_load_overrides_the_configuration():
    models = catalog()
    override = {"max_batch_size": 3, "model_transaction_policy": {"decoupled": True}}
    await models.load("ensemble", {"config": json.dumps(override)})
    assert models.find("ensemble").max_batch_size == 3
    assert models.find("ensemble").configuration()["max_batch_size"] == 3
    assert models.find("ensemble").is_decoupled is True
    await models.load("ensemble", {})
    assert models.find("ensemble").max_batch_size == 128


# Triton's text.
@pytest.mark.parametrize(
    ("parameters", "error", "fragment"),
    [
        ({"config": 3}, InvalidRequestError, "parameter 'config', expected string_param"),
        ({"config": "{bad"}, InvalidRequestError, "must be a ModelConfig as JSON"),
        ({"config": "[1]"}, InvalidRequestError, "must be a ModelConfig as JSON"),
        ({"config": '{"bogus": 1}'}, InvalidRequestError, "bogus"),
        ({"config": '{"max_batch_size": "x"}'}, InvalidRequestError, "max_batch_size"),
        ({"config": '{"max_batch_size": -1}'}, InvalidRequestError, "must be in"),
        ({"config": '{"name": "other"}'}, InvalidRequestError, "its name is 'other'"),
        ({"config": "[" * 9999}, InvalidRequestError, "must be a ModelConfig as JSON"),
        ({"bogus": "x"}, InvalidRequestError, "unrecognized load parameter 'bogus'."),
        ({"file:1/x": "no bytes"}, InvalidRequestError, "expected bytes_param"),
        ({"file:1/x": b"x"}, InvalidRequestError, "requires 'config' along with files"),
        (
            {"file:1/x": b"x", "config": "{}"},
            UnsupportedFeatureError,
            "cannot be replaced while the server runs",
        ),
    ],
)
async def test_a_bad_load_changes_nothing(parameters, error, fragment):
    models = catalog()
    models.unload("ensemble")
    with pytest.raises(error, match=fragment):
        await models.load("ensemble", parameters)
    assert not models.is_ready("ensemble")


async def test_a_model_that_is_nowhere():
    # Triton's text.
    with pytest.raises(NotFoundError, match="failed to load 'nope', failed to poll from model"):
        await catalog().load("nope", {})


async def test_a_repository_may_read_the_configuration_itself():
    seen = []

    def reload(declaration, config, files):
        seen.append((declaration.name, config, files))
        return declaration

    models = catalog(reload=reload)
    await models.load("ensemble", {"config": "{}", "file:1/x": b"y"})
    assert seen == [("ensemble", "{}", {"1/x": b"y"})]


# ---------------------------------------------------------------- models that start later


class Growing(EchoService):
    """Base models may be added."""

    def __init__(self):
        super().__init__()
        self.started = []

    async def start_model(self, name, settings):
        if settings.path == "/broken":
            raise ConfigError("its weights are torn")
        self.started.append((name, settings.path))
        self._models |= EchoService((name,))._models


def later(name, base, kind=TENSORRT_LLM):
    return ModelDeclaration(name=name, kind=kind, base_model=base, max_batch_size=8)


def discover(name):
    found = {"core": "b", "chat": "b", "bad": "bad"}
    if name not in found:
        raise InvalidRequestError(f"failed to load '{name}', failed to poll from model repository")
    base = found[name]
    path = "/broken" if base == "bad" else f"/models/{base}"
    declarations = [later(each, base) for each in found if found[each] == base]
    return FoundModel(tuple(declarations), ModelConfig(path=path))


@pytest.fixture
def growing():
    backend = Growing()
    models = Catalog(
        backend,
        declarations=[later("first", "echo"), later("core", "b")],
        control=ModelControl(ControlMode.EXPLICIT, loaded=["first"], discover=discover),
        start_model=backend.start_model,
    )
    return backend, models


async def test_a_load_starts_a_base_model_once(growing):
    backend, models = growing
    rows = {row["name"]: row["reason"] for row in models.index()}
    assert rows == {"first": "", "core": "not loaded"}
    with refused(ModelNotFoundError, "core", param="model"):
        models.find("core")
    await models.load("core", {})
    assert models.find("core").card.name == "b"
    await models.load("chat", {})
    models.unload("core")
    await models.load("core", {})
    assert [row["name"] for row in models.index(only_ready=True)] == ["first", "core", "chat"]
    assert backend.started == [("b", "/models/b")]


async def test_a_load_that_fails_changes_nothing(growing):
    backend, models = growing
    with pytest.raises(InvalidRequestError, match="failed to load 'bad': its weights are torn"):
        await models.load("bad", {})
    with pytest.raises(InvalidRequestError, match="failed to load 'gone'"):
        await models.load("gone", {})
    with refused(InvalidRequestError, "ModelConfig", "JSON", "core", "config", param="config"):
        await models.load("core", {"config": "{"})
    assert [row["name"] for row in models.index()] == ["first", "core"]
    assert backend.started == []
