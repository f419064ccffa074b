"""A model of the vLLM backend: model.json, multi_lora.json, config.pbtxt."""

import json

import pytest

from loraplex.compat.triton.repository import read_repositories
from loraplex.compat.triton.setting_rows import ENGINE_ARGS, row_of
from loraplex.core.config_layers import resolve
from loraplex.core.errors import ConfigError
from loraplex.core.support import Support
from loraplex.frontends.kserve.statistics import first_response_buckets
from support.naming import naming

SEED = {
    "disable_log_requests": "true",
    "gpu_memory_utilization": 0.8,
    "tensor_parallel_size": 2,
    "block_size": 16,
    "enforce_eager": "true",
    "enable_lora": "true",
    "max_lora_rank": 16,
}


@pytest.fixture
def vllm(tmp_path):
    """Writes the files of a model and reads its repository."""
    (tmp_path / "weights").mkdir()
    folder = tmp_path / "repository" / "vllm_model"
    (folder / "1").mkdir(parents=True)

    def read(args=None, loras=None, pbtxt='backend: "vllm"'):
        (folder / "config.pbtxt").write_text(pbtxt)
        document = {"model": str(tmp_path / "weights"), **(args or {})}
        (folder / "1" / "model.json").write_text(json.dumps(document, indent=2))
        if loras is not None:
            (folder / "1" / "multi_lora.json").write_text(json.dumps(loras))
        return read_repositories([folder.parent])

    return read


def settings(repository):
    return resolve(repository.layers).models["vllm_model"]


def test_the_seed(vllm, tmp_path):
    (tmp_path / "alpaca").mkdir()
    repository = vllm(SEED, {"alpaca": str(tmp_path / "alpaca"), "lost": "/nowhere/lost"})
    model = settings(repository)
    assert model.path == str(tmp_path / "weights")
    assert model.kv_cache_fraction == 0.8
    assert (model.block_size, model.max_lora_rank) == (16, 16)
    assert (model.cuda_graphs, model.enable_lora) == (False, True)
    assert {name: a.path for name, a in model.adapters.items()} == {
        "alpaca": str(tmp_path / "alpaca"),
        "lost": "/nowhere/lost",
    }
    assert all(adapter.optional for adapter in model.adapters.values())
    (declaration,) = repository.declarations
    assert declaration.kind.name == "vllm"
    assert (declaration.max_batch_size, declaration.is_decoupled) == (0, True)
    assert declaration.options.lora_enabled
    assert any("/nowhere/lost, which does not exist" in t for t in repository.notes.warnings)
    assert any("tensor_parallel_size 2 is served as 1" in t for t in repository.notes.warnings)
    assert any("disable_log_requests has no effect" in t for t in repository.notes.infos)


def test_adapters_are_off_by_default(vllm):
    repository = vllm({}, {"alpaca": "/nowhere"})
    assert settings(repository).enable_lora is False
    assert repository.declarations[0].options.lora_enabled is False
    assert settings(repository).adapters == {}
    assert repository.notes.warnings == []


def test_adapters_without_their_list(vllm):
    # Triton's text.
    with pytest.raises(ConfigError, match=r"Triton backend cannot find .*1/multi_lora.json\. It"):
        vllm({"enable_lora": True})


def test_paths_of_adapters(vllm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("here", "repository/there", "repository/vllm_model/1/beside"):
        (tmp_path / folder).mkdir()
    written = {"a": "here", "b": "there", "c": "beside", "d": "x", "e": "later/x"}
    (tmp_path / "repository" / "later").mkdir()
    repository = vllm({"enable_lora": "True"}, written)
    adapters = settings(repository).adapters
    assert adapters["a"].path == "here"
    assert adapters["b"].path == str(tmp_path / "repository" / "there")
    assert adapters["c"].path == str(tmp_path / "repository" / "vllm_model" / "1" / "beside")
    # What does not exist yet is expected in the first place whose parent folder does.
    assert adapters["d"].path == "x"
    assert adapters["e"].path == str(tmp_path / "repository" / "later" / "x")


@pytest.mark.parametrize("loras", [["a"], {"a": 3}, {"a": ""}])
def test_lists_of_adapters_that_are_none(vllm, loras):
    with pytest.raises(ConfigError, match=r"multi_lora.json"):
        vllm({"enable_lora": True}, loras)


def test_texts_are_taken_for_values(vllm):
    model = settings(
        vllm(
            {
                "gpu_memory_utilization": "0.25",
                "max_model_len": "128",
                "max_num_seqs": 4,
                "max_num_batched_tokens": None,
                "enable_prefix_caching": "False",
                "dtype": "half",
                "swap_space": "0.5",
                "quantization": None,
                "async_scheduling": "true",
                "cudagraph_capture_sizes": [1, 2],
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
                "load_format": "safetensors",
                "rope_scaling": None,
                "tensor_parallel_size": 1,
            }
        )
    )
    assert (model.kv_cache_fraction, model.max_model_len, model.max_num_seqs) == (0.25, 128, 4)
    assert (model.enable_prefix_cache, model.dtype, model.overlap) == (False, "float16", True)
    assert model.kv_cache_host_memory_bytes == 1 << 29
    assert model.num_draft_tokens == 3
    assert model.cuda_graph_batch_sizes == (1, 2)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"gpu_memory_utilisation": 0.5}, "line 3: .*did you mean gpu_memory_utilization"),
        ({"nothing_like_it_at_all": 1}, "is not an engine argument of vLLM"),
        ({"max_num_seqs": "many"}, "line 3: max_num_seqs: 'many' is not a whole number"),
        ({"max_num_seqs": 1.5}, "1.5 is not a whole number"),
        ({"enforce_eager": "perhaps"}, "'perhaps' is not true or false"),
        ({"model": 3}, "3 is not a text"),
        ({"model": ""}, "'model' is missing"),
        ({"device": "tpu"}, "'tpu' is not auto, cuda or cpu"),
        ({"speculative_config": {"method": "eagle"}}, "only the method ngram is served"),
        ({"speculative_config": "{"}, "speculative_config is not JSON"),
        ({"load_format": "dummy"}, "weights that are not in the folder, is not served"),
        ({"hf_overrides": {"a": 1}}, "is not served; leave it out"),
    ],
)
def test_wrong_arguments_name_file_line_and_what_is_right(vllm, args, expected):
    with pytest.raises(ConfigError, match=rf"model\.json.*{expected}"):
        vllm(args)


