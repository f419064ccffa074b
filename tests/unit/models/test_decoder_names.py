"""What checkpoints call a decoder's parts: with and without their root, and what they need not."""

import pytest

from loraplex.models.decoder_names import LLAMA_NAMES
from loraplex.models.families.gpt2 import NAMES as GPT2_NAMES
from loraplex.models.families.gpt_neox import NAMES as NEOX_NAMES


@pytest.mark.parametrize(
    ("stored", "full"),
    [
        ("transformer.h.3.ln_1.bias", "transformer.h.3.ln_1.bias"),
        ("h.3.attn.c_attn.weight", "transformer.h.3.attn.c_attn.weight"),
        ("wte.weight", "transformer.wte.weight"),
        ("wpe.weight", "transformer.wpe.weight"),
        ("ln_f.bias", "transformer.ln_f.bias"),
        ("lm_head.weight", "lm_head.weight"),
        ("foo.weight", "foo.weight"),
        ("h.11.attn.bias", None),
        ("transformer.h.0.attn.masked_bias", None),
    ],
)
def test_gpt2(stored: str, full: str | None) -> None:
    """The first checkpoints are of the decoder alone, and hold its causal mask."""
    assert GPT2_NAMES.canonical(stored) == full


def test_llama() -> None:
    assert LLAMA_NAMES.canonical("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    assert LLAMA_NAMES.canonical("model.norm.weight") == "model.norm.weight"
    assert LLAMA_NAMES.canonical("lm_head.weight") == "lm_head.weight"


@pytest.mark.parametrize(
    "stored",
    [
        "_orig_mod.model.layers.0.mlp.up_proj.weight",
        "model.layers.0._orig_mod.mlp.up_proj.weight",
        "module.model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.up_proj.weight",
    ],
)
def test_names_of_torch_s_wrappers_are_left_out(stored: str) -> None:
    assert LLAMA_NAMES.canonical(stored) == "model.layers.0.mlp.up_proj.weight"


def test_paths_outside_the_layers() -> None:
    assert LLAMA_NAMES.outer_paths("lm_head") == ("model.lm_head", "lm_head")
    assert "embed_out" in NEOX_NAMES.outer_paths(NEOX_NAMES.lm_head)
    assert "lm_head" in NEOX_NAMES.outer_paths(NEOX_NAMES.lm_head)


def test_a_module_is_called_by_its_last_name_where_that_says_which() -> None:
    assert LLAMA_NAMES.module("self_attn.o_proj") == "o_proj"
    assert GPT2_NAMES.module("mlp.c_proj") == "mlp.c_proj"
    assert GPT2_NAMES.module("attn.c_attn") == "attn.c_attn"
