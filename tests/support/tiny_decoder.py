"""A small decoder's configuration, for tests that need sizes and no weights."""

from typing import Final

from loraplex.models.config import DecoderConfig, RopeConfig

TINY_DECODER: Final = DecoderConfig(
    architecture="LlamaForCausalLM",
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=100,
    max_position_embeddings=100,
    norm_eps=1e-6,
    rope=RopeConfig(),
    layer_windows=(None, None),
    dtype="bfloat16",
)
