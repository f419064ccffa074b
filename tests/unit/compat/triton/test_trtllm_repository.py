"""The five models of a TensorRT-LLM repository: settings, and what clients see."""

import json
import shutil

import pytest

from loraplex.compat.triton.repository import Reloading
from loraplex.core.config import Config
from loraplex.core.config_layers import resolve
from loraplex.core.errors import ConfigError
from loraplex.frontends.kserve.models.catalog import Catalog
from loraplex.frontends.kserve.models.kinds import TENSORRT_LLM
from loraplex.frontends.kserve.models.model_control import ControlMode, ModelControl
from support.echo_service import EchoService
from support.naming import naming
from support.triton_repositories import FIVE, merged, source_of


def declarations(repository):
    return {declaration.name: declaration for declaration in repository.declarations}


def served(repository, control=None):
    """The models as clients meet them."""
    backend = EchoService(models=("tensorrt_llm",))
    return Catalog(backend, declarations=repository.declarations, control=control)


def test_two_filled_values_are_enough(written):
    repository = written.read()
    found = declarations(repository)
    assert tuple(found) == FIVE
    assert {d.base_model for d in found.values()} == {"tensorrt_llm"}
    assert {name: d.kind.name for name, d in found.items()} == {name: name for name in FIVE}
    assert {d.max_batch_size for d in found.values()} == {128}
    assert {name: d.is_decoupled for name, d in found.items()} == {
        "ensemble": True,
        "postprocessing": False,
        "preprocessing": False,
        "tensorrt_llm": True,
        "tensorrt_llm_bls": True,
    }
    assert merged(repository, "tensorrt_llm") == {
        "batch_scheduler_policy": "guaranteed_no_evict",
        "enable_prefix_cache": False,
        "path": str(written.engine),
    }
    assert repository.loaded is None
    assert repository.notes.warnings == []


def test_a_filled_bls_says_itself_whether_it_is_decoupled(written):
    written.fill("tensorrt_llm_bls", decoupled_mode="False")
    assert declarations(written.read())["tensorrt_llm_bls"].is_decoupled is False


def test_parameters_are_settings_that_know_their_line(written):
    written.fill(
        "tensorrt_llm",
        enable_kv_cache_reuse="True",
        enable_trt_overlap="true",
        batching_strategy="V1",
        batch_scheduler_policy="max_utilization",
        kv_cache_free_gpu_mem_fraction="0.5",
        lora_cache_max_adapter_size="16",
        lora_cache_optimal_adapter_size="4",
        lora_cache_host_memory_bytes="1048576",
        max_attention_window_size="64,32",
        max_num_sequences="3",
        max_queue_size="7",
        max_queue_delay_microseconds="100",
        exclude_input_in_output="1",
        max_beam_width="2",
    )
    repository = written.read()
    model = resolve(repository.layers).models["tensorrt_llm"]
    assert model.enable_prefix_cache is True
    assert model.overlap is True
    assert model.batching == "static"
    assert model.batch_scheduler_policy == "max_utilization"
    assert model.kv_cache_fraction == 0.5
    assert (model.optimal_lora_rank, model.max_lora_rank) == (4, 16)
    assert model.lora_host_bytes == 1048576
    assert model.max_attention_window_size == (64, 32)
    assert model.max_num_seqs == 3
    assert (model.max_queue_size, model.max_queue_delay_microseconds) == (7, 100)
    for name in ("ensemble", "tensorrt_llm", "tensorrt_llm_bls"):
        options = served(repository).find(name).options
        assert options.excludes_input
        assert options.max_beam_width == 2
    line = written.line("tensorrt_llm", '"lora_cache_max_adapter_size"')
    pbtxt = written.path / "tensorrt_llm" / "config.pbtxt"
    source = source_of(repository, "tensorrt_llm", "max_lora_rank")
    assert source == f"{pbtxt}, line {line}: lora_cache_max_adapter_size"


