"""Public descriptions of models from Phi 2 to Baichuan: config.json and the tensors of their files.

Shapes are by name; {} is the number of a layer.
"""

import json
from pathlib import Path
from typing import Any

Tensors = dict[str, tuple[int, ...]]


def linear(name: str, num_outputs: int, num_inputs: int, *, has_bias: bool = True) -> Tensors:
    bias: Tensors = {f"{name}.bias": (num_outputs,)} if has_bias else {}
    return {f"{name}.weight": (num_outputs, num_inputs)} | bias


def norm(name: str, size: int, *, has_bias: bool = True) -> Tensors:
    bias: Tensors = {f"{name}.bias": (size,)} if has_bias else {}
    return {f"{name}.weight": (size,)} | bias


def llama_layer(
    hidden: int, kv: int, inner: int, *, has_bias: bool = False, has_fused_qkv: bool = False
) -> Tensors:
    """The linear layers of a decoder layer with Llama's names."""
    sizes = {"q_proj": hidden, "k_proj": kv, "v_proj": kv, "o_proj": hidden}
    if has_fused_qkv:
        sizes = {"W_pack": 3 * hidden, "o_proj": hidden}
    tensors: Tensors = {}
    for name, size in sizes.items():
        tensors |= linear(f"model.layers.{{}}.self_attn.{name}", size, hidden, has_bias=has_bias)
    for name in ("gate_proj", "up_proj"):
        tensors |= linear(f"model.layers.{{}}.mlp.{name}", inner, hidden, has_bias=has_bias)
    return tensors | linear("model.layers.{}.mlp.down_proj", hidden, inner, has_bias=has_bias)


def neox_layer(prefix: str, attention: str, hidden: int, qkv: int, *, has_bias: bool) -> Tensors:
    """The linear layers of a decoder layer with Megatron's names."""
    return (
        linear(f"{prefix}.{attention}.query_key_value", qkv, hidden, has_bias=has_bias)
        | linear(f"{prefix}.{attention}.dense", hidden, hidden, has_bias=has_bias)
        | linear(f"{prefix}.mlp.dense_h_to_4h", 4 * hidden, hidden, has_bias=has_bias)
        | linear(f"{prefix}.mlp.dense_4h_to_h", hidden, 4 * hidden, has_bias=has_bias)
    )


def opt_layers(hidden: int, inner: int) -> Tensors:
    """The decoder layers of OPT and its table of positions."""
    tensors: Tensors = {"model.decoder.embed_positions.weight": (2050, hidden)}
    layer = "model.decoder.layers.{}"
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        tensors |= linear(f"{layer}.self_attn.{name}", hidden, hidden)
    tensors |= norm(f"{layer}.self_attn_layer_norm", hidden)
    tensors |= norm(f"{layer}.final_layer_norm", hidden)
    return tensors | linear(f"{layer}.fc1", inner, hidden) | linear(f"{layer}.fc2", hidden, inner)


CONFIGS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("real_configs_rest.json").read_text(encoding="utf-8")
)

