"""Command lines by a table: both spellings, switches of both times, and errors that help."""

import pytest

from loraplex.compat.convert.flag_tables import BUILD_FLAGS, CHECKPOINT_FLAGS
from loraplex.compat.flags import (
    FlagKind,
    Flags,
    check_values,
    here,
    ignored,
    read_flags,
    refused,
)
from loraplex.core.errors import ConfigError
from loraplex.core.support import Support
from support.naming import naming

ROWS = (
    here("model_dir", FlagKind.TEXT, "the model"),
    here("max_batch_size", FlagKind.WHOLE, "sequences"),
    here("lora_plugin", FlagKind.PLUGIN, "adapters", "use_lora_plugin"),
    here("modules", FlagKind.TEXTS, "modules", choices=("attn_q", "attn_k")),
    here("force", FlagKind.SWITCH, "anyway", "f"),
    ignored("paged", FlagKind.SWITCH, "it is always so"),
    refused("recipe", FlagKind.TEXT, "no recipes"),
    refused("calibrate", FlagKind.SWITCH, "no calibration"),
)


def read(*words: str) -> Flags:
    return read_flags(ROWS, words, "tool")


@pytest.mark.parametrize(
    "words",
    [
        ["--model_dir", "x", "--max_batch_size", "8"],
        ["--model_dir=x", "--max_batch_size=8"],
        ["--model-dir", "x", "--max-batch-size=8"],
    ],
)
def test_spellings(words: list[str]) -> None:
    assert read(*words).values == {"model_dir": "x", "max_batch_size": 8}


def test_hyphens_of_values_stay() -> None:
    assert read("--model-dir=a-b_c").get("model_dir") == "a-b_c"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], None),
        (["--lora_plugin"], "float16"),
        (["--use_lora_plugin", "bfloat16"], "bfloat16"),
        (["--lora_plugin", "enable"], "auto"),
        (["--lora_plugin", "disable"], None),
        (["--lora_plugin=disable"], None),
    ],
)
def test_plugins(words: list[str], value: str | None) -> None:
    assert read(*words).get("lora_plugin") == value


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--force"], True),
        (["-f"], True),
        (["--force", "enable"], True),
        (["--force=disable"], False),
        (["--force", "False"], False),
    ],
)
def test_switches(words: list[str], value: bool) -> None:
    assert read(*words).get("force") is value


def test_a_switch_takes_no_flag_for_its_word() -> None:
    assert read("--force", "--model_dir", "x").values == {"force": True, "model_dir": "x"}


def test_lists_end_at_the_next_flag() -> None:
    found = read("--modules", "attn_q", "attn_k", "--model_dir", "x")
    assert found.values == {"modules": ["attn_q", "attn_k"], "model_dir": "x"}


def test_what_has_no_effect_is_known() -> None:
    assert [row.name for row in read("--paged", "--model_dir", "x").without_effect] == ["paged"]


def test_a_refused_flag_may_request_nothing() -> None:
    assert read("--calibrate", "disable").get("calibrate") is False
    with pytest.raises(ConfigError, match=naming("--calibrate")):
        read("--calibrate")
    with pytest.raises(ConfigError, match=naming("--recipe", "rich")):
        read("--recipe", "rich")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--max_batchsize", "8"], ("--max_batchsize", "--max_batch_size")),
        (["--max_batch", "8"], ("--max_batch_size",)),
        (["--what"], ("--what", "--help")),
        (["stray"], ("stray",)),
        (["--max_batch_size", "many"], ("--max_batch_size", "many")),
        (["--lora_plugin", "fp3"], ("--lora_plugin", "auto", "float16", "fp3")),
        (["--force=maybe"], ("--force", "maybe")),
        (["--modules", "q_proj"], ("--modules", "attn_q", "attn_k", "got", "q_proj")),
        (["--model_dir"], ("--model_dir",)),
    ],
)
def test_errors_name_the_flag(words: list[str], named: tuple[object, ...]) -> None:
    with pytest.raises(ConfigError, match=naming(*named)):
        read(*words)


def test_values_of_a_file() -> None:
    found = check_values({"max_batch_size": 4, "force": True, "modules": ["attn_q"]}, ROWS, "f: ")
    assert found.values == {"max_batch_size": 4, "force": True, "modules": ["attn_q"]}
    with pytest.raises(ConfigError, match=naming("max_batch_size", "True")):
        check_values({"max_batch_size": True}, ROWS, "f: ")
    with pytest.raises(ConfigError, match=naming("batch")):
        check_values({"batch": 1}, ROWS, "f: ")


@pytest.mark.parametrize("rows", [BUILD_FLAGS, CHECKPOINT_FLAGS])
def test_tables(rows: tuple) -> None:
    names = [name for row in rows for name in (row.name, *row.aliases)]
    assert len(set(names)) == len(names)
    assert all(row.reason for row in rows)
    assert all(name == name.lower() and "-" not in name for name in names)


SEED_FLAGS = {
    "of trtllm-build": "checkpoint_dir output_dir gemm_plugin max_batch_size max_seq_len "
    "gpt_attention_plugin kv_cache_type remove_input_padding use_paged_context_fmha lora_plugin "
    "lora_target_modules max_lora_rank lora_dir lora_ckpt_source context_fmha paged_kv_cache "
    "max_input_len",
    "of build.py": "model_dir dtype use_gpt_attention_plugin use_inflight_batching paged_kv_cache "
    "remove_input_padding use_gemm_plugin output_dir use_layernorm_plugin hidden_act "
    "enable_context_fmha max_batch_size max_input_len max_output_len use_lora_plugin "
    "lora_target_modules max_lora_rank world_size tp_size",
}


@pytest.mark.parametrize("names", SEED_FLAGS.values(), ids=SEED_FLAGS)
def test_flags_that_users_have(names: str) -> None:
    known = {name: row.support for row in BUILD_FLAGS for name in (row.name, *row.aliases)}
    assert {name: known.get(name) for name in names.split()} == {
        name: known[name] for name in names.split() if known[name] is not Support.REFUSED
    }
