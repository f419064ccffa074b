import json
import math

import numpy as np
import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from loraplex.adapters.formats.peft_config import parse_config, read_config
from loraplex.core.errors import InvalidAdapterError, UnsupportedFeatureError
from support.naming import naming


def parse(**values):
    return parse_config(json.dumps({"peft_type": "LORA"} | values).encode())


PATHS = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 10, 11)
    for module in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
]
ENDS = ["model.embed_tokens", "lm_head"]


def test_what_peft_saves_is_understood(tmp_path):
    saved = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"], task_type="CAUSAL_LM")
    saved.save_pretrained(tmp_path)
    config = read_config(tmp_path, 1 << 20)
    assert (config.r, config.lora_alpha, config.target_modules) == (4, 6, ["q_proj"])


# What PEFT 0.2 and 0.4 wrote: keys that are gone since, and none of those that came later.
OLDER = {
    "0.2": {
        "base_model_name_or_path": "decapoda-research/llama-7b-hf",
        "bias": "none",
        "enable_lora": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "merge_weights": False,
        "modules_to_save": None,
        "r": 8,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
    },
    "0.4": {
        "auto_mapping": None,
        "base_model_name_or_path": "meta-llama/Llama-2-7b-hf",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": 16,
        "lora_dropout": 0.1,
        "modules_to_save": None,
        "r": 8,
        "revision": None,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
    },
}


@pytest.mark.parametrize("version", OLDER)
def test_what_older_versions_saved_is_understood(version):
    config = parse(**OLDER[version])
    assert config.settings_of(PATHS[0]) == (True, 8, 2.0)
    assert [config.targets(path) for path in PATHS[:3]] == [True, False, False]
    assert (config.use_dora, config.lora_bias, config.use_rslora) == (False, False, False)
    assert config.modules_to_save == []


def test_what_is_not_said_is_peft_s_default():
    config, default = parse(), LoraConfig()
    for field in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"):
        assert getattr(config, field) == getattr(default, field), field
    for field in ("use_dora", "lora_bias", "ensure_weight_tying"):
        assert getattr(config, field) is getattr(default, field) is False, field


@pytest.mark.parametrize(
    "pattern",
    [
        {},
        {"q_proj": 3},
        {"layers.1.self_attn.q_proj": 3, "q_proj": 5},
        {"q_proj": 5, "layers.1.self_attn.q_proj": 3},
        {r"model.layers.\d+.self_attn.(q|k)_proj": 7},
        {r"^model.layers.0.*": 7},
        {"proj": 9},
        {".*": 2},
        {"1.self_attn.k_proj": 4},
    ],
)
def test_patterns_match_as_in_peft(pattern):
    config = parse(r=8, lora_alpha=16, rank_pattern=pattern, alpha_pattern=pattern)
    for path in PATHS:
        expected = pattern.get(get_pattern_key(pattern.keys(), path), 8)
        alpha = pattern.get(get_pattern_key(pattern.keys(), path), 16)
        settings = config.settings_of(path)
        assert (settings.rank, settings.scale) == (expected, np.float32(alpha / expected))


def test_rank_stabilised_scale():
    assert parse(r=8, lora_alpha=16, use_rslora=True).settings_of(PATHS[0]).scale == np.float32(
        16 / math.sqrt(8)
    )


TARGETS = [
    {"target_modules": ["q_proj", "down_proj"]},
    {"target_modules": ["proj"]},
    {"target_modules": ["model.layers.1.self_attn.q_proj", "k_proj"]},
    {"target_modules": r".*\.(q|k)_proj"},
    {"target_modules": r"model\.layers\.1.*"},
    {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["k_proj"]},
    {"target_modules": ["q_proj"], "exclude_modules": r".*layers\.1\..*"},
    {"target_modules": ["q_proj"], "layers_to_transform": 1},
    {"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [0, 11]},
    {"target_modules": ["q_proj"], "layers_to_transform": []},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "h"},
    {"target_modules": ["q_proj", "lm_head"]},
    {"target_modules": ["embed_tokens"]},
    {"target_modules": ".*"},
    {"target_modules": ["q_proj", "k_proj"], "modules_to_save": ["k_proj"]},
    {"target_modules": ".*", "modules_to_save": ["lm_head"]},
    {"target_modules": ["q_proj", "embed_tokens"], "layers_to_transform": [1]},
]