def test_a_parameter_of_our_own(written):
    assert not served(written.read()).find("tensorrt_llm").options.clamps_token_ids
    own = 'parameters { key: "clamp_token_ids" value: { string_value: "true" } }'
    with (written.path / "tensorrt_llm" / "config.pbtxt").open("a") as file:
        file.write(own)
    assert served(written.read()).find("tensorrt_llm").options.clamps_token_ids


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("enable_kv_cache_reuse", "yes", "'yes' is not True, true, TRUE, 1, False"),
        ("max_beam_width", "two", "'two' is not a whole number"),
        ("kv_cache_free_gpu_mem_fraction", "much", "'much' is not a number"),
        ("gpu_device_ids", "0,a", "must be numbers of GPUs"),
        ("decoding_mode", "medusa", "medusa: .* is not served; leave it out or set top_k"),
        ("tokenizer_dir", "/nowhere/tokenizer", "there is no folder /nowhere/tokenizer"),
    ],
)
def test_wrong_values_name_file_and_line(written, key, value, expected):
    line = written.line("tensorrt_llm", f"${{{key}}}") - 2
    written.fill("tensorrt_llm", **{key: value})
    with pytest.raises(ConfigError, match=rf"config.pbtxt, line {line}: .*{expected}"):
        list(written.read().layers)


@pytest.mark.parametrize(
    ("key", "value", "valid"),
    [
        ("batch_scheduler_policy", "fastest", "max_utilization, guaranteed_no_evict"),
    ],
)
def test_wrong_choices_name_what_is_valid(written, key, value, valid):
    line = written.line("tensorrt_llm", f"${{{key}}}") - 2
    written.fill("tensorrt_llm", **{key: value})
    with pytest.raises(ConfigError, match=f"line {line}.*must be one of {valid}"):
        resolve(written.read().layers)


def test_what_has_no_effect_is_reported_once(written):
    written.fill("tensorrt_llm", medusa_choices="mc_sim", multi_block_mode="true")
    infos = written.read().notes.infos
    assert any("medusa_choices has no effect: speculation here needs" in text for text in infos)
    assert any("multi_block_mode has no effect" in text for text in infos)
    assert len(infos) == len(set(infos))


def test_zeros_that_say_nothing(written):
    written.fill("tensorrt_llm", iter_stats_max_iterations="0", sink_token_length="0")
    settings = merged(written.read(), "tensorrt_llm")
    assert "iter_stats_max_iterations" not in settings
    assert settings["sink_token_length"] == 0
    assert resolve(written.read().layers)


def test_unknown_parameters(written):
    written.replace("tensorrt_llm", max_tokens_in_paged_kv_cache="max_token_in_paged_kv_cache")
    written.fill("tensorrt_llm", max_token_in_paged_kv_cache="5")
    with pytest.raises(
        ConfigError, match=naming("max_tokens_in_paged_kv_cache", "max_token_in_paged_kv_cache")
    ):
        written.read()
    written.replace("tensorrt_llm", max_token_in_paged_kv_cache="EXECUTION_ENV_PATH")
    (warning,) = written.read().notes.warnings
    assert "EXECUTION_ENV_PATH is not known" in warning


def test_parameters_of_the_parts(written):
    written.replace("preprocessing", add_special_tokens="max_num_images")
    written.fill("preprocessing", max_num_images="4")
    infos = written.read().notes.infos
    assert "preprocessing: max_num_images has no effect: of multimodal models" in infos
    written.replace("preprocessing", max_num_images="multimodal_model_path")
    line = written.line("preprocessing", "multimodal_model_path")
    expected = rf"preprocessing/config\.pbtxt, line {line}: .* a multimodal model, is not served"
    with pytest.raises(ConfigError, match=expected):
        written.read()


def test_unknown_parameters_of_the_parts(written):
    written.replace("postprocessing", skip_special_tokens="skip_special_token")
    written.fill("postprocessing", skip_special_token="False")
    with pytest.raises(ConfigError, match=naming("skip_special_tokens")):
        written.read()


# ---------------------------------------------------------------- which models form an ensemble


