"""llgtrt.json5: every key checked, mapped to a setting, or said to have no effect."""

import json

import pytest

from loraplex.compat.llgtrt import (
    LIMITS,
    RUNTIME,
    SECTIONS,
    TOKENIZER,
    Form,
    chat_template,
    check_engine,
    own_chat_template,
    read_config,
    sections,
    shown_config,
)
from loraplex.core.config import ModelConfig
from loraplex.core.config_layers import Layer, resolve
from loraplex.core.errors import ConfigError
from loraplex.core.grammar import GrammarLimits
from loraplex.core.support import Support
from support.naming import naming


def config_of(folder, text):
    (folder / "llgtrt.json5").write_text(text)
    return read_config(folder, [])


def model_of(config):
    layers = [Layer("path", {"models": {"m": {"path": "/m"}}}), *config.layers("m")]
    return resolve(layers).models["m"]


RUNTIME_VALUES = {
    "guaranteed_no_evict": (True, "batch_scheduler_policy", "guaranteed_no_evict"),
    "max_batch_size": (3, "max_num_seqs", 3),
    "max_num_tokens": (77, "max_num_batched_tokens", 77),
    "max_queue_size": (9, "max_queue_size", 9),
    "enable_kv_cache_reuse": (False, "enable_prefix_cache", False),
    "kv_cache_free_gpu_mem_fraction": (0.25, "kv_cache_fraction", 0.25),
    "kv_cache_host_memory_megabytes": (2, "kv_cache_host_memory_bytes", 2 << 20),
}


@pytest.mark.parametrize("key", [key.name for key in RUNTIME if key.support is Support.WORKS])
def test_each_runtime_key_is_its_setting(tmp_path, key):
    value, setting, expected = RUNTIME_VALUES[key]
    config = config_of(tmp_path, json.dumps({"runtime": {key: value}}))
    model = model_of(config)
    assert getattr(model, setting) == expected != getattr(ModelConfig(path="/m"), setting)
    assert json.loads(shown_config(config, model, None))["runtime"][key] == value
    assert list(config.notes()) == []


def test_guaranteed_no_evict_off(tmp_path):
    model = model_of(config_of(tmp_path, "{runtime: {guaranteed_no_evict: false}}"))
    assert model.batch_scheduler_policy == "max_utilization"


@pytest.mark.parametrize(
    "key", [key for key in RUNTIME if key.support is Support.NO_EFFECT], ids=lambda key: key.name
)
def test_what_has_no_effect_is_reported_if_it_is_not_neutral(tmp_path, key):
    other = {Form.BOOL: not key.default, Form.WHOLE: 5, Form.SHARE: 0.5}[key.kind]
    config = config_of(tmp_path, json.dumps({"runtime": {key.name: other}}))
    assert list(config.notes()) == [
        f"{tmp_path}/llgtrt.json5: runtime.{key.name} has no effect: {key.note}"
    ]
    assert list(config_of(tmp_path, json.dumps({"runtime": {key.name: key.default}})).notes()) == []


@pytest.mark.parametrize("key", [key.name for key in LIMITS])
def test_each_limit_of_grammars(tmp_path, key):
    model = model_of(config_of(tmp_path, f"{{llguidance: {{limits: {{{key}: 12}}}}}}"))
    changed = {f: getattr(model.grammar_limits, f) for f in GrammarLimits.__struct_fields__}
    assert changed.pop(key) == 12
    assert all(value == getattr(GrammarLimits(), name) for name, value in changed.items())


