"""Published models of the families: their config.json, and the tensors of their first layer.

Fields that no reader needs are left out.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

LINEARS = "self_attn.{q,k,v,o}_proj mlp.{gate,up,down}_proj"
NORMS = "input_layernorm post_attention_layernorm"
_SANDWICH = f"{NORMS} pre_feedforward_layernorm post_feedforward_layernorm"
HEAD_NORMS = "self_attn.q_norm self_attn.k_norm"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    config: Mapping[str, Any]
    num_parameters: int
    """Elements of the language model's tensors, as published."""
    num_tensors: int
    """Tensors of the language model in the checkpoint."""
    root: str = "model."
    """Prefix of the language model's tensors in the checkpoint."""
    parts: str
    """Weights of a layer; braces hold alternatives."""
    biases: str = ""
    others: str = ""
    """Other tensors of a layer, by their whole names."""
    ends: str = ""
    """Weights outside the layers, in addition to embedding, last norm and head."""
    windows: Mapping[int, int | None] = dataclasses.field(default_factory=dict)
    """Window by layer, of some layers."""
    thetas: Mapping[int, float | None]
    """Theta by layer, of some layers; None: the layer does not rotate."""
    score_scale: float
    ignored: tuple[str, ...] = ()
    """Other tensors in the checkpoint."""


def config(architecture: str, sizes: str, **fields: Any) -> dict[str, Any]:
    """Return a config.json; sizes: of hidden, inner, layers, heads, key heads, vocabulary."""
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "vocab_size"),
    )
    values = dict(zip(names, map(int, sizes.split()), strict=True))
    return {"architectures": [architecture], "torch_dtype": "bfloat16", **values, **fields}


_QWEN_VISION = {"depth": 32, "hidden_size": 1280, "num_heads": 16}
_SIGLIP = {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27}

_GEMMA_4_INPUTS = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144}
_GEMMA_4_INPUT = "per_layer_input_gate per_layer_projection post_per_layer_input_norm"
_GEMMA_4_ENDS = "embed_tokens_per_layer per_layer_model_projection per_layer_projection_norm"


def _gemma_4(sizes: str, types: list[str], **fields: Any) -> dict[str, Any]:
    """Return the config.json of a Gemma 4; types: of the first layers, which repeat."""
    text = config("", sizes)
    num_layers = text["num_hidden_layers"]
    text |= {
        "dtype": "bfloat16",
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": types * (num_layers // len(types)),
        "model_type": "gemma4_text",
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        **fields,
    }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": {name: value for name, value in text.items() if name != "architectures"},
        "tie_word_embeddings": True,
    }


