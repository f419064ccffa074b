"""A load request changes what clients see of a model, and nothing that needs another engine."""

import json

import pytest

from loraplex.compat.triton.repository import Reloading
from loraplex.core.config import Config
from loraplex.core.errors import InvalidRequestError, NotReadyError, UnsupportedFeatureError
from support.naming import naming, refused


@pytest.fixture
def repository(written):
    return written.read()


def declared(repository, name):
    return next(model for model in repository.declarations if model.name == name)


def load(repository, name, config, files=None):
    text = None if config is None else json.dumps(config)
    reloading = Reloading(repository, [], lambda _: Config())
    return reloading(declared(repository, name), text, files or {})


def test_fields_that_are_sent_replace_those_of_the_file(repository):
    before = declared(repository, "tensorrt_llm")
    changed = load(repository, "tensorrt_llm", {"max_batch_size": 7})
    assert changed.max_batch_size == 7
    assert changed.is_decoupled is before.is_decoupled is True
    assert changed.config["max_batch_size"] == 7
    assert changed.config["input"] == before.config["input"]
    assert declared(repository, "tensorrt_llm").max_batch_size == before.max_batch_size


def test_a_repository_that_is_not_there_for_now(repository, tmp_path):
    reloading = Reloading(repository, [tmp_path / "unmounted"], lambda _: Config())
    with pytest.raises(NotReadyError, match=naming("unmounted", "tensorrt_llm")):
        reloading.discover("tensorrt_llm")


def test_parameters_take_effect(repository):
    yes = {"parameters": {"accumulate_tokens": {"string_value": "yes"}}}
    assert not declared(repository, "tensorrt_llm_bls").options.accumulates_tokens
    assert load(repository, "tensorrt_llm_bls", yes).options.accumulates_tokens


def test_without_a_configuration_the_file_is_read_again(repository, written):
    written.fill("tensorrt_llm_bls", accumulate_tokens="yes")
    assert load(repository, "tensorrt_llm_bls", None).options.accumulates_tokens


def test_what_needs_another_engine_is_named(repository, written):
    parameters = {
        "gpt_model_path": {"string_value": str(written.engine)},
        "max_beam_width": {"string_value": "2"},
    }
    changed = load(repository, "tensorrt_llm", {"parameters": parameters})
    assert changed.options.max_beam_width == 2
    parameters["batch_scheduler_policy"] = {"string_value": "max_utilization"}
    parameters["kv_cache_free_gpu_mem_fraction"] = {"string_value": "0.5"}
    with refused(
        UnsupportedFeatureError,
        "batch_scheduler_policy",
        "kv_cache_free_gpu_mem_fraction",
        "tensorrt_llm",
        param="config",
    ):
        load(repository, "tensorrt_llm", {"parameters": parameters})


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"name": "other"}, ("config.pbtxt", "tensorrt_llm", "other")),
        ({"bogus": 1}, ("ModelConfig", "JSON", "tensorrt_llm", "config", "bogus")),
        (
            {"parameters": {"gpt_model_path": {"string_value": "/nowhere"}}},
            ("/nowhere", "tensorrt_llm", "gpt_model_path"),
        ),
        (
            {"parameters": {"max_beam_width": {"string_value": "x"}}},
            ("gpt_model_path", "tensorrt_llm", "config.pbtxt"),
        ),
    ],
)
def test_errors_are_reported(repository, config, named):
    with pytest.raises(InvalidRequestError, match=naming(*named)):
        load(repository, "tensorrt_llm", config)


def test_files_come_along(repository):
    assert load(repository, "postprocessing", {}, {"1/note.txt": b"x"}).name == "postprocessing"


@pytest.mark.parametrize("path", ["../x", "/etc/x", "config.pbtxt", "a\0b", "", "1/" + "x" * 300])
def test_files_stay_in_the_folder(repository, path):
    with pytest.raises(
        InvalidRequestError, match=naming("path", "postprocessing", 1, "config.pbtxt")
    ):
        load(repository, "postprocessing", {}, {path: b"x"})