def test_the_tokenizer_section_replaces_entries_of_the_folders(tmp_path):
    text = """{tokenizer: {eos_token: {content: "<e>"}, bos_token: null, add_bos_token: false,
      json_start_token: "<t>", n_vocab_override: 32064, model_max_length: 7}}"""
    config = config_of(tmp_path, text)
    model = model_of(config)
    assert model.tokenizer_config == {
        "eos_token": {"content": "<e>"},
        "bos_token": None,
        "add_bos_token": False,
        "model_max_length": 7,
    }
    assert model.json_start_token == "<t>"
    assert [note.partition(" has")[0].rpartition(" ")[2] for note in config.notes()] == [
        "tokenizer.n_vocab_override"
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{runtime: {max_batch_sise: 3}}", ("runtime.max_batch_sise", "runtime.max_batch_size")),
        ("{run_time: {}}", ("run_time", "runtime")),
        ("{runtime: []}", ("runtime", "[]")),
        ("{runtime: {max_batch_size: null}}", ("runtime.max_batch_size", 0, "null")),
        ("{runtime: {max_batch_size: 0}}", ("runtime.max_batch_size", 1, 0)),
        ("{runtime: {max_batch_size: true}}", ("runtime.max_batch_size", 0, "True")),
        (
            "{runtime: {kv_cache_free_gpu_mem_fraction: 1.5}}",
            ("runtime.kv_cache_free_gpu_mem_fraction", 0, 1, 1.5),
        ),
        (
            "{runtime: {kv_cache_free_gpu_mem_fraction: 0}}",
            ("runtime.kv_cache_free_gpu_mem_fraction", "more than 0", 1),
        ),
        (
            "{runtime: {cross_kv_cache_fraction: 'a'}}",
            ("runtime.cross_kv_cache_fraction", 0, 1, "null", "'a'"),
        ),
        ("{tokenizer: {bos_tokn: 'a'}}", ("tokenizer.bos_tokn", "tokenizer.bos_token")),
        ("{tokenizer: {eos_token: 5}}", ("tokenizer.eos_token", "'content'", 5)),
        ("{tokenizer: {eos_token: ''}}", ("tokenizer.eos_token", "'content'", "''")),
        ("{llguidance: {limits: 3}}", ("llguidance.limits", 3)),
        (
            "{llguidance: {limits: {step_max_item: 3}}}",
            ("llguidance.limits.step_max_item", "llguidance.limits.step_max_items"),
        ),
        ("{py: {input_processor: 'p.py'}}", ("py.input_processor", "Python", "null")),
    ],
)
def test_errors_are_reported_with_file_and_key(tmp_path, text, named):
    with pytest.raises(ConfigError, match=naming(f"{tmp_path}/llgtrt.json5", *named)):
        config_of(tmp_path, text)


def test_the_file_that_says_it_is_blamed(tmp_path):
    paths = [tmp_path / "1", tmp_path / "2"]
    paths[0].write_text("{runtime: {max_batch_size: 0}}")
    paths[1].write_text("{runtime: {max_num_tokens: 5}}")
    with pytest.raises(ConfigError, match=f"{paths[0]}: runtime.max_batch_size"):
        read_config(tmp_path, paths)
    paths[1].write_text("{runtime: {max_batch_size: 8}}")
    assert model_of(read_config(tmp_path, paths)).max_num_seqs == 8


def test_a_plugin_in_the_folder_is_refused_if_it_is_not_turned_off(tmp_path):
    (tmp_path / "input_processor.py").write_text("")
    with pytest.raises(ConfigError, match=naming("input_processor.py", "Python")):
        read_config(tmp_path, [])
    assert model_of(config_of(tmp_path, "{py: {input_processor: null}}"))


def test_paths_are_relative_to_the_file_that_names_them(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "c.json5").write_text("{py: {hf_model_dir: '../hf', arguments: {a: 1}}}")
    config = read_config(tmp_path, [other / "c.json5"])
    shown = json.loads(shown_config(config, model_of(config), None))["py"]
    assert shown["hf_model_dir"] == str(other / ".." / "hf")
    assert shown["arguments"] == {"a": 1}
    assert len(list(config.notes())) == 2


def test_the_complete_configuration_has_the_folders_tokenizer(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "pad_token": "<p>"}')
    (tmp_path / "chat_template.jinja").write_text("folder's")
    config = config_of(tmp_path, "{tokenizer: {pad_token: null}}")
    shown = json.loads(shown_config(config, model_of(config), tmp_path))
    assert shown["tokenizer"] == {
        "bos_token": "<s>",
        "pad_token": None,
        "chat_template": "folder's",
    }
    config = config_of(tmp_path, "{tokenizer: {chat_template: 'file'}}")
    assert chat_template(model_of(config), tmp_path) == "file"
    config = config_of(tmp_path, "{tokenizer: {chat_template: null}}")
    assert chat_template(model_of(config), tmp_path) is None


def test_engine_folders(tmp_path):
    with pytest.raises(ConfigError, match=naming("--engine")):
        check_engine(tmp_path / "gone", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=naming("file")):
        check_engine(tmp_path / "file", tmp_path)
    with pytest.raises(ConfigError, match=naming("config.json")):
        check_engine(tmp_path, tmp_path)
    (tmp_path / "rank0.engine").write_text("")
    with pytest.raises(ConfigError, match=naming("config.json", "rank0.engine")):
        check_engine(tmp_path, tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ConfigError, match=naming("tokenizer.json")):
        check_engine(tmp_path, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    check_engine(tmp_path, tmp_path)
    assert own_chat_template(tmp_path) is None
    (tmp_path / "chat_template.j2").write_text("")
    assert own_chat_template(tmp_path) == tmp_path / "chat_template.j2"


def test_the_tables_are_documentation():
    titles = [section.title for section in sections()]
    assert titles == [f"`{name}`" for name in (*SECTIONS, "llguidance.limits")]
    assert all(row.note for section in sections() for row in section.rows)
    assert {key.name for key in TOKENIZER} >= {"bos_token", "json_start_token"}
