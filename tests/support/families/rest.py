"""Cases of the families from Phi 2 to Baichuan."""

from typing import Any

from transformers import (
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    FalconConfig,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    Qwen2Config,
    SmolLM3Config,
    Starcoder2Config,
)

from support.families.baichuan import (
    BAICHUAN_7B,
    BAICHUAN_13B,
    VOCAB_SIZE_2,
    AlibiLlama,
    UnitHeadLlama,
)
from support.families.case import VOCAB_SIZE, FamilyCase, sizes
from support.families.llama_relatives import INTERNLM2, INTERNLM3, MISTRAL

_QKV = ("q_proj", "k_proj", "v_proj")
_NEOX_LINEARS = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
_PHI_LINEARS = (*_QKV, "dense", "fc1", "fc2")
_STARCODER_LINEARS = (*_QKV, "o_proj", "c_fc", "c_proj")
_OPT_LINEARS = (*_QKV, "out_proj", "fc1", "fc2")
_GPTJ_LINEARS = (*_QKV, "out_proj", "fc_in", "fc_out")


def phi(**changes: Any) -> PhiConfig:
    return PhiConfig(**(sizes() | changes))


def gpt_neox(**changes: Any) -> GPTNeoXConfig:
    fields = sizes(num_attention_heads=2)
    del fields["num_key_value_heads"]
    return GPTNeoXConfig(**(fields | changes))


def starcoder2(**changes: Any) -> Starcoder2Config:
    return Starcoder2Config(**(sizes() | changes))


def cohere(**changes: Any) -> CohereConfig:
    return CohereConfig(**(sizes(pad_token_id=None) | changes))


def cohere2(**changes: Any) -> Cohere2Config:
    return Cohere2Config(**(sizes(pad_token_id=None, sliding_window=8) | changes))


def _with_head_dim(config: Cohere2Config, head_dim: int) -> Cohere2Config:
    """Return a config whose heads have another size than transformers would compute."""
    config.head_dim = head_dim
    return config


def smollm3(**changes: Any) -> SmolLM3Config:
    return SmolLM3Config(**(sizes(pad_token_id=None) | changes))


def falcon(**changes: Any) -> FalconConfig:
    fields = sizes(ffn_hidden_size=48)
    del fields["num_key_value_heads"], fields["intermediate_size"]
    return FalconConfig(**(fields | changes))


def new_falcon(**changes: Any) -> FalconConfig:
    return falcon(**({"new_decoder_architecture": True, "num_kv_heads": 2} | changes))


def old_falcon(**changes: Any) -> FalconConfig:
    fields = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
    return falcon(**(fields | changes))


def bloom(**changes: Any) -> BloomConfig:
    fields = {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "n_layer": 3, "n_head": 6}
    return BloomConfig(**(fields | {"bos_token_id": None, "eos_token_id": None} | changes))


def gptj(**changes: Any) -> GPTJConfig:
    fields = {"n_embd": 32, "n_inner": 48, "n_layer": 3, "n_head": 2, "n_positions": 64}
    ids = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": None}
    return GPTJConfig(**(fields | {"rotary_dim": 4} | ids | changes))


def opt(**changes: Any) -> OPTConfig:
    fields = sizes(ffn_dim=48, pad_token_id=None, word_embed_proj_dim=32)
    del fields["num_key_value_heads"], fields["intermediate_size"]
    return OPTConfig(**(fields | changes))


def baichuan(**changes: Any) -> LlamaConfig:
    return llama(**({"num_key_value_heads": 4} | changes))


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**(sizes() | changes))


def ministral(**changes: Any) -> MinistralConfig:
    types = ["full_attention", "sliding_attention"] * 2
    return MinistralConfig(**(sizes(sliding_window=8, layer_types=types, head_dim=8) | changes))


def rope(**changes: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 50.0} | changes