@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_targets_are_those_of_peft(targets):
    ours = parse(**targets)
    theirs = LoraConfig(**targets)
    for path in PATHS + ENDS:
        found = check_target_module_exists(theirs, path)
        expected = bool(found) and "Excluded" not in type(found).__name__
        assert ours.targets(path) == expected, path


@pytest.mark.parametrize("all_of_them", [{"target_modules": "all-linear"}, {}])
def test_all_linear_and_nothing_said_target_everything(all_of_them):
    assert all(parse(**all_of_them).targets(path) for path in PATHS)


def test_all_linear_leaves_out_the_output_layer_as_peft_does():
    config = parse(target_modules="all-linear")
    assert not any(config.targets(path) for path in ENDS)


@pytest.mark.parametrize(
    ("names", "saved"),
    [
        (["lm_head"], {"lm_head"}),
        (["norm"], {"model.norm", "model.layers.0.input_layernorm"}),
        (["input_layernorm"], {"model.layers.0.input_layernorm"}),
        ([], set()),
    ],
)
def test_a_copy_is_named_by_the_end_of_its_path(names, saved):
    paths = ["lm_head", "model.embed_tokens", "model.norm", "model.layers.0.input_layernorm"]
    config = parse(modules_to_save=names)
    assert {path for path in paths if config.saves(path)} == saved


@pytest.mark.parametrize(
    "config",
    [
        {"lora_alpha": 1e308},
        {"lora_alpha": -1e40},
        {"lora_alpha": 1e40, "use_rslora": True},
        {"alpha_pattern": {"q_proj": 1e300}},
    ],
    ids=str,
)
def test_a_scale_that_float32_does_not_hold_is_refused(config):
    with pytest.raises(
        InvalidAdapterError, match=naming(PATHS[0], "model.layers.0.self_attn.q_proj")
    ):
        parse(**config).settings_of(PATHS[0])


def test_a_path_that_peft_writes_for_a_tied_embedding_means_both_ends():
    config = parse(target_modules=["q_proj", "model.embed_tokens"], ensure_weight_tying=True)
    assert all(config.targets(path) for path in ENDS)
    assert not parse(target_modules=["model.embed_tokens"]).targets("lm_head")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("pissa", ("path_initial_model_for_weight_conversion", "init_lora_weights", "pissa")),
        ("olora", ("path_initial_model_for_weight_conversion", "init_lora_weights", "olora")),
        ("corda", ("path_initial_model_for_weight_conversion", "init_lora_weights", "corda")),
        ("loftq", ("LoftQ", "init_lora_weights", "loftq")),
    ],
)
def test_an_init_that_changes_the_base_is_refused_with_its_conversion(value, named):
    with pytest.raises(UnsupportedFeatureError, match=naming(*named)):
        parse(init_lora_weights=value)


def test_ensured_ties_make_the_embedding_and_the_output_layer_one():
    targeted = parse(target_modules=["embed_tokens"], ensure_weight_tying=True)
    assert all(targeted.targets(path) for path in ENDS)
    copied = parse(modules_to_save=["lm_head"], ensure_weight_tying=True)
    assert all(copied.saves(path) for path in ENDS)


def test_trained_tokens_of_a_list_are_of_the_embedding():
    of_list = parse(trainable_token_indices=[4, 2])
    assert (of_list.token_indices("embed_tokens"), of_list.token_indices("lm_head")) == ([4, 2], [])
    both = parse(trainable_token_indices={"model.embed_tokens": [1], "lm_head": [0, 5]})
    assert (both.token_indices("embed_tokens"), both.token_indices("lm_head")) == ([1], [0, 5])
    assert both.modules_with_tokens == ["embed_tokens", "lm_head"]