def test_two_base_models(written):
    for name in FIVE:
        shutil.copytree(written.path / name, written.path / f"{name}_b")
        other = f"{name}_b"
        written.replace(other, **{f'name: "{name}"\n': f'name: "{other}"\n'})
    for part in ("preprocessing", "tensorrt_llm", "postprocessing"):
        written.replace("ensemble_b", **{f'model_name: "{part}"': f'model_name: "{part}_b"'})
    for bls in ("tensorrt_llm_bls", "tensorrt_llm_bls_b"):
        base = "tensorrt_llm_b" if bls.endswith("_b") else "tensorrt_llm"
        written.fill(bls, tensorrt_llm_model_name=base)
    found = declarations(written.read())
    assert len(found) == 10
    for name, declaration in found.items():
        assert declaration.base_model == ("tensorrt_llm_b" if name[-2:] == "_b" else "tensorrt_llm")
    assert set(merged(written.read("ensemble_b"), "tensorrt_llm")) == set(), "only what is needed"


def test_a_part_belongs_to_the_model_with_its_tokenizer(written):
    shutil.rmtree(written.path / "ensemble")
    shutil.copytree(written.path / "tensorrt_llm", written.path / "other")
    written.replace("other", **{'name: "tensorrt_llm"': 'name: "other"'})
    written.fill("tensorrt_llm_bls", tensorrt_llm_model_name="other")
    other = written.path.parent / "other_engine"
    shutil.copytree(written.engine, other)
    written.replace("other", **{str(written.engine): str(other)})
    with pytest.raises(ConfigError, match=naming("tensorrt_llm", "postprocessing")):
        written.read()
    written.fill("preprocessing", tokenizer_dir=str(other))
    written.fill("postprocessing", tokenizer_dir=str(written.engine))
    found = declarations(written.read())
    assert found["preprocessing"].base_model == "other"
    assert found["postprocessing"].base_model == "tensorrt_llm"
    assert "tokenizer" not in merged(written.read(), "other"), "it is the model's own"


def test_ensembles_that_lead_nowhere(written):
    written.replace("ensemble", **{'model_name: "tensorrt_llm"': 'model_name: "gone"'})
    with pytest.raises(ConfigError, match=naming("gone", "ensemble", "tensorrt_llm")):
        written.read()
    written.replace("ensemble", **{'model_name: "gone"': 'model_name: "preprocessing"'})
    with pytest.raises(ConfigError, match=naming("ensemble", "tensorrt_llm")):
        written.read()


def test_a_bls_of_no_model(written):
    written.fill("tensorrt_llm_bls", tensorrt_llm_model_name="gone")
    with pytest.raises(ConfigError, match=naming("gone", "tensorrt_llm")):
        written.read()


def test_options_of_the_parts(written):
    written.fill("preprocessing", add_special_tokens="False")
    written.fill("postprocessing", skip_special_tokens="perhaps")
    written.fill("tensorrt_llm_bls", accumulate_tokens="yes", tensorrt_llm_draft_model_name="draft")
    repository = written.read()
    found = declarations(repository)
    assert found["preprocessing"].options.adds_special_tokens is False
    assert found["postprocessing"].options.skips_special_tokens is True
    assert found["tensorrt_llm_bls"].options.accumulates_tokens is True
    assert found["tensorrt_llm_bls"].options.has_draft_model is True
    (warning,) = repository.notes.warnings
    assert "skip_special_tokens: 'perhaps' is neither" in warning
    models = served(repository)
    for name, accumulates in (("ensemble", False), ("tensorrt_llm_bls", True)):
        options = models.find(name).options
        assert options.accumulates_tokens is options.has_draft_model is accumulates
        assert options.adds_special_tokens is False
        assert options.skips_special_tokens is True
    # Token ids are as they were sent.
    assert models.find("tensorrt_llm").options.adds_special_tokens


def test_the_options_are_of_the_parts_that_a_model_names(written):
    """Not of the first ones of its base model; a BLS calls its parts by fixed names."""
    for part, key in (("preprocessing", "add"), ("postprocessing", "skip")):
        other = written.path / f"a_{part}"
        shutil.copytree(written.path / part, other)
        text = (other / "config.pbtxt").read_text().replace(f'"{part}"', f'"a_{part}"')
        (other / "config.pbtxt").write_text(text)
        written.replace("ensemble", **{f'"{part}"': f'"a_{part}"'})
        written.fill(f"a_{part}", **{f"{key}_special_tokens": "n"})
    models = served(written.read())
    for name, expected in (("ensemble", False), ("tensorrt_llm_bls", True)):
        options = models.find(name).options
        assert options.adds_special_tokens is options.skips_special_tokens is expected
    assert models.steps(models.find("ensemble"))["preprocessing"] == "a_preprocessing"


