"""What checkpoints call a decoder's parts: with and without their root, and what they need not."""

import pytest

from loraplex.models.decoder_names import LLAMA_NAMES
from loraplex.models.gpt2 import NAMES as GPT2_NAMES


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


def test_a_module_is_called_by_its_last_name_where_that_says_which() -> None:
    assert LLAMA_NAMES.module("self_attn.o_proj") == "o_proj"
    assert GPT2_NAMES.module("mlp.c_proj") == "mlp.c_proj"
    assert GPT2_NAMES.module("attn.c_attn") == "attn.c_attn"