OTHER_METHODS = ("VERA", "LOHA", "LOKR", "OFT", "BOFT", "ADALORA", "IA3", "PROMPT_TUNING", "XLORA")


@pytest.mark.parametrize(
    "feature",
    [
        {"peft_type": "IA3"},
        {"peft_type": None},
        *({"peft_type": name} for name in OTHER_METHODS),
        {"megatron_config": {"a": 1}},
        {"layer_replication": [[0, 4]]},
        {"target_parameters": ["w"]},
        {"alora_invocation_tokens": [1]},
        {"use_qalora": True},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa_niter_16"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "corda"},
        {"init_lora_weights": "loftq"},
        {"init_lora_weights": "lora_ga"},
        {"init_lora_weights": "of_tomorrow"},
        {"init_lora_weights": 3},
        {"trainable_token_indices": {"wte": [1]}},
        {"use_bdlora": {"nblocks": 2}},
        {"arrow_config": {"top_k": 2}},
        {"some_future_feature": 3},
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(feature):
    (name,) = feature
    with pytest.raises(UnsupportedFeatureError, match=name):
        parse(**feature)


@pytest.mark.parametrize(
    "harmless",
    [
        {"bias": "none", "use_dora": False, "modules_to_save": None, "layer_replication": []},
        {"init_lora_weights": True},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"fan_in_fan_out": True},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"lora_dropout": 0.1, "inference_mode": True, "task_type": "CAUSAL_LM", "revision": "x"},
        {"some_future_feature": None, "another": False, "third": {}},
        {"rank_pattern": None, "alpha_pattern": None},
        {"lora_alpha": 16.5},
    ],
    ids=str,
)
def test_what_changes_nothing_is_accepted(harmless):
    parse(**harmless)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"r": "8"}, (".r",)),
        ({"r": 0}, ("r", 0)),
        ({"r": 10**400}, ("r",)),
        ({"rank_pattern": {"q_proj": 10**400}}, ("q_proj",)),
        ({"r": 2**31}, (2147483647, "r")),
        ({"lora_alpha": 10**400}, (".lora_alpha",)),
        ({"trainable_token_indices": [2**63]}, ("trainable_token_indices", "embed_tokens")),
        ({"r": None}, ("r",)),
        ({"lora_alpha": None}, ("lora_alpha",)),
        ({"rank_pattern": {"q": -1}}, ("q", 1, -1)),
        ({"rank_pattern": {"(": 1}}, ("expression",)),
        ({"alpha_pattern": {"[": 1}}, ("expression",)),
        ({"target_modules": "(q"}, ("(q",)),
        ({"layers_pattern": ["("]}, ("expression",)),
        ({"target_modules": 3}, ("$.target_modules",)),
        ({"bias": "some"}, ("lora_only", "some", "none", "all")),
        ({"use_dora": True, "lora_bias": True}, ("use_dora", "lora_bias")),
        (
            {"trainable_token_indices": [3, 3]},
            ("trainable_token_indices", "[3, 3]", "embed_tokens"),
        ),
        (
            {"trainable_token_indices": {"lm_head": [-1]}},
            ("lm_head", "trainable_token_indices", "[-1]"),
        ),
        ({"modules_to_save": "lm_head"}, ("$.modules_to_save",)),
    ],
)
def test_a_bad_value_is_named(bad, named):
    with pytest.raises(InvalidAdapterError, match=naming(*named)):
        parse(**bad)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 50_000])
def test_what_is_not_a_json_object(content):
    with pytest.raises(InvalidAdapterError, match="JSON"):
        parse_config(content)


def test_errors_name_the_file(tmp_path):
    with pytest.raises(InvalidAdapterError, match=naming("adapter_config.json")):
        read_config(tmp_path, 100)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(UnsupportedFeatureError, match=str(tmp_path)):
        read_config(tmp_path, 100)