async def test_an_ensemble_follows_a_part_that_is_loaded_again(written):
    repository = written.read()
    reloading = Reloading(repository, [], lambda _: Config())
    models = served(repository, ModelControl(ControlMode.EXPLICIT, reload=reloading))
    no = {"parameters": {"add_special_tokens": {"string_value": "no"}}}
    for name, config, expected in (
        ("preprocessing", no, False),
        ("ensemble", {"max_batch_size": 2}, False),
    ):
        await models.load(name, {"config": json.dumps(config)})
        assert models.find("ensemble").options.adds_special_tokens is expected
        assert models.find("tensorrt_llm_bls").options.adds_special_tokens is expected


async def test_an_ensemble_is_decoupled_as_its_model_is_now(written):
    repository = written.read()
    reloading = Reloading(repository, [], lambda _: Config())
    models = served(repository, ModelControl(ControlMode.EXPLICIT, reload=reloading))
    for is_decoupled in (False, True):
        policy = {"model_transaction_policy": {"decoupled": is_decoupled}}
        await models.load("tensorrt_llm", {"config": json.dumps(policy)})
        for name in ("tensorrt_llm", "ensemble"):
            model = models.find(name)
            assert model.is_decoupled is is_decoupled
            assert (
                model.configuration()["model_transaction_policy"]
                == policy["model_transaction_policy"]
            )


# ---------------------------------------------------------------- tokenizer, adapters, devices


def test_one_tokenizer_for_all_parts(written):
    tokenizer = written.path.parent / "tokenizer"
    tokenizer.mkdir()
    written.fill("preprocessing", tokenizer_dir=str(tokenizer))
    assert merged(written.read(), "tensorrt_llm")["tokenizer"] == str(tokenizer)
    written.fill("postprocessing", tokenizer_dir=str(written.engine))
    with pytest.raises(ConfigError, match=naming("postprocessing", "tokenizer_dir")):
        written.read()


def test_a_tokenizer_of_the_hub(written):
    written.fill("preprocessing", tokenizer_dir="owner/name")
    written.fill("postprocessing", tokenizer_dir="owner/name")
    assert merged(written.read(), "tensorrt_llm")["tokenizer"] == "owner/name"


def test_prefetched_adapters(written):
    written.fill("tensorrt_llm", lora_prefetch_dir="adapters")
    repository = written.read()
    assert "adapter_dirs" not in merged(repository, "tensorrt_llm")
    (warning,) = repository.notes.warnings
    assert "there is no folder adapters: nothing is loaded" in warning
    adapters = written.path / "tensorrt_llm" / "adapters"
    adapters.mkdir()
    assert merged(written.read(), "tensorrt_llm")["adapter_dirs"] == [str(adapters)]


def test_devices(written, monkeypatch):
    written.fill("tensorrt_llm", gpu_device_ids="1,2;3")
    assert any("this machine has no GPU" in text for text in written.read().notes.infos)
    monkeypatch.setattr("loraplex.compat.triton.model_folder.has_gpu", lambda: True)
    repository = written.read()
    assert merged(repository, "tensorrt_llm")["device"] == "cuda:1"
    assert any("of the GPUs 1,2;3 one is used" in text for text in repository.notes.warnings)
    written.replace("tensorrt_llm", **{"1,2;3": ""})
    assert "device" not in merged(written.read(), "tensorrt_llm")


# ---------------------------------------------------------------- what clients see