CASES: dict[str, FamilyCase] = {
    "phi": FamilyCase(config=lambda: phi(qk_layernorm=True), linears=_PHI_LINEARS, is_quick=True),
    "phi-plain": FamilyCase(config=phi, linears=_PHI_LINEARS),
    "phi-part": FamilyCase(
        config=lambda: phi(rope_parameters=rope(partial_rotary_factor=0.25), hidden_size=64),
        linears=_PHI_LINEARS,
    ),
    "phi-linear": FamilyCase(
        config=lambda: phi(
            rope_parameters=rope(rope_type="linear", factor=3.0), layer_norm_eps=1e-2
        ),
        linears=_PHI_LINEARS,
    ),
    "phi-relu": FamilyCase(
        config=lambda: phi(hidden_act="relu", num_key_value_heads=1), linears=_PHI_LINEARS
    ),
    "phi-gelu": FamilyCase(
        config=lambda: phi(hidden_act="gelu", num_key_value_heads=4, qk_layernorm=True),
        linears=_PHI_LINEARS,
    ),
    "gpt-neox": FamilyCase(config=gpt_neox, linears=_NEOX_LINEARS, is_quick=True),
    "gpt-neox-one-by-one": FamilyCase(
        config=lambda: gpt_neox(use_parallel_residual=False, num_attention_heads=4),
        linears=_NEOX_LINEARS,
    ),
    "gpt-neox-no-biases": FamilyCase(
        config=lambda: gpt_neox(attention_bias=False, hidden_act="gelu_new"),
        linears=_NEOX_LINEARS,
    ),
    "gpt-neox-full": FamilyCase(
        config=lambda: gpt_neox(rope_parameters=rope(partial_rotary_factor=1.0)),
        linears=_NEOX_LINEARS,
    ),
    "gpt-neox-linear": FamilyCase(
        config=lambda: gpt_neox(
            rope_parameters=rope(rope_type="linear", factor=3.0), layer_norm_eps=1e-2
        ),
        linears=_NEOX_LINEARS,
    ),
    "gpt-neox-tied": FamilyCase(
        config=lambda: gpt_neox(tie_word_embeddings=True, hidden_size=40, hidden_act="relu"),
        linears=_NEOX_LINEARS,
    ),
    "starcoder2": FamilyCase(
        config=lambda: starcoder2(sliding_window=8), linears=_STARCODER_LINEARS, is_quick=True
    ),
    "starcoder2-full": FamilyCase(config=starcoder2, linears=_STARCODER_LINEARS),
    "starcoder2-no-biases": FamilyCase(
        config=lambda: starcoder2(use_bias=False, num_key_value_heads=1),
        linears=_STARCODER_LINEARS,
    ),
    "starcoder2-own-head": FamilyCase(
        config=lambda: starcoder2(tie_word_embeddings=False, norm_epsilon=1e-2),
        linears=_STARCODER_LINEARS,
    ),
    "starcoder2-yarn": FamilyCase(
        config=lambda: starcoder2(
            rope_parameters=rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
        ),
        linears=_STARCODER_LINEARS,
    ),
    "starcoder2-gelu": FamilyCase(
        config=lambda: starcoder2(hidden_act="gelu", num_key_value_heads=4, hidden_size=40),
        linears=_STARCODER_LINEARS,
    ),
    "cohere": FamilyCase(config=lambda: cohere(use_qk_norm=True), is_quick=True),
    "cohere-plain": FamilyCase(config=cohere),
    "cohere-scale": FamilyCase(
        config=lambda: cohere(logit_scale=3.0, use_qk_norm=True, num_key_value_heads=1)
    ),
    "cohere-biases": FamilyCase(
        config=lambda: cohere(attention_bias=True, num_key_value_heads=4, layer_norm_eps=1e-2)
    ),
    "cohere-theta": FamilyCase(config=lambda: cohere(rope_parameters=rope(), hidden_size=40)),
    "cohere-own-head": FamilyCase(
        config=lambda: cohere(tie_word_embeddings=False, use_qk_norm=True)
    ),
    "cohere2": FamilyCase(config=cohere2, is_quick=True),
    "cohere2-period": FamilyCase(
        config=lambda: cohere2(sliding_window_pattern=2, sliding_window=3)
    ),
    "cohere2-types": FamilyCase(
        config=lambda: cohere2(
            layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=5
        )
    ),
    "cohere2-biases": FamilyCase(
        config=lambda: cohere2(attention_bias=True, num_key_value_heads=1, logit_scale=2.0)
    ),
    "cohere2-head-dim": FamilyCase(config=lambda: _with_head_dim(cohere2(), 12)),
    "cohere2-theta": FamilyCase(config=lambda: cohere2(rope_parameters=rope(), hidden_size=40)),
    "cohere2-own-head": FamilyCase(
        config=lambda: cohere2(tie_word_embeddings=False, layer_norm_eps=1e-2)
    ),
    "smollm3": FamilyCase(config=smollm3, is_quick=True),
    "smollm3-windows": FamilyCase(
        config=lambda: smollm3(use_sliding_window=True, sliding_window=8)
    ),
    "smollm3-period": FamilyCase(
        config=lambda: smollm3(no_rope_layer_interval=2, rope_parameters=rope())
    ),
    "smollm3-layers": FamilyCase(
        config=lambda: smollm3(no_rope_layers=[0, 1, 1, 0], num_key_value_heads=1)
    ),
    "smollm3-types": FamilyCase(
        config=lambda: smollm3(
            layer_types=["full_attention", "sliding_attention"] * 2,
            use_sliding_window=True,
            sliding_window=5,
        )
    ),
    "smollm3-biases": FamilyCase(
        config=lambda: smollm3(attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    ),
    "falcon": FamilyCase(config=falcon, linears=_NEOX_LINEARS, is_quick=True),
    "falcon-heads": FamilyCase(
        config=lambda: falcon(multi_query=False, bias=True, rope_parameters=rope()),
        linears=_NEOX_LINEARS,
    ),
    "falcon-one-by-one": FamilyCase(
        config=lambda: falcon(parallel_attn=False, activation="relu", ffn_hidden_size=None),
        linears=_NEOX_LINEARS,
    ),
    "falcon-new": FamilyCase(config=new_falcon, linears=_NEOX_LINEARS, is_quick=True),
    "falcon-new-one-norm": FamilyCase(
        config=lambda: new_falcon(num_ln_in_parallel_attn=1, bias=True), linears=_NEOX_LINEARS
    ),
    "falcon-new-own-head": FamilyCase(
        config=lambda: new_falcon(tie_word_embeddings=False, num_kv_heads=4),
        linears=_NEOX_LINEARS,
    ),
    # The eager attention of transformers adds Falcon's ALiBi twice.
    "falcon-alibi": FamilyCase(
        config=old_falcon, linears=_NEOX_LINEARS, attention="sdpa", is_quick=True
    ),
    "falcon-alibi-parallel": FamilyCase(
        config=lambda: old_falcon(multi_query=True, parallel_attn=True, layer_norm_epsilon=1e-2),
        linears=_NEOX_LINEARS,
        attention="sdpa",
    ),
    "bloom": FamilyCase(config=bloom, linears=_NEOX_LINEARS, is_quick=True),
    "bloom-4-heads": FamilyCase(config=lambda: bloom(n_head=4), linears=_NEOX_LINEARS),
    "bloom-7-heads": FamilyCase(
        config=lambda: bloom(n_head=7, hidden_size=42, layer_norm_epsilon=1e-2),
        linears=_NEOX_LINEARS,
    ),
    "bloom-own-head": FamilyCase(
        config=lambda: bloom(tie_word_embeddings=False), linears=_NEOX_LINEARS
    ),
    "bloom-3-heads": FamilyCase(
        config=lambda: bloom(n_head=3, pretraining_tp=2), linears=_NEOX_LINEARS
    ),
    "bloom-one-head": FamilyCase(
        config=lambda: bloom(n_head=1, hidden_size=16), linears=_NEOX_LINEARS
    ),
    "gptj": FamilyCase(config=gptj, linears=_GPTJ_LINEARS, is_quick=True),
    "gptj-full": FamilyCase(
        config=lambda: gptj(rotary_dim=16, activation_function="gelu"), linears=_GPTJ_LINEARS
    ),
    "gptj-inner": FamilyCase(
        config=lambda: gptj(n_inner=None, n_head=4, layer_norm_epsilon=1e-2),
        linears=_GPTJ_LINEARS,
    ),
    "gptj-relu": FamilyCase(
        config=lambda: gptj(activation_function="relu", rotary_dim=2), linears=_GPTJ_LINEARS
    ),
    "gptj-one-head": FamilyCase(
        config=lambda: gptj(n_head=1, rotary_dim=18), linears=_GPTJ_LINEARS
    ),
    "gptj-odd": FamilyCase(
        config=lambda: gptj(n_embd=42, n_head=3, rotary_dim=6), linears=_GPTJ_LINEARS
    ),
    "internlm3": FamilyCase(config=llama, convert=INTERNLM3, is_quick=True),
    "internlm3-biases": FamilyCase(
        config=lambda: llama(attention_bias=True, mlp_bias=True), convert=INTERNLM3
    ),
    "internlm2": FamilyCase(config=llama, convert=INTERNLM2, is_quick=True),
    "internlm2-biases": FamilyCase(
        config=lambda: llama(attention_bias=True, num_key_value_heads=1), convert=INTERNLM2
    ),
    "internlm2-heads": FamilyCase(
        config=lambda: llama(num_key_value_heads=4, rope_parameters=rope()), convert=INTERNLM2
    ),
    "internlm2-linear": FamilyCase(
        config=lambda: llama(rope_parameters=rope(rope_type="linear", factor=3.0)),
        convert=INTERNLM2,
    ),
    "internlm2-tied": FamilyCase(
        config=lambda: llama(tie_word_embeddings=True, rms_norm_eps=1e-2), convert=INTERNLM2
    ),
    "opt": FamilyCase(config=opt, linears=_OPT_LINEARS, is_quick=True),
    "opt-350m": FamilyCase(
        config=lambda: opt(do_layer_norm_before=False, word_embed_proj_dim=16),
        linears=_OPT_LINEARS,
        is_quick=True,
    ),
    "opt-norms-after": FamilyCase(
        config=lambda: opt(do_layer_norm_before=False, num_hidden_layers=2),
        linears=_OPT_LINEARS,
    ),
    "opt-projections": FamilyCase(
        config=lambda: opt(word_embed_proj_dim=40, activation_function="gelu"),
        linears=_OPT_LINEARS,
    ),
    "opt-no-biases": FamilyCase(
        config=lambda: opt(enable_bias=False, num_attention_heads=2), linears=_OPT_LINEARS
    ),
    "opt-own-head": FamilyCase(
        config=lambda: opt(tie_word_embeddings=False, word_embed_proj_dim=16),
        linears=_OPT_LINEARS,
    ),
    "baichuan": FamilyCase(
        config=baichuan, model_class=AlibiLlama, convert=BAICHUAN_13B, is_quick=True
    ),
    "baichuan-8-heads": FamilyCase(
        config=lambda: baichuan(num_attention_heads=8, num_key_value_heads=8, rms_norm_eps=1e-2),
        model_class=AlibiLlama,
        convert=BAICHUAN_13B,
    ),
    "baichuan-7b": FamilyCase(config=baichuan, convert=BAICHUAN_7B),
    "baichuan-7b-one-head": FamilyCase(
        config=lambda: baichuan(num_attention_heads=1, num_key_value_heads=1),
        convert=BAICHUAN_7B,
    ),
    "baichuan-7b-odd": FamilyCase(
        config=lambda: baichuan(hidden_size=40, rms_norm_eps=1e-2), convert=BAICHUAN_7B
    ),
    "baichuan-2": FamilyCase(
        config=lambda: baichuan(vocab_size=VOCAB_SIZE_2, num_hidden_layers=2),
        model_class=UnitHeadLlama,
        convert=BAICHUAN_7B,
    ),
    "llama-relu": FamilyCase(config=lambda: llama(hidden_act="relu")),
    "llama-relu2": FamilyCase(config=lambda: llama(hidden_act="relu2", mlp_bias=True)),
    "llama-gelu": FamilyCase(config=lambda: llama(hidden_act="gelu", head_dim=6)),
    "llama-partial": FamilyCase(
        config=lambda: llama(rope_parameters=rope(partial_rotary_factor=0.5))
    ),
    "ministral": FamilyCase(config=ministral),
    "mistral-types": FamilyCase(config=ministral, convert=MISTRAL),
    "mistral-full": FamilyCase(config=lambda: MistralConfig(**sizes(sliding_window=None))),
    "qwen2-all-windows": FamilyCase(
        config=lambda: Qwen2Config(
            **sizes(use_sliding_window=True, sliding_window=8, max_window_layers=0)
        )
    ),
}
