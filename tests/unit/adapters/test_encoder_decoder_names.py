"""Names in PEFT's files of encoder-decoder models, and their modules in TensorRT-LLM."""

import pytest

from loraplex.adapters.formats.modules import module_of
from loraplex.adapters.formats.peft_names import PeftSlot, parse_name

T5, BART = "base_model.model.", "base_model.model.model."
NAMES = {
    f"{T5}encoder.block.7.layer.0.SelfAttention.q": (7, "encoder.q_proj", None),
    f"{T5}encoder.block.7.layer.1.DenseReluDense.wi_1": (7, "encoder.up_proj", None),
    f"{T5}encoder.block.0.layer.1.DenseReluDense.wo": (0, "encoder.down_proj", None),
    f"{T5}decoder.block.3.layer.0.SelfAttention.o": (3, "o_proj", 4),
    f"{T5}decoder.block.3.layer.0.SelfAttention.v": (3, "v_proj", 3),
    f"{T5}decoder.block.3.layer.1.EncDecAttention.k": (3, "cross_attn.k_proj", 10),
    f"{T5}decoder.block.3.layer.1.EncDecAttention.o": (3, "cross_attn.o_proj", 12),
    f"{T5}decoder.block.3.layer.2.DenseReluDense.wi": (3, "fc1", 5),
    f"{T5}decoder.block.3.layer.2.DenseReluDense.wi_0": (3, "gate_proj", 5),
    f"{T5}decoder.block.3.layer.2.DenseReluDense.wo": (3, "down_proj", 6),
    f"{BART}encoder.layers.2.self_attn.out_proj": (2, "encoder.out_proj", None),
    f"{BART}encoder.layers.2.fc1": (2, "encoder.fc1", None),
    f"{BART}decoder.layers.2.self_attn.q_proj": (2, "q_proj", 1),
    f"{BART}decoder.layers.2.self_attn.out_proj": (2, "out_proj", 4),
    f"{BART}decoder.layers.2.encoder_attn.q_proj": (2, "cross_attn.q_proj", 9),
    f"{BART}decoder.layers.2.encoder_attn.out_proj": (2, "cross_attn.out_proj", 12),
    f"{BART}decoder.layers.2.fc2": (2, "fc2", 6),
}
"""Layer, module, and id of TensorRT-LLM's module, which has none for an encoder."""


@pytest.mark.parametrize(("path", "expected"), NAMES.items(), ids=NAMES)
def test_names_of_linear_layers(path: str, expected: tuple[int, str, int | None]) -> None:
    parsed = parse_name(f"{path}.lora_A.weight")
    assert parsed is not None
    layer, module, module_id = expected
    assert (parsed.layer, parsed.module, parsed.slot) == (layer, module, PeftSlot.A)
    found = module_of(path.split(".")[-2], module)
    assert (None if found is None else found.id) == module_id


def test_no_two_layers_have_one_name() -> None:
    """An encoder's and a decoder's layers of one number stay apart."""
    found = {(layer, module) for layer, module, _ in NAMES.values()}
    assert len(found) == len(NAMES)


@pytest.mark.parametrize("name", ["shared", "model.shared"])
def test_the_shared_embedding(name: str) -> None:
    parsed = parse_name(f"base_model.model.{name}.lora_embedding_A")
    assert parsed is not None
    assert (parsed.layer, parsed.module) == (None, "embed_tokens")