MODELS: dict[str, Published] = {
    "gemma-2b": Published(
        config=config(
            "GemmaForCausalLM",
            "2048 16384 18 8 1 256000",
            head_dim=256,
            hidden_act="gelu",
            max_position_embeddings=8192,
            rms_norm_eps=1e-06,
            rope_scaling=None,
            rope_theta=10000.0,
            attention_bias=False,
        ),
        num_parameters=2_506_172_416,
        num_tensors=18 * 9 + 2,
        parts=f"{LINEARS} {NORMS}",
        thetas={0: 1e4},
        score_scale=256**-0.5,
    ),
    "gemma-2-27b": Published(
        config=config(
            "Gemma2ForCausalLM",
            "4608 36864 46 32 16 256000",
            head_dim=128,
            hidden_act="gelu_pytorch_tanh",
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=144,
            sliding_window=4096,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
            cache_implementation="hybrid",
            max_position_embeddings=8192,
            rms_norm_eps=1e-06,
            rope_theta=10000.0,
        ),
        num_parameters=27_227_128_320,
        num_tensors=46 * 11 + 2,
        parts=f"{LINEARS} {_SANDWICH}",
        windows={0: 4096, 1: None, 44: 4096, 45: None},
        thetas={0: 1e4, 1: 1e4},
        score_scale=144**-0.5,
    ),
    "gemma-3-1b-it": Published(
        config=config(
            "Gemma3ForCausalLM",
            "1152 6912 26 4 1 262144",
            head_dim=256,
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=256,
            sliding_window=512,
            sliding_window_pattern=6,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            max_position_embeddings=32768,
            rope_local_base_freq=10000,
            rope_scaling=None,
            rope_theta=1000000,
            eos_token_id=[1, 106],
        ),
        num_parameters=999_885_952,
        num_tensors=26 * 13 + 2,
        parts=f"{LINEARS} {_SANDWICH} {HEAD_NORMS}",
        windows={0: 512, 4: 512, 5: None, 6: 512, 23: None, 25: 512},
        thetas={0: 1e4, 5: 1e6},
        score_scale=256**-0.5,
    ),
    "embeddinggemma-300m": Published(
        config=config(
            "Gemma3TextModel",
            "768 1152 24 3 1 262144",
            _sliding_window_pattern=6,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            head_dim=256,
            hidden_activation="gelu_pytorch_tanh",
            layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 4,
            max_position_embeddings=2048,
            query_pre_attn_scalar=256,
            rms_norm_eps=1e-06,
            rope_local_base_freq=10000.0,
            rope_scaling=None,
            rope_theta=1000000.0,
            sliding_window=512,
            use_bidirectional_attention=True,
            eos_token_id=1,
        ),
        num_parameters=302_863_104,
        num_tensors=24 * 13 + 2,
        root="",
        parts=f"{LINEARS} {_SANDWICH} {HEAD_NORMS}",
        windows={0: 257, 4: 257, 5: None, 6: 257, 23: None},
        thetas={0: 1e4, 5: 1e6},
        score_scale=256**-0.5,
    ),
    "gemma-3-4b-it": Published(
        config={
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "image_token_index": 262144,
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16",
            "vision_config": _SIGLIP,
        },
        num_parameters=3_880_263_168,
        num_tensors=34 * 13 + 2,
        root="language_model.model.",
        parts=f"{LINEARS} {_SANDWICH} {HEAD_NORMS}",
        windows={0: 1024, 5: None, 29: None, 33: 1024},
        thetas={0: 1e4, 5: 1e6},
        score_scale=256**-0.5,
        ignored=(
            "multi_modal_projector.mm_input_projection_weight",
            "multi_modal_projector.mm_soft_emb_norm.weight",
            "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
        ),
    ),
    "gemma-4-e2b-it": Published(
        config=_gemma_4(
            "1536 6144 35 8 1 262144",
            ["sliding_attention"] * 4 + ["full_attention"],
            **_GEMMA_4_INPUTS,
            attention_k_eq_v=False,
            max_position_embeddings=131_072,
            num_global_key_value_heads=None,
            num_kv_shared_layers=20,
            sliding_window=512,
            use_double_wide_mlp=True,
        ),
        num_parameters=4_628_569_379,
        num_tensors=35 * 14 + 15 * 3 + 5,
        root="model.language_model.",
        parts=f"{LINEARS} {_SANDWICH} {HEAD_NORMS} {_GEMMA_4_INPUT}",
        others="layer_scalar",
        ends=_GEMMA_4_ENDS,
        windows={0: 512, 4: None, 13: 512, 33: 512, 34: None},
        thetas={0: 1e4, 4: 1e6, 34: 1e6},
        score_scale=1.0,
        ignored=(
            "model.language_model.layers.15.self_attn.k_proj.weight",
            "model.language_model.layers.34.self_attn.k_norm.weight",
            "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight",
            "model.audio_tower.layers.0.norm_out.weight",
            "model.embed_vision.embedding_projection.weight",
            "model.embed_audio.embedding_projection.weight",
        ),
    ),
    "gemma-4-e4b-it": Published(
        config=_gemma_4(
            "2560 10240 42 8 2 262144",
            ["sliding_attention"] * 5 + ["full_attention"],
            **_GEMMA_4_INPUTS,
            attention_k_eq_v=False,
            max_position_embeddings=131_072,
            num_global_key_value_heads=None,
            num_kv_shared_layers=18,
            sliding_window=512,
            use_double_wide_mlp=False,
        ),
        num_parameters=7_463_013_418,
        num_tensors=42 * 14 + 24 * 3 + 5,
        root="model.language_model.",
        parts=f"{LINEARS} {_SANDWICH} {HEAD_NORMS} {_GEMMA_4_INPUT}",
        others="layer_scalar",
        ends=_GEMMA_4_ENDS,
        windows={0: 512, 5: None, 40: 512, 41: None},
        thetas={0: 1e4, 5: 1e6},
        score_scale=1.0,
    ),
    "gemma-4-12b-it": Published(
        config={
            **_gemma_4(
                "3840 15360 48 16 8 262144",
                ["sliding_attention"] * 5 + ["full_attention"],
                attention_k_eq_v=True,
                max_position_embeddings=262_144,
                num_global_key_value_heads=1,
                num_kv_shared_layers=0,
                sliding_window=1024,
            ),
            "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        },
        num_parameters=11_907_350_320,
        num_tensors=48 * 14 - 8 + 2,
        root="model.language_model.",
        parts=f"{LINEARS} {_SANDWICH} {HEAD_NORMS}",
        others="layer_scalar",
        windows={0: 1024, 5: None, 47: None},
        thetas={0: 1e4, 5: 1e6},
        score_scale=1.0,
        ignored=("model.vision_embedder.patch_dense.weight",),
    ),
    "gemma-4-26b-a4b-it": Published(
        config=_gemma_4(
            "2816 2112 30 16 8 262144",
            ["sliding_attention"] * 5 + ["full_attention"],
            attention_k_eq_v=True,
            enable_moe_block=True,
            hidden_size_per_layer_input=0,
            max_position_embeddings=262_144,
            moe_intermediate_size=704,
            num_experts=128,
            num_global_key_value_heads=2,
            num_kv_shared_layers=0,
            sliding_window=1024,
            top_k_experts=8,
            use_double_wide_mlp=False,
            vocab_size_per_layer_input=262_144,
        ),
        num_parameters=25_233_141_790,
        num_tensors=30 * (14 + 3 + 3 + 128 * 3) - 5 + 2,
        root="model.language_model.",
        parts=(
            f"{LINEARS} {_SANDWICH} {HEAD_NORMS} router.proj post_feedforward_layernorm_{{1,2}} "
            "pre_feedforward_layernorm_2 "
            f"experts.{{{','.join(map(str, range(128)))}}}.{{gate,up,down}}_proj"
        ),
        others="layer_scalar router.scale router.per_expert_scale",
        windows={0: 1024, 5: None, 29: None},
        thetas={0: 1e4, 5: 1e6},
        score_scale=1.0,
        ignored=("model.vision_tower.std_scale", "model.embed_vision.embedding_projection.weight"),
    ),
    "gemma-4-31b-it": Published(
        config=_gemma_4(
            "5376 21504 60 32 16 262144",
            ["sliding_attention"] * 5 + ["full_attention"],
            attention_k_eq_v=True,
            enable_moe_block=False,
            hidden_size_per_layer_input=0,
            max_position_embeddings=262_144,
            num_global_key_value_heads=4,
            num_kv_shared_layers=0,
            sliding_window=1024,
            use_double_wide_mlp=False,
            vocab_size_per_layer_input=262_144,
        ),
        num_parameters=30_697_345_340,
        num_tensors=60 * 14 - 10 + 2,
        root="model.language_model.",
        parts=f"{LINEARS} {_SANDWICH} {HEAD_NORMS}",
        others="layer_scalar",
        windows={0: 1024, 5: None, 59: None},
        thetas={0: 1e4, 5: 1e6},
        score_scale=1.0,
    ),
    "phi-3-mini-4k": Published(
        config=config(
            "Phi3ForCausalLM",
            "3072 8192 32 32 32 32064",
            max_position_embeddings=4096,
            original_max_position_embeddings=4096,
            rms_norm_eps=1e-05,
            rope_scaling=None,
            rope_theta=10000.0,
            sliding_window=2047,
            attention_bias=False,
            tie_word_embeddings=False,
        ),
        num_parameters=3_821_079_552,
        num_tensors=32 * 6 + 3,
        parts=f"self_attn.qkv_proj self_attn.o_proj mlp.gate_up_proj mlp.down_proj {NORMS}",
        windows={0: 2047, 31: 2047},
        thetas={0: 1e4},
        score_scale=96**-0.5,
    ),
    "phi-4-mini": Published(
        config=config(
            "Phi3ForCausalLM",
            "3072 8192 32 24 8 200064",
            max_position_embeddings=131072,
            original_max_position_embeddings=4096,
            partial_rotary_factor=0.75,
            rms_norm_eps=1e-05,
            rope_scaling={
                "long_factor": [1.0 + 0.5 * i for i in range(48)],
                "short_factor": [1.0] * 48,
                "type": "longrope",
            },
            rope_theta=10000.0,
            sliding_window=262144,
            attention_bias=False,
            mlp_bias=False,
            lm_head_bias=False,
            full_attn_mod=1,
            interpolate_factor=1,
            tie_word_embeddings=True,
        ),
        num_parameters=3_836_021_760,
        num_tensors=32 * 6 + 2,
        parts=f"self_attn.qkv_proj self_attn.o_proj mlp.gate_up_proj mlp.down_proj {NORMS}",
        thetas={0: 1e4},
        score_scale=128**-0.5,
    ),
    "mistral-small-3.1-24b": Published(
        config={
            "architectures": ["Mistral3ForConditionalGeneration"],
            "image_token_index": 10,
            "model_type": "mistral3",
            "multimodal_projector_bias": False,
            "text_config": {
                "attention_dropout": 0.0,
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": 5120,
                "intermediate_size": 32768,
                "max_position_embeddings": 131072,
                "model_type": "mistral",
                "num_attention_heads": 32,
                "num_hidden_layers": 40,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-05,
                "rope_theta": 1000000000.0,
                "sliding_window": None,
                "vocab_size": 131072,
            },
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vision_config": {"model_type": "pixtral"},
        },
        num_parameters=23_572_403_200,
        num_tensors=40 * 9 + 3,
        root="language_model.model.",
        parts=f"{LINEARS} {NORMS}",
        windows={0: None, 39: None},
        thetas={0: 1e9},
        score_scale=128**-0.5,
        ignored=(
            "multi_modal_projector.linear_1.weight",
            "multi_modal_projector.patch_merger.merging_layer.weight",
            "vision_tower.transformer.layers.0.attention.q_proj.weight",
        ),
    ),
    "ministral-3-8b": Published(
        config={
            "architectures": ["Mistral3ForConditionalGeneration"],
            "dtype": "bfloat16",
            "model_type": "mistral3",
            "text_config": {
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "max_position_embeddings": 262144,
                "model_type": "ministral3",
                "num_attention_heads": 32,
                "num_hidden_layers": 34,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-05,
                "rope_parameters": {
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "factor": 16.0,
                    "llama_4_scaling_beta": 0.1,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "original_max_position_embeddings": 16384,
                    "rope_theta": 1000000.0,
                    "rope_type": "yarn",
                    "type": "yarn",
                },
                "sliding_window": None,
                "vocab_size": 131072,
            },
            "tie_word_embeddings": False,
            "vision_config": {"model_type": "pixtral"},
        },
        num_parameters=8_489_553_920,
        num_tensors=34 * 9 + 3,
        root="language_model.model.",
        parts=f"{LINEARS} {NORMS}",
        thetas={0: 1e6},
        score_scale=128**-0.5,
        ignored=("multi_modal_projector.norm.weight", "vision_tower.ln_pre.weight"),
    ),
    "granite-3.1-8b": Published(
        config=config(
            "GraniteForCausalLM",
            "4096 12800 40 32 8 49155",
            attention_bias=False,
            attention_multiplier=0.0078125,
            embedding_multiplier=12.0,
            logits_scaling=16.0,
            residual_multiplier=0.22,
            max_position_embeddings=131072,
            mlp_bias=False,
            rms_norm_eps=1e-05,
            rope_scaling=None,
            rope_theta=10000000.0,
            tie_word_embeddings=True,
        ),
        num_parameters=8_170_848_256,
        num_tensors=40 * 9 + 2,
        parts=f"{LINEARS} {NORMS}",
        thetas={0: 1e7},
        score_scale=0.0078125,
    ),
    "olmo-2-7b": Published(
        config=config(
            "Olmo2ForCausalLM",
            "4096 11008 32 32 32 100352",
            attention_bias=False,
            hidden_act="silu",
            max_position_embeddings=4096,
            rms_norm_eps=1e-06,
            rope_scaling=None,
            rope_theta=500000,
            tie_word_embeddings=False,
        ),
        num_parameters=7_298_617_344,
        num_tensors=32 * 11 + 3,
        parts=f"{LINEARS} {HEAD_NORMS} post_{{attention,feedforward}}_layernorm",
        thetas={0: 5e5},
        score_scale=128**-0.5,
    ),
    "olmo-3-7b": Published(
        config=config(
            "Olmo3ForCausalLM",
            "4096 11008 32 32 32 100278",
            attention_bias=False,
            layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
            max_position_embeddings=65536,
            rms_norm_eps=1e-06,
            rope_scaling={
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
            rope_theta=500000,
            sliding_window=4096,
            tie_word_embeddings=False,
        ),
        num_parameters=7_298_011_136,
        num_tensors=32 * 11 + 3,
        parts=f"{LINEARS} {HEAD_NORMS} post_{{attention,feedforward}}_layernorm",
        windows={0: 4096, 2: 4096, 3: None, 31: None},
        thetas={0: 5e5, 3: 5e5},
        score_scale=128**-0.5,
    ),
    "glm-4-9b-0414": Published(
        config=config(
            "Glm4ForCausalLM",
            "4096 13696 40 32 2 151552",
            attention_bias=True,
            eos_token_id=[151329, 151336, 151338],
            head_dim=128,
            hidden_act="silu",
            max_position_embeddings=32768,
            partial_rotary_factor=0.5,
            rms_norm_eps=1e-05,
            rope_theta=10000.0,
            tie_word_embeddings=False,
        ),
        num_parameters=9_400_279_040,
        num_tensors=40 * 13 + 3,
        parts=(
            "self_attn.{q,k,v,o}_proj mlp.gate_up_proj mlp.down_proj "
            f"{NORMS} post_self_attn_layernorm post_mlp_layernorm"
        ),
        biases="self_attn.{q,k,v}_proj",
        thetas={0: 1e4},
        score_scale=128**-0.5,
    ),
    "qwen2.5-vl-3b": Published(
        config=config(
            "Qwen2_5_VLForConditionalGeneration",
            "2048 11008 36 16 2 151936",
            eos_token_id=151645,
            hidden_act="silu",
            max_position_embeddings=128000,
            max_window_layers=70,
            rms_norm_eps=1e-06,
            rope_scaling={"mrope_section": [16, 24, 24], "type": "mrope"},
            rope_theta=1000000.0,
            sliding_window=32768,
            tie_word_embeddings=True,
            use_sliding_window=False,
            vision_config=_QWEN_VISION,
        ),
        num_parameters=3_085_938_688,
        num_tensors=36 * 12 + 2,
        parts=f"{LINEARS} {NORMS}",
        biases="self_attn.{q,k,v}_proj",
        windows={0: None, 35: None},
        thetas={0: 1e6},
        score_scale=128**-0.5,
        ignored=("visual.blocks.0.attn.qkv.weight", "visual.merger.mlp.0.bias"),
    ),
    "qwen3-vl-4b": Published(
        config={
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "image_token_id": 151655,
            "model_type": "qwen3_vl",
            "text_config": {
                "attention_bias": False,
                "dtype": "bfloat16",
                "eos_token_id": 151645,
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": 2560,
                "intermediate_size": 9728,
                "max_position_embeddings": 262144,
                "model_type": "qwen3_vl_text",
                "num_attention_heads": 32,
                "num_hidden_layers": 36,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-06,
                "rope_scaling": {
                    "mrope_interleaved": True,
                    "mrope_section": [24, 20, 20],
                    "rope_type": "default",
                },
                "rope_theta": 5000000,
                "tie_word_embeddings": True,
                "vocab_size": 151936,
            },
            "tie_word_embeddings": True,
            "vision_config": {"depth": 24, "model_type": "qwen3_vl"},
        },
        num_parameters=4_022_468_096,
        num_tensors=36 * 11 + 2,
        root="model.language_model.",
        parts=f"{LINEARS} {NORMS} {HEAD_NORMS}",
        thetas={0: 5e6},
        score_scale=128**-0.5,
        ignored=(
            "model.visual.blocks.0.attn.qkv.weight",
            "model.visual.deepstack_merger_list.0.norm.weight",
        ),
    ),
}