TENSORS: dict[str, Tensors] = {
    "phi-2": linear("model.embed_tokens", 51200, 2560, has_bias=False)
    | norm("model.layers.{}.input_layernorm", 2560)
    | linear("model.layers.{}.self_attn.q_proj", 2560, 2560)
    | linear("model.layers.{}.self_attn.k_proj", 2560, 2560)
    | linear("model.layers.{}.self_attn.v_proj", 2560, 2560)
    | linear("model.layers.{}.self_attn.dense", 2560, 2560)
    | linear("model.layers.{}.mlp.fc1", 10240, 2560)
    | linear("model.layers.{}.mlp.fc2", 2560, 10240)
    | norm("model.final_layernorm", 2560)
    | linear("lm_head", 51200, 2560),
    "gpt-neox-20b": linear("gpt_neox.embed_in", 50432, 6144, has_bias=False)
    | norm("gpt_neox.layers.{}.input_layernorm", 6144)
    | norm("gpt_neox.layers.{}.post_attention_layernorm", 6144)
    | neox_layer("gpt_neox.layers.{}", "attention", 6144, 18432, has_bias=True)
    | norm("gpt_neox.final_layer_norm", 6144)
    | linear("embed_out", 50432, 6144, has_bias=False),
    "starcoder2-7b": linear("model.embed_tokens", 49152, 4608, has_bias=False)
    | norm("model.layers.{}.input_layernorm", 4608)
    | norm("model.layers.{}.post_attention_layernorm", 4608)
    | linear("model.layers.{}.self_attn.q_proj", 4608, 4608)
    | linear("model.layers.{}.self_attn.k_proj", 512, 4608)
    | linear("model.layers.{}.self_attn.v_proj", 512, 4608)
    | linear("model.layers.{}.self_attn.o_proj", 4608, 4608)
    | linear("model.layers.{}.mlp.c_fc", 18432, 4608)
    | linear("model.layers.{}.mlp.c_proj", 4608, 18432)
    | norm("model.norm", 4608),
    "c4ai-command-r-v01": linear("model.embed_tokens", 256000, 8192, has_bias=False)
    | norm("model.layers.{}.input_layernorm", 8192, has_bias=False)
    | llama_layer(8192, 8192, 22528)
    | norm("model.norm", 8192, has_bias=False),
    "c4ai-command-r7b-12-2024": linear("model.embed_tokens", 256000, 4096, has_bias=False)
    | norm("model.layers.{}.input_layernorm", 4096, has_bias=False)
    | llama_layer(4096, 1024, 14336)
    | norm("model.norm", 4096, has_bias=False),
    "SmolLM3-3B": linear("model.embed_tokens", 128256, 2048, has_bias=False)
    | norm("model.layers.{}.input_layernorm", 2048, has_bias=False)
    | norm("model.layers.{}.post_attention_layernorm", 2048, has_bias=False)
    | llama_layer(2048, 512, 11008)
    | norm("model.norm", 2048, has_bias=False),
    "internlm3-8b-instruct": linear("model.embed_tokens", 128512, 4096, has_bias=False)
    | norm("model.layers.{}.input_layernorm", 4096, has_bias=False)
    | norm("model.layers.{}.post_attention_layernorm", 4096, has_bias=False)
    | llama_layer(4096, 256, 10240)
    | norm("model.norm", 4096, has_bias=False)
    | linear("lm_head", 128512, 4096, has_bias=False),
    "internlm2-chat-7b": linear("model.tok_embeddings", 92544, 4096, has_bias=False)
    | norm("model.layers.{}.attention_norm", 4096, has_bias=False)
    | norm("model.layers.{}.ffn_norm", 4096, has_bias=False)
    | linear("model.layers.{}.attention.wqkv", 6144, 4096, has_bias=False)
    | linear("model.layers.{}.attention.wo", 4096, 4096, has_bias=False)
    | linear("model.layers.{}.feed_forward.w1", 14336, 4096, has_bias=False)
    | linear("model.layers.{}.feed_forward.w3", 14336, 4096, has_bias=False)
    | linear("model.layers.{}.feed_forward.w2", 4096, 14336, has_bias=False)
    | norm("model.norm", 4096, has_bias=False)
    | linear("output", 92544, 4096, has_bias=False),
    "falcon-7b": linear("transformer.word_embeddings", 65024, 4544, has_bias=False)
    | norm("transformer.h.{}.input_layernorm", 4544)
    | neox_layer("transformer.h.{}", "self_attention", 4544, 4672, has_bias=False)
    | norm("transformer.ln_f", 4544),
    "falcon-40b": linear("transformer.word_embeddings", 65024, 8192, has_bias=False)
    | norm("transformer.h.{}.ln_attn", 8192)
    | norm("transformer.h.{}.ln_mlp", 8192)
    | neox_layer("transformer.h.{}", "self_attention", 8192, 9216, has_bias=False)
    | norm("transformer.ln_f", 8192),
    "falcon-rw-1b": linear("transformer.word_embeddings", 50304, 2048, has_bias=False)
    | norm("transformer.h.{}.input_layernorm", 2048)
    | norm("transformer.h.{}.post_attention_layernorm", 2048)
    | neox_layer("transformer.h.{}", "self_attention", 2048, 6144, has_bias=True)
    | norm("transformer.ln_f", 2048),
    "bloom-560m": linear("transformer.word_embeddings", 250880, 1024, has_bias=False)
    | norm("transformer.word_embeddings_layernorm", 1024)
    | norm("transformer.h.{}.input_layernorm", 1024)
    | norm("transformer.h.{}.post_attention_layernorm", 1024)
    | neox_layer("transformer.h.{}", "self_attention", 1024, 3072, has_bias=True)
    | norm("transformer.ln_f", 1024),
    "gpt-j-6b": linear("transformer.wte", 50400, 4096, has_bias=False)
    | norm("transformer.h.{}.ln_1", 4096)
    | linear("transformer.h.{}.attn.q_proj", 4096, 4096, has_bias=False)
    | linear("transformer.h.{}.attn.k_proj", 4096, 4096, has_bias=False)
    | linear("transformer.h.{}.attn.v_proj", 4096, 4096, has_bias=False)
    | linear("transformer.h.{}.attn.out_proj", 4096, 4096, has_bias=False)
    | linear("transformer.h.{}.mlp.fc_in", 16384, 4096)
    | linear("transformer.h.{}.mlp.fc_out", 4096, 16384)
    | norm("transformer.ln_f", 4096)
    | linear("lm_head", 50400, 4096),
    "opt-350m": linear("model.decoder.embed_tokens", 50272, 512, has_bias=False)
    | linear("model.decoder.project_in", 1024, 512, has_bias=False)
    | linear("model.decoder.project_out", 512, 1024, has_bias=False)
    | opt_layers(1024, 4096),
    "opt-1.3b": linear("model.decoder.embed_tokens", 50272, 2048, has_bias=False)
    | opt_layers(2048, 8192)
    | norm("model.decoder.final_layer_norm", 2048),
    "Baichuan-7B": linear("model.embed_tokens", 64000, 4096, has_bias=False)
    | norm("model.layers.{}.input_layernorm", 4096, has_bias=False)
    | norm("model.layers.{}.post_attention_layernorm", 4096, has_bias=False)
    | llama_layer(4096, 4096, 11008, has_fused_qkv=True)
    | norm("model.norm", 4096, has_bias=False)
    | linear("lm_head", 64000, 4096, has_bias=False),
    "Baichuan2-13B-Chat": linear("model.embed_tokens", 125696, 5120, has_bias=False)
    | norm("model.layers.{}.input_layernorm", 5120, has_bias=False)
    | norm("model.layers.{}.post_attention_layernorm", 5120, has_bias=False)
    | llama_layer(5120, 5120, 13696, has_fused_qkv=True)
    | norm("model.norm", 5120, has_bias=False)
    | linear("lm_head", 125696, 5120, has_bias=False),
}
"""What must be in the files; heads tied to the embedding need not be."""
