"""Published hybrid models: their config.json, numbers of parameters, and kinds of layers.

Fields that no reader needs are left out. The texts are written from memory, but for the sizes of
Nemotron-H (Megatron-Bridge states them), and those of Nemotron 3, Granite 4.0 H Tiny, Qwen 3.5 4B
and 35B-A3B, and LFM2, which tests of public repositories repeat. Numbers of parameters are those of
transformers' classes, built from the same texts without memory; and close to the published ones.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from support.families.published import config

_ROPE: Final = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_type": "default",
}
_DELTA: Final = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
_MAMBA: Final = {
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
}
_LINEAR_AND_FULL: Final = [*["linear_attention"] * 3, "full_attention"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PublishedHybrid:
    config: Mapping[str, Any]
    num_parameters: int
    """Elements of the language model's tensors."""
    kinds: str
    """A letter for each layer: A attention, D delta rule, S state space, C convolution, - none."""
    num_expert_layers: int = 0
    default_max_model_len: int
    ignored: tuple[str, ...] = ()
    """Tensors of the checkpoint that are not of the language model."""


def _qwen3_5(architecture: str, model_type: str, text: Mapping[str, Any], *, ties: bool) -> Any:
    return {
        "architectures": [architecture],
        "image_token_id": 248056,
        "model_type": model_type,
        "text_config": {
            "attention_bias": False,
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "eos_token_id": 248044,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_act": "silu",
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "mlp_only_layers": [],
            "model_type": f"{model_type}_text",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": 16,
            "rms_norm_eps": 1e-06,
            "rope_parameters": _ROPE,
            "tie_word_embeddings": ties,
            "vocab_size": 248320,
            **_DELTA,
            **text,
        },
        "tie_word_embeddings": ties,
        "vision_config": {"depth": 24, "model_type": model_type},
    }


def _granite(sizes: str, attending: tuple[int, ...], **fields: Any) -> dict[str, Any]:
    """attending: the layers with attention."""
    made = config("GraniteMoeHybridForCausalLM", sizes, **(_MAMBA | fields))
    layers = range(made["num_hidden_layers"])
    return {
        **made,
        "attention_bias": False,
        "embedding_multiplier": 12,
        "hidden_act": "silu",
        "layer_types": ["attention" if index in attending else "mamba" for index in layers],
        "max_position_embeddings": 131072,
        "model_type": "granitemoehybrid",
        "normalization_function": "rmsnorm",
        "position_embedding_type": "nope",
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000,
        "tie_word_embeddings": True,
    }


def _nemotron(sizes: str, pattern: str, **fields: Any) -> dict[str, Any]:
    return config(
        "NemotronHForCausalLM",
        sizes,
        attention_bias=False,
        chunk_size=128,
        conv_kernel=4,
        expand=2,
        hybrid_override_pattern=pattern,
        layer_norm_epsilon=1e-05,
        mamba_head_dim=64,
        mamba_hidden_act="silu",
        mamba_proj_bias=False,
        mlp_bias=False,
        mlp_hidden_act="relu2",
        model_type="nemotron_h",
        n_groups=8,
        residual_in_fp32=False,
        tie_word_embeddings=False,
        time_step_floor=0.0001,
        time_step_max=0.1,
        time_step_min=0.001,
        use_bias=False,
        use_conv_bias=True,
        **fields,
    )


def _lfm2_layers(num_layers: int, attending: tuple[int, ...]) -> list[str]:
    return ["full_attention" if index in attending else "conv" for index in range(num_layers)]


def _lfm2(sizes: str, **fields: Any) -> dict[str, Any]:
    return config(
        "Lfm2ForCausalLM",
        sizes,
        conv_L_cache=3,
        conv_bias=False,
        layer_types=_lfm2_layers(16, (2, 5, 8, 10, 12, 14)),
        max_position_embeddings=128000,
        model_type="lfm2",
        norm_eps=1e-05,
        rope_theta=1000000.0,
        **fields,
    )


_PATTERN_8B: Final = "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"
_PATTERN_47B: Final = (
    "M-" * 8 + "M*-" + "M-" * 9 + "M*-" + "M-M-M-M-M*-" * 2 + "M-" * 6 + "M---MM---M-M*-" + "M-" * 5
)
_PATTERN_56B: Final = "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-"
_PATTERN_NANO: Final = "MEMEM*" + "EMEMEM*" * 4 + "EMEMEMEM*" + "EMEMEMEME"
_NINE_OF_TEN: Final = (5, 15, 25, 35)