def test_wrong_values_of_settings_name_the_line(vllm):
    with pytest.raises(ConfigError, match=naming("model.json", 3, "kv_cache_dtype")):
        settings(vllm({"kv_cache_dtype": "fp8"}))


def test_a_model_without_arguments(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.pbtxt").write_text('backend: "vllm"')
    # Triton's text.
    with pytest.raises(ConfigError, match=r"'model.json' containing vllm engine args must be"):
        read_repositories([tmp_path])


@pytest.mark.parametrize("text", ["{", "[]", "\x00", "[" * 100000])
def test_arguments_that_are_no_object(tmp_path, text):
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "vllm"')
    (tmp_path / "m" / "1" / "model.json").write_text(text)
    with pytest.raises(ConfigError, match="JSON"):
        read_repositories([tmp_path])


def test_health_and_metrics(vllm):
    pbtxt = """backend: "vllm"
parameters { key: "REPORT_CUSTOM_METRICS" value { string_value: "true" } }
parameters { key: "ENABLE_VLLM_HEALTH_CHECK" value { string_value: "true" } }"""
    (declaration,) = vllm({}, pbtxt=pbtxt).declarations
    assert declaration.options.checks_health
    assert declaration.options.reports_metrics
    (declaration,) = vllm({"disable_log_stats": True}, pbtxt=pbtxt).declarations
    assert not declaration.options.reports_metrics
    (declaration,) = vllm().declarations
    assert not declaration.options.checks_health
    assert not declaration.options.reports_metrics


def test_buckets_of_a_histogram(vllm):
    family = "nv_inference_first_response_histogram_ms"
    pbtxt = """backend: "vllm"
model_metrics { metric_control [ {
  metric_identifier { family: "FAMILY" } histogram_options { buckets: [ 5, 20.5 ] } } ] }"""
    (declaration,) = vllm({}, pbtxt=pbtxt.replace("FAMILY", family)).declarations
    assert first_response_buckets("vllm_model", declaration.config) == (5.0, 20.5)
    (declaration,) = vllm().declarations
    assert first_response_buckets("vllm_model", declaration.config) is None


def test_tensors_are_completed(vllm):
    pbtxt = 'backend: "vllm" input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]'
    (declaration,) = vllm(pbtxt=pbtxt).declarations
    names = [row["name"] for row in declaration.config["input"]]
    assert names[0] == "text_input"
    assert names.count("text_input") == 1
    assert "sampling_parameters" in names
    assert declaration.config["model_transaction_policy"] == {"decoupled": True}


def test_devices(vllm, monkeypatch):
    assert settings(vllm()).device == "auto"
    monkeypatch.setattr("loraplex.compat.triton.vllm.has_gpu", lambda: True)
    assert settings(vllm()).device == "auto"
    pbtxt = 'backend: "vllm" instance_group [ { count: 1 kind: KIND_GPU gpus: [ 1 ] } ]'
    assert settings(vllm(pbtxt=pbtxt)).device == "cuda:1"
    assert settings(vllm({"device": "cpu"})).device == "cpu"


@pytest.mark.parametrize(
    ("changes", "num_gpus", "expected"),
    [
        ({}, 2, 2),
        ({"device": "cuda"}, 4, 2),
        ({}, 1, 1),
        ({"device": "cpu"}, 2, 1),
        ({"device": "cuda:1"}, 2, 1),
        ({"pipeline_parallel_size": 2}, 8, 1),
    ],
)
def test_tensor_parallel_on_as_many_gpus(vllm, monkeypatch, changes, num_gpus, expected):
    monkeypatch.setattr("loraplex.compat.triton.vllm.has_gpu", lambda: num_gpus > 0)
    monkeypatch.setattr("loraplex.compat.triton.vllm.num_gpus", lambda: num_gpus)
    repository = vllm({"tensor_parallel_size": 2, **changes})
    assert settings(repository).tensor_parallel_size == expected
    warned = [text for text in repository.notes.warnings if "is served as 1" in text]
    assert bool(warned) == (expected == 1)


def test_the_table_of_arguments():
    keys = [row.key for row in ENGINE_ARGS]
    assert len(keys) == len(set(keys))
    for row in ENGINE_ARGS:
        assert bool(row.setting) != bool(row.reason), row.key
        assert row.support is Support.WORKS or not row.setting, row.key
    assert row_of("enable_lora").support is Support.WORKS