def test_configuration_as_declared_and_completed(written):
    config = declarations(written.read())["tensorrt_llm"].config
    assert config["backend"] == "tensorrtllm"
    assert config["max_batch_size"] == 128
    assert config["model_transaction_policy"] == {"decoupled": True}
    names = [row["name"] for row in config["input"]]
    assert names == [row.name for row in TENSORRT_LLM.declared_inputs]
    rows = {row["name"]: row for row in config["input"]}
    assert rows["input_ids"]["dims"] == [-1]
    assert rows["input_lengths"]["reshape"] == {"shape": []}
    assert rows["input_lengths"]["optional"] is False
    assert config["instance_group"][0]["name"] == "tensorrt_llm_0"
    assert config["version_policy"] == {"latest": {"num_versions": 1}}
    assert json.dumps(config)
    line = config["parameters"]["gpt_model_path"]["string_value"]
    assert line == str(written.engine)


def test_an_older_repository_declares_less(written):
    pbtxt = written.path / "postprocessing" / "config.pbtxt"
    pbtxt.write_text(
        'backend: "python" max_batch_size: 4\n'
        'input [ { name: "TOKENS_BATCH" data_type: TYPE_INT32 dims: [ -1, -1 ] } ]\n'
        'output [ { name: "OUTPUT" data_type: TYPE_STRING dims: [ -1 ] } ]\n'
    )
    found = declarations(written.read())["postprocessing"]
    assert [row["name"] for row in found.config["input"]] == ["TOKENS_BATCH"]
    assert found.max_batch_size == 4


def test_tensors_of_another_type(written):
    written.replace(
        "postprocessing",
        **{'"TOKENS_BATCH"\n    data_type: TYPE_INT32': '"TOKENS_BATCH"\n data_type: TYPE_INT64'},
    )
    line = written.line("postprocessing", "TOKENS_BATCH")
    expected = f"line {line}: input 'TOKENS_BATCH' has data_type TYPE_INT64, but it is TYPE_INT32"
    with pytest.raises(ConfigError, match=expected):
        written.read()


def test_unknown_tensors(written):
    written.replace("tensorrt_llm", **{'"early_stopping"': '"stopping_early"'})
    (warning,) = written.read().notes.warnings
    assert "input 'stopping_early' is declared, but not known here" in warning


def test_logits_may_have_the_type_that_the_operator_filled_in(written):
    written.fill("tensorrt_llm", logits_datatype="TYPE_FP16")
    declaration = declarations(written.read())["tensorrt_llm"]
    assert declaration.options.logits_datatype == "FP16"
    assert declaration.options.generation_logits_datatype == "FP16"
    config = declaration.config
    types = {row["name"]: row["data_type"] for row in config["output"]}
    assert types["context_logits"] == "TYPE_FP16"


def test_logits_may_have_two_types(written):
    generation = 'name: "generation_logits"\n    data_type: '
    written.replace("tensorrt_llm", **{generation + "${logits_datatype}": generation + "TYPE_BF16"})
    written.fill("tensorrt_llm", logits_datatype="TYPE_FP16")
    for name in ("ensemble", "tensorrt_llm"):
        options = served(written.read()).find(name).options
        assert options.logits_datatype == "FP16"
        assert options.generation_logits_datatype == "BF16"


def test_the_batch_size_of_the_build(written):
    built = {"loraplex": {}, "build_config": {"max_batch_size": 8}, "pretrained_config": {}}
    (written.engine / "config.json").write_text(json.dumps(built))
    assert {d.max_batch_size for d in written.read().declarations} == {8}
    written.fill("tensorrt_llm", triton_max_batch_size="2")
    assert declarations(written.read())["tensorrt_llm"].max_batch_size == 2


# ---------------------------------------------------------------- what is loaded


def test_only_wanted_models_and_their_parts(written):
    repository = written.read("ensemble")
    assert repository.loaded == ("ensemble", "preprocessing", "tensorrt_llm", "postprocessing")
    assert tuple(declarations(repository)) == FIVE, "what stands before the same model may follow"
    with pytest.raises(ConfigError, match=naming("--load-model", "gone", "tensorrt_llm")):
        written.read("gone")


def test_errors_name_the_users_key(written):
    written.fill("tensorrt_llm", batching_strategy="V3")
    line = written.line("tensorrt_llm", '"gpt_model_type"')
    # The original's words, which its tests look for in the log.
    said = rf"line {line}: gpt_model_type: Invalid gpt_model_type\. Must be v1/inflight.*, got 'V3'"
    with pytest.raises(ConfigError, match=said):
        written.read()