MODELS: Final[dict[str, PublishedHybrid]] = {
    "qwen3.5-4b": PublishedHybrid(
        config=_qwen3_5(
            "Qwen3_5ForConditionalGeneration",
            "qwen3_5",
            {
                "hidden_size": 2560,
                "intermediate_size": 9216,
                "layer_types": _LINEAR_AND_FULL * 8,
                "num_hidden_layers": 32,
                "num_key_value_heads": 4,
            },
            ties=True,
        ),
        num_parameters=4_205_751_296,
        kinds="DDDA" * 8,
        default_max_model_len=262144,
        ignored=("mtp.fc.weight", "model.visual.blocks.0.attn.qkv.weight"),
    ),
    "qwen3.5-27b": PublishedHybrid(
        config=_qwen3_5(
            "Qwen3_5ForConditionalGeneration",
            "qwen3_5",
            {
                "hidden_size": 5120,
                "intermediate_size": 17408,
                "layer_types": _LINEAR_AND_FULL * 16,
                "linear_num_value_heads": 48,
                "num_attention_heads": 24,
                "num_hidden_layers": 64,
                "num_key_value_heads": 4,
            },
            ties=False,
        ),
        num_parameters=26_895_998_464,
        kinds="DDDA" * 16,
        default_max_model_len=262144,
        ignored=("mtp.layers.0.input_layernorm.weight",),
    ),
    "qwen3.5-35b-a3b": PublishedHybrid(
        config=_qwen3_5(
            "Qwen3_5MoeForConditionalGeneration",
            "qwen3_5_moe",
            {
                "hidden_size": 2048,
                "layer_types": _LINEAR_AND_FULL * 10,
                "moe_intermediate_size": 512,
                "num_experts": 256,
                "num_experts_per_tok": 8,
                "num_hidden_layers": 40,
                "num_key_value_heads": 2,
                "router_aux_loss_coef": 0.001,
                "shared_expert_intermediate_size": 512,
            },
            ties=False,
        ),
        num_parameters=34_660_610_688,
        kinds="DDDA" * 10,
        num_expert_layers=40,
        default_max_model_len=262144,
        ignored=("mtp.norm.weight",),
    ),
    "qwen3-next-80b-a3b": PublishedHybrid(
        config=config(
            "Qwen3NextForCausalLM",
            "2048 5120 48 16 2 151936",
            attention_bias=False,
            decoder_sparse_step=1,
            full_attention_interval=4,
            head_dim=256,
            hidden_act="silu",
            max_position_embeddings=262144,
            mlp_only_layers=[],
            model_type="qwen3_next",
            moe_intermediate_size=512,
            norm_topk_prob=True,
            num_experts=512,
            num_experts_per_tok=10,
            partial_rotary_factor=0.25,
            rms_norm_eps=1e-06,
            rope_scaling=None,
            rope_theta=10000000,
            shared_expert_intermediate_size=512,
            tie_word_embeddings=False,
            use_sliding_window=False,
            **_DELTA,
        ),
        num_parameters=79_674_391_296,
        kinds="DDDA" * 12,
        num_expert_layers=48,
        default_max_model_len=262144,
        ignored=("mtp.pre_fc_norm_hidden.weight",),
    ),
    "granite-4.0-h-tiny": PublishedHybrid(
        config=_granite(
            "1536 512 40 12 4 100352",
            _NINE_OF_TEN,
            attention_multiplier=0.0078125,
            logits_scaling=6,
            mamba_n_heads=48,
            num_experts_per_tok=6,
            num_local_experts=64,
            residual_multiplier=0.22,
            shared_intermediate_size=1024,
        ),
        num_parameters=6_939_037_248,
        kinds="SSSSSASSSS" * 4,
        num_expert_layers=40,
        default_max_model_len=131072,
    ),
    "granite-4.0-h-small": PublishedHybrid(
        config=_granite(
            "4096 768 40 32 8 100352",
            _NINE_OF_TEN,
            attention_multiplier=0.0078125,
            logits_scaling=16,
            mamba_n_heads=128,
            num_experts_per_tok=10,
            num_local_experts=72,
            residual_multiplier=0.22,
            shared_intermediate_size=1536,
        ),
        num_parameters=32_207_337_984,
        kinds="SSSSSASSSS" * 4,
        num_expert_layers=40,
        default_max_model_len=131072,
    ),
    "granite-4.0-h-micro": PublishedHybrid(
        config=_granite(
            "2048 8192 40 32 8 100352",
            _NINE_OF_TEN,
            attention_multiplier=0.015625,
            logits_scaling=8,
            mamba_n_heads=64,
            num_experts_per_tok=0,
            num_local_experts=0,
            residual_multiplier=0.22,
            shared_intermediate_size=8192,
        ),
        num_parameters=3_191_396_096,
        kinds="SSSSSASSSS" * 4,
        default_max_model_len=131072,
    ),
    "nemotron-h-8b": PublishedHybrid(
        config=_nemotron(
            "4096 21504 52 32 8 131072",
            _PATTERN_8B,
            attention_head_dim=128,
            mamba_num_heads=128,
            max_position_embeddings=8192,
            rms_norm_eps=1e-05,
            ssm_state_size=128,
        ),
        num_parameters=8_100_852_736,
        kinds=_PATTERN_8B.replace("M", "S").replace("*", "A"),
        default_max_model_len=8192,
    ),
    "nemotron-h-47b": PublishedHybrid(
        config=_nemotron(
            "8192 30720 98 64 8 131072",
            _PATTERN_47B,
            attention_head_dim=128,
            mamba_num_heads=256,
            max_position_embeddings=8192,
            rms_norm_eps=1e-05,
            ssm_state_size=256,
        ),
        num_parameters=46_791_554_816,
        kinds=_PATTERN_47B.replace("M", "S").replace("*", "A"),
        default_max_model_len=8192,
    ),
    "nemotron-h-56b": PublishedHybrid(
        config=_nemotron(
            "8192 32768 118 64 8 131072",
            _PATTERN_56B,
            attention_head_dim=128,
            mamba_num_heads=256,
            max_position_embeddings=8192,
            rms_norm_eps=1e-05,
            ssm_state_size=256,
        ),
        num_parameters=56_324_350_464,
        kinds=_PATTERN_56B.replace("M", "S").replace("*", "A"),
        default_max_model_len=8192,
    ),
    "nemotron-3-nano-30b-a3b": PublishedHybrid(
        config=_nemotron(
            "2688 1856 52 32 2 131072",
            _PATTERN_NANO,
            head_dim=128,
            mamba_num_heads=64,
            max_position_embeddings=262144,
            moe_intermediate_size=1856,
            moe_shared_expert_intermediate_size=3712,
            n_group=1,
            n_routed_experts=128,
            n_shared_experts=1,
            norm_eps=1e-05,
            norm_topk_prob=True,
            num_experts_per_tok=6,
            rope_theta=10000,
            routed_scaling_factor=2.5,
            ssm_state_size=128,
            topk_group=1,
        ),
        num_parameters=31_577_940_288,
        kinds=_PATTERN_NANO.replace("M", "S").replace("*", "A").replace("E", "-"),
        num_expert_layers=23,
        default_max_model_len=262144,
    ),
    "bamba-9b": PublishedHybrid(
        config=config(
            "BambaForCausalLM",
            "4096 14336 32 32 8 128256",
            attention_bias=False,
            attn_layer_indices=[9, 18, 27],
            attn_rotary_emb=64,
            hidden_act="silu",
            mamba_n_heads=128,
            max_position_embeddings=262144,
            mlp_bias=False,
            model_type="bamba",
            partial_rotary_factor=0.5,
            rms_norm_eps=1e-05,
            rope_scaling=None,
            rope_theta=10000.0,
            tie_word_embeddings=False,
            **_MAMBA,
        ),
        num_parameters=9_780_235_392,
        kinds="".join("A" if index in (9, 18, 27) else "S" for index in range(32)),
        default_max_model_len=262144,
    ),
    "lfm2-350m": PublishedHybrid(
        config=_lfm2(
            "1024 6656 16 16 8 65536",
            block_auto_adjust_ff_dim=True,
            block_dim=1024,
            block_ff_dim=6656,
            block_ffn_dim_multiplier=1.0,
            block_multiple_of=256,
            tie_embedding=True,
        ),
        num_parameters=354_483_968,
        kinds="CCACCACCACACACAC",
        default_max_model_len=128000,
    ),
    "lfm2-1.2b": PublishedHybrid(
        config=_lfm2(
            "2048 12288 16 32 8 65536",
            block_auto_adjust_ff_dim=True,
            block_dim=2048,
            block_ff_dim=12288,
            block_ffn_dim_multiplier=1.0,
            block_multiple_of=256,
            tie_embedding=True,
        ),
        num_parameters=1_170_340_608,
        kinds="CCACCACCACACACAC",
        default_max_model_len=128000,
    ),
    "lfm2-8b-a1b": PublishedHybrid(
        config=config(
            "Lfm2MoeForCausalLM",
            "2048 7168 24 32 8 65536",
            conv_L_cache=3,
            conv_bias=False,
            layer_types=_lfm2_layers(24, (2, 6, 10, 14, 18, 21)),
            max_position_embeddings=128000,
            model_type="lfm2_moe",
            moe_intermediate_size=1792,
            norm_eps=1e-05,
            norm_topk_prob=True,
            num_dense_layers=2,
            num_experts=32,
            num_experts_per_tok=4,
            rope_theta=1000000.0,
            routed_scaling_factor=1.0,
            tie_embedding=True,
            use_expert_bias=True,
        ),
        num_parameters=8_339_930_560,
        kinds="CCACCCACCCACCCACCCACCACC",
        num_expert_layers=22,
        default_max_model_len=128000,
    ),
}
