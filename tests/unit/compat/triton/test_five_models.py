"""The repository that we write: the shipped template, and a filled one."""

import re
from pathlib import Path

import pytest

from loraplex.compat.triton.five_models import FILLED, MODELS, config_text, write_five_models
from loraplex.compat.triton.model_folder import Notes, parse_pbtxt, read_model_folders
from loraplex.compat.triton.repository import read_repositories
from loraplex.compat.triton.roles import (
    KINDS,
    PART_PARAMETERS,
    TENSORRT_LLM_PARAMETERS,
    Role,
    role_of,
)
from loraplex.core.errors import ConfigError
from loraplex.frontends.kserve.models.kinds import TENSORRT_LLM
from support.naming import naming
from tools.triton_page import TEMPLATE_VARIABLES

COMPAT = Path(__file__).parents[4] / "compat"
SHIPPED = COMPAT / "tensorrtllm_backend" / "all_models" / "inflight_batcher_llm"
README_NAMES = {
    "ensemble": "triton_max_batch_size logits_datatype",
    "preprocessing": "tokenizer_dir triton_max_batch_size preprocessing_instance_count",
    "tensorrt_llm": "triton_backend triton_max_batch_size decoupled_mode engine_dir "
    "max_queue_delay_microseconds batching_strategy max_queue_size "
    "encoder_input_features_data_type logits_datatype enable_trt_overlap enable_kv_cache_reuse",
    "postprocessing": "tokenizer_dir triton_max_batch_size postprocessing_instance_count",
    "tensorrt_llm_bls": "triton_max_batch_size decoupled_mode bls_instance_count logits_datatype",
}


@pytest.mark.parametrize("role", MODELS)
def test_the_shipped_template_is_what_the_tables_say(role):
    name = KINDS[role].name
    assert (SHIPPED / name / "config.pbtxt").read_text() == config_text(role)
    assert (SHIPPED / name / "1" / ".gitkeep").is_file()


@pytest.mark.parametrize("role", MODELS)
def test_every_name_that_guides_fill_in_is_there(role):
    text = config_text(role)
    for name in README_NAMES[KINDS[role].name].split():
        assert f"${{{name}}}" in text
    assert not re.search(r"\$(?!\{\w+\})", text)


def test_every_parameter_of_the_template_is_known():
    config = parse_pbtxt(config_text(Role.TENSORRT_LLM), "template")
    assert set(config.parameters) <= {row.key for row in TENSORRT_LLM_PARAMETERS}


def test_every_name_to_fill_in_has_a_row():
    rows = {row.name for row in TEMPLATE_VARIABLES}
    rows |= {row.key for row in TENSORRT_LLM_PARAMETERS}
    rows |= {row.key for table in PART_PARAMETERS.values() for row in table}
    names = {name for role in MODELS for name in re.findall(r"\$\{(\w+)\}", config_text(role))}
    assert names - rows == set()


def test_each_template_has_the_role_that_it_is_for(tmp_path):
    write_five_models(tmp_path)
    folders = read_model_folders(tmp_path, Notes(), {})
    assert {f.name: role_of(f) for f in folders} == {KINDS[role].name: role for role in MODELS}


def test_the_steps_of_the_ensemble_connect():
    config = parse_pbtxt(config_text(Role.ENSEMBLE), "template")
    known = {row.name for row in config.input}
    outputs = {row.name for row in config.output}
    kinds = {kind.name: kind for kind in KINDS.values()}
    for step in config.ensemble_scheduling.step:
        kind = kinds[step.model_name]
        assert {name for name in step.input_map if name not in kind.inputs_by_name} == set()
        assert {name for name in step.output_map if name not in kind.outputs_by_name} == set()
        assert set(step.input_map.values()) <= known
        known |= set(step.output_map.values())
    assert outputs <= known
    inside = config.ensemble_scheduling.step[1].input_map
    expected = {
        "runtime_top_k": "top_k",
        "runtime_top_p": "top_p",
        "len_penalty": "length_penalty",
        "streaming": "stream",
        "lora_task_id": "lora_task_id",
        "lora_weights": "lora_weights",
        "lora_config": "lora_config",
        "exclude_input_in_output": "exclude_input_in_output",
        "seed": "seed",
        "stop_words_list": "_STOP_WORDS_IDS",
    }
    assert {name: inside[name] for name in expected} == expected
    required = {row.name for row in TENSORRT_LLM.inputs if row.required}
    assert required <= set(inside)


def test_a_filled_repository_is_ready(tmp_path):
    engine = tmp_path / 'a "folder" $x'
    engine.mkdir()
    (engine / "config.json").write_text("{}")
    write_five_models(tmp_path / "r", {"engine_dir": str(engine), "decoupled_mode": "True"})
    for path in (tmp_path / "r").glob("*/config.pbtxt"):
        assert "${" not in path.read_text()
    repository = read_repositories([tmp_path / "r"])
    assert repository.layers[-1].values["models"]["tensorrt_llm"]
    paths = [r.values["models"]["tensorrt_llm"].get("path") for r in repository.layers]
    assert str(engine) in paths
    assert {d.max_batch_size for d in repository.declarations} == {
        int(FILLED["triton_max_batch_size"])
    }


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "ensemble").mkdir()
    with pytest.raises(ConfigError, match=naming("ensemble")):
        write_five_models(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["ensemble"]
    (tmp_path / "file").touch()
    # The system's text.
    with pytest.raises(ConfigError, match="cannot write to"):
        write_five_models(tmp_path / "file")


def test_the_shipped_sample_of_the_vllm_backend():
    repository = read_repositories([COMPAT / "vllm_backend" / "samples" / "model_repository"])
    assert [declaration.name for declaration in repository.declarations] == ["vllm_model"]
